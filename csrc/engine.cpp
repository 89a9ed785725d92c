// See engine.hpp for what is guaranteed.
#include "engine.hpp"

#include <algorithm>
#include <chrono>
#include <limits>
#include <stdexcept>
#include <utility>

#include "checksum.hpp"
#include "posix.hpp"
#include "ring.hpp"

namespace megatron_uring {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t max_request_bytes = 0x7ffff000;  // what Linux transfers in one call at most
constexpr std::int64_t write_alignment_bytes = 4096;
constexpr int idle_attempt_limit = 1000;

std::int64_t align_down(std::int64_t value, std::int64_t alignment) {
    return value - value % alignment;
}

std::int64_t align_up(std::int64_t value, std::int64_t alignment) {
    return align_down(value + alignment - 1, alignment);
}

std::int64_t nanoseconds(Clock::time_point begin, Clock::time_point end) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin).count();
}

void require_bound(std::int64_t value, std::int64_t limit, const char* name) {
    if (value < 1 || value > limit) {
        throw std::invalid_argument(std::string(name) + " is not between 1 and " +
                                    std::to_string(limit) + ": " + std::to_string(value));
    }
}

void check_range(const Range& range, std::size_t file_count, std::size_t number) {
    const std::string name = "range " + std::to_string(number) + ": ";
    if (range.file_number < 0 || static_cast<std::size_t>(range.file_number) >= file_count) {
        throw std::invalid_argument(name + "no such file_number");
    }
    if (range.start < 0 || range.start % block_bytes != 0) {
        throw std::invalid_argument(name + "start is not a multiple of 1 MiB");
    }
    // Room above the end, so that rounding up to an alignment cannot overflow.
    constexpr std::int64_t end_limit = std::numeric_limits<std::int64_t>::max() - (1 << 30);
    if (range.length < 0 || range.length > end_limit - range.start) {
        throw std::invalid_argument(name + "length is negative or too large");
    }
}

}  // namespace

SignalsBlocked::SignalsBlocked() noexcept {
    sigset_t blocked;
    sigfillset(&blocked);
    // The synchronous ones stay, so that faulthandler can report them.
    for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&blocked, number);
    pthread_sigmask(SIG_SETMASK, &blocked, &previous_);
}

SignalsBlocked::~SignalsBlocked() {
    pthread_sigmask(SIG_SETMASK, &previous_, nullptr);
}

// ---- Job ----

Job::Job(Operation operation, std::vector<std::shared_ptr<Descriptor>> files,
         std::vector<Range> ranges, std::shared_ptr<const PieceTable> pieces,
         std::optional<std::vector<std::uint32_t>> expected)
    : operation_(operation),
      files_(std::move(files)),
      ranges_(std::move(ranges)),
      pieces_(std::move(pieces)),
      expected_(std::move(expected)) {
    std::size_t blocks = 0;
    first_blocks_.reserve(ranges_.size());
    for (std::size_t i = 0; i < ranges_.size(); ++i) {
        check_range(ranges_[i], files_.size(), i);
        first_blocks_.push_back(blocks);
        blocks += static_cast<std::size_t>(align_up(ranges_[i].length, block_bytes) / block_bytes);
        if (__builtin_add_overflow(bytes_total_, ranges_[i].length, &bytes_total_)) {
            throw std::invalid_argument("ranges hold too many bytes");
        }
    }
    if (expected_ && expected_->size() != blocks) {
        throw std::invalid_argument("expected has " + std::to_string(expected_->size()) +
                                    " checksums for " + std::to_string(blocks) + " blocks");
    }
    checksums_.resize(blocks);
}

bool Job::wait(double timeout_s) const {
    if (done()) return true;
    std::unique_lock<std::mutex> lock(mutex_);
    return finished_.wait_for(lock, std::chrono::duration<double>(timeout_s),
                              [this] { return done(); });
}

void Job::rethrow() const {
    if (error_) throw OsError(*error_);
}

