// See ring.hpp for what is guaranteed.
#include "ring.hpp"

#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <future>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace megatron_uring {
namespace {

void set_up(io_uring& ring, unsigned entries) {
    constexpr std::array<unsigned, 3> flag_sets = {
        IORING_SETUP_CLAMP | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN |
            IORING_SETUP_DEFER_TASKRUN,
        IORING_SETUP_CLAMP | IORING_SETUP_COOP_TASKRUN,
        IORING_SETUP_CLAMP,
    };
    int result = -EINVAL;
    for (const unsigned flags : flag_sets) {
        io_uring_params params = {};
        params.flags = flags;
        result = io_uring_queue_init_params(entries, &ring, &params);
        if (result != -EINVAL) break;  // EINVAL: a flag that this kernel does not know
    }
    if (result < 0) throw OsError(-result, "io_uring_queue_init", "");
}

void require_operations(io_uring& ring) {
    io_uring_probe* const probe = io_uring_get_probe_ring(&ring);
    if (probe == nullptr) throw OsError(ENOSYS, "io_uring_get_probe", "");
    int missing = -1;
    for (const int opcode :
         {IORING_OP_WRITE, IORING_OP_READ, IORING_OP_FSYNC, IORING_OP_POLL_ADD}) {
        if (!io_uring_opcode_supported(probe, opcode)) missing = opcode;
    }
    io_uring_free_probe(probe);
    if (missing >= 0) {
        throw OsError(ENOSYS, "io_uring operation " + std::to_string(missing), "");
    }
}

// An initialised ring and the eventfd that wakes its owner.
class Ring {
  public:
    explicit Ring(unsigned entries) {
        set_up(ring_, entries);
        try {
            require_operations(ring_);
        } catch (...) {
            io_uring_queue_exit(&ring_);
            throw;
        }
        io_uring_ring_dontfork(&ring_);
        close_in_child(ring_.ring_fd);
    }
    ~Ring() {
        forget_in_child(ring_.ring_fd);
        io_uring_queue_exit(&ring_);
    }
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;
    io_uring* get() noexcept { return &ring_; }

  private:
    io_uring ring_ = {};
};

class EventDescriptor {
  public:
    EventDescriptor() : number_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
        if (number_ < 0) throw OsError(errno, "eventfd", "");
        close_in_child(number_);
    }
    ~EventDescriptor() {
        forget_in_child(number_);
        ::close(number_);
    }
    EventDescriptor(const EventDescriptor&) = delete;
    EventDescriptor& operator=(const EventDescriptor&) = delete;
    int number() const noexcept { return number_; }
    void raise() const noexcept { eventfd_write(number_, 1); }
    void clear() const noexcept {
        eventfd_t value = 0;
        eventfd_read(number_, &value);
    }

  private:
    int number_;
};

class RingBackend final : public Backend {
  public:
    RingBackend(RequestSink& sink, std::int64_t queue_depth)
        : sink_(sink), queue_depth_(queue_depth) {
        // The ring belongs to the thread that makes it (SINGLE_ISSUER), so its failure has to be
        // carried out of there.
        std::promise<void> ready;
        std::future<void> outcome = ready.get_future();
        {
            const SignalsBlocked blocked;
            thread_ = std::thread(
                [this, promise = std::move(ready)]() mutable { run(std::move(promise)); });
        }
        try {
            outcome.get();
        } catch (...) {
            thread_.join();
            throw;
        }
    }

