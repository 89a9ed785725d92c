// See engine.hpp for what is guaranteed.
#include "engine.hpp"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

#include "checksum.hpp"
#include "posix.hpp"

namespace megatron_uring {
namespace {

constexpr std::int64_t write_alignment_bytes = 4096;
// How often to ask for a chunk that another process reads, which takes it milliseconds.
constexpr std::chrono::microseconds deferred_poll{300};

void require_bound(std::int64_t value, std::int64_t limit, const char* name,
                   std::int64_t least = 1) {
    if (value < least || value > limit) {
        throw std::invalid_argument(std::string(name) + " is not between " + std::to_string(least) +
                                    " and " + std::to_string(limit) + ": " + std::to_string(value));
    }
}

}  // namespace

// ---- life ----

Engine::Engine(std::shared_ptr<SlabPool> pool, const EngineOptions& options)
    : pool_(std::move(pool)), transfer_limit_(2 * options.ring.queue_depth) {
    require_bound(options.ring.queue_depth, 4096, "queue_depth");
    require_bound(options.ring.submission_batch, 4096, "submission_batch", 0);
    require_bound(options.posix_threads, 256, "posix_threads");
    require_bound(options.copy_threads, 64, "copy_threads");
    choose_backend(options);
    try {
        pool_->subscribe(this);
        const SignalsBlocked blocked;
        for (std::int64_t i = 0; i < options.copy_threads; ++i) {
            workers_.emplace_back([this] { work(); });
        }
    } catch (...) {
        pool_->unsubscribe(this);
        stop_threads(false);
        throw;
    }
}

void Engine::choose_backend(const EngineOptions& options) {
    if (options.kind != "io_uring" && options.kind != "posix" && options.kind != "auto") {
        throw std::invalid_argument("kind is not io_uring, posix or auto: " + options.kind);
    }
    if (options.kind == "posix") {
        reason_ = "posix: asked for";
    } else {
        try {
            backend_ = make_ring_backend(*this, options.ring);
            kind_ = "io_uring";
            reason_ = options.kind == "auto" ? "io_uring: available" : "io_uring: asked for";
            return;
        } catch (const OsError& error) {
            if (options.kind == "io_uring") throw;
            reason_ = "posix: " + error.message();
        }
    }
    kind_ = "posix";
    backend_ = make_posix_backend(*this, std::min(options.ring.queue_depth, options.posix_threads));
}

void Engine::stop_threads(bool abandon) noexcept {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
    }
    work_available_.notify_all();
    for (std::thread& worker : workers_) abandon ? worker.detach() : worker.join();
    workers_.clear();
    abandon ? backend_->abandon() : backend_->stop();
}

bool Engine::close() noexcept {
    if (in_child()) return false;
    const std::lock_guard<std::mutex> close_lock(close_mutex_);
    if (closed_) return !abandoned_;
    closed_ = true;
    abandoned_ = !wait_until_idle(false);
    if (abandoned_) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            for (const auto& job : live_) {
                job->fail_with([] { return OsError(ECANCELED, "engine closed", ""); });
            }
            work_available_.notify_all();
        }
        abandoned_ = !wait_until_idle(true);
    }
    // An abandoned engine stays subscribed: it lives for ever, and its threads may still need slabs
    // to come to an end.
    if (!abandoned_) pool_->unsubscribe(this);
    stop_threads(abandoned_);
    return !abandoned_;
}

bool Engine::wait_until_idle(bool cancelled) noexcept {
    const std::chrono::duration<double> patience(cancelled ? idle_limit_s / 5 : idle_limit_s);
    std::unique_lock<std::mutex> lock(mutex_);
    closing_ = true;
    while (!live_.empty()) {
        const std::uint64_t seen = progress_count_;
        const bool moved = idle_.wait_for(lock, patience,
                                          [&] { return live_.empty() || progress_count_ != seen; });
        if (!moved) return false;
    }
    return true;
}

// ---- jobs ----

std::shared_ptr<Job> Engine::write(const File& file, std::int64_t start, std::int64_t length,
                                   std::shared_ptr<const PieceTable> pieces,
                                   const WriteOptions& options) {
    stamp_.require_owner("engine");
    if (length % write_alignment_bytes != 0) {
        throw std::invalid_argument("length is not a multiple of 4096: " + std::to_string(length));
    }
    if (pieces->max_file_number() > 0) {
        throw std::invalid_argument("pieces of a write have file_number 0");
    }
    auto job = std::make_shared<Job>(Operation::write, std::vector{file.descriptor()},
                                     std::vector{Range{0, start, length}}, pieces, std::nullopt,
                                     Sharing{}, pool_->slab_bytes());
    if (!pieces->within(start, start + length)) {
        throw std::invalid_argument("a piece lies outside of [start, start + length)");
    }
    job->set_write_options(options);
    this->start(job);
    return job;
}

