// Memory of devices: when it may be read, and the way from there into a slab.
//
// 1. A copy from a device begins when everything is over there that was queued, when the
//    DeviceEvents were made, on the streams that they were given: kernels that still write the
//    tensors come first. Streams that nobody named are not waited for.
// 2. Copies run on a stream of the copying thread's own, not ordered with anybody else's work, and
//    do not disturb graphs that another thread captures.
// 3. fetch() returns, or throws, only when no copy into the slab is in flight any more. (A device
//    that is lost for good may leave one; then no call of CUDA works again in this process.)
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "copy.hpp"
#include "cuda.hpp"

namespace megatron_uring {

// One event on one stream of each device.
class DeviceEvents {
  public:
    struct StreamOf {
        int device;
        CudaRuntime::Stream stream;
    };

    DeviceEvents(std::shared_ptr<const CudaRuntime> runtime, const std::vector<StreamOf>& streams);
    DeviceEvents(const DeviceEvents&) = delete;
    DeviceEvents& operator=(const DeviceEvents&) = delete;
    ~DeviceEvents();

    const std::shared_ptr<const CudaRuntime>& runtime() const noexcept { return runtime_; }
    bool cover(int device) const noexcept;
    // What is queued on `stream`, which is of this device, from now on comes after the events.
    void hold_back(int device, CudaRuntime::Stream stream) const;

  private:
    void record(const std::vector<StreamOf>& streams);
    void destroy() noexcept;

    struct Recorded {
        int device;
        CudaRuntime::Event event;
    };
    const std::shared_ptr<const CudaRuntime> runtime_;
    std::vector<Recorded> events_;
};

// The streams of one thread, which alone uses them; each is made when it is first needed. Leaves
// another device current.
class DeviceStreams {
  public:
    DeviceStreams() noexcept = default;
    DeviceStreams(const DeviceStreams&) = delete;
    DeviceStreams& operator=(const DeviceStreams&) = delete;
    ~DeviceStreams();

    // Copies what the pieces have on devices of this window into its slab; the rest is not touched.
    void fetch(const PieceTable& pieces, const Window& window);

  private:
    struct Own {
        std::shared_ptr<const CudaRuntime> runtime;
        int device;
        CudaRuntime::Stream stream;
        bool in_use;  // by the fetch at hand
    };
    Own& stream_of(const std::shared_ptr<const CudaRuntime>& runtime, int device);
    void queue(const DeviceEvents& events, const std::vector<DeviceRun>& runs);

    std::vector<Own> streams_;
    std::shared_ptr<const CudaRuntime> relaxed_;  // through which the thread's mode was changed
    int capture_mode_ = 0;
};

}  // namespace megatron_uring
