// A request: one chunk of a job on its way from memory to a file or back, in one slab, or, of a
// transfer, in the caller's own memory.
//
// 1. Short transfers resume where they stopped (at the aligned position before it if the file is
//    direct); EINTR and EAGAIN are retried a bounded number of times without progress. Every other
//    errno fails the job. All of this is here, for both backends.
// 2. A checksum of a write is that of the bytes handed to the kernel, provided that nobody changes
//    the memory of the pieces while the job runs. Who does gets, if not the torn tensor, a block
//    that a restore refuses.
// 3. No byte of a block whose checksum differs from the expected one is ever scattered.
// 4. Nothing here waits: a pause is handed to the backend, which knows what else there is to do.
// 5. Nothing throws. What goes wrong, memory that ran out included, fails the job.
// 6. Queues of requests need no memory, so that handing a request on cannot fail.
// 7. A transfer asks for exactly the bytes that it was given, and what the file system refuses, it
//    refuses: no byte of memory outside of them is touched.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "device.hpp"
#include "job.hpp"
#include "slab_pool.hpp"

namespace megatron_uring {

// The backend asks prepare() what to hand to the kernel, and tells advance() what came back, until
// that says `finished`.
struct Request {
    using Clock = std::chrono::steady_clock;
    enum class Outcome { resubmit, finished };
    struct Step {
        int error = 0;  // not 0: do not ask the kernel, advance(-error)
        std::uint8_t* buffer = nullptr;
        std::int64_t offset = 0;
        std::int64_t length = 0;
        Clock::duration pause{0};  // let this pass first, cancelled or not
    };

    // Write: copies the pieces into the slab and computes the checksums. Ends early if the job has
    // been stopped.
    void fill() noexcept;
    // The same in two steps, if some of the pieces lie on devices: copies, through the streams of
    // this thread, after which the chunk is staged; and checksums, which nobody waits for.
    bool copies_from_devices() const noexcept;
    void stage(DeviceStreams& streams) noexcept;
    void check_slab() noexcept;
    // Read: whether the chunk came from the node's cache; if not, whether it has to be read now.
    NodeCache::Outcome look_in_cache(bool patient) noexcept;
    // Read: verifies the blocks of the slab and scatters them.
    void land() noexcept;

    bool transfers() const noexcept;  // without a slab
    const Step& prepare() noexcept;
    Outcome advance(std::int64_t result) noexcept;
    int number() const noexcept { return descriptor->number(); }
    int io_priority() const noexcept {  // of other operations the kernel refuses one
        return operation == Operation::write ? job->write_options_.io_priority : 0;
    }

    std::shared_ptr<Job> job;
    Descriptor* descriptor = nullptr;  // kept open by the job
    Operation operation = Operation::sync;
    Slab slab;
    std::uint8_t* memory = nullptr;  // of the slab, or the caller's
    std::size_t range_number = 0;
    std::int64_t file_offset = 0;
    std::int64_t length = 0;
    std::size_t first_block = 0;

    Clock::time_point cut_at;       // when the chunk was cut from its range
    Step step;                      // as prepare() left it
    int file_slot = -1;             // of a ring's registered files, while in flight
    Clock::time_point due;          // of the backend: when the pause of the step is over
    std::unique_ptr<Request> next;  // of the queue that holds the request

  private:
    std::size_t block_number(std::int64_t at) const noexcept;
    void land_block(std::int64_t at, Clock::duration& checking);
    void prepare_transfer(bool shorten) noexcept;
    bool must_wait() noexcept;
    Outcome advance_transfer(std::int64_t result) noexcept;
    Outcome retry_or_fail(int error, bool pause) noexcept;
    void fail(int error) noexcept;

    NodeCache::Claim claim_;  // to offer the chunk to other processes
    bool verified_ = false;   // came from the cache, which checks
    bool intact_ = true;      // no bad block was found
    std::int64_t done_bytes_ = 0;
    // Where the step in flight began: done_bytes_, aligned down if direct.
    std::int64_t resume_bytes_ = 0;
    std::int64_t wanted_bytes_ = 0;  // what the step in flight wanted before a fault cut it
    bool step_direct_ = false;
    bool step_recorded_ = false;
    bool reserved_ = false;  // of the job's rate
    bool paced_ = false;     // the step in flight only waits
    Clock::time_point not_before_;
    int idle_attempts_ = 0;
    Clock::duration back_off_{0};  // before the next step
};

// First in, first out.
class RequestQueue {
  public:
    RequestQueue() noexcept = default;
    RequestQueue(const RequestQueue&) = delete;
    RequestQueue& operator=(const RequestQueue&) = delete;
    ~RequestQueue();

    bool empty() const noexcept { return first_ == nullptr; }
    const Request* first() const noexcept { return first_.get(); }
    void push_back(std::unique_ptr<Request> request) noexcept;
    void push_front(std::unique_ptr<Request> request) noexcept;
    // Behind those that are due no later.
    void insert_by_due(std::unique_ptr<Request> request) noexcept;
    std::unique_ptr<Request> pop_front() noexcept;

  private:
    std::unique_ptr<Request> first_;
    Request* last_ = nullptr;
};

}  // namespace megatron_uring
