// The io_uring backend.
//
// 1. One thread owns the ring, submits and reaps: SINGLE_ISSUER and DEFER_TASKRUN where the kernel
//    has them, plain flags where it answers EINVAL. Other threads reach it through a queue and an
//    eventfd.
// 2. At most queue_depth operations are in flight. Every operation that was submitted is reaped
//    before the ring goes.
// 3. Set-up fails with the errno and the call's name, nothing half-made; operations that are needed
//    but not supported count as ENOSYS.
// 4. If the ring itself breaks later, requests fail with its errno; what is in flight is still
//    waited for.
// 5. A forked child closes its copies of the ring's descriptors and never uses them. The ring is
//    not mapped there.
// 6. A pause (back-off, injected delay) holds up its own request only; it counts as in flight.
// 7. What RingOptions adds changes how operations reach the kernel, never which: memory that is not
//    within one registered range, and a file that gets no slot, go the plain way. A file stays open
//    in the kernel, and its space taken, while it has a slot.
#pragma once

#include <cerrno>
#include <cstdint>
#include <memory>
#include <vector>

#include "backend.hpp"

namespace megatron_uring {

struct MemoryRange {
    std::uint8_t* data;
    std::int64_t length;
};

struct RingOptions {
    std::int64_t queue_depth = 0;
    std::int64_t submission_batch =
        0;                           // operations submitted by one call at most; 0: all there are
    bool polled_submission = false;  // a kernel thread takes them (SQPOLL)
    bool registered_files = false;
    std::vector<MemoryRange> registered_memory;  // at most 1 GiB each, as the kernel wants it
};

#ifdef MEGATRON_URING_WITH_LIBURING
inline constexpr bool built_with_liburing = true;
std::unique_ptr<Backend> make_ring_backend(RequestSink& sink, RingOptions options);
#else
inline constexpr bool built_with_liburing = false;
inline std::unique_ptr<Backend> make_ring_backend(RequestSink&, RingOptions) {
    throw OsError(ENOSYS, "built without liburing", "");
}
#endif

}  // namespace megatron_uring
