// See node_cache.hpp for what is guaranteed.
#include "node_cache.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <stdexcept>

#include "checksum.hpp"
#include "copy.hpp"
#include "file.hpp"

namespace megatron_uring {
namespace {

constexpr std::uint64_t magic = 0x3345484341435552;  // of this layout of the header
constexpr std::int64_t page_bytes = 4096;
// A chunk that was offered and that nobody took for so long makes room for another: long enough for
// a process that keeps pace, short enough that waiting for room costs less than reading twice.
constexpr std::int64_t stale_ns = 50'000'000;
// Chunks offered before it shows that somebody takes them, and for each one taken.
constexpr std::uint64_t free_trials = 16;
constexpr std::uint64_t trials_per_hit = 4;

enum State : std::uint32_t { empty, reading, ready };

std::int64_t now_in_ns() noexcept {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace

struct NodeCache::Slot {
    ChunkKey key;
    std::uint64_t generation;
    std::int64_t since_ns;
    std::int64_t takers_left;
    std::uint32_t state;
    std::uint32_t reserved;

    bool holds(const ChunkKey& other) const noexcept {
        return state != empty && key.file == other.file && key.offset == other.offset &&
               key.length == other.length;
    }
};

struct NodeCache::Header {
    std::uint64_t magic;
    std::int64_t slot_bytes;
    std::int64_t slot_count;
    pthread_mutex_t mutex;
    std::uint64_t processes;  // that ever attached
    // Of each file, by its number: which processes have looked for it. Numbers that fall together,
    // and processes that are gone, make chunks be offered in vain, no more.
    std::uint64_t interest[512];
    std::int64_t attached;  // too high after a death: then chunks are kept a little longer
    std::uint64_t published;
    std::uint64_t taken;
    ChunkKey position;  // looked for last; without length: none yet
    Slot slots[max_slots];
};

class NodeCache::Lock {
  public:
    explicit Lock(Header& header) noexcept : mutex_(&header.mutex) {
        timespec until = {};
        clock_gettime(CLOCK_REALTIME, &until);
        ++until.tv_sec;  // held for microseconds, unless its holder was stopped
        const int error = pthread_mutex_timedlock(mutex_, &until);
        // Whoever died with it left at most one slot half changed, and no slot is believed.
        if (error == EOWNERDEAD) pthread_mutex_consistent(mutex_);
        held_ = error == 0 || error == EOWNERDEAD;
    }
    ~Lock() {
        if (held_) pthread_mutex_unlock(mutex_);
    }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;
    explicit operator bool() const noexcept { return held_; }

  private:
    pthread_mutex_t* mutex_;
    bool held_ = false;
};

// ---- finding and offering ----

NodeCache::Answer NodeCache::look(const ChunkKey& key, const std::uint32_t* expected,
                                  std::uint8_t* to, bool patient) noexcept {
    std::int64_t found = -1;
    std::uint64_t generation = 0;
    {
        const Lock lock(*header_);
        if (!lock) return {Outcome::absent, {}};
        header_->position = key;
        interest_in(key) |= own_bit_;
        for (std::int64_t i = 0; i < slot_count_ && found < 0; ++i) {
            if (header_->slots[i].holds(key)) found = i;
        }
        const std::int64_t now_ns = now_in_ns();
        if (found < 0) {
            if (!pays_locked(key)) return {Outcome::absent, {}};
            Claim claim = claim_locked(key, now_ns);
            const bool wait = !claim && patient;  // for room
            return {wait ? Outcome::busy : Outcome::absent, std::move(claim)};
        }
        const Slot& slot = header_->slots[found];
        if (slot.state == reading) {
            const std::chrono::nanoseconds age(now_ns - slot.since_ns);
            const bool fresh = patient && age < claim_limit;
            return {fresh ? Outcome::busy : Outcome::absent, {}};
        }
        generation = slot.generation;
    }
    const std::uint8_t* const from = data_of(found);
    constexpr std::int64_t step_bytes = 32 * 1024;  // as in Request::fill
    std::uint32_t checksum = 0;
    for (std::int64_t at = 0; at < key.length; at += step_bytes) {
        const std::int64_t length = std::min(step_bytes, key.length - at);
        std::memcpy(to + at, from + at, static_cast<std::size_t>(length));
        checksum = crc32c(to + at, length, at % block_bytes == 0 ? 0 : checksum);
        const bool block_ends = (at + length) % block_bytes == 0 || at + length == key.length;
        if (block_ends && checksum != expected[at / block_bytes]) return {Outcome::absent, {}};
    }
    const Lock lock(*header_);
    Slot& slot = header_->slots[found];
    if (lock && slot.generation == generation) {
        ++header_->taken;
        if (--slot.takers_left <= 0) slot.state = empty;
    }
    return {Outcome::copied, {}};
}

std::optional<ChunkKey> NodeCache::position() const noexcept {
    const Lock lock(*header_);
    if (!lock || header_->position.length == 0) return std::nullopt;
    return header_->position;
}

std::uint64_t& NodeCache::interest_in(const ChunkKey& key) const noexcept {
    return header_->interest[key.file % std::size(header_->interest)];
}

bool NodeCache::pays_locked(const ChunkKey& key) const noexcept {
    return header_->attached > 1 && key.length <= slot_bytes_ &&
           header_->published < free_trials + trials_per_hit * header_->taken;
}

NodeCache::Claim NodeCache::claim_locked(const ChunkKey& key, std::int64_t now_ns) noexcept {
    std::int64_t chosen = -1;
    for (std::int64_t i = 0; i < slot_count_; ++i) {
        const Slot& slot = header_->slots[i];
        if (slot.state == empty) {
            chosen = i;
            break;
        }
        const std::int64_t limit_ns =
            slot.state == ready ? stale_ns : std::chrono::nanoseconds(claim_limit).count();
        const bool stale = now_ns - slot.since_ns > limit_ns;
        if (stale && (chosen < 0 || slot.since_ns < header_->slots[chosen].since_ns)) chosen = i;
    }
    if (chosen < 0) return {};
    Slot& slot = header_->slots[chosen];
    slot = {key, slot.generation + 1, now_ns, header_->attached - 1, reading, slot.reserved};
    return {shared_from_this(), chosen, slot.generation};
}

void NodeCache::Claim::publish(const std::uint8_t* data, std::int64_t length) noexcept {
    if (!cache_->is_wanted(slot_) || !cache_->reserve_slot(slot_)) return drop();
    // Whoever took over a claim that went stale may write here too: the checksums of what is copied
    // out will tell.
    copy_past_cache(cache_->data_of(slot_), data, length);
    settle(true);
}

void NodeCache::Claim::drop() noexcept {
    if (cache_ != nullptr) settle(false);
}

void NodeCache::Claim::settle(bool filled) noexcept {
    {
        Header& header = *cache_->header_;
        const Lock lock(header);
        Slot& slot = header.slots[slot_];
        if (lock && slot.generation == generation_ && slot.state == reading) {
            slot.state = filled ? ready : empty;
            slot.since_ns = now_in_ns();
            header.published += filled ? 1 : 0;
        }
    }
    cache_.reset();
}

// ---- life ----

std::shared_ptr<NodeCache> NodeCache::open(const std::string& path, std::int64_t slot_bytes,
                                           std::int64_t slot_count) {
    if (slot_bytes <= 0 || slot_bytes % block_bytes != 0 || slot_bytes > (std::int64_t{1} << 40)) {
        throw std::invalid_argument("slot_bytes is not a positive multiple of 1 MiB");
    }
    if (slot_count < 1 || slot_count > max_slots) {
        throw std::invalid_argument("slot_count is not between 1 and 1024");
    }
    std::shared_ptr<NodeCache> cache(new NodeCache(path, slot_bytes, slot_count));
    // The last one to let go may remove the file right before it is locked here; the next try makes
    // a new one.
    for (int attempt = 0; attempt < 100; ++attempt) {
        if (cache->attach()) return cache;
    }
    throw OsError(EBUSY, "attach to node cache", path);
}

NodeCache::NodeCache(std::string path, std::int64_t slot_bytes, std::int64_t slot_count)
    : path_(std::move(path)),
      slot_bytes_(slot_bytes),
      slot_count_(slot_count),
      file_bytes_((static_cast<std::int64_t>(sizeof(Header)) + page_bytes - 1) / page_bytes *
                      page_bytes +
                  slot_bytes * slot_count) {}

// Who gets the lock for itself alone makes the cache if it is not made yet. It is never made again
// under the same name: another process may have it mapped.
bool NodeCache::attach() {
    number_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (number_ < 0) throw OsError(errno, "open node cache", path_);
    close_in_child(number_);
    const bool alone = ::flock(number_, LOCK_EX | LOCK_NB) == 0;
    if (!alone && ::flock(number_, LOCK_SH) != 0) throw OsError(errno, "lock node cache", path_);
    struct stat facts = {};
    if (::fstat(number_, &facts) != 0) throw OsError(errno, "fstat of node cache", path_);
    if (facts.st_uid != ::geteuid()) throw OsError(EPERM, "node cache of another user", path_);
    if (facts.st_nlink == 0) return detach();
    if (alone && facts.st_size != file_bytes_) {
        reserve();
    } else if (facts.st_size != file_bytes_) {
        throw OsError(EINVAL, "size of node cache", path_);
    }
    map();
    if (alone && header_->magic != magic) initialise();
    if (header_->magic != magic || header_->slot_bytes != slot_bytes_ ||
        header_->slot_count != slot_count_) {
        throw OsError(EINVAL, "header of node cache", path_);
    }
    if (alone) {
        // Lets go of the one lock before it has the other: another process may remove the file.
        if (::flock(number_, LOCK_SH) != 0) throw OsError(errno, "lock node cache", path_);
        if (::fstat(number_, &facts) != 0 || facts.st_nlink == 0) return detach();
    }
    const Lock lock(*header_);
    if (!lock) throw OsError(EBUSY, "lock node cache", path_);
    ++header_->attached;
    own_bit_ = std::uint64_t{1} << (header_->processes++ % 64);
    attached_ = true;
    return true;
}

bool NodeCache::detach() noexcept {
    if (header_ != nullptr) munmap(std::exchange(header_, nullptr), mapped_bytes());
    forget_in_child(number_);
    ::close(std::exchange(number_, -1));
    return false;
}

void NodeCache::reserve() {
    // Emptied first: what somebody left behind half made is gone, and every byte is zero.
    int result = ::ftruncate(number_, 0);
    if (result == 0) result = ::fallocate(number_, 0, 0, file_bytes_ - slot_bytes_ * slot_count_);
    if (result == 0) result = ::ftruncate(number_, file_bytes_);
    if (result == 0) return;
    const int error = errno;
    ::unlink(path_.c_str());
    throw OsError(error, "reserve node cache", path_);
}

// Whether another process has looked for the file whose chunk is in the slot.
bool NodeCache::is_wanted(std::int64_t slot) noexcept {
    const Lock lock(*header_);
    return lock && (interest_in(header_->slots[slot].key) & ~own_bit_) != 0;
}

// By who has claimed the slot; in tmpfs this also makes and clears its pages, which takes as long
// as copying them.
bool NodeCache::reserve_slot(std::int64_t slot) noexcept {
    if (header_->slots[slot].reserved != 0) return true;
    const std::int64_t start = data_of(slot) - reinterpret_cast<std::uint8_t*>(header_);
    if (::fallocate(number_, 0, start, slot_bytes_) != 0) return false;
    header_->slots[slot].reserved = 1;
    return true;
}

void NodeCache::initialise() {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&header_->mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
    header_->slot_bytes = slot_bytes_;
    header_->slot_count = slot_count_;
    header_->magic = magic;
}

void NodeCache::map() {
    void* const raw = mmap(nullptr, mapped_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, number_, 0);
    if (raw == MAP_FAILED) throw OsError(errno, "mmap of node cache", path_);
    header_ = static_cast<Header*>(raw);
    // Hints, as for slabs.
    madvise(raw, mapped_bytes(), MADV_HUGEPAGE);
    madvise(raw, mapped_bytes(), MADV_DONTFORK);
}

std::uint8_t* NodeCache::data_of(std::int64_t slot) const noexcept {
    auto* const base = reinterpret_cast<std::uint8_t*>(header_);
    return base + (file_bytes_ - slot_bytes_ * slot_count_) + slot * slot_bytes_;
}

NodeCache::~NodeCache() {
    if (stamp_.in_child() || number_ < 0) return;  // a child has neither mapping nor descriptor
    if (attached_) {
        const Lock lock(*header_);
        if (lock) --header_->attached;
    }
    if (::flock(number_, LOCK_EX | LOCK_NB) == 0) ::unlink(path_.c_str());
    detach();
}

void sweep_node_caches(const std::string& directory, const std::string& prefix) noexcept {
    DIR* const entries = ::opendir(directory.c_str());
    if (entries == nullptr) return;
    while (const dirent* const entry = ::readdir(entries)) {
        if (std::strncmp(entry->d_name, prefix.c_str(), prefix.size()) != 0) continue;
        const int number =
            ::openat(::dirfd(entries), entry->d_name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
        if (number < 0) continue;  // of another user, or gone
        if (::flock(number, LOCK_EX | LOCK_NB) == 0) {
            ::unlinkat(::dirfd(entries), entry->d_name, 0);
        }
        ::close(number);
    }
    ::closedir(entries);
}

}  // namespace megatron_uring