    void submit(std::unique_ptr<Request> request) noexcept override {
        bool was_empty;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            was_empty = incoming_.empty();
            incoming_.push_back(std::move(request));
        }
        // Who finds the queue filled knows that the wake-up for it is still unread.
        if (was_empty) wakeup_.raise();
    }

    void stop() noexcept override {
        request_stop();
        thread_.join();
    }

    void abandon() noexcept override {
        request_stop();
        thread_.detach();
    }

  private:
    void request_stop() noexcept {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        wakeup_.raise();
    }

    void run(std::promise<void> ready) noexcept {
        std::optional<Ring> ring;
        try {
            ring.emplace(static_cast<unsigned>(queue_depth_) + 2);
        } catch (...) {
            ready.set_exception(std::current_exception());
            return;
        }
        ring_ = ring->get();
        ready.set_value();
        while (!take_incoming()) {
            submit_pending();
            if (!wakeup_armed_) arm_wakeup();
            const int result = submit_and_wait();
            if (result < 0 && result != -EINTR && result != -ETIME) submission_failed(-result);
            reap();
        }
    }

    // Returns true when it is time to end.
    bool take_incoming() noexcept {
        const std::lock_guard<std::mutex> lock(mutex_);
        while (!incoming_.empty()) pending_.push_back(incoming_.pop_front());
        return stopping_ && pending_.empty() && in_flight_ == 0;
    }

    void submit_pending() noexcept {
        while (!paused_.empty() && paused_.first()->due <= Request::Clock::now()) {
            submit_step(paused_.pop_front());
        }
        while (!pending_.empty() && in_flight_ < queue_depth_) {
            std::unique_ptr<Request> request = pending_.pop_front();
            ++in_flight_;
            const auto pause = request->prepare().pause;
            if (pause.count() > 0) {
                request->due = Request::Clock::now() + pause;
                paused_.insert_by_due(std::move(request));
            } else {
                submit_step(std::move(request));
            }
        }
    }

    void submit_step(std::unique_ptr<Request> request) noexcept {
        const int error = request->step.error != 0 ? request->step.error : broken_errno_;
        if (error != 0) return advance(std::move(request), -error);
        io_uring_sqe* const entry = io_uring_get_sqe(ring_);
        // After a failed submission the queue may still be full.
        if (entry == nullptr) return advance(std::move(request), -EAGAIN);
        fill_entry(*entry, *request, request->step);
        io_uring_sqe_set_data(entry, request.release());
    }

    // Until something completes or the first pause is over.
    int submit_and_wait() noexcept {
        if (paused_.empty()) return io_uring_submit_and_wait(ring_, 1);
        const auto left = paused_.first()->due - Request::Clock::now();
        const auto left_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
        const std::int64_t wait_ns = std::max<std::int64_t>(left_ns, 0);
        __kernel_timespec limit = {wait_ns / 1'000'000'000, wait_ns % 1'000'000'000};
        io_uring_cqe* completion = nullptr;
        return io_uring_submit_and_wait_timeout(ring_, &completion, 1, &limit, nullptr);
    }

    static void fill_entry(io_uring_sqe& entry, const Request& request,
                           const Request::Step& step) noexcept {
        const auto length = static_cast<unsigned>(step.length);
        const auto offset = static_cast<std::uint64_t>(step.offset);
        if (request.operation == Operation::write) {
            io_uring_prep_write(&entry, request.number(), step.buffer, length, offset);
        } else if (request.operation == Operation::read) {
            io_uring_prep_read(&entry, request.number(), step.buffer, length, offset);
        } else {
            io_uring_prep_fsync(&entry, request.number(), IORING_FSYNC_DATASYNC);
        }
    }

    // What was in flight, or counted as such, has come back.
    void advance(std::unique_ptr<Request> request, std::int64_t result) noexcept {
        --in_flight_;
        if (request->advance(result) == Request::Outcome::resubmit) {
            pending_.push_front(std::move(request));
        } else {
            sink_.finished(std::move(request));
        }
    }

    void arm_wakeup() noexcept {
        io_uring_sqe* const entry = io_uring_get_sqe(ring_);
        if (entry == nullptr) return;
        io_uring_prep_poll_add(entry, wakeup_.number(), POLLIN);
        io_uring_sqe_set_data(entry, nullptr);
        wakeup_armed_ = true;
    }

    void reap() noexcept {
        io_uring_cqe* completion = nullptr;
        while (io_uring_peek_cqe(ring_, &completion) == 0 && completion != nullptr) {
            auto* const request = static_cast<Request*>(io_uring_cqe_get_data(completion));
            const std::int64_t result = completion->res;
            io_uring_cqe_seen(ring_, completion);
            if (request == nullptr) {
                wakeup_.clear();
                wakeup_armed_ = false;
                continue;
            }
            advance(std::unique_ptr<Request>(request), result);
        }
    }

    void submission_failed(int error) noexcept {
        // EAGAIN, EBUSY: out of memory or completions to reap first. Anything else does not get
        // better.
        if (error != EAGAIN && error != EBUSY) broken_errno_ = error;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }

    RequestSink& sink_;
    const std::int64_t queue_depth_;
    EventDescriptor wakeup_;

    std::mutex mutex_;
    RequestQueue incoming_;
    bool stopping_ = false;

    // Of the ring's thread alone.
    io_uring* ring_ = nullptr;
    RequestQueue pending_;
    RequestQueue paused_;  // by due; they count as in flight
    std::int64_t in_flight_ = 0;
    bool wakeup_armed_ = false;
    int broken_errno_ = 0;

    std::thread thread_;
};

}  // namespace

std::unique_ptr<Backend> make_ring_backend(RequestSink& sink, std::int64_t queue_depth) {
    return std::make_unique<RingBackend>(sink, queue_depth);
}

}  // namespace megatron_uring
