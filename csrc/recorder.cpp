// See recorder.hpp for what is guaranteed.
#include "recorder.hpp"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "error.hpp"

namespace megatron_uring {
namespace {

constexpr std::array<const char*, 11> operation_names = {
    "open",  "preallocate", "write",          "read",   "sync", "truncate",
    "close", "rename",      "sync_directory", "remove", "step"};

enum class Effect : std::uint8_t { error, shorten, delay, kill };

struct FaultName {
    const char* name;
    Effect effect;
    int error;
};

constexpr std::array<FaultName, 14> fault_names = {{
    {"short", Effect::shorten, 0},
    {"eintr", Effect::error, EINTR},
    {"eagain", Effect::error, EAGAIN},
    {"eio", Effect::error, EIO},
    {"enospc", Effect::error, ENOSPC},
    {"edquot", Effect::error, EDQUOT},
    {"einval", Effect::error, EINVAL},
    {"efault", Effect::error, EFAULT},
    {"enomem", Effect::error, ENOMEM},
    {"erofs", Effect::error, EROFS},
    {"estale", Effect::error, ESTALE},
    {"emfile", Effect::error, EMFILE},
    {"delay", Effect::delay, 0},
    {"kill", Effect::kill, 0},
}};

struct Fault {
    Operation operation;
    Effect effect;
    int error;
    std::int64_t skip;
    std::int64_t count;
    std::string path_contains;
    double delay_s;
};

struct State {
    std::mutex mutex;
    std::vector<Fault> faults;
    std::vector<recorder::Entry> trace;
    bool overflowed = false;
};

// Never destroyed: threads that were abandoned on purpose may still pass here while the process
// exits.
State& state() {
    static State* const instance = [] {
        auto* fresh = new State;
        pthread_atfork([] { state().mutex.lock(); }, [] { state().mutex.unlock(); },
                       [] { state().mutex.unlock(); });
        return fresh;
    }();
    return *instance;
}

Operation operation_of(const std::string& name) {
    for (std::size_t i = 0; i < operation_names.size(); ++i) {
        if (name == operation_names[i]) return static_cast<Operation>(i);
    }
    throw std::invalid_argument("no such operation: " + name);
}

const FaultName& fault_of(const std::string& name) {
    for (const FaultName& fault : fault_names) {
        if (name == fault.name) return fault;
    }
    throw std::invalid_argument("no such fault: " + name);
}

}  // namespace

const char* name_of(Operation operation) noexcept {
    return operation_names[static_cast<std::size_t>(operation)];
}

namespace recorder {

Verdict judge(Operation operation, const std::string& path) {
    Verdict verdict;
    bool kill_now = false;
    {
        const std::lock_guard<std::mutex> lock(state().mutex);
        for (Fault& fault : state().faults) {
            if (fault.operation != operation || fault.count == 0) continue;
            if (path.find(fault.path_contains) == std::string::npos) continue;
            if (fault.skip > 0) {
                --fault.skip;
                continue;
            }
            if (fault.count > 0) --fault.count;
            if (fault.effect == Effect::error && verdict.error == 0) verdict.error = fault.error;
            if (fault.effect == Effect::shorten) verdict.shorten = true;
            if (fault.effect == Effect::delay) verdict.delay_s += fault.delay_s;
            if (fault.effect == Effect::kill) kill_now = true;
        }
    }
    if (kill_now) std::this_thread::sleep_for(std::chrono::duration<double>(verdict.delay_s));
    while (kill_now) ::kill(::getpid(), SIGKILL);
    return verdict;
}

void append(Operation operation, const std::string& path, std::int64_t offset, std::int64_t length,
            std::int64_t result) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    if (!trace_active.load(std::memory_order_relaxed)) return;
    if (state().trace.size() >= trace_limit) {
        state().overflowed = true;
        return;
    }
    state().trace.push_back({operation, path, offset, length, result});
}

void inject_fault(const std::string& operation, const std::string& fault, std::int64_t skip,
                  std::int64_t count, const std::string& path_contains, double delay_s) {
    const Operation target = operation_of(operation);
    const FaultName& what = fault_of(fault);
    if (skip < 0) throw std::invalid_argument("skip is negative");
    if (count < -1) throw std::invalid_argument("count is below -1");
    if (!(delay_s >= 0.0 && delay_s <= 86400.0)) {
        throw std::invalid_argument("delay_s is not between 0 and 86400");
    }
    const bool transfers = target == Operation::write || target == Operation::read;
    if (what.effect == Effect::shorten && !transfers) {
        throw std::invalid_argument("only write and read can be short");
    }
    const std::lock_guard<std::mutex> lock(state().mutex);
    state().faults.push_back(
        {target, what.effect, what.error, skip, count, path_contains, delay_s});
    faults_active.store(true, std::memory_order_relaxed);
}

void clear_faults() {
    const std::lock_guard<std::mutex> lock(state().mutex);
    faults_active.store(false, std::memory_order_relaxed);
    state().faults.clear();
}

void trace_start() {
    const std::lock_guard<std::mutex> lock(state().mutex);
    state().trace.clear();
    state().overflowed = false;
    trace_active.store(true, std::memory_order_relaxed);
}

std::vector<Entry> trace_stop() {
    const std::lock_guard<std::mutex> lock(state().mutex);
    trace_active.store(false, std::memory_order_relaxed);
    std::vector<Entry> entries = std::exchange(state().trace, {});
    if (state().overflowed) {
        throw OsError(EOVERFLOW,
                      "trace of more than " + std::to_string(trace_limit) + " operations", "");
    }
    return entries;
}

}  // namespace recorder
}  // namespace megatron_uring
