// CRC32C.
//
// 1. crc32c(b"123456789") is 0xE3069283: initial value and final inversion as in RFC 3720. ISA-L's
//    crc32_iscsi inverts neither, so both are done here and nowhere else.
// 2. Values chain: crc32c(b, crc32c(a)) is crc32c of a followed by b.
// 3. Any length is legal, also one that does not fit ISA-L's int.
#pragma once

#include <cstdint>

namespace megatron_uring {

inline constexpr std::int64_t block_bytes = std::int64_t{1} << 20;  // the unit of checksums

std::uint32_t crc32c(const std::uint8_t* data, std::int64_t length,
                     std::uint32_t value = 0) noexcept;

}  // namespace megatron_uring
