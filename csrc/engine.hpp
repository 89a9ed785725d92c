// The engine: moves bytes between memory and files through slabs, on native threads.
//
// 1. Bounded: data in flight never exceeds the slab pool. Where no slab is free, work waits;
// nothing grows.
// 2. A job is done exactly once, and only when nothing of it is in flight and its slabs are back in
// the pool, whether
//    it succeeded, failed or was cancelled. Until then the memory it was given must stay valid;
//    after, it is not touched.
// 3. Short transfers resume where they stopped (at the aligned position before it if the file is
// direct); EINTR and
//    EAGAIN are retried a bounded number of times without progress. Every other errno fails the
//    job, the first one wins.
// 4. No byte of a block whose checksum differs from the expected one is ever scattered.
// 5. A read that succeeds has filled every byte of its pieces, bad blocks apart: ranges that do not
// cover the pieces
//    fail the job.
// 6. Jobs start in the order in which they were given, and run at the same time as far as slabs
// allow.
// 7. close() waits for the jobs as long as they make progress. After idle_limit_s without any it
// cancels them, and if
//    even that does not end them, it abandons the threads and leaks what they use, on purpose: no
//    wait is unbounded.
// 8. Locks: the engine's mutex may be held when the pool's free list is locked, never the reverse;
// no slab is
//    destroyed, no job completed and no system call made under it.
#pragma once

#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "copy.hpp"
#include "error.hpp"
#include "file.hpp"
#include "recorder.hpp"
#include "slab_pool.hpp"

namespace megatron_uring {

struct Range {
    std::int32_t file_number;
    std::int64_t start;
    std::int64_t length;
};

struct BadBlock {
    std::int64_t range_number;
    std::int64_t file_offset;
    std::uint32_t expected;
    std::uint32_t found;
};

class Job {
  public:
    Job(Operation operation, std::vector<std::shared_ptr<Descriptor>> files,
        std::vector<Range> ranges, std::shared_ptr<const PieceTable> pieces,
        std::optional<std::vector<std::uint32_t>> expected);

    bool done() const noexcept { return done_.load(std::memory_order_acquire); }
    // Whether to start nothing more: it has failed or was cancelled.
    bool stopped() const noexcept { return stopped_.load(std::memory_order_acquire); }
    bool wait(double timeout_s) const;
    void rethrow() const;  // of a done job
    void fail(OsError error) noexcept;

    std::int64_t bytes_total() const noexcept { return bytes_total_; }
    std::int64_t bytes_done() const noexcept { return bytes_done_.load(std::memory_order_relaxed); }
    double copy_s() const noexcept { return static_cast<double>(copy_ns_.load()) * 1e-9; }
    double checksum_s() const noexcept { return static_cast<double>(checksum_ns_.load()) * 1e-9; }
    const std::vector<std::uint32_t>& checksums() const noexcept { return checksums_; }
    const std::vector<BadBlock>& bad_blocks() const noexcept { return bad_blocks_; }
    Operation operation() const noexcept { return operation_; }

  private:
    friend class Engine;
    friend struct Request;
    void complete() noexcept;

    const Operation operation_;
    const std::vector<std::shared_ptr<Descriptor>> files_;
    const std::vector<Range> ranges_;
    std::vector<std::size_t> first_blocks_;  // of each range, in checksums_
    const std::shared_ptr<const PieceTable> pieces_;
    const std::optional<std::vector<std::uint32_t>> expected_;
    std::int64_t bytes_total_ = 0;

    // Guarded by the engine's mutex: what has not been started yet, and what is in flight.
    std::size_t next_range_ = 0;
    std::int64_t next_offset_ = 0;
    std::int64_t in_flight_ = 0;

    std::atomic<std::int64_t> bytes_done_{0};
    std::atomic<std::int64_t> bytes_scattered_{0};
    std::atomic<std::int64_t> copy_ns_{0};
    std::atomic<std::int64_t> checksum_ns_{0};
    std::vector<std::uint32_t> checksums_;  // each element has one writer: the request of its block

    mutable std::mutex mutex_;
    mutable std::condition_variable finished_;
    std::vector<BadBlock> bad_blocks_;  // under mutex_ until done
    std::optional<OsError> error_;      // under mutex_ until done
    std::atomic<bool> stopped_{false};
    std::atomic<bool> done_{false};
};

// One chunk of a job on its way through the backend. The backend asks prepare() what to hand to the
// kernel, and tells advance() what came back, until that says `finished`; all retry and resume
// logic is here, for both backends.
struct Request {
    enum class Outcome { resubmit, finished };
    struct Step {
        int error;  // not 0: do not ask the kernel, advance(-error)
        std::uint8_t* buffer;
        std::int64_t offset;
        std::int64_t length;
    };

