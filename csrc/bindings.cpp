// The Python face of the engine; with bindings.hpp the only file that knows Python. The interface
// is megatron_uring/_engine.pyi.
//
// 1. Every call that can block releases the GIL. Waiting wakes up to look for signals, so Ctrl-C
//    works.
// 2. Arguments are checked here for type and shape (ValueError naming the argument), and below for
//    their values.
// 3. Errors are translated in one place, translate_error: OsError becomes OSError with errno,
//    strerror and filename.
// 4. Arrays are copied before a call returns; only the addresses in Pieces are borrowed, until the
//    job is done.
#include "bindings.hpp"

#include <algorithm>
#include <chrono>

#include "bindings_job.hpp"
#include "bindings_pieces.hpp"
#include "checksum.hpp"
#include "ring.hpp"
#include "watchdog.hpp"

namespace megatron_uring {
namespace {

constexpr auto without_gil = py::call_guard<py::gil_scoped_release>();

void translate_error(std::exception_ptr pointer) {
    try {
        if (pointer) std::rethrow_exception(pointer);
    } catch (const OsError& error) {
        const py::object filename = error.path().empty() ? py::none() : path_to(error.path());
        PyErr_SetObject(PyExc_OSError,
                        py::make_tuple(error.number(), error.message(), filename).ptr());
    } catch (const std::system_error& error) {  // threads that cannot be started
        PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code().value(), error.what()).ptr());
    }
}

// ---- engine ----

std::shared_ptr<Engine> make_engine(
    const std::string& kind, std::shared_ptr<SlabPool> pool, std::int64_t queue_depth,
    std::int64_t posix_threads, std::int64_t copy_threads, std::int64_t submission_batch,
    bool polled_submission, bool registered_files,
    const std::vector<std::pair<std::uintptr_t, std::int64_t>>& registered_memory) {
    const py::gil_scoped_release release;
    RingOptions ring = {queue_depth, submission_batch, polled_submission, registered_files, {}};
    for (const auto& [address, length] : registered_memory) {
        ring.registered_memory.push_back({reinterpret_cast<std::uint8_t*>(address), length});
    }
    auto* const engine =
        new Engine(std::move(pool), {kind, std::move(ring), posix_threads, copy_threads});
    // The last owner is always a Python object, so the deleter runs with the GIL held.
    return std::shared_ptr<Engine>(engine, [](Engine* last) {
        const py::gil_scoped_release unlocked;
        Engine::destroy(last);
    });
}

JobHandle start_write(const std::shared_ptr<Engine>& engine, const File& file, std::int64_t start,
                      std::int64_t length, std::shared_ptr<PieceTable> pieces, bool checksum_copies,
                      std::int64_t bytes_per_s, int io_priority, bool syncs) {
    if (bytes_per_s < 0) throw std::invalid_argument("bytes_per_s is negative");
    if (io_priority < 0 || io_priority > 0xffff) {
        throw std::invalid_argument("io_priority is not between 0 and 65535");
    }
    const WriteOptions options = {checksum_copies, bytes_per_s, io_priority, syncs};
    const py::gil_scoped_release release;
    return {engine, engine->write(file, start, length, std::move(pieces), options)};
}

std::vector<Range> make_ranges(const py::object& file_number, const py::object& start,
                               const py::object& length) {
    const auto numbers = array_from<std::int32_t>(file_number, "file_number", 1);
    const auto starts = array_from<std::int64_t>(start, "start", 1);
    const auto lengths = array_from<std::int64_t>(length, "length", 1);
    if (numbers.shape(0) != starts.shape(0) || numbers.shape(0) != lengths.shape(0)) {
        throw std::invalid_argument("file_number, start, length differ in length");
    }
    std::vector<Range> ranges;
    ranges.reserve(static_cast<std::size_t>(numbers.shape(0)));
    for (py::ssize_t i = 0; i < numbers.shape(0); ++i) {
        ranges.push_back({numbers.at(i), starts.at(i), lengths.at(i)});
    }
    return ranges;
}

void require_files(const std::vector<const File*>& files) {
    if (std::find(files.begin(), files.end(), nullptr) != files.end()) {
        throw std::invalid_argument("files contains None");
    }
}

