// Copy between tensors and slabs: pack and scatter of strided boxes.
//
// 1. A piece is a box of runs. Runs come in ascending, disjoint file order (strides are nested;
//    checked once, when the table is made), so the first run of a window is found by division, not
//    by walking.
// 2. The pieces of a window are found by binary search: O(log N + pieces in the window), also with
//    200,000 pieces. Pieces may overlap in file order (one file byte may go to several places when
//    reading), hence the search runs over prefix maxima of the ends.
// 3. pack fills every byte of its window: bytes of no piece become zero. scatter writes bytes of
//    pieces only.
// 4. Both directions are one function template, so they cannot disagree about where a byte belongs.
// 5. Dimensions that can be merged are merged when the table is made; a contiguous piece is one
//    run.
// 6. Addresses are trusted; everything else is checked. Zero pieces and pieces of zero bytes are
//    legal.
// 7. A piece may lie on a device, as one run of bytes. Nothing here reads it: device_runs says
// where
//    its bytes are, and pack leaves those of the window as they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace megatron_uring {

class DeviceEvents;

enum class Direction { pack, scatter };

struct PieceColumns {
    std::size_t count = 0;
    std::size_t dimensions = 0;
    const std::int32_t* file_number = nullptr;
    const std::int64_t* file_start = nullptr;
    const std::uint64_t* address = nullptr;
    const std::int64_t* run_bytes = nullptr;
    const std::int64_t* counts = nullptr;
    const std::int64_t* file_strides = nullptr;
    const std::int64_t* memory_strides = nullptr;
    const std::int32_t* device_number = nullptr;  // -1: in host memory, as all are without it
};

struct Window {
    std::int32_t file_number;
    std::int64_t start;  // in the file
    std::int64_t length;
    std::uint8_t* slab;  // holds the byte at `start`
};

struct DeviceRun {
    std::int32_t device;
    const std::uint8_t* source;
    std::uint8_t* slab;
    std::int64_t length;
};

// Copies without leaving the destination in the cache, where nobody will read it soon. Other
// threads that are handed the destination through a lock see the bytes. `next` is where `length`
// bytes will be read after this, if known: they are fetched meanwhile. Nothing needs to be there.
void copy_past_cache(std::uint8_t* to, const std::uint8_t* from, std::int64_t length,
                     const std::uint8_t* next = nullptr) noexcept;

class PieceTable {
  public:
    static constexpr std::size_t max_dimensions = 16;
    static constexpr std::int32_t max_device_number = 32767;

    // Throws std::invalid_argument, naming the piece. `events` cover every device that has pieces.
    explicit PieceTable(const PieceColumns& columns,
                        std::shared_ptr<const DeviceEvents> events = nullptr);

    std::size_t size() const noexcept { return pieces_.size(); }
    std::int64_t bytes() const noexcept { return bytes_; }
    std::int32_t max_file_number() const noexcept;  // -1 without pieces
    // Whether all bytes of all pieces lie in [start, end).
    bool within(std::int64_t start, std::int64_t end) const noexcept;

    // Null if all pieces are in host memory.
    const DeviceEvents* device_events() const noexcept { return events_.get(); }
    std::vector<DeviceRun> device_runs(const Window& window) const;

    // How the window begins: bytes that lie in one run of memory, long enough to be copied past the
    // cache, or (nullptr) bytes up to the next such run, which pack has to gather. At least one.
    struct Span {
        const std::uint8_t* source;
        std::int64_t length;
        const std::uint8_t* next;  // what follows in the file, most likely; a hint
    };
    Span next_span(const Window& window) const noexcept;

    // CRC32C of the window as pack would fill it; `scratch` holds as many bytes, those of devices
    // already.
    std::uint32_t checksum(Window window, std::uint8_t* scratch) const noexcept;

    // Returns the bytes copied.
    std::int64_t pack(const Window& window) const noexcept;
    std::int64_t scatter(const Window& window) const noexcept;

  private:
    struct Dimension {
        std::int64_t count;
        std::int64_t file_stride;
        std::int64_t memory_stride;
    };
    struct Piece {
        std::int64_t file_start;
        std::int64_t file_end;
        std::int64_t run_bytes;
        std::uint8_t* address;
        std::size_t first_dimension;
        std::int32_t file_number;
        std::uint8_t dimensions;  // at least 1
        bool dense;               // no gap between its runs
        std::int16_t device;      // -1: in host memory
    };

    void add(const PieceColumns& columns, std::size_t i);
    void append(std::size_t i, const Piece& piece);
    // The pieces of the file from the first on that ends behind the start of the window.
    std::pair<const Piece*, const Piece*> candidates(const Window& window) const noexcept;
    template <Direction direction>
    std::int64_t move(const Window& window) const noexcept;
    template <Direction direction>
    std::int64_t move_piece(const Piece& piece, const Window& window) const noexcept;

    std::vector<Piece> pieces_;
    std::vector<Dimension> dimensions_;
    std::vector<std::int64_t> prefix_ends_;  // largest file_end of the same file so far
    std::int64_t bytes_ = 0;
    std::shared_ptr<const DeviceEvents> events_;
    bool overlap_ = false;  // of pieces, in file order
};

}  // namespace megatron_uring
