// See slab_pool.hpp for what is guaranteed.
#include "slab_pool.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

#include "checksum.hpp"

namespace megatron_uring {
namespace {

constexpr std::size_t huge_page_bytes = std::size_t{2} << 20;

OsError mapping_error(int error, const char* call, std::size_t length) {
    return OsError(error, std::string(call) + " of " + std::to_string(length) + " bytes for slabs",
                   "");
}

}  // namespace

void Slab::reset() noexcept {
    if (pool_ != nullptr) pool_->release(std::exchange(data_, nullptr));
    pool_ = nullptr;
}

SlabPool::SlabPool(std::int64_t slab_bytes, std::int64_t slab_count, bool touched)
    : slab_bytes_(slab_bytes), slab_count_(slab_count) {
    if (slab_bytes <= 0 || slab_bytes % block_bytes != 0) {
        throw std::invalid_argument("slab_bytes is not a positive multiple of 1 MiB: " +
                                    std::to_string(slab_bytes));
    }
    if (slab_count <= 0 || slab_count > 65536) {
        throw std::invalid_argument("slab_count is not between 1 and 65536: " +
                                    std::to_string(slab_count));
    }
    std::int64_t total = 0;
    if (__builtin_mul_overflow(slab_bytes, slab_count, &total) || total > (std::int64_t{1} << 62)) {
        throw std::invalid_argument("slab_bytes * slab_count is too large");
    }
    free_.reserve(static_cast<std::size_t>(slab_count));
    const auto begin = std::chrono::steady_clock::now();
    map();
    if (touched) touch();
    allocate_s_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    for (std::int64_t i = slab_count; i-- > 0;) free_.push_back(base_ + i * slab_bytes);
}

void SlabPool::map() {
    mapped_bytes_ = static_cast<std::size_t>(slab_bytes_ * slab_count_);
    const std::size_t asked = mapped_bytes_ + huge_page_bytes;
    void* const raw =
        mmap(nullptr, asked, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) throw mapping_error(errno, "mmap", asked);
    auto* const start = static_cast<std::uint8_t*>(raw);
    const auto address = reinterpret_cast<std::uintptr_t>(raw);
    const std::size_t head = (huge_page_bytes - address % huge_page_bytes) % huge_page_bytes;
    const std::size_t tail = huge_page_bytes - head;
    if (head > 0) munmap(start, head);
    if (tail > 0) munmap(start + head + mapped_bytes_, tail);
    base_ = start + head;
    // Hints: a kernel without them runs correctly, only slower.
    madvise(base_, mapped_bytes_, MADV_HUGEPAGE);
    madvise(base_, mapped_bytes_, MADV_DONTFORK);
}

void SlabPool::touch() {
#ifdef MADV_POPULATE_WRITE
    int populated;
    do {
        populated = madvise(base_, mapped_bytes_, MADV_POPULATE_WRITE);
    } while (populated != 0 && (errno == EINTR || errno == EAGAIN));
    if (populated == 0) return;
    if (errno == ENOMEM || errno == EFAULT) {
        // Touching by hand would end in SIGBUS or the OOM killer; here it is still an error with a
        // number.
        const int error = errno;
        munmap(base_, mapped_bytes_);
        throw mapping_error(error == EFAULT ? ENOMEM : error, "MADV_POPULATE_WRITE", mapped_bytes_);
    }
#endif
    const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    auto* const bytes = static_cast<volatile std::uint8_t*>(base_);
    for (std::size_t i = 0; i < mapped_bytes_; i += page_bytes) bytes[i] = 0;
}

SlabPool::~SlabPool() {
    // In a child the range is not ours any more: something else may be mapped there.
    if (stamp_.in_child()) return;
    if (locked_by_) {
        try {
            CurrentDevice current(locked_by_);
            current.change_to(lock_device_);
            locked_by_->unregister_host(base_);
        } catch (const OsError&) {  // a device that is lost holds no memory any more
        }
    }
    munmap(base_, mapped_bytes_);
}

std::string SlabPool::page_lock(const std::shared_ptr<const CudaRuntime>& runtime, int device) {
    stamp_.require_owner("slab pool");
    const std::lock_guard<std::mutex> lock(page_lock_mutex_);
    if (std::exchange(page_lock_tried_, true)) return page_lock_refusal_;
    try {
        CurrentDevice current(runtime);
        current.change_to(device);
        runtime->register_host(base_, mapped_bytes_);
        locked_by_ = runtime;
        lock_device_ = device;
    } catch (const OsError& error) {
        page_lock_refusal_ = error.message();
    }
    return page_lock_refusal_;
}

std::int64_t SlabPool::free_count() const {
    stamp_.require_owner("slab pool");
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<std::int64_t>(free_.size());
}

Slab SlabPool::try_acquire() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) return {};
    // Last in, first out: the slab that was used last is the one that is still in the cache.
    std::uint8_t* const data = free_.back();
    free_.pop_back();
    return Slab(this, data);
}

void SlabPool::release(std::uint8_t* data) noexcept {
    if (stamp_.in_child()) return;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        free_.push_back(data);
    }
    const std::lock_guard<std::mutex> lock(listeners_mutex_);
    for (SlabListener* listener : listeners_) listener->slab_released();
}

void SlabPool::subscribe(SlabListener* listener) {
    stamp_.require_owner("slab pool");
    const std::lock_guard<std::mutex> lock(listeners_mutex_);
    listeners_.push_back(listener);
}

void SlabPool::unsubscribe(SlabListener* listener) {
    const std::lock_guard<std::mutex> lock(listeners_mutex_);
    listeners_.erase(std::remove(listeners_.begin(), listeners_.end(), listener), listeners_.end());
}

}  // namespace megatron_uring
