// Syncs of the engine: alone, and behind the last byte of a write. See engine.hpp for what is
// guaranteed.
#include <utility>

#include "engine.hpp"

namespace megatron_uring {

std::unique_ptr<Request> Engine::sync_request(const std::shared_ptr<Job>& job) {
    auto request = std::make_unique<Request>();
    request->job = job;
    request->descriptor = job->files_.front().get();
    request->operation = Operation::sync;
    return request;
}

std::shared_ptr<Job> Engine::sync(const File& file) {
    stamp_.require_owner("engine");
    auto job =
        std::make_shared<Job>(Operation::sync, std::vector{file.descriptor()}, std::vector<Range>{},
                              nullptr, std::nullopt, Sharing{}, pool_->slab_bytes());
    std::unique_ptr<Request> request = sync_request(job);
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        enlist_locked(job, false);
        job->in_flight_ = 1;
    }
    backend_->submit(std::move(request));
    return job;
}

// Of a write that syncs and has been written.
std::unique_ptr<Request> Engine::next_sync_locked(const std::shared_ptr<Job>& job) noexcept {
    const bool written = job->in_flight_ == 0 && job->next_chunk_ == job->chunks_.size();
    if (!job->write_options_.syncs || job->sync_begun_ || !written || job->stopped()) {
        return nullptr;
    }
    try {
        std::unique_ptr<Request> request = sync_request(job);
        job->sync_begun_ = true;
        job->stamp_written();
        job->in_flight_ = 1;
        return request;
    } catch (...) {
        job->fail(std::current_exception());
        return nullptr;
    }
}

}  // namespace megatron_uring
