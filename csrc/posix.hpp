// The POSIX backend: a pool of threads that call pwrite, pread and fdatasync.
//
// 1. Same interface and same results as the ring; it is the common case on clusters where io_uring
//    is absent.
// 2. As many operations in flight as threads; requests start in the order in which they were
//    submitted.
// 3. A pause (back-off, injected delay) occupies one thread.
#pragma once

#include <cstdint>
#include <memory>

#include "backend.hpp"

namespace megatron_uring {

std::unique_ptr<Backend> make_posix_backend(RequestSink& sink, std::int64_t thread_count);

}  // namespace megatron_uring
