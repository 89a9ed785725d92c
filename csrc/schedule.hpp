// The schedule: in which chunks, and in which order, the ranges of a job are moved.
//
// 1. Each byte of each range lies in exactly one chunk; no chunk is longer than a slab.
// 2. Every file is gone through in ascending order, files_in_turn of them side by side: files may
//    lie on different devices, and reads of one are in flight while another's are.
// 3. What is shared with other processes is cut, and ordered, alike in all of them, whichever
//    ranges each has: chunks end at multiples of a slab in the file.
// 4. Who comes late begins where the others are, and does what it missed in the end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "node_cache.hpp"

namespace megatron_uring {

struct Range {
    std::int32_t file_number;
    std::int64_t start;
    std::int64_t length;
};

struct Chunk {
    std::size_t range_number;
    std::int64_t offset;  // in the range
    std::int64_t length;
};

constexpr std::uint64_t files_in_turn = 8;

// `ranges` do not overlap; those of one file ascend.
std::vector<Chunk> schedule(const std::vector<Range>& ranges, const Sharing& sharing,
                            std::int64_t slab_bytes);

}  // namespace megatron_uring