JobHandle start_transfer(const std::shared_ptr<Engine>& engine, const std::string& operation,
                         const std::vector<const File*>& files, const py::object& file_number,
                         const py::object& start, const py::object& length,
                         const py::object& address) {
    if (operation != "write" && operation != "read") {
        throw std::invalid_argument("operation is not write or read: " + operation);
    }
    require_files(files);
    std::vector<Range> ranges = make_ranges(file_number, start, length);
    const auto numbers = array_from<std::uint64_t>(address, "address", 1);
    std::vector<std::uint8_t*> addresses;
    addresses.reserve(static_cast<std::size_t>(numbers.shape(0)));
    for (py::ssize_t i = 0; i < numbers.shape(0); ++i) {
        addresses.push_back(reinterpret_cast<std::uint8_t*>(numbers.at(i)));
    }
    const py::gil_scoped_release release;
    return {engine, engine->transfer(operation == "write" ? Operation::write : Operation::read,
                                     files, std::move(ranges), std::move(addresses))};
}

JobHandle start_read(const std::shared_ptr<Engine>& engine, const std::vector<const File*>& files,
                     const py::object& file_number, const py::object& start,
                     const py::object& length, std::shared_ptr<PieceTable> pieces,
                     const py::object& expected, std::shared_ptr<NodeCache> cache,
                     std::vector<std::uint64_t> file_keys) {
    require_files(files);
    std::vector<Range> ranges = make_ranges(file_number, start, length);
    std::optional<std::vector<std::uint32_t>> checksums;
    if (!expected.is_none()) {
        const auto values = array_from<std::uint32_t>(expected, "expected", 1);
        checksums.emplace(values.data(), values.data() + values.shape(0));
    }
    const py::gil_scoped_release release;
    return {engine, engine->read(files, std::move(ranges), std::move(pieces), std::move(checksums),
                                 {std::move(cache), std::move(file_keys)})};
}

// ---- module ----

void bind_memory(py::module_& module) {
    py::class_<PieceTable, std::shared_ptr<PieceTable>>(module, "Pieces", py::is_final())
        .def(py::init(&make_pieces), py::arg("file_number"), py::arg("file_start"),
             py::arg("address"), py::arg("run_bytes"), py::arg("counts"), py::arg("file_strides"),
             py::arg("memory_strides"), py::kw_only(), py::arg("device_number") = py::none(),
             py::arg("device_events") = std::shared_ptr<DeviceEvents>())
        .def("__len__", &PieceTable::size);

    py::class_<SlabPool, std::shared_ptr<SlabPool>>(module, "SlabPool", py::is_final())
        .def(py::init<std::int64_t, std::int64_t, bool>(), py::arg("slab_bytes"),
             py::arg("slab_count"), py::kw_only(), py::arg("touched") = true, without_gil)
        .def_property_readonly("slab_bytes", &SlabPool::slab_bytes)
        .def_property_readonly("slab_count", &SlabPool::slab_count)
        .def_property_readonly("free_count", &SlabPool::free_count)
        .def_property_readonly("allocate_s", &SlabPool::allocate_s)
        .def_property_readonly(
            "address",
            [](const SlabPool& pool) { return reinterpret_cast<std::uintptr_t>(pool.data()); })
        .def("page_lock", &SlabPool::page_lock, py::arg("cuda").none(false), py::arg("device"),
             without_gil);
}

void bind_devices(py::module_& module) {
    py::class_<CudaRuntime, std::shared_ptr<CudaRuntime>>(module, "Cuda", py::is_final())
        .def(py::init([](const Path& path) { return std::make_shared<CudaRuntime>(path.name); }),
             py::arg("path") = "")
        .def_property_readonly("path",
                               [](const CudaRuntime& cuda) { return path_to(cuda.path()); });
    py::class_<DeviceEvents, std::shared_ptr<DeviceEvents>>(module, "DeviceEvents", py::is_final())
        .def(py::init(&record_events), py::arg("cuda").none(false), py::arg("streams"));
}