void Job::fail(OsError error) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (done() || error_) return;
    error_.emplace(std::move(error));
    stopped_.store(true, std::memory_order_release);
}

void Job::complete() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!error_ && operation_ == Operation::read && bad_blocks_.empty()) {
        const std::int64_t scattered = bytes_scattered_.load();
        if (scattered < pieces_->bytes()) {
            error_.emplace(EINVAL,
                           "read: the ranges hold only " + std::to_string(scattered) + " of the " +
                               std::to_string(pieces_->bytes()) + " bytes of the pieces",
                           files_.empty() ? "" : files_.front()->path());
        }
    }
    std::sort(bad_blocks_.begin(), bad_blocks_.end(), [](const BadBlock& a, const BadBlock& b) {
        return std::pair(a.range_number, a.file_offset) < std::pair(b.range_number, b.file_offset);
    });
    done_.store(true, std::memory_order_release);
    finished_.notify_all();
}

// ---- Request ----

Request::Step Request::prepare() noexcept {
    step_recorded = false;
    if (job->stopped()) return {ECANCELED, nullptr, 0, 0};
    const recorder::Verdict verdict = recorder::before(operation, descriptor->path());
    step_recorded = true;
    if (operation == Operation::sync) return {verdict.error, nullptr, 0, 0};

    step_direct = descriptor->direct();
    const std::int64_t alignment = step_direct ? descriptor->offset_alignment() : 1;
    resume_bytes = align_down(done_bytes, alignment);
    // A direct read has to ask for whole units; slabs have room for them.
    const std::int64_t end = operation == Operation::read ? align_up(length, alignment) : length;
    wanted_bytes = std::min(end - resume_bytes, align_down(max_request_bytes, alignment));
    std::int64_t step_bytes = wanted_bytes;
    if (verdict.shorten) {
        const std::int64_t half = align_down(wanted_bytes / 2, alignment);
        if (half > 0) step_bytes = half;
    }
    return {verdict.error, slab.data() + resume_bytes, file_offset + resume_bytes, step_bytes};
}

Request::Outcome Request::advance(std::int64_t result) noexcept {
    if (step_recorded) {
        const bool transfers = operation != Operation::sync;
        recorder::after(operation, descriptor->path(), transfers ? file_offset + resume_bytes : 0,
                        transfers ? wanted_bytes : 0, result);
    }
    if (result == -ECANCELED && job->stopped()) return Outcome::finished;
    if (result >= 0) {
        return operation == Operation::sync ? Outcome::finished : advance_transfer(result);
    }
    const int error = static_cast<int>(-result);
    if (error == EINTR && operation != Operation::sync) return retry_or_fail(error, false);
    if (error == EAGAIN && operation != Operation::sync) return retry_or_fail(error, true);
    if (error == EINVAL && operation == Operation::read && step_direct &&
        descriptor->set_direct(false) == 0) {
        return Outcome::resubmit;
    }
    fail(error);
    return Outcome::finished;
}

Request::Outcome Request::advance_transfer(std::int64_t result) noexcept {
    const std::int64_t reached = std::min(resume_bytes + result, length);
    if (reached > done_bytes) {
        done_bytes = reached;
        idle_attempts = 0;
        return done_bytes == length ? Outcome::finished : Outcome::resubmit;
    }
    if (operation == Operation::read) {  // not one byte more: the file ends here
        fail(ENODATA);
        return Outcome::finished;
    }
    return retry_or_fail(EIO, true);
}

Request::Outcome Request::retry_or_fail(int error, bool pause) noexcept {
    if (++idle_attempts > idle_attempt_limit) {
        fail(error);
        return Outcome::finished;
    }
    if (pause) {
        std::this_thread::sleep_for(std::chrono::microseconds(50 * std::min(idle_attempts, 20)));
    }
    return Outcome::resubmit;
}

