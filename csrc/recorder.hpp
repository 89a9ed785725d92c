// The recorder: the one door through which every file operation of the engine and of the commit
// helpers passes.
//
// 1. Idle (no fault injected, no trace running) it costs one relaxed load per operation.
// 2. A fault is decided before the operation starts, so that both engines behave alike: an error
//    replaces the operation (the kernel is not asked), `short` halves its length, `kill` acts
//    at once, `delay` is left to the caller, who may have other things to do meanwhile.
// 3. The trace lists operations in the order of completion, with the length that was wanted, also
//    when a fault cut it. For `open` the offset holds the flags; for `rename` the path is "source
//    -> destination".
// 4. Memory is bounded: a trace that outgrows trace_limit fails when it is stopped rather than
//    losing entries unseen.
// 5. A forked child inherits faults and trace in a consistent state.
#pragma once

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

namespace megatron_uring {

enum class Operation : std::uint8_t {
    open,
    preallocate,
    write,
    read,
    sync,
    truncate,
    close,
    rename,
    sync_directory,
    remove,
    step,  // of a save or a restore; no system call
};

const char* name_of(Operation operation) noexcept;

namespace recorder {

struct Verdict {
    int error = 0;         // complete with this errno instead of asking the kernel
    bool shorten = false;  // ask the kernel for half of the bytes
    double delay_s = 0.0;  // but first let so much time pass
};

struct Entry {
    Operation operation;
    std::string path;
    std::int64_t offset;
    std::int64_t length;
    std::int64_t result;  // or -errno
};

inline constexpr std::size_t trace_limit = 4'000'000;

inline std::atomic<bool> faults_active{false};
inline std::atomic<bool> trace_active{false};

Verdict judge(Operation operation, const std::string& path);
void append(Operation operation, const std::string& path, std::int64_t offset, std::int64_t length,
            std::int64_t result);

inline Verdict before(Operation operation, const std::string& path) {
    if (!faults_active.load(std::memory_order_relaxed)) return {};
    return judge(operation, path);
}

inline void after(Operation operation, const std::string& path, std::int64_t offset,
                  std::int64_t length, std::int64_t result) {
    if (trace_active.load(std::memory_order_relaxed))
        append(operation, path, offset, length, result);
}

// A whole synchronous operation: `call(length)` returns what the system call returns; errno becomes
// a negative result.
template <class Call>
std::int64_t perform(Operation operation, const std::string& path, std::int64_t offset,
                     std::int64_t length, Call&& call) {
    const Verdict verdict = before(operation, path);
    if (verdict.delay_s > 0.0) {
        std::this_thread::sleep_for(std::chrono::duration<double>(verdict.delay_s));
    }
    std::int64_t result;
    if (verdict.error != 0) {
        result = -verdict.error;
    } else {
        result = call(verdict.shorten && length > 1 ? length / 2 : length);
        if (result < 0) result = -errno;
    }
    after(operation, path, offset, length, result);
    return result;
}

// Throws std::invalid_argument for names that do not exist. `count` -1: for ever.
void inject_fault(const std::string& operation, const std::string& fault, std::int64_t skip,
                  std::int64_t count, const std::string& path_contains, double delay_s);
void clear_faults();
void trace_start();
std::vector<Entry> trace_stop();

}  // namespace recorder
}  // namespace megatron_uring
