// See schedule.hpp for what is guaranteed.
#include "schedule.hpp"

#include <algorithm>
#include <optional>
#include <tuple>

namespace megatron_uring {
namespace {

void cut(std::vector<Chunk>& chunks, const Range& range, std::size_t number, bool aligned,
         std::int64_t slab_bytes) {
    for (std::int64_t offset = 0; offset < range.length;) {
        const std::int64_t head = aligned ? (range.start + offset) % slab_bytes : 0;
        const std::int64_t length = std::min(slab_bytes - head, range.length - offset);
        chunks.push_back({number, offset, length});
        offset += length;
    }
}

}  // namespace

std::vector<Chunk> schedule(const std::vector<Range>& ranges, const Sharing& sharing,
                            std::int64_t slab_bytes) {
    std::vector<Chunk> chunks;
    for (std::size_t i = 0; i < ranges.size(); ++i) {
        cut(chunks, ranges[i], i, sharing.cache != nullptr, slab_bytes);
    }
    const auto place = [slab_bytes](std::uint64_t file, std::int64_t offset) {
        return std::tuple(file / files_in_turn, offset / slab_bytes, file, offset);
    };
    const auto place_of = [&](const Chunk& chunk) {
        const Range& range = ranges[chunk.range_number];
        const auto number = static_cast<std::size_t>(range.file_number);
        return place(sharing.cache ? sharing.file_keys[number] : number,
                     range.start + chunk.offset);
    };
    std::sort(chunks.begin(), chunks.end(), [&](const Chunk& left, const Chunk& right) {
        return place_of(left) < place_of(right);
    });
    const auto others = sharing.cache ? sharing.cache->position() : std::nullopt;
    if (others) {
        const auto at = place(others->file, others->offset);
        const auto behind = [&](const Chunk& chunk) { return place_of(chunk) < at; };
        const auto begin = std::partition_point(chunks.begin(), chunks.end(), behind);
        std::rotate(chunks.begin(), begin, chunks.end());
    }
    return chunks;
}

}  // namespace megatron_uring
