// See cuda.hpp for what is guaranteed.
#include "cuda.hpp"

#include <dlfcn.h>

#include <utility>

namespace megatron_uring {
namespace {

constexpr const char* known_names[] = {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0"};

// From cuda_runtime_api.h; the same from CUDA 11 to 13.
constexpr unsigned stream_non_blocking = 0x1;
constexpr unsigned event_disable_timing = 0x2;
constexpr unsigned host_register_portable = 0x1;  // page-locked for every device
constexpr int device_to_host = 2;
constexpr int capture_mode_relaxed = 2;

std::string loader_error() {
    const char* const text = dlerror();
    return text == nullptr ? "unknown error" : text;
}

}  // namespace

// ---- loading ----

CudaRuntime::CudaRuntime(const std::string& path) : library_(open(path)), path_(path) {
    resolve(get_device_, "cudaGetDevice");
    resolve(set_device_, "cudaSetDevice");
    resolve(create_stream_, "cudaStreamCreateWithFlags");
    resolve(destroy_stream_, "cudaStreamDestroy");
    resolve(copy_, "cudaMemcpyAsync");
    resolve(synchronize_, "cudaStreamSynchronize");
    resolve(create_event_, "cudaEventCreateWithFlags");
    resolve(destroy_event_, "cudaEventDestroy");
    resolve(record_, "cudaEventRecord");
    resolve(wait_, "cudaStreamWaitEvent");
    resolve(register_, "cudaHostRegister");
    resolve(unregister_, "cudaHostUnregister");
    resolve(exchange_capture_mode_, "cudaThreadExchangeStreamCaptureMode");
    resolve(last_error_, "cudaGetLastError");
    resolve(error_text_, "cudaGetErrorString");
    Dl_info info = {};
    if (dladdr(reinterpret_cast<void*>(copy_), &info) != 0 && info.dli_fname != nullptr) {
        path_ = info.dli_fname;
    }
}

void* CudaRuntime::open(const std::string& path) const {
    if (!path.empty()) {
        void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) throw OsError(EIO, "load libcudart: " + loader_error(), path);
        return library;
    }
    for (const char* name : known_names) {
        if (void* const library = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return library;
    }
    throw OsError(EIO, "load libcudart: the process has loaded none", "");
}

template <class Function>
void CudaRuntime::resolve(Function& function, const char* name) {
    void* const symbol = dlsym(library_, name);
    if (symbol == nullptr) throw OsError(EIO, "load libcudart: " + loader_error(), path_);
    function = reinterpret_cast<Function>(symbol);
}

// ---- errors ----

void CudaRuntime::check(int result, const char* call, int device, const std::string& detail) const {
    if (result == 0) return;
    forget_error(result);
    const std::string where = device < 0 ? "" : " on device " + std::to_string(device);
    throw OsError(
        EIO,
        call + where + detail + ": " + error_text_(result) + " (" + std::to_string(result) + ")",
        "");
}

void CudaRuntime::forget_error(int result) const noexcept {
    if (result != 0) last_error_();
}

// ---- calls ----

int CudaRuntime::current_device() const {
    stamp_.require_owner("CUDA");
    int device = -1;
    check(get_device_(&device), "cudaGetDevice", -1);
    return device;
}

void CudaRuntime::set_device(int device) const {
    stamp_.require_owner("CUDA");
    check(set_device_(device), "cudaSetDevice", device);
}

CudaRuntime::Stream CudaRuntime::create_stream(int device) const {
    Stream stream = nullptr;
    check(create_stream_(&stream, stream_non_blocking), "cudaStreamCreateWithFlags", device);
    return stream;
}

void CudaRuntime::destroy_stream(Stream stream) const noexcept {
    if (!in_child()) forget_error(destroy_stream_(stream));
}

void CudaRuntime::copy_to_host(void* to, const void* from, std::int64_t length, int device,
                               Stream stream) const {
    const int result = copy_(to, from, static_cast<std::size_t>(length), device_to_host, stream);
    check(result, "cudaMemcpyAsync", device, " of " + std::to_string(length) + " bytes");
}

void CudaRuntime::synchronize(int device, Stream stream) const {
    check(synchronize_(stream), "cudaStreamSynchronize", device);
}

CudaRuntime::Event CudaRuntime::create_event(int device) const {
    Event event = nullptr;
    check(create_event_(&event, event_disable_timing), "cudaEventCreateWithFlags", device);
    return event;
}

void CudaRuntime::destroy_event(Event event) const noexcept {
    if (!in_child()) forget_error(destroy_event_(event));
}

void CudaRuntime::record(int device, Event event, Stream stream) const {
    check(record_(event, stream), "cudaEventRecord", device);
}

void CudaRuntime::wait(int device, Stream stream, Event event) const {
    check(wait_(stream, event, 0), "cudaStreamWaitEvent", device);
}

void CudaRuntime::register_host(void* data, std::size_t length) const {
    check(register_(data, length, host_register_portable), "cudaHostRegister", -1,
          " of " + std::to_string(length) + " bytes");
}

void CudaRuntime::unregister_host(void* data) const noexcept {
    if (!in_child()) forget_error(unregister_(data));
}

int CudaRuntime::relax_capture() const {
    int mode = capture_mode_relaxed;
    check(exchange_capture_mode_(&mode), "cudaThreadExchangeStreamCaptureMode", -1);
    return mode;
}

void CudaRuntime::restore_capture(int mode) const noexcept {
    if (!in_child()) forget_error(exchange_capture_mode_(&mode));
}

CurrentDevice::~CurrentDevice() {
    try {
        change_to(device_);
    } catch (const OsError&) {  // the thread keeps the other one; what comes next will say why
    }
}

}  // namespace megatron_uring