std::shared_ptr<Job> Engine::read(const std::vector<const File*>& files, std::vector<Range> ranges,
                                  std::shared_ptr<const PieceTable> pieces,
                                  std::optional<std::vector<std::uint32_t>> expected,
                                  Sharing sharing) {
    stamp_.require_owner("engine");
    if (pieces->max_file_number() >= static_cast<std::int64_t>(files.size())) {
        throw std::invalid_argument("pieces name a file_number that is not in files");
    }
    std::vector<std::shared_ptr<Descriptor>> descriptors;
    descriptors.reserve(files.size());
    for (const File* file : files) descriptors.push_back(file->descriptor());
    auto job = std::make_shared<Job>(Operation::read, std::move(descriptors), std::move(ranges),
                                     std::move(pieces), std::move(expected), std::move(sharing),
                                     pool_->slab_bytes());
    start(job);
    return job;
}

void Engine::start(const std::shared_ptr<Job>& job) {
    bool settled;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        enlist_locked(job, !job->chunks_.empty());
        settled = settle_locked(*job);
    }
    settled ? job->complete() : work_available_.notify_all();
}

// All or, when memory runs out, nothing.
void Engine::enlist_locked(const std::shared_ptr<Job>& job, bool waits) {
    if (closing_) throw std::invalid_argument("engine is closed");
    live_.reserve(live_.size() + 1);
    if (waits) waiting_.push_back(job);
    live_.push_back(job);
}

bool Engine::wait(const Job& job, double timeout_s) const {
    if (job.done()) return true;
    stamp_.require_owner("job");
    return job.wait(timeout_s);
}

bool Engine::wait_staged(const Job& job, double timeout_s) const {
    if (job.staged()) return true;
    stamp_.require_owner("job");
    return job.wait_staged(timeout_s);
}

void Engine::cancel(Job& job) {
    if (job.done()) return;
    stamp_.require_owner("job");
    job.fail_with([&] { return OsError(ECANCELED, name_of(job.operation_), job.path()); });
    // Under the lock: a worker between looking and waiting would miss the call.
    const std::lock_guard<std::mutex> lock(mutex_);
    work_available_.notify_all();
}

// Whether nothing of the job is in flight and nothing will be; if so, it is forgotten here, and the
// caller completes it outside of the lock.
bool Engine::settle_locked(Job& job) noexcept {
    const bool exhausted = job.next_chunk_ == job.chunks_.size();
    if (job.in_flight_ > 0 || !(exhausted || job.stopped())) return false;
    const auto same = [&](const std::shared_ptr<Job>& other) { return other.get() == &job; };
    const auto found = std::find_if(live_.begin(), live_.end(), same);
    if (found == live_.end()) return false;  // somebody else has settled it
    live_.erase(found);
    return true;
}

// ---- the way of a chunk ----

void Engine::work() noexcept {
    DeviceStreams streams;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        try {
            if (advance_one(lock, streams)) continue;
        } catch (...) {  // no memory for a request
            waiting_.front()->fail(std::current_exception());
            continue;
        }
        if (stopping_) return;
        if (deferred_.empty()) {
            work_available_.wait(lock);
        } else {
            work_available_.wait_for(lock, deferred_poll);
            retry_deferred(lock);
        }
    }
}

// Returns false if there is nothing to do. Throws only while it makes a request for the first job
// that waits, with the lock held and nothing changed.
bool Engine::advance_one(std::unique_lock<std::mutex>& lock, DeviceStreams& streams) {
    if (drop_stopped(lock)) return true;
    const auto unlocked = [&lock](auto&& call) {
        lock.unlock();
        call();
        lock.lock();
        return true;
    };
    if (std::unique_ptr<Request> request = next_transfer_locked()) {
        return unlocked([&] { backend_->submit(std::move(request)); });
    }
    // Reads are started before landed ones are scattered, or the disk would idle meanwhile; writes
    // are filled after, because that takes long and scattering frees slabs.
    if (std::unique_ptr<Request> request = next_request_locked(Operation::read)) {
        return unlocked([&] { issue(std::move(request)); });
    }
    if (!landed_.empty()) {
        std::unique_ptr<Request> request = landed_.pop_front();
        return unlocked([&] {
            request->land();
            retire(std::move(request));
        });
    }
    if (std::unique_ptr<Request> request = next_request_locked(Operation::write)) {
        return unlocked([&] { fill(std::move(request), streams); });
    }
    if (!staged_.empty()) {
        std::unique_ptr<Request> request = staged_.pop_front();
        return unlocked([&] { check(std::move(request)); });
    }
    return false;
}

