// See watchdog.hpp for what is guaranteed.
#include "watchdog.hpp"

#include <pthread.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "error.hpp"
#include "recorder.hpp"

namespace megatron_uring {
namespace watchdog {
namespace {

// Text that a signal handler may read while it is replaced: it then gets the one before. Two
// replacements under one handler, which interrupts the thread that makes them, cannot be.
template <std::size_t limit>
class Text {
  public:
    void set(const std::string& text) noexcept {
        const int next = 1 - current_.load(std::memory_order_relaxed);
        std::array<char, limit>& slot = slots_[static_cast<std::size_t>(next)];
        const std::size_t length = std::min(text.size(), limit - 1);
        std::memcpy(slot.data(), text.data(), length);
        slot[length] = '\0';
        current_.store(next, std::memory_order_release);
    }

    const char* get() const noexcept {
        return slots_[static_cast<std::size_t>(current_.load(std::memory_order_acquire))].data();
    }

  private:
    std::array<std::array<char, limit>, 2> slots_{};
    std::atomic<int> current_{0};
};

Text<201> current_step;
Text<301> current_subject;
std::atomic<int> current_rank{-1};
std::atomic<std::int64_t> entered_ms{0};

// clock_gettime is async-signal-safe.
std::int64_t now_ms() noexcept {
    timespec now = {};
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1000 + now.tv_nsec / 1'000'000;
}

// A line that is put together without the C library's formatting, which a handler must not call.
class Line {
  public:
    Line& operator<<(const char* text) noexcept {
        while (*text != '\0' && length_ + 1 < text_.size()) text_[length_++] = *text++;
        return *this;
    }

    Line& operator<<(std::int64_t number) noexcept {
        std::array<char, 21> digits{};
        std::size_t at = digits.size() - 1;
        std::uint64_t rest = static_cast<std::uint64_t>(number < 0 ? -number : number);
        do {
            digits[--at] = static_cast<char>('0' + rest % 10);
            rest /= 10;
        } while (rest != 0);
        if (number < 0) digits[--at] = '-';
        return *this << digits.data() + at;
    }

    void print() noexcept {
        text_[length_++] = '\n';
        [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text_.data(), length_);
    }

  private:
    std::array<char, 700> text_{};
    std::size_t length_ = 0;
};

[[maybe_unused]] const int fork_handler_installed =
    pthread_atfork(nullptr, nullptr, [] { operations_in_flight.store(0); });

void answer(int) {
    const int kept = errno;
    const std::int64_t waited_ms = now_ms() - entered_ms.load(std::memory_order_relaxed);
    Line line;
    line << "megatron_uring: ";
    if (current_rank.load() >= 0) line << "rank " << current_rank.load() << ", ";
    line << "process " << static_cast<std::int64_t>(::getpid()) << ": ";
    if (*current_step.get() == '\0') {
        line << "no save and no restore has begun";
    } else {
        line << current_step.get() << " for " << waited_ms / 1000 << "." << waited_ms % 1000 / 100
             << " s";
        if (*current_subject.get() != '\0') line << ", " << current_subject.get();
    }
    line << ", " << operations_in_flight.load(std::memory_order_relaxed)
         << " operations in the kernel";
    line.print();
    errno = kept;
}

}  // namespace

void enter(const std::string& step) {
    current_step.set(step);
    entered_ms.store(now_ms(), std::memory_order_relaxed);
    const std::int64_t result =
        recorder::perform(Operation::step, step, 0, 0, [](std::int64_t) { return 0; });
    if (result < 0) throw OsError(static_cast<int>(-result), "step", step);
}

void describe(int rank, const std::string& subject) {
    if (rank >= 0) current_rank.store(rank);
    current_subject.set(subject);
}

bool install(int signal) {
    struct sigaction before = {};
    if (::sigaction(signal, nullptr, &before) != 0) {
        throw std::invalid_argument("no such signal: " + std::to_string(signal));
    }
    const bool simple = (before.sa_flags & SA_SIGINFO) == 0;
    if (simple && before.sa_handler == answer) return true;
    if (!simple || before.sa_handler != SIG_DFL) return false;
    struct sigaction ours = {};
    ours.sa_handler = answer;
    ours.sa_flags = SA_RESTART;
    ::sigemptyset(&ours.sa_mask);
    if (::sigaction(signal, &ours, nullptr) != 0) {
        throw std::invalid_argument("a signal that cannot be handled: " + std::to_string(signal));
    }
    return true;
}

}  // namespace watchdog
}  // namespace megatron_uring