    Step prepare() noexcept;
    Outcome advance(std::int64_t result) noexcept;
    int number() const noexcept { return descriptor->number(); }

    std::shared_ptr<Job> job;
    Descriptor* descriptor = nullptr;  // kept open by the job
    Operation operation = Operation::sync;
    Slab slab;
    std::size_t range_number = 0;
    std::int64_t file_offset = 0;
    std::int64_t length = 0;
    std::size_t first_block = 0;

    std::int64_t done_bytes = 0;
    std::int64_t resume_bytes =
        0;  // where the step in flight began: done_bytes, aligned down if direct
    std::int64_t wanted_bytes = 0;  // what the step in flight wanted before a fault cut it
    bool step_direct = false;
    bool step_recorded = false;
    int idle_attempts = 0;

  private:
    Outcome advance_transfer(std::int64_t result) noexcept;
    Outcome retry_or_fail(int error, bool pause) noexcept;
    void fail(int error) noexcept;
};

class RequestSink {
  public:
    // The request has ended, well or with its job failed. Called on a backend's thread.
    virtual void finished(std::unique_ptr<Request> request) noexcept = 0;

  protected:
    ~RequestSink() = default;
};

// Runs requests. Every submitted request comes back through the sink exactly once.
class Backend {
  public:
    virtual ~Backend() = default;
    virtual void submit(std::unique_ptr<Request> request) noexcept = 0;
    // After the last request has come back: ends the threads.
    virtual void stop() noexcept = 0;
    // When requests do not come back: lets the threads run on by themselves. The backend is never
    // destroyed then.
    virtual void abandon() noexcept = 0;
};

// While it lives, threads that are started inherit a mask without asynchronous signals: Python's
// handlers stay on its own threads, and a write over RLIMIT_FSIZE is EFBIG and not SIGXFSZ.
class SignalsBlocked {
  public:
    SignalsBlocked() noexcept;
    ~SignalsBlocked();
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

  private:
    sigset_t previous_;
};

struct EngineOptions {
    std::string kind;
    std::int64_t queue_depth;
    std::int64_t posix_threads;
    std::int64_t copy_threads;
};

class Engine final : private RequestSink, private SlabListener {
  public:
    static constexpr double idle_limit_s = 5.0;

    Engine(std::shared_ptr<SlabPool> pool, const EngineOptions& options);
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;
    // Only destroy() may use it: the threads have to be gone.
    ~Engine() = default;
    // Closes and deletes; leaks the engine if it had to be abandoned, or in a forked child.
    static void destroy(Engine* engine) noexcept;

    const std::string& kind() const noexcept { return kind_; }
    const std::string& reason() const noexcept { return reason_; }

    std::shared_ptr<Job> write(const File& file, std::int64_t start, std::int64_t length,
                               std::shared_ptr<const PieceTable> pieces);
    std::shared_ptr<Job> read(const std::vector<const File*>& files, std::vector<Range> ranges,
                              std::shared_ptr<const PieceTable> pieces,
                              std::optional<std::vector<std::uint32_t>> expected);
    std::shared_ptr<Job> sync(const File& file);

    bool wait(const Job& job, double timeout_s) const;
    void cancel(Job& job);
    bool in_child() const noexcept { return stamp_.in_child(); }
    // False if the threads had to be abandoned.
    bool close() noexcept;

  private:
    void choose_backend(const EngineOptions& options);
    void stop_threads(bool abandon) noexcept;
    void start(const std::shared_ptr<Job>& job);
    void work() noexcept;
    std::unique_ptr<Request> next_request_locked(Operation operation) noexcept;
    void cut_locked(Request& request) noexcept;
    void fill(std::unique_ptr<Request> request) noexcept;
    void land(std::unique_ptr<Request> request) noexcept;
    void retire(std::unique_ptr<Request> request) noexcept;
    bool settle_locked(Job& job) noexcept;
    bool wait_until_idle(bool cancelled) noexcept;
    void finished(std::unique_ptr<Request> request) noexcept override;
    void slab_released() noexcept override;

    const ForkStamp stamp_;
    const std::shared_ptr<SlabPool> pool_;
    std::string kind_;
    std::string reason_;
    std::unique_ptr<Backend> backend_;

    std::mutex mutex_;
    std::condition_variable work_available_;
    std::condition_variable idle_;
    std::deque<std::shared_ptr<Job>> waiting_;     // jobs with chunks that have not been started
    std::deque<std::unique_ptr<Request>> landed_;  // reads to verify and scatter
    std::vector<std::shared_ptr<Job>> live_;       // jobs that are not done
    std::uint64_t progress_count_ = 0;
    bool closing_ = false;
    bool stopping_ = false;

    std::mutex close_mutex_;
    bool closed_ = false;
    bool abandoned_ = false;
    std::vector<std::thread> workers_;
};

}  // namespace megatron_uring
