// See device.hpp for what is guaranteed.
#include "device.hpp"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <string>

namespace megatron_uring {

// ---- events ----

DeviceEvents::DeviceEvents(std::shared_ptr<const CudaRuntime> runtime,
                           const std::vector<StreamOf>& streams)
    : runtime_(std::move(runtime)) {
    events_.reserve(streams.size());
    try {
        record(streams);
    } catch (...) {
        destroy();
        throw;
    }
}

DeviceEvents::~DeviceEvents() {
    destroy();
}

void DeviceEvents::record(const std::vector<StreamOf>& streams) {
    CurrentDevice current(runtime_);
    for (const auto& [device, stream] : streams) {
        if (device < 0 || device > PieceTable::max_device_number) {
            throw std::invalid_argument("no such device: " + std::to_string(device));
        }
        if (cover(device)) {
            throw std::invalid_argument("device is there twice: " + std::to_string(device));
        }
        current.change_to(device);  // the default stream is that of the current device
        events_.push_back({device, runtime_->create_event(device)});
        runtime_->record(device, events_.back().event, stream);
    }
}

void DeviceEvents::destroy() noexcept {
    if (events_.empty() || runtime_->in_child()) return;
    try {
        CurrentDevice current(runtime_);
        for (const auto& [device, event] : events_) {
            current.change_to(device);
            runtime_->destroy_event(event);
        }
    } catch (const OsError&) {  // a device that is lost: what is left of it goes with the process
    }
}

bool DeviceEvents::cover(int device) const noexcept {
    return std::any_of(events_.begin(), events_.end(),
                       [device](const Recorded& one) { return one.device == device; });
}

void DeviceEvents::hold_back(int device, CudaRuntime::Stream stream) const {
    for (const auto& recorded : events_) {
        if (recorded.device == device) runtime_->wait(device, stream, recorded.event);
    }
}

// ---- streams ----

DeviceStreams::~DeviceStreams() {
    for (const Own& own : streams_) own.runtime->destroy_stream(own.stream);
    if (relaxed_) relaxed_->restore_capture(capture_mode_);
}

DeviceStreams::Own& DeviceStreams::stream_of(const std::shared_ptr<const CudaRuntime>& runtime,
                                             int device) {
    runtime->set_device(device);
    const auto found = std::find_if(streams_.begin(), streams_.end(), [&](const Own& own) {
        return own.runtime == runtime && own.device == device;
    });
    if (found != streams_.end()) return *found;
    if (!relaxed_) {
        capture_mode_ = runtime->relax_capture();
        relaxed_ = runtime;
    }
    streams_.reserve(streams_.size() + 1);  // or a stream could be lost
    streams_.push_back({runtime, device, runtime->create_stream(device), false});
    return streams_.back();
}

void DeviceStreams::queue(const DeviceEvents& events, const std::vector<DeviceRun>& runs) {
    int device = -1;
    CudaRuntime::Stream stream = nullptr;
    for (const DeviceRun& run : runs) {
        if (run.device != device) {
            Own& own = stream_of(events.runtime(), run.device);
            if (!own.in_use) events.hold_back(run.device, own.stream);
            own.in_use = true;
            device = run.device;
            stream = own.stream;
        }
        events.runtime()->copy_to_host(run.slab, run.source, run.length, device, stream);
    }
}

void DeviceStreams::fetch(const PieceTable& pieces, const Window& window) {
    const std::vector<DeviceRun> runs = pieces.device_runs(window);
    std::exception_ptr error;
    try {
        queue(*pieces.device_events(), runs);
    } catch (...) {
        error = std::current_exception();
    }
    // Also after a failure: copies that were queued before it still write to the slab.
    for (Own& own : streams_) {
        if (!std::exchange(own.in_use, false)) continue;
        try {
            own.runtime->synchronize(own.device, own.stream);
        } catch (...) {
            if (error == nullptr) error = std::current_exception();
        }
    }
    if (error != nullptr) std::rethrow_exception(error);
}

}  // namespace megatron_uring
