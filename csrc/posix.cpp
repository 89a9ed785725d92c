// See posix.hpp for what is guaranteed.
#include "posix.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace megatron_uring {
namespace {

class PosixBackend final : public Backend {
  public:
    PosixBackend(RequestSink& sink, std::int64_t thread_count) : sink_(sink) {
        const SignalsBlocked blocked;
        threads_.reserve(static_cast<std::size_t>(thread_count));
        try {
            for (std::int64_t i = 0; i < thread_count; ++i) {
                threads_.emplace_back([this] { run(); });
            }
        } catch (...) {
            stop();
            throw;
        }
    }

    void submit(std::unique_ptr<Request> request) noexcept override {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            queue_.push_back(std::move(request));
        }
        available_.notify_one();
    }

    std::int64_t submit_calls() const noexcept override { return submit_calls_.load(); }

    void stop() noexcept override {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        available_.notify_all();
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
    }

    void abandon() noexcept override {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        available_.notify_all();
        for (std::thread& thread : threads_) thread.detach();
        threads_.clear();
    }

  private:
    void run() noexcept {
        for (;;) {
            std::unique_ptr<Request> request;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                available_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
                if (queue_.empty()) return;
                request = queue_.pop_front();
            }
            while (request->advance(transfer(*request)) == Request::Outcome::resubmit) {
            }
            sink_.finished(std::move(request));
        }
    }

    // Of this thread, until the next write asks for another. A hint: where it is refused, the write
    // goes on without.
    static void take_priority(int priority) noexcept {
        thread_local int taken = 0;
        if (priority == taken) return;
        constexpr int this_thread = 1;  // IOPRIO_WHO_PROCESS, with the number 0
        syscall(SYS_ioprio_set, this_thread, 0, priority);
        taken = priority;
    }

    std::int64_t transfer(Request& request) noexcept {
        const Request::Step& step = request.prepare();
        if (step.pause.count() > 0) std::this_thread::sleep_for(step.pause);
        if (step.error != 0) return -step.error;
        submit_calls_.fetch_add(1, std::memory_order_relaxed);
        const auto length = static_cast<std::size_t>(step.length);
        std::int64_t result;
        if (request.operation == Operation::write) {
            take_priority(request.io_priority());
            result = ::pwrite(request.number(), step.buffer, length, step.offset);
        } else if (request.operation == Operation::read) {
            result = ::pread(request.number(), step.buffer, length, step.offset);
        } else {
            result = ::fdatasync(request.number());
        }
        return result < 0 ? -errno : result;
    }

    RequestSink& sink_;
    std::mutex mutex_;
    std::condition_variable available_;
    RequestQueue queue_;
    bool stopping_ = false;
    std::atomic<std::int64_t> submit_calls_{0};
    std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Backend> make_posix_backend(RequestSink& sink, std::int64_t thread_count) {
    return std::make_unique<PosixBackend>(sink, thread_count);
}

}  // namespace megatron_uring
