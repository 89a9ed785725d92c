// Conversions between Python and C++ values, for bindings.cpp.
//
// 1. A path is str, bytes or os.PathLike, and comes back as it was given, whatever its bytes.
// 2. An array of another dtype or number of dimensions is refused, naming the argument; nothing is
//    converted by guessing.
// 3. A buffer is borrowed for as long as its ContiguousBuffer lives.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace py = pybind11;

namespace megatron_uring {
// An argument that is str, bytes or os.PathLike.
struct Path {
    std::string name;
};
}  // namespace megatron_uring

template <>
struct py::detail::type_caster<megatron_uring::Path> {
    PYBIND11_TYPE_CASTER(megatron_uring::Path, const_name("str | bytes | os.PathLike"));
    bool load(py::handle source, bool) {
        PyObject* bytes = nullptr;
        if (PyUnicode_FSConverter(source.ptr(), &bytes) == 0) throw py::error_already_set();
        value.name = std::string(py::reinterpret_steal<py::bytes>(bytes));
        return true;
    }
};

namespace megatron_uring {

inline py::object path_to(const std::string& path) {
    return py::reinterpret_steal<py::object>(
        PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<py::ssize_t>(path.size())));
}

template <class T>
py::array_t<T, py::array::c_style> array_from(const py::object& object, const char* name,
                                              py::ssize_t dimensions) {
    const auto reject = [name](const std::string& what) {
        throw std::invalid_argument(std::string(name) + " " + what);
    };
    if (!py::isinstance<py::array>(object)) reject("is not a numpy array");
    const auto array = py::reinterpret_borrow<py::array>(object);
    if (!array.dtype().equal(py::dtype::of<T>())) {
        reject("has dtype " + std::string(py::str(array.dtype())) + ", not " +
               std::string(py::str(py::dtype::of<T>())));
    }
    if (array.ndim() != dimensions) {
        reject("has " + std::to_string(array.ndim()) + " dimensions, not " +
               std::to_string(dimensions));
    }
    return py::array_t<T, py::array::c_style>::ensure(array);
}

template <class T>
py::array_t<T> array_to(const std::vector<T>& values) {
    return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

// A contiguous read-only view of any buffer; holds the export open.
class ContiguousBuffer {
  public:
    explicit ContiguousBuffer(const py::object& object) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_ANY_CONTIGUOUS) != 0) {
            throw py::error_already_set();
        }
    }
    ~ContiguousBuffer() { PyBuffer_Release(&view_); }
    ContiguousBuffer(const ContiguousBuffer&) = delete;
    ContiguousBuffer& operator=(const ContiguousBuffer&) = delete;
    const std::uint8_t* data() const { return static_cast<const std::uint8_t*>(view_.buf); }
    std::int64_t length() const { return view_.len; }

  private:
    Py_buffer view_ = {};
};

}  // namespace megatron_uring
