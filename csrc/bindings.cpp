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
#include <cmath>

#include "checksum.hpp"
#include "engine.hpp"
#include "ring.hpp"

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

// ---- pieces ----

std::shared_ptr<PieceTable> make_pieces(const py::object& file_number, const py::object& file_start,
                                        const py::object& address, const py::object& run_bytes,
                                        const py::object& counts, const py::object& file_strides,
                                        const py::object& memory_strides) {
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
    const PieceColumns columns = {static_cast<std::size_t>(count),
                                  static_cast<std::size_t>(dimensions),
                                  numbers.data(),
                                  starts.data(),
                                  addresses.data(),
                                  runs.data(),
                                  count_table.data(),
                                  file_table.data(),
                                  memory_table.data()};
    const py::gil_scoped_release release;
    return std::make_shared<PieceTable>(columns);
}

// ---- jobs ----

struct JobHandle {
    std::shared_ptr<Engine> engine;  // outlives the handle, so that cancelling is always safe
    std::shared_ptr<Job> job;

    bool done() const {
        if (job->done()) return true;
        if (engine->in_child()) engine->wait(*job, 0.0);  // throws
        return false;
    }

    bool wait(double timeout_s) const {
        if (std::isnan(timeout_s) || timeout_s < 0) {
            throw std::invalid_argument("timeout_s is negative or not a number");
        }
        constexpr double slice_s = 0.1;
        const auto begin = std::chrono::steady_clock::now();
        for (;;) {
            const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
            const double left_s = std::max(timeout_s - spent.count(), 0.0);
            bool ended;
            {
                const py::gil_scoped_release release;
                ended = engine->wait(*job, std::min(left_s, slice_s));
            }
            if (ended) break;
            if (left_s <= slice_s) return false;
            if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        }
        job->rethrow();
        return true;
    }

    py::array_t<std::uint32_t> checksums() const {
        require_done();
        return array_to(job->checksums());
    }

    py::array bad_blocks() const {
        require_done();
        if (job->operation() != Operation::read) throw std::invalid_argument("not a read job");
        std::vector<std::int64_t> cells;
        for (const BadBlock& block : job->bad_blocks()) {
            cells.insert(cells.end(),
                         {block.range_number, block.file_offset, block.expected, block.found});
        }
        return array_to(cells).reshape({-1, 4});
    }

    void require_done() const {
        if (!done()) throw std::invalid_argument("job is not done");
        job->rethrow();
    }
};

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
                      std::int64_t length, std::shared_ptr<PieceTable> pieces) {
    const py::gil_scoped_release release;
    return {engine, engine->write(file, start, length, std::move(pieces))};
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
             py::arg("memory_strides"))
        .def("__len__", &PieceTable::size);

    py::class_<SlabPool, std::shared_ptr<SlabPool>>(module, "SlabPool", py::is_final())
        .def(py::init<std::int64_t, std::int64_t>(), py::arg("slab_bytes"), py::arg("slab_count"),
             without_gil)
        .def_property_readonly("slab_bytes", &SlabPool::slab_bytes)
        .def_property_readonly("slab_count", &SlabPool::slab_count)
        .def_property_readonly("free_count", &SlabPool::free_count)
        .def_property_readonly("allocate_s", &SlabPool::allocate_s);
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
        .def("preallocate", &File::preallocate, py::arg("length"), without_gil)
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
        .def("checksums", &JobHandle::checksums);

    py::class_<Engine, std::shared_ptr<Engine>>(module, "Engine", py::is_final())
        .def(py::init(&make_engine), py::arg("kind"), py::arg("pool").none(false), py::kw_only(),
             py::arg("queue_depth"), py::arg("posix_threads") = 4, py::arg("copy_threads") = 1,
             py::arg("submission_batch") = 0, py::arg("polled_submission") = false,
             py::arg("registered_files") = false,
             py::arg("registered_memory") = std::vector<std::pair<std::uintptr_t, std::int64_t>>())
        .def_property_readonly("kind", &Engine::kind)
        .def_property_readonly("reason", &Engine::reason)
        .def_property_readonly("submit_calls", &Engine::submit_calls)
        .def("transfer", &start_transfer, py::arg("operation"), py::arg("files"),
             py::arg("file_number"), py::arg("start"), py::arg("length"), py::arg("address"))
        .def("write", &start_write, py::arg("file"), py::arg("start"), py::arg("length"),
             py::arg("pieces").none(false))
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
        [](const Path& path, const py::object& data) {
            const ContiguousBuffer buffer(data);
            const py::gil_scoped_release release;
            write_file(path.name, buffer.data(), buffer.length());
        },
        py::arg("path"), py::arg("data"));
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
    bind_memory(module);
    bind_node_cache(module);
    bind_file(module);
    bind_engine(module);
    bind_commit_operations(module);
    bind_recorder(module);
}
