// Errors, and what is left of an object after fork.
//
// 1. Everything that the operating system refuses is an OsError: errno, the path, and in the
//    message the operation with its offset and length. bindings.cpp translates it in one place;
//    nothing below knows Python.
// 2. A wrong argument is std::invalid_argument, thrown before anything has been started.
// 3. Threads, rings and slabs do not survive fork. An object that owns one carries a ForkStamp; in
//    a child, using it throws EOWNERDEAD and destroying it touches nothing, since its memory and
//    its locks belong to threads that are gone.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <string>
#include <system_error>
#include <utility>

namespace megatron_uring {

class OsError : public std::system_error {
  public:
    OsError(int error, std::string context, std::string path)
        : std::system_error(error, std::generic_category(), context),
          context_(std::move(context)),
          path_(std::move(path)) {}

    int number() const noexcept { return code().value(); }
    const std::string& path() const noexcept { return path_; }
    std::string message() const { return context_ + ": " + code().message(); }

  private:
    std::string context_;
    std::string path_;
};

inline std::string describe(const char* operation, std::int64_t offset, std::int64_t length) {
    return std::string(operation) + " of " + std::to_string(length) + " bytes at offset " +
           std::to_string(offset);
}

// Counts the forks between the first process and this one; file.cpp installs the handler that
// increments it.
inline std::atomic<std::uint32_t> fork_generation{0};

class ForkStamp {
  public:
    bool in_child() const noexcept {
        return generation_ != fork_generation.load(std::memory_order_relaxed);
    }
    void require_owner(const char* what) const {
        if (in_child()) {
            throw OsError(EOWNERDEAD, std::string(what) + " used in a forked child", "");
        }
    }

  private:
    std::uint32_t generation_ = fork_generation.load(std::memory_order_relaxed);
};

}  // namespace megatron_uring
