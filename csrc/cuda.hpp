// The CUDA runtime, found when it is needed: nothing of CUDA is there when this is built.
//
// 1. Without a path it is the library that the process has already (PyTorch's), with one, a file or
//    a name, that one and no other. It is never unloaded: what it started may still run.
// 2. Every call that fails is an OsError, made in one place: EIO, the call, the device, and CUDA's
//    own text and number. CUDA's record of the thread's last error is cleared then, so that the
//    next one who asks, PyTorch for example, is not told of a failure that was dealt with here.
// 3. Nothing here picks a device: the caller makes one current first. CurrentDevice gives a thread
//    that is not ours its device back; where that device was never used, CUDA 12 sets it up then.
// 4. Nothing is called in a forked child, where CUDA does not work.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "error.hpp"

namespace megatron_uring {

class CudaRuntime {
  public:
    // As CUDA has them: pointers to what only it knows.
    using Stream = void*;
    using Event = void*;

    explicit CudaRuntime(const std::string& path);
    CudaRuntime(const CudaRuntime&) = delete;
    CudaRuntime& operator=(const CudaRuntime&) = delete;

    // Of the library, as far as the loader tells.
    const std::string& path() const noexcept { return path_; }
    bool in_child() const noexcept { return stamp_.in_child(); }

    int current_device() const;
    void set_device(int device) const;

    // Not ordered with any other stream, the default one included, but by events.
    Stream create_stream(int device) const;
    void destroy_stream(Stream stream) const noexcept;
    void copy_to_host(void* to, const void* from, std::int64_t length, int device,
                      Stream stream) const;
    void synchronize(int device, Stream stream) const;

    Event create_event(int device) const;
    void destroy_event(Event event) const noexcept;
    void record(int device, Event event, Stream stream) const;
    void wait(int device, Stream stream, Event event) const;

    void register_host(void* data, std::size_t length) const;
    void unregister_host(void* data) const noexcept;

    // From now on this thread's calls are none of the business of a graph that another thread
    // captures; returns the mode that was in force.
    int relax_capture() const;
    void restore_capture(int mode) const noexcept;

  private:
    void* open(const std::string& path) const;
    template <class Function>
    void resolve(Function& function, const char* name);
    void check(int result, const char* call, int device, const std::string& detail = "") const;
    void forget_error(int result) const noexcept;

    const ForkStamp stamp_;
    void* library_ = nullptr;
    std::string path_;
    // The signatures of CUDA 11 to 13; an enumeration is an int there.
    int (*get_device_)(int*) = nullptr;
    int (*set_device_)(int) = nullptr;
    int (*create_stream_)(Stream*, unsigned) = nullptr;
    int (*destroy_stream_)(Stream) = nullptr;
    int (*copy_)(void*, const void*, std::size_t, int, Stream) = nullptr;
    int (*synchronize_)(Stream) = nullptr;
    int (*create_event_)(Event*, unsigned) = nullptr;
    int (*destroy_event_)(Event) = nullptr;
    int (*record_)(Event, Stream) = nullptr;
    int (*wait_)(Stream, Event, unsigned) = nullptr;
    int (*register_)(void*, std::size_t, unsigned) = nullptr;
    int (*unregister_)(void*) = nullptr;
    int (*exchange_capture_mode_)(int*) = nullptr;
    int (*last_error_)() = nullptr;
    const char* (*error_text_)(int) = nullptr;
};

// While it lives, another device may be made current on this thread.
class CurrentDevice {
  public:
    explicit CurrentDevice(std::shared_ptr<const CudaRuntime> runtime)
        : runtime_(std::move(runtime)), device_(runtime_->current_device()) {}
    CurrentDevice(const CurrentDevice&) = delete;
    CurrentDevice& operator=(const CurrentDevice&) = delete;
    ~CurrentDevice();

    void change_to(int device) {
        if (device != runtime_->current_device()) runtime_->set_device(device);
    }

  private:
    const std::shared_ptr<const CudaRuntime> runtime_;
    const int device_;
};

}  // namespace megatron_uring