// Takes one stopped job out of those that wait; returns whether there was one.
bool Engine::drop_stopped(std::unique_lock<std::mutex>& lock) noexcept {
    const auto stopped = std::find_if(waiting_.begin(), waiting_.end(),
                                      [](const auto& job) { return job->stopped(); });
    if (stopped == waiting_.end()) return false;
    const std::shared_ptr<Job> job = std::move(*stopped);
    waiting_.erase(stopped);
    const bool settled = settle_locked(*job);
    ++progress_count_;
    lock.unlock();
    if (settled) job->complete();
    idle_.notify_all();
    lock.lock();
    return true;
}

std::unique_ptr<Request> Engine::next_request_locked(Operation operation) {
    if (waiting_.empty() || waiting_.front()->operation_ != operation) return nullptr;
    if (!waiting_.front()->addresses_.empty()) return nullptr;
    // Before the slab, which must not be given back under the lock.
    auto request = std::make_unique<Request>();
    request->slab = pool_->try_acquire();
    if (!request->slab) return nullptr;
    request->operation = operation;
    request->job = waiting_.front();
    cut_locked(*request);
    return request;
}

void Engine::cut_locked(Request& request) noexcept {
    Job& job = *request.job;
    const Chunk& chunk = job.chunks_[job.next_chunk_++];
    const Range& range = job.ranges_[chunk.range_number];
    request.cut_at = Request::Clock::now();
    request.range_number = chunk.range_number;
    request.descriptor = job.files_[static_cast<std::size_t>(range.file_number)].get();
    request.file_offset = range.start + chunk.offset;
    request.length = chunk.length;
    request.memory = request.slab ? request.slab.data() : job.addresses_[chunk.range_number];
    request.first_block = job.first_blocks_[chunk.range_number] +
                          static_cast<std::size_t>(chunk.offset / block_bytes);
    ++job.in_flight_;
    if (job.next_chunk_ == job.chunks_.size()) waiting_.pop_front();
}

// A read: from the node's cache, later if another process is at it, or from the file.
void Engine::issue(std::unique_ptr<Request> request) noexcept {
    const bool patient = Request::Clock::now() - request->cut_at < NodeCache::claim_limit;
    const NodeCache::Outcome outcome = request->look_in_cache(patient);
    if (outcome == NodeCache::Outcome::absent) return backend_->submit(std::move(request));
    if (outcome == NodeCache::Outcome::copied) return land_later(std::move(request));
    const std::lock_guard<std::mutex> lock(mutex_);
    deferred_.push_back(std::move(request));
}

void Engine::retry_deferred(std::unique_lock<std::mutex>& lock) noexcept {
    RequestQueue asked;
    while (!deferred_.empty()) asked.push_back(deferred_.pop_front());
    lock.unlock();
    while (!asked.empty()) {
        std::unique_ptr<Request> request = asked.pop_front();
        request->job->stopped() ? retire(std::move(request)) : issue(std::move(request));
    }
    lock.lock();
}

void Engine::finished(std::unique_ptr<Request> request) noexcept {
    Job& job = *request->job;
    if (request->operation == Operation::read && request->slab && !job.stopped()) {
        return land_later(std::move(request));
    }
    if (!job.stopped()) job.bytes_done_ += request->length;
    retire(std::move(request));
}

void Engine::land_later(std::unique_ptr<Request> request) noexcept {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        ++progress_count_;
        landed_.push_back(std::move(request));
    }
    work_available_.notify_one();
}

void Engine::retire(std::unique_ptr<Request> request) noexcept {
    const bool transfer = request->transfers();
    const std::shared_ptr<Job> job = std::move(request->job);
    request.reset();  // the slab goes back before the job can be seen to be done
    std::unique_ptr<Request> sync;
    bool settled;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        ++progress_count_;
        --job->in_flight_;
        if (transfer) {
            --transfers_in_flight_;
            work_available_.notify_one();
        }
        sync = next_sync_locked(job);
        settled = settle_locked(*job);
    }
    if (sync) backend_->submit(std::move(sync));
    if (settled) job->complete();
    idle_.notify_all();
}

void Engine::slab_released() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    work_available_.notify_one();
}

}  // namespace megatron_uring