void bind_node_cache(py::module_& module) {
    py::class_<NodeCache, std::shared_ptr<NodeCache>>(module, "NodeCache", py::is_final())
        // Not without_gil: pybind11 registers what a factory returns under the same guard.
        .def(py::init([](const Path& path, std::int64_t slot_bytes, std::int64_t slot_count) {
                 const py::gil_scoped_release release;
                 return NodeCache::open(path.name, slot_bytes, slot_count);
             }),
             py::arg("path"), py::arg("slot_bytes"), py::arg("slot_count"));
    module.def(
        "sweep_node_caches",
        [](const Path& directory, const std::string& prefix) {
            sweep_node_caches(directory.name, prefix);
        },
        py::arg("directory"), py::arg("prefix"), without_gil);
}

void bind_file(py::module_& module) {
    py::class_<File>(module, "File", py::is_final())
        .def_static(
            "create", [](const Path& path, bool direct) { return File::create(path.name, direct); },
            py::arg("path"), py::kw_only(), py::arg("direct"), without_gil)
        .def_static(
            "open",
            [](const Path& path, bool writable, bool direct) {
                return File::open(path.name, writable, direct);
            },
            py::arg("path"), py::kw_only(), py::arg("writable"), py::arg("direct"), without_gil)
        .def_property_readonly("path", [](const File& file) { return path_to(file.path()); })
        .def_property_readonly("direct", &File::direct)
        .def_property_readonly("offset_alignment", &File::offset_alignment)
        .def_property_readonly("memory_alignment", &File::memory_alignment)
        .def("set_direct", &File::set_direct, py::arg("direct"), without_gil)
        .def("size", &File::size, without_gil)
        .def("preallocate", &File::preallocate, py::arg("length"), py::arg("start") = 0,
             without_gil)
        .def("truncate", &File::truncate, py::arg("length"), without_gil)
        .def("close", &File::close, without_gil)
        .def_property_readonly("closed", &File::closed);
}

void bind_engine(py::module_& module) {
    py::class_<JobHandle>(module, "Job", py::is_final())
        .def("done", &JobHandle::done)
        .def("wait", &JobHandle::wait, py::arg("timeout_s"))
        .def(
            "cancel", [](const JobHandle& handle) { handle.engine->cancel(*handle.job); },
            without_gil)
        .def_property_readonly("bytes_total",
                               [](const JobHandle& h) { return h.job->bytes_total(); })
        .def_property_readonly("bytes_done", [](const JobHandle& h) { return h.job->bytes_done(); })
        .def_property_readonly("bytes_shared",
                               [](const JobHandle& h) { return h.job->bytes_shared(); })
        .def_property_readonly("copy_s", [](const JobHandle& h) { return h.job->copy_s(); })
        .def_property_readonly("checksum_s", [](const JobHandle& h) { return h.job->checksum_s(); })
        .def("checksums", &JobHandle::checksums)
        .def("staged", [](const JobHandle& handle) { return handle.staged(); })
        .def("wait_staged", &JobHandle::wait_staged, py::arg("timeout_s"))
        .def_property_readonly("bytes_staged",
                               [](const JobHandle& h) { return h.job->bytes_staged(); })
        .def_property_readonly("staged_at_s",
                               [](const JobHandle& h) { return h.job->staged_at_s(); })
        .def_property_readonly("written_at_s",
                               [](const JobHandle& h) { return h.job->written_at_s(); })
        .def_property_readonly("done_at_s", [](const JobHandle& h) { return h.job->done_at_s(); });

    py::class_<Engine, std::shared_ptr<Engine>>(module, "Engine", py::is_final())
        .def(py::init(&make_engine), py::arg("kind"), py::arg("pool").none(false), py::kw_only(),
             py::arg("queue_depth"), py::arg("posix_threads") = 4, py::arg("copy_threads") = 1,
             py::arg("submission_batch") = 0, py::arg("polled_submission") = false,
             py::arg("registered_files") = false,
             py::arg("registered_memory") = std::vector<std::pair<std::uintptr_t, std::int64_t>>())
        .def_property_readonly("kind", &Engine::kind)
        .def_property_readonly("reason", &Engine::reason)
        .def_property_readonly("slab_count", &Engine::slab_count)
        .def("page_lock", &Engine::page_lock, py::arg("cuda").none(false), py::arg("device"),
             without_gil)
        .def_property_readonly("submit_calls", &Engine::submit_calls)
        .def("transfer", &start_transfer, py::arg("operation"), py::arg("files"),
             py::arg("file_number"), py::arg("start"), py::arg("length"), py::arg("address"))
        .def("write", &start_write, py::arg("file"), py::arg("start"), py::arg("length"),
             py::arg("pieces").none(false), py::kw_only(), py::arg("checksum_copies") = false,
             py::arg("bytes_per_s") = 0, py::arg("io_priority") = 0, py::arg("syncs") = false)
        .def("read", &start_read, py::arg("files"), py::arg("file_number"), py::arg("start"),
             py::arg("length"), py::arg("pieces").none(false), py::arg("expected"),
             py::arg("cache") = std::shared_ptr<NodeCache>(),
             py::arg("file_keys") = std::vector<std::uint64_t>())
        .def(
            "sync",
            [](const std::shared_ptr<Engine>& engine, const File& file) -> JobHandle {
                const py::gil_scoped_release release;
                return {engine, engine->sync(file)};
            },
            py::arg("file"))
        .def(
            "bad_blocks",
            [](const Engine&, const JobHandle& handle) { return handle.bad_blocks(); },
            py::arg("job"))
        .def("close", [](Engine& engine) { engine.close(); }, without_gil);
}

