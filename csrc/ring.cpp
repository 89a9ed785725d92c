// See ring.hpp for what is guaranteed.
#include "ring.hpp"

#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <future>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace megatron_uring {
namespace {

// How long the kernel's polling thread spins for more before it sleeps.
constexpr unsigned polling_idle_ms = 50;
constexpr unsigned file_slots = 64;

void set_up(io_uring& ring, unsigned entries, bool polled) {
    constexpr std::array<unsigned, 3> flag_sets = {
        IORING_SETUP_CLAMP | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN |
            IORING_SETUP_DEFER_TASKRUN,
        IORING_SETUP_CLAMP | IORING_SETUP_COOP_TASKRUN,
        IORING_SETUP_CLAMP,
    };
    constexpr unsigned unpolled = IORING_SETUP_COOP_TASKRUN | IORING_SETUP_DEFER_TASKRUN;
    int result = -EINVAL;
    for (const unsigned flags : flag_sets) {
        io_uring_params params = {};
        params.flags = polled ? (flags & ~unpolled) | IORING_SETUP_SQPOLL : flags;
        params.sq_thread_idle = polled ? polling_idle_ms : 0;
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
    Ring(unsigned entries, bool polled) {
        set_up(ring_, entries, polled);
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

// The registered files of a ring: the slot of each descriptor, an old one replaced when all are
// taken. A slot stays as it is while a request that was queued with it is not back.
class FileSlots {
  public:
    explicit FileSlots(io_uring& ring) : ring_(ring) {
        const int result = io_uring_register_files_sparse(&ring_, file_slots);
        if (result < 0) throw OsError(-result, "io_uring_register_files_sparse", "");
    }

    // -1 where it gets none. What it gets is to be released.
    int acquire(const Descriptor& descriptor) noexcept {
        for (unsigned slot = 0; slot < file_slots; ++slot) {
            if (serials_[slot] == descriptor.serial()) return use(slot);
        }
        for (unsigned tried = 0; tried < file_slots; ++tried) {
            const unsigned slot = next_++ % file_slots;
            if (users_[slot] == 0) return fill(slot, descriptor) ? use(slot) : -1;
        }
        return -1;
    }

    void release(int slot) noexcept { --users_[static_cast<unsigned>(slot)]; }

  private:
    int use(unsigned slot) noexcept {
        ++users_[slot];
        return static_cast<int>(slot);
    }

    bool fill(unsigned slot, const Descriptor& descriptor) noexcept {
        const int number = descriptor.number();
        serials_[slot] = 0;
        if (io_uring_register_files_update(&ring_, slot, &number, 1) != 1) return false;
        serials_[slot] = descriptor.serial();
        return true;
    }

    io_uring& ring_;
    std::array<std::uint64_t, file_slots> serials_ = {};
    std::array<unsigned, file_slots> users_ = {};
    unsigned next_ = 0;
};

void register_memory(io_uring& ring, const std::vector<MemoryRange>& ranges) {
    if (ranges.empty()) return;
    std::vector<iovec> vectors;
    vectors.reserve(ranges.size());
    for (const MemoryRange& range : ranges) {
        vectors.push_back({range.data, static_cast<std::size_t>(range.length)});
    }
    const int result =
        io_uring_register_buffers(&ring, vectors.data(), static_cast<unsigned>(vectors.size()));
    if (result < 0) throw OsError(-result, "io_uring_register_buffers", "");
}

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
    RingBackend(RequestSink& sink, RingOptions options)
        : sink_(sink), options_(std::move(options)) {
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

    std::int64_t submit_calls() const noexcept override { return submit_calls_.load(); }

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
            ring.emplace(static_cast<unsigned>(options_.queue_depth) + 2,
                         options_.polled_submission);
            register_memory(*ring->get(), options_.registered_memory);
            if (options_.registered_files) file_slots_.emplace(*ring->get());
        } catch (...) {
            ready.set_exception(std::current_exception());
            return;
        }
        ring_ = ring->get();
        ready.set_value();
        while (!take_incoming()) {
            submit_pending();
            if (!wakeup_armed_) arm_wakeup();
            check_submission(submit_and_wait());
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
        while (!pending_.empty() && in_flight_ < options_.queue_depth) {
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
        fill_entry(*entry, *request);
        io_uring_sqe_set_data(entry, request.release());
        if (options_.submission_batch > 0 && ++unsubmitted_ >= options_.submission_batch) {
            count_submission();
            check_submission(io_uring_submit(ring_));
        }
    }

    // Not where there is nothing to submit, and the call only waits.
    void count_submission() noexcept {
        unsubmitted_ = 0;
        if (io_uring_sq_ready(ring_) > 0) submit_calls_.fetch_add(1, std::memory_order_relaxed);
    }

    void check_submission(int result) noexcept {
        if (result < 0 && result != -EINTR && result != -ETIME) submission_failed(-result);
    }

    // Until something completes or the first pause is over.
    int submit_and_wait() noexcept {
        count_submission();
        if (paused_.empty()) return io_uring_submit_and_wait(ring_, 1);
        const auto left = paused_.first()->due - Request::Clock::now();
        const auto left_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
        const std::int64_t wait_ns = std::max<std::int64_t>(left_ns, 0);
        __kernel_timespec limit = {wait_ns / 1'000'000'000, wait_ns % 1'000'000'000};
        io_uring_cqe* completion = nullptr;
        return io_uring_submit_and_wait_timeout(ring_, &completion, 1, &limit, nullptr);
    }

    void fill_entry(io_uring_sqe& entry, Request& request) noexcept {
        const Request::Step& step = request.step;
        const auto length = static_cast<unsigned>(step.length);
        const auto offset = static_cast<std::uint64_t>(step.offset);
        if (file_slots_) request.file_slot = file_slots_->acquire(*request.descriptor);
        const int file = request.file_slot < 0 ? request.number() : request.file_slot;
        const int memory = memory_number(step);
        if (request.operation == Operation::sync) {
            io_uring_prep_fsync(&entry, file, IORING_FSYNC_DATASYNC);
        } else if (request.operation == Operation::write && memory >= 0) {
            io_uring_prep_write_fixed(&entry, file, step.buffer, length, offset, memory);
        } else if (request.operation == Operation::write) {
            io_uring_prep_write(&entry, file, step.buffer, length, offset);
        } else if (memory >= 0) {
            io_uring_prep_read_fixed(&entry, file, step.buffer, length, offset, memory);
        } else {
            io_uring_prep_read(&entry, file, step.buffer, length, offset);
        }
        entry.ioprio = static_cast<std::uint16_t>(request.io_priority());
        if (request.file_slot >= 0) entry.flags |= IOSQE_FIXED_FILE;
    }

    // Of the registered range that holds all of the step's memory; -1 if none does.
    int memory_number(const Request::Step& step) const noexcept {
        const auto& ranges = options_.registered_memory;
        for (std::size_t i = 0; i < ranges.size(); ++i) {
            const auto begin = reinterpret_cast<std::intptr_t>(step.buffer) -
                               reinterpret_cast<std::intptr_t>(ranges[i].data);
            if (begin >= 0 && begin + step.length <= ranges[i].length) return static_cast<int>(i);
        }
        return -1;
    }

    // What was in flight, or counted as such, has come back.
    void advance(std::unique_ptr<Request> request, std::int64_t result) noexcept {
        --in_flight_;
        if (request->file_slot >= 0) file_slots_->release(std::exchange(request->file_slot, -1));
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
    const RingOptions options_;
    EventDescriptor wakeup_;

    std::mutex mutex_;
    RequestQueue incoming_;
    bool stopping_ = false;
    std::atomic<std::int64_t> submit_calls_{0};

    // Of the ring's thread alone.
    io_uring* ring_ = nullptr;
    std::optional<FileSlots> file_slots_;
    std::int64_t unsubmitted_ = 0;
    RequestQueue pending_;
    RequestQueue paused_;  // by due; they count as in flight
    std::int64_t in_flight_ = 0;
    bool wakeup_armed_ = false;
    int broken_errno_ = 0;

    std::thread thread_;
};

}  // namespace

std::unique_ptr<Backend> make_ring_backend(RequestSink& sink, RingOptions options) {
    return std::make_unique<RingBackend>(sink, std::move(options));
}

}  // namespace megatron_uring
