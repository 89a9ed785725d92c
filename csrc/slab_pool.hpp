// The pool of staging memory.
//
// 1. Bounded: one mapping made at construction, `slab_count` slabs of `slab_bytes`, and it never
//    grows.
// 2. Every slab is private memory aligned to 2 MiB (if slab_bytes is a multiple of it; to 1 MiB
//    otherwise) with MADV_HUGEPAGE, because 4 KiB pages halve the bandwidth of direct writes, and
//    with MADV_DONTFORK, because copying the page tables of a pool makes fork slow. All pages are
//    touched once, at construction, unless whoever made the pool cannot wait for that: then by
//    whom uses a slab first, and memory that is not there is met only then.
// 3. A slab has one owner, a move-only Slab; destroying it returns the slab, and then wakes the
//    engines that wait.
// 4. page_lock registers the whole mapping with CUDA, once, so that devices copy into it by
//    themselves and at full speed. Where that is refused the pool works as before; why is
//    remembered, and not tried again.
// 5. A listener is never called with the lock of the free list held, so an engine may try_acquire
//    under its own lock; it must not destroy a Slab there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda.hpp"
#include "error.hpp"

namespace megatron_uring {

class SlabPool;

class Slab {
  public:
    Slab() noexcept = default;
    Slab(Slab&& other) noexcept
        : pool_(std::exchange(other.pool_, nullptr)), data_(std::exchange(other.data_, nullptr)) {}
    Slab& operator=(Slab&& other) noexcept {
        std::swap(pool_, other.pool_);
        std::swap(data_, other.data_);
        return *this;
    }
    Slab(const Slab&) = delete;
    Slab& operator=(const Slab&) = delete;
    ~Slab() { reset(); }

    void reset() noexcept;
    std::uint8_t* data() const noexcept { return data_; }
    explicit operator bool() const noexcept { return data_ != nullptr; }

  private:
    friend class SlabPool;
    Slab(SlabPool* pool, std::uint8_t* data) noexcept : pool_(pool), data_(data) {}

    SlabPool* pool_ = nullptr;
    std::uint8_t* data_ = nullptr;
};

class SlabListener {
  public:
    virtual void slab_released() noexcept = 0;

  protected:
    ~SlabListener() = default;
};

class SlabPool {
  public:
    SlabPool(std::int64_t slab_bytes, std::int64_t slab_count, bool touched = true);
    ~SlabPool();
    SlabPool(const SlabPool&) = delete;
    SlabPool& operator=(const SlabPool&) = delete;

    std::int64_t slab_bytes() const noexcept { return slab_bytes_; }
    std::int64_t slab_count() const noexcept { return slab_count_; }
    std::int64_t free_count() const;
    double allocate_s() const noexcept { return allocate_s_; }

    const std::uint8_t* data() const noexcept { return base_; }

    // Empty, or why it was refused. Touches the memory of the pool.
    std::string page_lock(const std::shared_ptr<const CudaRuntime>& runtime, int device);

    // An empty Slab when none is free; never waits.
    Slab try_acquire() noexcept;

    void subscribe(SlabListener* listener);
    void unsubscribe(SlabListener* listener);

  private:
    friend class Slab;
    void release(std::uint8_t* data) noexcept;
    void map();
    void touch();

    const ForkStamp stamp_;
    const std::int64_t slab_bytes_;
    const std::int64_t slab_count_;
    std::uint8_t* base_ = nullptr;
    std::size_t mapped_bytes_ = 0;
    double allocate_s_ = 0.0;

    mutable std::mutex mutex_;
    std::vector<std::uint8_t*> free_;  // reserved for all slabs: pushing cannot fail
    std::mutex listeners_mutex_;
    std::vector<SlabListener*> listeners_;
    std::mutex page_lock_mutex_;
    bool page_lock_tried_ = false;
    std::string page_lock_refusal_;
    std::shared_ptr<const CudaRuntime> locked_by_;  // while it is page-locked
    int lock_device_ = -1;                          // whose context was asked
};

}  // namespace megatron_uring
