// The watchdog: says, when it is asked by a signal, what this process is doing.
//
// 1. It answers wherever the process stands, also while it is blocked in MPI or in a system call of
//    a disk that does not answer: the handler reads static memory and calls write(2), nothing else.
// 2. It never takes a signal that somebody else handles: it is installed only where the signal has
//    its default action, and again only where it was itself.
// 3. Each step passes the recorder, so that a test can stop or fail a process at any of them.
// 4. Idle it costs a step some stores; there are some dozens of them in a save.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace megatron_uring {
namespace watchdog {

// Operations that were handed to the kernel and have not come back.
inline std::atomic<std::int64_t> operations_in_flight{0};

// This process begins with `step`, which is cut at 200 bytes. Throws OsError if a fault says so.
void enter(const std::string& step);

// What is printed beside the step: the rank, if it is not negative, which leaves it as it was, and
// what the process works on, cut at 300 bytes.
void describe(int rank, const std::string& subject);

// Whether the signal is answered from now on. Throws std::invalid_argument for what is none.
bool install(int signal);

}  // namespace watchdog
}  // namespace megatron_uring
