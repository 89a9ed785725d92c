// See request.hpp for what is guaranteed.
#include "request.hpp"

#include <algorithm>
#include <utility>

#include "checksum.hpp"
#include "watchdog.hpp"

namespace megatron_uring {
namespace {

constexpr std::int64_t max_request_bytes = 0x7ffff000;  // what Linux transfers in one call at most
constexpr int idle_attempt_limit = 1000;
constexpr std::chrono::milliseconds longest_pause{200};

std::int64_t align_down(std::int64_t value, std::int64_t alignment) {
    return value - value % alignment;
}

std::int64_t align_up(std::int64_t value, std::int64_t alignment) {
    return align_down(value + alignment - 1, alignment);
}

std::int64_t nanoseconds(Request::Clock::duration duration) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
}

}  // namespace

// ---- between memory and slab ----

std::size_t Request::block_number(std::int64_t at) const noexcept {
    return first_block + static_cast<std::size_t>(at / block_bytes);
}

void Request::fill() noexcept {
    // Step by step, so that whichever of copy and checksum comes second finds the bytes in a near
    // cache. Measured per GB when this was first built: 0.155 CPU seconds in steps of 16 to 32 KiB,
    // 0.20 in whole blocks, 0.22 with the checksum in a thread of its own.
    constexpr std::int64_t step_bytes = 64 * 1024;
    static_assert(block_bytes % step_bytes == 0);
    // A direct write reads the slab by DMA only: bytes that lie in one run are copied past the
    // cache, and their checksum is that of the source, which the copy then finds in the cache while
    // it fetches the next step. Measured per GB, interleaved, the kernel included: 0.22 instead of
    // 0.26 to 0.28 CPU seconds; with the fetching and steps of 64 instead of 32 KiB 0.25 instead of
    // 0.29 in an hour when memory was slow. What the next long run cuts off is gathered by pack:
    // with tensors of 4 to 256 KiB 0.35 instead of 0.41 if whole steps only were streamed.
    const bool stream = descriptor->direct() && !job->write_options_.checksum_copies;
    Clock::duration copying{0};
    Clock::duration checking{0};
    std::uint32_t checksum = 0;
    for (std::int64_t at = 0; at < length;) {
        if (at % block_bytes == 0) {
            if (job->stopped()) return;
            checksum = 0;
        }
        const std::int64_t left = std::min(step_bytes - at % step_bytes, length - at);
        Window window = {0, file_offset + at, left, slab.data() + at};
        PieceTable::Span span = {nullptr, left, nullptr};
        if (stream) span = job->pieces_->next_span(window);
        window.length = span.length;
        const auto begin = Clock::now();
        if (span.source != nullptr) {
            checksum = crc32c(span.source, span.length, checksum);
            const auto checked = Clock::now();
            copy_past_cache(window.slab, span.source, span.length, span.next);
            checking += checked - begin;
            copying += Clock::now() - checked;
        } else {
            job->pieces_->pack(window);
            const auto copied = Clock::now();
            checksum = crc32c(window.slab, window.length, checksum);
            copying += copied - begin;
            checking += Clock::now() - copied;
        }
        job->checksums_[block_number(at)] = checksum;
        at += span.length;
    }
    job->copy_ns_ += nanoseconds(copying);
    job->checksum_ns_ += nanoseconds(checking);
    job->add_staged(length);
}

bool Request::copies_from_devices() const noexcept {
    return job->pieces_->device_events() != nullptr;
}

void Request::stage(DeviceStreams& streams) noexcept {
    if (job->stopped()) return;
    const auto begin = Clock::now();
    try {
        const Window window = {0, file_offset, length, slab.data()};
        job->pieces_->pack(window);  // what lies in host memory, and zeros
        // All of the slab at once: the device is kept busy, and waited for one time.
        streams.fetch(*job->pieces_, window);
        job->add_staged(length);
    } catch (...) {
        job->fail(std::current_exception());
    }
    job->copy_ns_ += nanoseconds(Clock::now() - begin);
}