void Request::fail(int error) noexcept {
    const char* const name = operation == Operation::sync ? "fdatasync" : name_of(operation);
    const std::string context = operation == Operation::sync
                                    ? name
                                    : describe(name, file_offset + done_bytes, length - done_bytes);
    job->fail(OsError(error, context, descriptor->path()));
}

// ---- Engine: life ----

Engine::Engine(std::shared_ptr<SlabPool> pool, const EngineOptions& options)
    : pool_(std::move(pool)) {
    require_bound(options.queue_depth, 4096, "queue_depth");
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
            backend_ = make_ring_backend(*this, options.queue_depth);
            kind_ = "io_uring";
            reason_ = options.kind == "auto" ? "io_uring: available" : "io_uring: asked for";
            return;
        } catch (const OsError& error) {
            if (options.kind == "io_uring") throw;
            reason_ = "posix: " + error.message();
        }
    }
    kind_ = "posix";
    backend_ = make_posix_backend(*this, std::min(options.queue_depth, options.posix_threads));
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
        std::vector<std::shared_ptr<Job>> stuck;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            stuck = live_;
        }
        for (const auto& job : stuck) job->fail(OsError(ECANCELED, "engine closed", ""));
        {
            const std::lock_guard<std::mutex> lock(mutex_);
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

void Engine::destroy(Engine* engine) noexcept {
    if (engine->close()) delete engine;
}

// ---- Engine: jobs ----

std::shared_ptr<Job> Engine::write(const File& file, std::int64_t start, std::int64_t length,
                                   std::shared_ptr<const PieceTable> pieces) {
    stamp_.require_owner("engine");
    if (length % write_alignment_bytes != 0) {
        throw std::invalid_argument("length is not a multiple of 4096: " + std::to_string(length));
    }
    if (pieces->max_file_number() > 0) {
        throw std::invalid_argument("pieces of a write have file_number 0");
    }
    auto job = std::make_shared<Job>(Operation::write, std::vector{file.descriptor()},
                                     std::vector{Range{0, start, length}}, pieces, std::nullopt);
    if (!pieces->within(start, start + length)) {
        throw std::invalid_argument("a piece lies outside of [start, start + length)");
    }
    this->start(job);
    return job;
}

std::shared_ptr<Job> Engine::read(const std::vector<const File*>& files, std::vector<Range> ranges,
                                  std::shared_ptr<const PieceTable> pieces,
                                  std::optional<std::vector<std::uint32_t>> expected) {
    stamp_.require_owner("engine");
    if (pieces->max_file_number() >= static_cast<std::int64_t>(files.size())) {
        throw std::invalid_argument("pieces name a file_number that is not in files");
    }
    std::vector<std::shared_ptr<Descriptor>> descriptors;
    descriptors.reserve(files.size());
    for (const File* file : files) descriptors.push_back(file->descriptor());
    auto job = std::make_shared<Job>(Operation::read, std::move(descriptors), std::move(ranges),
                                     std::move(pieces), std::move(expected));
    start(job);
    return job;
}

std::shared_ptr<Job> Engine::sync(const File& file) {
    stamp_.require_owner("engine");
    auto job = std::make_shared<Job>(Operation::sync, std::vector{file.descriptor()},
                                     std::vector<Range>{}, nullptr, std::nullopt);
    auto request = std::make_unique<Request>();
    request->job = job;
    request->descriptor = job->files_.front().get();
    request->operation = Operation::sync;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (closing_) throw std::invalid_argument("engine is closed");
        live_.push_back(job);
        job->in_flight_ = 1;
    }
    backend_->submit(std::move(request));
    return job;
}

void Engine::start(const std::shared_ptr<Job>& job) {
    bool settled;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (closing_) throw std::invalid_argument("engine is closed");
        live_.push_back(job);
        auto& next = job->next_range_;
        while (next < job->ranges_.size() && job->ranges_[next].length == 0) ++next;
        settled = settle_locked(*job);
        if (!settled) waiting_.push_back(job);
    }
    settled ? job->complete() : work_available_.notify_all();
}

