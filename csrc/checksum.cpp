// See checksum.hpp for what is guaranteed.
#include "checksum.hpp"

#include <isa-l/crc.h>

#include <algorithm>

namespace megatron_uring {

std::uint32_t crc32c(const std::uint8_t* data, std::int64_t length, std::uint32_t value) noexcept {
    constexpr std::int64_t step_bytes = std::int64_t{1} << 30;
    std::uint32_t state = ~value;
    while (length > 0) {
        const std::int64_t step = std::min(length, step_bytes);
        // ISA-L's signature lacks const; it does not write.
        state = crc32_iscsi(const_cast<std::uint8_t*>(data), static_cast<int>(step), state);
        data += step;
        length -= step;
    }
    return ~state;
}

}  // namespace megatron_uring
