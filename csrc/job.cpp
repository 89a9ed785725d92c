// See job.hpp for what is guaranteed.
#include "job.hpp"

#include <algorithm>
#include <chrono>
#include <limits>
#include <new>
#include <stdexcept>
#include <utility>

#include "checksum.hpp"

namespace megatron_uring {
namespace {

void check_range(const Range& range, std::size_t file_count, std::size_t number,
                 std::int64_t alignment_bytes) {
    const std::string name = "range " + std::to_string(number) + ": ";
    if (range.file_number < 0 || static_cast<std::size_t>(range.file_number) >= file_count) {
        throw std::invalid_argument(name + "no such file_number");
    }
    if (range.start < 0 || range.start % alignment_bytes != 0) {
        throw std::invalid_argument(name + "start is not a multiple of " +
                                    std::to_string(alignment_bytes));
    }
    // Room above the end, so that rounding up to an alignment cannot overflow.
    constexpr std::int64_t end_limit = std::numeric_limits<std::int64_t>::max() - (1 << 30);
    if (range.length < 0 || range.length > end_limit - range.start) {
        throw std::invalid_argument(name + "length is negative or too large");
    }
}

// On Linux, steady_clock is CLOCK_MONOTONIC.
std::int64_t monotonic_ns() noexcept {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace

Job::Job(Operation operation, std::vector<std::shared_ptr<Descriptor>> files,
         std::vector<Range> ranges, std::shared_ptr<const PieceTable> pieces,
         std::optional<std::vector<std::uint32_t>> expected, Sharing sharing,
         std::int64_t slab_bytes)
    : operation_(operation),
      files_(std::move(files)),
      ranges_(std::move(ranges)),
      pieces_(std::move(pieces)),
      expected_(std::move(expected)),
      sharing_(std::move(sharing)) {
    check_ranges(block_bytes);
    std::size_t blocks = 0;
    first_blocks_.reserve(ranges_.size());
    for (const Range& range : ranges_) {
        first_blocks_.push_back(blocks);
        blocks += static_cast<std::size_t>((range.length + block_bytes - 1) / block_bytes);
    }
    if (expected_ && expected_->size() != blocks) {
        throw std::invalid_argument("expected has " + std::to_string(expected_->size()) +
                                    " checksums for " + std::to_string(blocks) + " blocks");
    }
    if (sharing_.cache && (!expected_ || sharing_.file_keys.size() != files_.size())) {
        throw std::invalid_argument("sharing needs expected checksums and a key for each file");
    }
    if (operation_ == Operation::read && pieces_->device_events() != nullptr) {
        throw std::invalid_argument("pieces of a read lie in host memory");
    }
    checksums_.resize(blocks);
    chunks_ = schedule(ranges_, sharing_, slab_bytes);
}

Job::Job(Operation operation, std::vector<std::shared_ptr<Descriptor>> files,
         std::vector<Range> ranges, std::vector<std::uint8_t*> addresses)
    : operation_(operation),
      files_(std::move(files)),
      ranges_(std::move(ranges)),
      addresses_(std::move(addresses)) {
    if (addresses_.size() != ranges_.size()) {
        throw std::invalid_argument("file_number and address differ in length");
    }
    check_ranges(1);
    first_blocks_.resize(ranges_.size());
    for (std::size_t i = 0; i < ranges_.size(); ++i) {
        if (ranges_[i].length > 0) chunks_.push_back({i, 0, ranges_[i].length});
    }
}

void Job::check_ranges(std::int64_t alignment_bytes) {
    for (std::size_t i = 0; i < ranges_.size(); ++i) {
        check_range(ranges_[i], files_.size(), i, alignment_bytes);
        if (__builtin_add_overflow(bytes_total_, ranges_[i].length, &bytes_total_)) {
            throw std::invalid_argument("ranges hold too many bytes");
        }
    }
}

bool Job::wait(double timeout_s) const {
    if (done()) return true;
    std::unique_lock<std::mutex> lock(mutex_);
    return finished_.wait_for(lock, std::chrono::duration<double>(timeout_s),
                              [this] { return done(); });
}

bool Job::wait_staged(double timeout_s) const {
    if (staged()) return true;
    std::unique_lock<std::mutex> lock(mutex_);
    return finished_.wait_for(lock, std::chrono::duration<double>(timeout_s),
                              [this] { return staged(); });
}

void Job::add_staged(std::int64_t bytes) noexcept {
    const std::int64_t staged = bytes_staged_.fetch_add(bytes, std::memory_order_acq_rel) + bytes;
    if (staged < bytes_total_) return;
    staged_at_ns_.store(monotonic_ns());
    const std::lock_guard<std::mutex> lock(mutex_);  // or who is about to wait would miss it
    finished_.notify_all();
}

void Job::stamp_written() noexcept {
    written_at_ns_.store(monotonic_ns());
}

// How long to wait before these bytes may be written.
std::chrono::steady_clock::duration Job::reserve(std::int64_t bytes) noexcept {
    using Clock = std::chrono::steady_clock;
    if (write_options_.bytes_per_s <= 0) return Clock::duration{0};
    const std::chrono::duration<double> takes(static_cast<double>(bytes) /
                                              static_cast<double>(write_options_.bytes_per_s));
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto now = Clock::now();
    const auto begin = std::max(next_write_, now);  // what was not used is not saved up
    next_write_ = begin + std::chrono::duration_cast<Clock::duration>(takes);
    return begin - now;
}

void Job::rethrow() const {
    if (error_ == nullptr) return;
    const auto translated = [this](int number, const std::string& text) {
        return OsError(number, name_of(operation_) + text, path());
    };
    try {
        std::rethrow_exception(error_);
    } catch (const OsError&) {
        throw;
    } catch (const std::bad_alloc&) {
        throw translated(ENOMEM, "");
    } catch (const std::exception& error) {
        throw translated(EIO, std::string(": ") + error.what());
    }
}

void Job::fail(std::exception_ptr error) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (done() || error_ != nullptr) return;
    error_ = std::move(error);
    stopped_.store(true, std::memory_order_release);
}

void Job::require_covered_pieces() const {
    const std::int64_t scattered = bytes_scattered_.load();
    if (scattered >= pieces_->bytes()) return;
    throw OsError(EINVAL,
                  "read: the ranges hold only " + std::to_string(scattered) + " of the " +
                      std::to_string(pieces_->bytes()) + " bytes of the pieces",
                  path());
}

void Job::complete() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error_ == nullptr && operation_ == Operation::read && pieces_ && bad_blocks_.empty()) {
        try {
            require_covered_pieces();
        } catch (...) {
            error_ = std::current_exception();
        }
    }
    std::sort(bad_blocks_.begin(), bad_blocks_.end(), [](const BadBlock& a, const BadBlock& b) {
        return std::pair(a.range_number, a.file_offset) < std::pair(b.range_number, b.file_offset);
    });
    done_at_ns_.store(monotonic_ns());
    // failed, or no bytes
    if (staged_at_ns_.load() == 0) staged_at_ns_.store(done_at_ns_.load());
    if (written_at_ns_.load() == 0) written_at_ns_.store(done_at_ns_.load());
    done_.store(true, std::memory_order_release);
    finished_.notify_all();
}

}  // namespace megatron_uring