bool Engine::wait(const Job& job, double timeout_s) const {
    if (job.done()) return true;
    stamp_.require_owner("job");
    return job.wait(timeout_s);
}

void Engine::cancel(Job& job) {
    if (job.done()) return;
    stamp_.require_owner("job");
    job.fail(OsError(ECANCELED, name_of(job.operation_),
                     job.files_.empty() ? "" : job.files_.front()->path()));
    // Under the lock: a worker between looking and waiting would miss the call.
    const std::lock_guard<std::mutex> lock(mutex_);
    work_available_.notify_all();
}

// Whether nothing of the job is in flight and nothing will be; if so, it is forgotten here, and the
// caller completes it outside of the lock.
bool Engine::settle_locked(Job& job) noexcept {
    const bool exhausted = job.next_range_ == job.ranges_.size();
    if (job.in_flight_ > 0 || !(exhausted || job.stopped())) return false;
    const auto same = [&](const std::shared_ptr<Job>& other) { return other.get() == &job; };
    const auto found = std::find_if(live_.begin(), live_.end(), same);
    if (found == live_.end()) return false;  // somebody else has settled it
    live_.erase(found);
    return true;
}

// ---- Engine: the way of a chunk ----

void Engine::work() noexcept {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        const auto stopped = std::find_if(waiting_.begin(), waiting_.end(),
                                          [](const auto& job) { return job->stopped(); });
        if (stopped != waiting_.end()) {
            const std::shared_ptr<Job> job = std::move(*stopped);
            waiting_.erase(stopped);
            const bool settled = settle_locked(*job);
            ++progress_count_;
            lock.unlock();
            if (settled) job->complete();
            idle_.notify_all();
            lock.lock();
            continue;
        }
        // Reads are started before landed ones are scattered, or the disk would idle meanwhile;
        // writes are filled after, because that takes long and scattering frees slabs.
        std::unique_ptr<Request> request = next_request_locked(Operation::read);
        if (request != nullptr) {
            lock.unlock();
            backend_->submit(std::move(request));
            lock.lock();
            continue;
        }
        if (!landed_.empty()) {
            request = std::move(landed_.front());
            landed_.pop_front();
            lock.unlock();
            land(std::move(request));
            lock.lock();
            continue;
        }
        request = next_request_locked(Operation::write);
        if (request != nullptr) {
            lock.unlock();
            fill(std::move(request));
            lock.lock();
            continue;
        }
        if (stopping_) return;
        work_available_.wait(lock);
    }
}

std::unique_ptr<Request> Engine::next_request_locked(Operation operation) noexcept {
    if (waiting_.empty() || waiting_.front()->operation_ != operation) return nullptr;
    Slab slab = pool_->try_acquire();
    if (!slab) return nullptr;
    auto request = std::make_unique<Request>();
    request->slab = std::move(slab);
    request->operation = operation;
    request->job = waiting_.front();
    cut_locked(*request);
    return request;
}

void Engine::cut_locked(Request& request) noexcept {
    Job& job = *request.job;
    const Range& range = job.ranges_[job.next_range_];
    request.range_number = job.next_range_;
    request.descriptor = job.files_[static_cast<std::size_t>(range.file_number)].get();
    request.file_offset = range.start + job.next_offset_;
    request.length = std::min(pool_->slab_bytes(), range.length - job.next_offset_);
    request.first_block = job.first_blocks_[job.next_range_] +
                          static_cast<std::size_t>(job.next_offset_ / block_bytes);
    ++job.in_flight_;
    job.next_offset_ += request.length;
    while (job.next_range_ < job.ranges_.size() &&
           job.next_offset_ == job.ranges_[job.next_range_].length) {
        ++job.next_range_;
        job.next_offset_ = 0;
    }
    if (job.next_range_ == job.ranges_.size()) waiting_.pop_front();
}