void bind_commit_operations(py::module_& module) {
    module.def(
        "write_file",
        [](const Path& path, const py::object& data, bool sync) {
            const ContiguousBuffer buffer(data);
            const py::gil_scoped_release release;
            write_file(path.name, buffer.data(), buffer.length(), sync);
        },
        py::arg("path"), py::arg("data"), py::kw_only(), py::arg("sync") = true);
    module.def(
        "read_file",
        [](const Path& path) {
            std::string content;
            {
                const py::gil_scoped_release release;
                content = read_file(path.name);
            }
            return py::bytes(content);
        },
        py::arg("path"));
    module.def(
        "rename",
        [](const Path& source, const Path& destination) { rename(source.name, destination.name); },
        py::arg("source"), py::arg("destination"), without_gil);
    module.def(
        "sync_directory", [](const Path& path) { sync_directory(path.name); }, py::arg("path"),
        without_gil);
    module.def("remove", [](const Path& path) { remove(path.name); }, py::arg("path"), without_gil);
}

void bind_recorder(py::module_& module) {
    module.def("enter_step", &watchdog::enter, py::arg("step"));
    module.def("describe_process", &watchdog::describe, py::arg("rank"), py::arg("subject"));
    module.def("answer_signal", &watchdog::install, py::arg("signal"));
    module.def("inject_fault", &recorder::inject_fault, py::arg("operation"), py::arg("fault"),
               py::kw_only(), py::arg("skip") = 0, py::arg("count") = 1,
               py::arg("path_contains") = "", py::arg("delay_s") = 0.0);
    module.def("clear_faults", &recorder::clear_faults);
    module.def("trace_start", &recorder::trace_start);
    module.def("trace_stop", [] {
        py::list rows;
        for (const recorder::Entry& entry : recorder::trace_stop()) {
            rows.append(py::make_tuple(name_of(entry.operation), path_to(entry.path), entry.offset,
                                       entry.length, entry.result));
        }
        return rows;
    });
}

}  // namespace
}  // namespace megatron_uring

PYBIND11_MODULE(_engine, module) {
    using namespace megatron_uring;
    module.doc() = "Native engine: moves bytes between memory and files through slabs.";
    py::register_local_exception_translator(&translate_error);
    module.attr("BLOCK_BYTES") = block_bytes;
    module.def("has_io_uring", [] { return built_with_liburing; });
    module.def(
        "crc32c",
        [](const py::object& data, std::uint32_t value) {
            const ContiguousBuffer buffer(data);
            const py::gil_scoped_release release;
            return crc32c(buffer.data(), buffer.length(), value);
        },
        py::arg("data"), py::arg("value") = 0);
    module.def("block_checksums", &block_checksums, py::arg("pieces").none(false), py::arg("start"),
               py::arg("length"), py::arg("block_number"));
    bind_devices(module);
    bind_memory(module);
    bind_node_cache(module);
    bind_file(module);
    bind_engine(module);
    bind_commit_operations(module);
    bind_recorder(module);
}
