// Pieces of memory as Python gives them, and what is known of them without an engine.
//
// 1. All columns are checked for type, dimensions and length before anything is made of them.
// 2. Work that takes long is done without the GIL.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "checksum.hpp"
#include "device.hpp"

namespace megatron_uring {

inline std::shared_ptr<DeviceEvents> record_events(
    const std::shared_ptr<CudaRuntime>& runtime,
    const std::vector<std::pair<int, std::uintptr_t>>& streams) {
    std::vector<DeviceEvents::StreamOf> handles;
    handles.reserve(streams.size());
    for (const auto& [device, stream] : streams) {
        handles.push_back({device, reinterpret_cast<CudaRuntime::Stream>(stream)});
    }
    return std::make_shared<DeviceEvents>(runtime, handles);
}

inline std::shared_ptr<PieceTable> make_pieces(
    const py::object& file_number, const py::object& file_start, const py::object& address,
    const py::object& run_bytes, const py::object& counts, const py::object& file_strides,
    const py::object& memory_strides, const py::object& device_number,
    std::shared_ptr<DeviceEvents> device_events) {
    const auto numbers = array_from<std::int32_t>(file_number, "file_number", 1);
    const auto starts = array_from<std::int64_t>(file_start, "file_start", 1);
    const auto addresses = array_from<std::uint64_t>(address, "address", 1);
    const auto runs = array_from<std::int64_t>(run_bytes, "run_bytes", 1);
    const auto count_table = array_from<std::int64_t>(counts, "counts", 2);
    const auto file_table = array_from<std::int64_t>(file_strides, "file_strides", 2);
    const auto memory_table = array_from<std::int64_t>(memory_strides, "memory_strides", 2);
    const py::ssize_t count = numbers.shape(0);
    const py::ssize_t dimensions = count_table.shape(1);
    for (const py::ssize_t length :
         {starts.shape(0), addresses.shape(0), runs.shape(0), count_table.shape(0),
          file_table.shape(0), memory_table.shape(0)}) {
        if (length != count) throw std::invalid_argument("the columns of pieces differ in length");
    }
    if (file_table.shape(1) != dimensions || memory_table.shape(1) != dimensions) {
        throw std::invalid_argument("counts, file_strides, memory_strides differ in dimensions");
    }
    py::array_t<std::int32_t, py::array::c_style> devices;
    if (!device_number.is_none()) {
        devices = array_from<std::int32_t>(device_number, "device_number", 1);
        if (devices.shape(0) != count) {
            throw std::invalid_argument("the columns of pieces differ in length");
        }
    }
    const PieceColumns columns = {static_cast<std::size_t>(count),
                                  static_cast<std::size_t>(dimensions),
                                  numbers.data(),
                                  starts.data(),
                                  addresses.data(),
                                  runs.data(),
                                  count_table.data(),
                                  file_table.data(),
                                  memory_table.data(),
                                  device_number.is_none() ? nullptr : devices.data()};
    const py::gil_scoped_release release;
    return std::make_shared<PieceTable>(columns, std::move(device_events));
}

// Of these blocks of the region [start, start + length), as a write of the pieces would give them.
inline py::array_t<std::uint32_t> block_checksums(const std::shared_ptr<PieceTable>& pieces,
                                                  std::int64_t start, std::int64_t length,
                                                  const py::object& block_number) {
    const auto numbers = array_from<std::int64_t>(block_number, "block_number", 1);
    const std::int64_t blocks = length / block_bytes + (length % block_bytes != 0);
    std::vector<std::uint32_t> found;
    found.reserve(static_cast<std::size_t>(numbers.shape(0)));
    for (py::ssize_t i = 0; i < numbers.shape(0); ++i) {
        if (start < 0 || numbers.at(i) < 0 || numbers.at(i) >= blocks) {
            throw std::invalid_argument("block_number is not in the region");
        }
    }
    {
        const py::gil_scoped_release release;
        std::vector<std::uint8_t> scratch(static_cast<std::size_t>(block_bytes));
        const DeviceEvents* const events = pieces->device_events();
        std::optional<CurrentDevice> current;  // this thread is Python's: it gets its device back
        if (events != nullptr) current.emplace(events->runtime());
        DeviceStreams streams;
        for (py::ssize_t i = 0; i < numbers.shape(0); ++i) {
            const std::int64_t at = numbers.at(i) * block_bytes;
            const Window window = {0, start + at, std::min(block_bytes, length - at),
                                   scratch.data()};
            if (events != nullptr) streams.fetch(*pieces, window);
            found.push_back(pieces->checksum(window, scratch.data()));
        }
    }
    return array_to(found);
}

}  // namespace megatron_uring