void Engine::fill(std::unique_ptr<Request> request) noexcept {
    Job& job = *request->job;
    std::int64_t copy_ns = 0;
    std::int64_t checksum_ns = 0;
    // Step by step, so that the checksum reads what the copy has just left in the nearest cache.
    // Measured per GB: 0.155 CPU seconds in steps of 16 to 32 KiB, 0.20 in whole blocks, 0.22 with
    // the checksum in a thread of its own.
    constexpr std::int64_t step_bytes = 32 * 1024;
    static_assert(block_bytes % step_bytes == 0);
    std::uint32_t checksum = 0;
    for (std::int64_t at = 0; at < request->length; at += step_bytes) {
        if (at % block_bytes == 0) {
            if (job.stopped()) break;
            checksum = 0;
        }
        const std::int64_t length = std::min(step_bytes, request->length - at);
        std::uint8_t* const bytes = request->slab.data() + at;
        const auto begin = Clock::now();
        job.pieces_->pack({0, request->file_offset + at, length, bytes});
        const auto copied = Clock::now();
        checksum = crc32c(bytes, length, checksum);
        job.checksums_[request->first_block + static_cast<std::size_t>(at / block_bytes)] =
            checksum;
        copy_ns += nanoseconds(begin, copied);
        checksum_ns += nanoseconds(copied, Clock::now());
    }
    job.copy_ns_ += copy_ns;
    job.checksum_ns_ += checksum_ns;
    if (job.stopped()) {
        retire(std::move(request));
    } else {
        backend_->submit(std::move(request));
    }
}

void Engine::land(std::unique_ptr<Request> request) noexcept {
    Job& job = *request->job;
    const std::int32_t file_number = job.ranges_[request->range_number].file_number;
    std::int64_t copy_ns = 0;
    std::int64_t checksum_ns = 0;
    std::int64_t scattered = 0;
    for (std::int64_t at = 0; at < request->length && !job.stopped(); at += block_bytes) {
        const std::int64_t length = std::min(block_bytes, request->length - at);
        std::uint8_t* const block = request->slab.data() + at;
        const std::int64_t offset = request->file_offset + at;
        const auto number = request->first_block + static_cast<std::size_t>(at / block_bytes);
        const auto begin = Clock::now();
        const std::uint32_t found = crc32c(block, length);
        const auto checked = Clock::now();
        job.checksums_[number] = found;
        checksum_ns += nanoseconds(begin, checked);
        if (job.expected_ && (*job.expected_)[number] != found) {
            const std::lock_guard<std::mutex> lock(job.mutex_);
            job.bad_blocks_.push_back({static_cast<std::int64_t>(request->range_number), offset,
                                       (*job.expected_)[number], found});
            continue;
        }
        scattered += job.pieces_->scatter({file_number, offset, length, block});
        copy_ns += nanoseconds(checked, Clock::now());
    }
    job.copy_ns_ += copy_ns;
    job.checksum_ns_ += checksum_ns;
    job.bytes_scattered_ += scattered;
    if (!job.stopped()) job.bytes_done_ += request->length;
    retire(std::move(request));
}

void Engine::finished(std::unique_ptr<Request> request) noexcept {
    Job& job = *request->job;
    if (request->operation == Operation::read && !job.stopped()) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            ++progress_count_;
            landed_.push_back(std::move(request));
        }
        work_available_.notify_one();
        return;
    }
    if (!job.stopped()) job.bytes_done_ += request->length;
    retire(std::move(request));
}

void Engine::retire(std::unique_ptr<Request> request) noexcept {
    const std::shared_ptr<Job> job = std::move(request->job);
    request.reset();  // the slab goes back before the job can be seen to be done
    bool settled;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        ++progress_count_;
        --job->in_flight_;
        settled = settle_locked(*job);
    }
    if (settled) job->complete();
    idle_.notify_all();
}

void Engine::slab_released() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    work_available_.notify_one();
}

}  // namespace megatron_uring