void Request::check_slab() noexcept {
    const auto begin = Clock::now();
    for (std::int64_t at = 0; at < length && !job->stopped(); at += block_bytes) {
        job->checksums_[block_number(at)] =
            crc32c(slab.data() + at, std::min(block_bytes, length - at));
    }
    job->checksum_ns_ += nanoseconds(Clock::now() - begin);
}

NodeCache::Outcome Request::look_in_cache(bool patient) noexcept {
    const Sharing& sharing = job->sharing_;
    if (!sharing.cache) return NodeCache::Outcome::absent;
    const auto file = static_cast<std::size_t>(job->ranges_[range_number].file_number);
    const ChunkKey key = {sharing.file_keys[file], file_offset, length};
    const std::uint32_t* const expected = job->expected_->data() + first_block;
    NodeCache::Answer answer = sharing.cache->look(key, expected, slab.data(), patient);
    claim_ = std::move(answer.claim);
    verified_ = answer.outcome == NodeCache::Outcome::copied;
    if (verified_) job->bytes_shared_ += length;
    return answer.outcome;
}

void Request::land() noexcept {
    const auto begin = Clock::now();
    Clock::duration checking{0};
    intact_ = true;
    try {
        for (std::int64_t at = 0; at < length && !job->stopped(); at += block_bytes) {
            land_block(at, checking);
        }
    } catch (...) {
        job->fail(std::current_exception());
    }
    if (claim_ && intact_ && !job->stopped()) claim_.publish(slab.data(), length);
    job->copy_ns_ += nanoseconds(Clock::now() - begin - checking);
    job->checksum_ns_ += nanoseconds(checking);
    if (!job->stopped()) job->bytes_done_ += length;
}

void Request::land_block(std::int64_t at, Clock::duration& checking) {
    const Window block = {job->ranges_[range_number].file_number, file_offset + at,
                          std::min(block_bytes, length - at), slab.data() + at};
    const std::size_t number = block_number(at);
    const auto begin = Clock::now();
    const std::uint32_t found =
        verified_ ? (*job->expected_)[number] : crc32c(block.slab, block.length);
    checking += Clock::now() - begin;
    job->checksums_[number] = found;
    const std::uint32_t expected = job->expected_ ? (*job->expected_)[number] : found;
    if (found != expected) {
        intact_ = false;
        const std::lock_guard<std::mutex> lock(job->mutex_);
        job->bad_blocks_.push_back(
            {static_cast<std::int64_t>(range_number), block.start, expected, found});
        return;
    }
    job->bytes_scattered_ += job->pieces_->scatter(block);
}

// ---- between slab and kernel ----

bool Request::transfers() const noexcept {
    return !job->addresses_.empty();
}

// Whether the rate of the job leaves this write for later. It waits in short pauses, so that one
// that is cancelled ends soon.
bool Request::must_wait() noexcept {
    if (operation != Operation::write || job->write_options_.bytes_per_s == 0) return false;
    const auto now = Clock::now();
    if (!std::exchange(reserved_, true)) not_before_ = now + job->reserve(length);
    paced_ = now < not_before_;
    if (paced_) {
        step.pause = std::min<Clock::duration>(not_before_ - now, longest_pause);
        step.error = EAGAIN;
    }
    return paced_;
}

const Request::Step& Request::prepare() noexcept {
    step = {};
    step_recorded_ = false;
    if (job->stopped()) {
        step.error = ECANCELED;
        return step;
    }
    if (must_wait()) return step;
    try {
        const recorder::Verdict verdict = recorder::before(operation, descriptor->path());
        step_recorded_ = true;
        watchdog::operations_in_flight.fetch_add(1, std::memory_order_relaxed);
        step.error = verdict.error;
        step.pause =
            std::exchange(back_off_, {}) + std::chrono::duration_cast<Clock::duration>(
                                               std::chrono::duration<double>(verdict.delay_s));
        if (operation != Operation::sync) prepare_transfer(verdict.shorten);
    } catch (...) {
        job->fail(std::current_exception());
        step.error = ECANCELED;
    }
    return step;
}

