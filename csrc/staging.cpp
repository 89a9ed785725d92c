// Writes of the engine: from memory into slabs. See engine.hpp for what is guaranteed.
#include <utility>

#include "engine.hpp"

namespace megatron_uring {

void Engine::fill(std::unique_ptr<Request> request, DeviceStreams& streams) noexcept {
    if (!request->copies_from_devices()) {
        request->fill();
        return submit_filled(std::move(request));
    }
    request->stage(streams);
    if (request->job->stopped()) return retire(std::move(request));
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        ++progress_count_;
        staged_.push_back(std::move(request));
    }
    work_available_.notify_one();  // another thread may compute checksums while this one copies
}

void Engine::check(std::unique_ptr<Request> request) noexcept {
    request->check_slab();
    submit_filled(std::move(request));
}

void Engine::submit_filled(std::unique_ptr<Request> request) noexcept {
    if (request->job->stopped()) {
        retire(std::move(request));
    } else {
        backend_->submit(std::move(request));
    }
}

}  // namespace megatron_uring
