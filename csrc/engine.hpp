// The engine: moves bytes between memory and files through slabs, on native threads.
//
// 1. Bounded: data in flight never exceeds the slab pool. Where no slab is free, work waits;
//    nothing grows.
// 2. Jobs start in the order in which they were given, and run at the same time as far as slabs
//    allow.
// 3. close() waits for the jobs as long as they make progress. After idle_limit_s without any it
//    cancels them, and if even that does not end them, it abandons the threads and leaks what they
//    use, on purpose: no wait is unbounded.
// 4. No exception leaves a native thread: it fails the job at hand.
// 5. A transfer uses no slab, the caller's memory instead; at most twice the queue depth of them
// are
//    under way.
// 6. Where pieces lie on devices, all free slabs are filled before the first checksum is computed:
//    who waits for the copies waits for nothing else.
// 7. Locks: the engine's mutex may be held when a job's or the pool's free list is locked, never
//    the reverse; no slab is destroyed, no job completed and no system call made under it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "backend.hpp"
#include "ring.hpp"

namespace megatron_uring {

struct EngineOptions {
    std::string kind;
    RingOptions ring;
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
    static void destroy(Engine* engine) noexcept {
        if (engine->close()) delete engine;
    }

    const std::string& kind() const noexcept { return kind_; }
    const std::string& reason() const noexcept { return reason_; }
    std::int64_t slab_count() const noexcept { return pool_->slab_count(); }
    std::string page_lock(const std::shared_ptr<const CudaRuntime>& runtime, int device) {
        return pool_->page_lock(runtime, device);
    }

    std::shared_ptr<Job> write(const File& file, std::int64_t start, std::int64_t length,
                               std::shared_ptr<const PieceTable> pieces,
                               const WriteOptions& options);
    std::shared_ptr<Job> read(const std::vector<const File*>& files, std::vector<Range> ranges,
                              std::shared_ptr<const PieceTable> pieces,
                              std::optional<std::vector<std::uint32_t>> expected, Sharing sharing);
    std::shared_ptr<Job> sync(const File& file);
    // Moves each range between its file and its address: no copy, no checksum (transfer.cpp).
    std::shared_ptr<Job> transfer(Operation operation, const std::vector<const File*>& files,
                                  std::vector<Range> ranges, std::vector<std::uint8_t*> addresses);
    std::int64_t submit_calls() const noexcept { return backend_->submit_calls(); }

    bool wait(const Job& job, double timeout_s) const;
    bool wait_staged(const Job& job, double timeout_s) const;
    void cancel(Job& job);
    bool in_child() const noexcept { return stamp_.in_child(); }
    // False if the threads had to be abandoned.
    bool close() noexcept;

  private:
    void choose_backend(const EngineOptions& options);
    void stop_threads(bool abandon) noexcept;
    void start(const std::shared_ptr<Job>& job);
    static std::unique_ptr<Request> sync_request(const std::shared_ptr<Job>& job);
    void work() noexcept;
    bool advance_one(std::unique_lock<std::mutex>& lock, DeviceStreams& streams);
    bool drop_stopped(std::unique_lock<std::mutex>& lock) noexcept;
    std::unique_ptr<Request> next_request_locked(Operation operation);
    std::unique_ptr<Request> next_transfer_locked();
    void cut_locked(Request& request) noexcept;
    void issue(std::unique_ptr<Request> request) noexcept;
    void retry_deferred(std::unique_lock<std::mutex>& lock) noexcept;
    void land_later(std::unique_ptr<Request> request) noexcept;
    void fill(std::unique_ptr<Request> request, DeviceStreams& streams) noexcept;
    void check(std::unique_ptr<Request> request) noexcept;
    void submit_filled(std::unique_ptr<Request> request) noexcept;
    void retire(std::unique_ptr<Request> request) noexcept;
    void enlist_locked(const std::shared_ptr<Job>& job, bool waits);
    std::unique_ptr<Request> next_sync_locked(const std::shared_ptr<Job>& job) noexcept;
    bool settle_locked(Job& job) noexcept;
    bool wait_until_idle(bool cancelled) noexcept;
    void finished(std::unique_ptr<Request> request) noexcept override;
    void slab_released() noexcept override;

    const ForkStamp stamp_;
    const std::shared_ptr<SlabPool> pool_;
    const std::int64_t transfer_limit_;
    std::string kind_;
    std::string reason_;
    std::unique_ptr<Backend> backend_;

    std::mutex mutex_;
    std::condition_variable work_available_;
    std::condition_variable idle_;
    std::deque<std::shared_ptr<Job>> waiting_;  // jobs with chunks that have not been started
    RequestQueue deferred_;                     // reads that another process of the node does
    RequestQueue landed_;                       // reads to verify and scatter
    RequestQueue staged_;                       // writes copied from devices, without checksums
    std::int64_t transfers_in_flight_ = 0;
    std::vector<std::shared_ptr<Job>> live_;  // jobs that are not done
    std::uint64_t progress_count_ = 0;
    bool closing_ = false;
    bool stopping_ = false;

    std::mutex close_mutex_;
    bool closed_ = false;
    bool abandoned_ = false;
    std::vector<std::thread> workers_;
};

}  // namespace megatron_uring
