// A job: what was asked for, how far it has come, and how it ended.
//
// 1. A job is done exactly once, and only when nothing of it is in flight and its slabs are back in
//    the pool, whether it succeeded, failed or was cancelled. Until then the memory it was given
//    must stay valid; after, it is not touched.
// 2. The first failure wins and is what every rethrow() throws. Failing needs no memory: what a
//    native thread could not allocate for becomes ENOMEM, any other exception EIO with its text.
// 3. A read that succeeds has filled every byte of its pieces, bad blocks apart: ranges that do not
//    cover the pieces fail the job.
// 4. A write is staged once every byte of its pieces was copied, or the job is done: from then on
//    the memory of the pieces is not read any more, and may change.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "copy.hpp"
#include "error.hpp"
#include "file.hpp"
#include "node_cache.hpp"
#include "recorder.hpp"
#include "schedule.hpp"

namespace megatron_uring {

struct BadBlock {
    std::int64_t range_number;
    std::int64_t file_offset;
    std::uint32_t expected;
    std::uint32_t found;
};

// How a write goes about it.
struct WriteOptions {
    // Checksums are those of the copies, so that memory that changes while it is copied never makes
    // a block that a restore refuses: who lets it change has other means to notice.
    bool checksum_copies = false;
    std::int64_t bytes_per_s = 0;  // at most, over the job; 0: no limit
    int io_priority = 0;           // as ioprio_set(2) has it; 0: none of its own
    bool syncs = false;            // behind the last byte, before the job is done
};

class Job {
  public:
    Job(Operation operation, std::vector<std::shared_ptr<Descriptor>> files,
        std::vector<Range> ranges, std::shared_ptr<const PieceTable> pieces,
        std::optional<std::vector<std::uint32_t>> expected, Sharing sharing,
        std::int64_t slab_bytes);
    void set_write_options(const WriteOptions& options) noexcept { write_options_ = options; }
    // A transfer: each range as one request, in this order, between its file and its address.
    Job(Operation operation, std::vector<std::shared_ptr<Descriptor>> files,
        std::vector<Range> ranges, std::vector<std::uint8_t*> addresses);

    bool done() const noexcept { return done_.load(std::memory_order_acquire); }
    // Whether to start nothing more: it has failed or was cancelled.
    bool stopped() const noexcept { return stopped_.load(std::memory_order_acquire); }
    bool wait(double timeout_s) const;
    bool staged() const noexcept { return done() || bytes_staged() >= bytes_total_; }
    bool wait_staged(double timeout_s) const;
    std::int64_t bytes_staged() const noexcept {
        return bytes_staged_.load(std::memory_order_acquire);
    }
    // When it was staged and when it was done, in seconds of CLOCK_MONOTONIC; 0 before.
    double staged_at_s() const noexcept { return static_cast<double>(staged_at_ns_.load()) * 1e-9; }
    double written_at_s() const noexcept {  // the same, but for a sync behind it
        return static_cast<double>(written_at_ns_.load()) * 1e-9;
    }
    double done_at_s() const noexcept { return static_cast<double>(done_at_ns_.load()) * 1e-9; }
    void rethrow() const;  // of a done job; an OsError
    void fail(std::exception_ptr error) noexcept;
    // Fails with the OsError that `make` returns, or with what keeps it from being made.
    template <class Make>
    void fail_with(Make&& make) noexcept {
        try {
            throw make();
        } catch (...) {
            fail(std::current_exception());
        }
    }

    std::int64_t bytes_total() const noexcept { return bytes_total_; }
    std::int64_t bytes_done() const noexcept { return bytes_done_.load(std::memory_order_relaxed); }
    // Of bytes_done: what came from another process of the node.
    std::int64_t bytes_shared() const noexcept { return bytes_shared_.load(); }
    double copy_s() const noexcept { return static_cast<double>(copy_ns_.load()) * 1e-9; }
    double checksum_s() const noexcept { return static_cast<double>(checksum_ns_.load()) * 1e-9; }
    const std::vector<std::uint32_t>& checksums() const noexcept { return checksums_; }
    const std::vector<BadBlock>& bad_blocks() const noexcept { return bad_blocks_; }
    Operation operation() const noexcept { return operation_; }
    std::string path() const { return files_.empty() ? "" : files_.front()->path(); }

  private:
    friend class Engine;
    friend struct Request;
    void check_ranges(std::int64_t alignment_bytes);
    void complete() noexcept;
    void require_covered_pieces() const;
    void add_staged(std::int64_t bytes) noexcept;
    void stamp_written() noexcept;
    std::chrono::steady_clock::duration reserve(std::int64_t bytes) noexcept;

    const Operation operation_;
    const std::vector<std::shared_ptr<Descriptor>> files_;
    const std::vector<Range> ranges_;
    std::vector<std::size_t> first_blocks_;  // of each range, in checksums_
    const std::shared_ptr<const PieceTable> pieces_;
    const std::optional<std::vector<std::uint32_t>> expected_;
    const Sharing sharing_;
    const std::vector<std::uint8_t*> addresses_;  // of each range of a transfer; else empty
    std::int64_t bytes_total_ = 0;
    WriteOptions write_options_;  // before the job starts

    std::vector<Chunk> chunks_;

    // Guarded by the engine's mutex: what has not been started yet, and what is in flight.
    std::size_t next_chunk_ = 0;
    std::int64_t in_flight_ = 0;
    bool sync_begun_ = false;

    std::atomic<std::int64_t> bytes_done_{0};
    std::atomic<std::int64_t> bytes_staged_{0};
    std::atomic<std::int64_t> bytes_scattered_{0};
    std::atomic<std::int64_t> bytes_shared_{0};
    std::atomic<std::int64_t> copy_ns_{0};
    std::atomic<std::int64_t> checksum_ns_{0};
    std::atomic<std::int64_t> staged_at_ns_{0};
    std::atomic<std::int64_t> written_at_ns_{0};
    std::atomic<std::int64_t> done_at_ns_{0};
    std::vector<std::uint32_t> checksums_;  // each element has one writer: the request of its block

    mutable std::mutex mutex_;
    mutable std::condition_variable finished_;
    std::vector<BadBlock> bad_blocks_;                  // under mutex_ until done
    std::exception_ptr error_;                          // under mutex_ until done
    std::chrono::steady_clock::time_point next_write_;  // under mutex_: with a limited rate
    std::atomic<bool> stopped_{false};
    std::atomic<bool> done_{false};
};

}  // namespace megatron_uring