void Request::prepare_transfer(bool shorten) noexcept {
    step_direct_ = descriptor->direct();
    const std::int64_t alignment = step_direct_ ? descriptor->offset_alignment() : 1;
    resume_bytes_ = align_down(done_bytes_, alignment);
    // A direct read has to ask for whole units; slabs have room for them.
    const bool whole_units = operation == Operation::read && !transfers();
    const std::int64_t end = whole_units ? align_up(length, alignment) : length;
    wanted_bytes_ = std::min(end - resume_bytes_, align_down(max_request_bytes, alignment));
    const std::int64_t half = align_down(wanted_bytes_ / 2, alignment);
    step.buffer = memory + resume_bytes_;
    step.offset = file_offset + resume_bytes_;
    step.length = shorten && half > 0 ? half : wanted_bytes_;
}

Request::Outcome Request::advance(std::int64_t result) noexcept {
    const bool moves = operation != Operation::sync;
    if (std::exchange(paced_, false) && !job->stopped()) return Outcome::resubmit;
    if (step_recorded_) {
        watchdog::operations_in_flight.fetch_sub(1, std::memory_order_relaxed);
        try {
            recorder::after(operation, descriptor->path(), step.offset, moves ? wanted_bytes_ : 0,
                            result);
        } catch (...) {
            job->fail(std::current_exception());
        }
    }
    if (result == -ECANCELED && job->stopped()) return Outcome::finished;
    if (result >= 0) return moves ? advance_transfer(result) : Outcome::finished;
    const int error = static_cast<int>(-result);
    if (error == EINTR && moves) return retry_or_fail(error, false);
    if (error == EAGAIN && moves) return retry_or_fail(error, true);
    if (error == EINVAL && operation == Operation::read && step_direct_ && !transfers() &&
        descriptor->set_direct(false) == 0) {
        return Outcome::resubmit;
    }
    fail(error);
    return Outcome::finished;
}

Request::Outcome Request::advance_transfer(std::int64_t result) noexcept {
    const std::int64_t reached = std::min(resume_bytes_ + result, length);
    if (reached > done_bytes_) {
        done_bytes_ = reached;
        idle_attempts_ = 0;
        return done_bytes_ == length ? Outcome::finished : Outcome::resubmit;
    }
    if (operation == Operation::read) {  // not one byte more: the file ends here
        fail(ENODATA);
        return Outcome::finished;
    }
    return retry_or_fail(EIO, true);
}

Request::Outcome Request::retry_or_fail(int error, bool pause) noexcept {
    if (++idle_attempts_ > idle_attempt_limit) {
        fail(error);
        return Outcome::finished;
    }
    if (pause) back_off_ = std::chrono::microseconds(50 * std::min(idle_attempts_, 20));
    return Outcome::resubmit;
}

void Request::fail(int error) noexcept {
    job->fail_with([&] {
        const bool syncs = operation == Operation::sync;
        const std::string context =
            syncs ? "fdatasync"
                  : describe(name_of(operation), file_offset + done_bytes_, length - done_bytes_);
        return OsError(error, context, descriptor->path());
    });
}

// ---- queues ----

RequestQueue::~RequestQueue() {
    while (!empty()) pop_front();  // not by recursion
}

void RequestQueue::push_back(std::unique_ptr<Request> request) noexcept {
    std::unique_ptr<Request>& end = empty() ? first_ : last_->next;
    last_ = request.get();
    end = std::move(request);
}

void RequestQueue::push_front(std::unique_ptr<Request> request) noexcept {
    if (empty()) last_ = request.get();
    request->next = std::move(first_);
    first_ = std::move(request);
}

void RequestQueue::insert_by_due(std::unique_ptr<Request> request) noexcept {
    std::unique_ptr<Request>* place = &first_;
    while (*place != nullptr && (*place)->due <= request->due) place = &(*place)->next;
    if (*place == nullptr) last_ = request.get();
    request->next = std::move(*place);
    *place = std::move(request);
}

std::unique_ptr<Request> RequestQueue::pop_front() noexcept {
    std::unique_ptr<Request> request = std::move(first_);
    first_ = std::move(request->next);
    if (first_ == nullptr) last_ = nullptr;
    return request;
}

}  // namespace megatron_uring
