// The node cache: chunks of subfiles that one process of a node has read, for the others that need
// the same bytes.
//
// 1. Opportunistic: it is never needed. What is not found here is read from the file, and nobody
//    waits for a chunk that another process reads for longer than claim_limit.
// 2. Bounded: slots of one file in shared memory. Each is reserved before the first store to it, so
//    that none ends in SIGBUS; where it cannot be, it is not used.
// 3. Nothing is believed: who copies a chunk out checks the checksum of each of its blocks and that
//    the slot was not given away meanwhile; else it counts as not found.
// 4. A process may die at any point: the mutex is robust, claims go stale, the file is removed by
//    the last process that lets go of it, and files of the dead by the next one that opens any.
// 5. Only chunks of files that another process has looked for are offered: ranks that restore
//    different bytes pay for neither slots nor copies. It stops by itself where it does not pay:
//    chunks that nobody takes are soon not offered any more.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "error.hpp"

namespace megatron_uring {

struct ChunkKey {
    std::uint64_t file;  // the same number in every process, and of no other file
    std::int64_t offset;
    std::int64_t length;
};

class NodeCache;

// What a read shares with other processes of the node.
struct Sharing {
    std::shared_ptr<NodeCache> cache;      // null: nothing
    std::vector<std::uint64_t> file_keys;  // of each file, as in ChunkKey
};

class NodeCache : public std::enable_shared_from_this<NodeCache> {
  public:
    static constexpr std::int64_t max_slots = 1024;
    static constexpr std::chrono::milliseconds claim_limit{1000};

    // The right to fill a slot; given back unless publish() was called.
    class Claim {
      public:
        Claim() noexcept = default;
        Claim(std::shared_ptr<NodeCache> cache, std::int64_t slot,
              std::uint64_t generation) noexcept
            : cache_(std::move(cache)), slot_(slot), generation_(generation) {}
        Claim(Claim&&) noexcept = default;
        Claim& operator=(Claim&& other) noexcept {
            std::swap(cache_, other.cache_);
            std::swap(slot_, other.slot_);
            std::swap(generation_, other.generation_);
            return *this;
        }
        ~Claim() { drop(); }
        explicit operator bool() const noexcept { return cache_ != nullptr; }
        void publish(const std::uint8_t* data, std::int64_t length) noexcept;
        void drop() noexcept;

      private:
        void settle(bool filled) noexcept;

        std::shared_ptr<NodeCache> cache_;
        std::int64_t slot_ = 0;
        std::uint64_t generation_ = 0;
    };

    enum class Outcome { copied, busy, absent };
    struct Answer {
        Outcome outcome;
        Claim claim;  // of an absent chunk, if it is worth offering to others
    };

    // Attaches to the cache of this path, or makes it. Throws OsError where that cannot be.
    static std::shared_ptr<NodeCache> open(const std::string& path, std::int64_t slot_bytes,
                                           std::int64_t slot_count);
    ~NodeCache();
    NodeCache(const NodeCache&) = delete;
    NodeCache& operator=(const NodeCache&) = delete;

    // Copies the chunk to `to` if it is here and its blocks have the checksums `expected`. `busy`:
    // another process reads it just now; not answered unless `patient`.
    Answer look(const ChunkKey& key, const std::uint32_t* expected, std::uint8_t* to,
                bool patient) noexcept;

    // The chunk that was looked for last, by whichever process; a hint.
    std::optional<ChunkKey> position() const noexcept;

  private:
    struct Slot;
    struct Header;
    class Lock;

    NodeCache(std::string path, std::int64_t slot_bytes, std::int64_t slot_count);
    bool attach();  // false: the file was removed meanwhile
    bool detach() noexcept;
    void reserve();
    void initialise();
    void map();
    std::size_t mapped_bytes() const noexcept { return static_cast<std::size_t>(file_bytes_); }
    std::uint8_t* data_of(std::int64_t slot) const noexcept;
    bool is_wanted(std::int64_t slot) noexcept;
    bool reserve_slot(std::int64_t slot) noexcept;
    std::uint64_t& interest_in(const ChunkKey& key) const noexcept;
    bool pays_locked(const ChunkKey& key) const noexcept;
    Claim claim_locked(const ChunkKey& key, std::int64_t now_ns) noexcept;

    const ForkStamp stamp_;
    const std::string path_;
    const std::int64_t slot_bytes_;
    const std::int64_t slot_count_;
    const std::int64_t file_bytes_;
    int number_ = -1;
    bool attached_ = false;
    std::uint64_t own_bit_ = 0;  // of this process, in Header::interest
    Header* header_ = nullptr;
};

// Removes caches in `directory` whose names begin with `prefix` and that no process holds.
void sweep_node_caches(const std::string& directory, const std::string& prefix) noexcept;

}  // namespace megatron_uring
