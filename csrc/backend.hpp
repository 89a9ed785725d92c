// What the engine asks of whoever hands requests to the kernel, and what it gives in return.
//
// 1. Every submitted request comes back through the sink exactly once, well or with its job failed,
//    on a thread of the backend.
// 2. Submitting neither blocks nor fails.
// 3. The threads take no signals: a handler never runs on them, and SIGXFSZ becomes EFBIG.
#pragma once

#include <signal.h>

#include <cstdint>
#include <memory>

#include "request.hpp"

namespace megatron_uring {

class RequestSink {
  public:
    virtual void finished(std::unique_ptr<Request> request) noexcept = 0;

  protected:
    ~RequestSink() = default;
};

class Backend {
  public:
    virtual ~Backend() = default;
    virtual void submit(std::unique_ptr<Request> request) noexcept = 0;
    // System calls so far that handed I/O to the kernel.
    virtual std::int64_t submit_calls() const noexcept = 0;
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
    SignalsBlocked() noexcept {
        sigset_t blocked;
        sigfillset(&blocked);
        // The synchronous ones stay, so that faulthandler can report them.
        for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&blocked, number);
        pthread_sigmask(SIG_SETMASK, &blocked, &previous_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &previous_, nullptr); }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

  private:
    sigset_t previous_;
};

}  // namespace megatron_uring
