"""A view: an HDF5 file whose datasets lie in the subfiles of a checkpoint, for tools that know HDF5
and nothing of us. Beside `index` the only importer of h5py: what it writes is a file for others,
whereas an index is an image in memory, which nothing else reads.

A tensor saved as one shard is a dataset with external raw storage; one saved in several is a
virtual dataset over one such dataset for each shard, under ``/shards``. Tensors are under
``/tensors``, objects (their ``torch.save`` archives) as bytes under ``/objects``.

Guarantees
----------
- No element is copied; only the index is read. A view is a few hundred bytes for each shard.
- Every key has its dataset, whatever is in the key: how keys become names, `dataset_names` says.
  Where the name is not the key, the attribute ``key`` holds that.
- It is written beside and renamed; a file that is no view of ours is not replaced.
- Reading through it checks nothing: `verify` does.

It is not part of the checkpoint, because it costs too much there: an external dataset for each of
100,000 tensors takes longer to write (7 s) than all the rest of a save's index (0.3 s).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from megatron_uring import _engine, roots
from megatron_uring import index as index_module
from megatron_uring.errors import StorageError, as_checkpoint_error
from megatron_uring.index_rules import Index
from megatron_uring.layout import DTYPE_NAMES, FORMAT_NAME, subfile_name

VIEW_NAME = "view.h5"
_MARK = "megatron_uring_view"
_NAME_BYTES_MAXIMUM = 60_000  # HDF5 takes no link name of 64 KiB
_SURROGATES = ("utf-8", "surrogatepass")
# bits, exponent bits, mantissa bits, bias. float8_e4m3fn and the like have no infinities, and other
# NaNs, which HDF5 cannot say: they are bytes.
_FLOATS = {
    "float16": (16, 5, 10, 15),
    "bfloat16": (16, 8, 7, 127),
    "float32": (32, 8, 23, 127),
    "float64": (64, 11, 52, 1023),
    "float8_e5m2": (8, 5, 2, 15),
}


@dataclass(frozen=True)
class View:
    """What `write_view` wrote.

    Attributes
    ----------
    path, directory
        Of the view, and of the checkpoint that it shows.
    tensors, shards, objects
    as_bytes
        Keys of the tensors whose dtype HDF5 cannot say: they are uint8, with the dtype's name in
        the attribute ``dtype``.
    """

    path: str
    directory: str
    tensors: int
    shards: int
    objects: int
    as_bytes: tuple[str, ...]


def write_view(
    directory: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    relative: bool = False,
) -> View:
    """Write a view of a checkpoint.

    Parameters
    ----------
    directory
        A checkpoint, or a save root, of which the newest is taken.
    output
        Default: ``view.h5`` in the checkpoint's directory. An older view there is replaced.
    relative
        Name subfiles relative to the view's directory. Readers then have to be told so: the
        variable ``HDF5_EXTFILE_PREFIX='${ORIGIN}'``, or h5py's ``efile_prefix``. By default they
        are named by absolute paths, which every reader follows.

    Raises
    ------
    CheckpointError
        If there is no checkpoint, or the file cannot be written.
    """
    resolved = roots.resolve_latest(os.path.abspath(os.fspath(directory)))
    index = index_module.read_index(resolved)
    path = os.path.join(resolved, VIEW_NAME) if output is None else os.fspath(output)
    path = os.path.abspath(path)
    _require_replaceable(path)
    beside = os.path.join(
        os.path.dirname(path), f".{os.path.basename(path)}.writing-{secrets.token_hex(8)}"
    )
    base = os.path.relpath(resolved, os.path.dirname(path)) if relative else resolved
    try:
        # as HDF5 1.10 reads it
        with h5py.File(beside, "x", libver=("v110", "v110")) as file:
            as_bytes = _Writer(file, index, os.path.normpath(base)).write(resolved)
        with open(beside, "rb") as written:
            os.fsync(written.fileno())
        _engine.rename(beside, path)
        _engine.sync_directory(os.path.dirname(path))
    except (OSError, RuntimeError, ValueError) as error:
        raise as_checkpoint_error(error, "write view", path) from error
    finally:
        with contextlib.suppress(OSError):
            os.remove(beside)
    return View(
        path,
        resolved,
        len(index.shards.keys),
        len(index.shards),
        len(index.object_keys),
        as_bytes,
    )


def _require_replaceable(path: str) -> None:
    if not os.path.lexists(path):
        return
    try:
        with h5py.File(path, "r") as file:
            if _MARK in file.attrs:
                return
    except OSError:
        pass  # no HDF5 file
    raise StorageError(
        "write view", path=path, expected="no file, or an older view", found="another file"
    )


# -------------------------------------------------------------------------------------------------
# names


def dataset_names(keys: Sequence[str]) -> list[str]:
    """Paths of the datasets of `keys`, each its own, without a leading slash.

    A key is its own path where that is possible: ``/`` makes groups. What HDF5 cannot have in a
    name, or takes for something else, is written as in URLs: ``%`` as ``%25``, NUL as ``%00``, a
    lone surrogate as its bytes, the names ``.`` and ``..`` as ``%2E`` and ``%2E%2E``; an empty
    name, as between two slashes, as ``%``. Where the path is a group for longer keys too, the
    dataset's name ends with one more ``%``. A name that is too long for HDF5 becomes
    ``%long-`` and its SHA-256.
    """
    paths = [tuple(map(_name, key.split("/"))) for key in keys]
    groups = {path[:length] for path in paths for length in range(1, len(path))}
    return ["/".join(path) + ("%" if path in groups else "") for path in paths]


def _name(part: str) -> str:
    if part in ("", ".", ".."):
        return part.replace(".", "%2E") or "%"
    data = part.encode(*_SURROGATES)
    if len(data) > _NAME_BYTES_MAXIMUM:
        return f"%long-{hashlib.sha256(data).hexdigest()}"
    part = part.replace("%", "%25").replace("\0", "%00")
    return "".join(
        "".join(f"%{byte:02X}" for byte in letter.encode(*_SURROGATES))
        if "\ud800" <= letter <= "\udfff"
        else letter
        for letter in part
    )


# -------------------------------------------------------------------------------------------------
# datasets


class _Writer:
    """Fills a view."""

    def __init__(self, file: h5py.File, index: Index, base: str) -> None:
        self._file, self._index, self._base = file, index, base
        self._texts: dict[str, Any] = {}
        self._scalar = h5py.h5s.create(h5py.h5s.SCALAR)
        self._links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
        self._links.set_create_intermediate_group(True)
        self._links.set_char_encoding(h5py.h5t.CSET_UTF8)

    def write(self, directory: str) -> tuple[str, ...]:
        """All of it; gives the keys of tensors that are shown as bytes."""
        index, root = self._index, self._file.attrs
        root[_MARK] = 1
        root["format"], root["save_id"] = FORMAT_NAME, index.save_id
        root["directory"] = np.void(os.fsencode(directory))
        for group in ("tensors", "objects", "shards"):
            self._file.create_group(group)
        as_bytes = self._tensors()
        extents = index.object_extents
        for row, name in enumerate(dataset_names(index.object_keys)):
            length = int(extents.length[row])
            dataset = self._external(f"objects/{name}", h5py.h5t.STD_U8LE, (length,), extents, row)
            self._describe(dataset, name, index.object_keys[row], "torch.save archive")
        return as_bytes

    def _tensors(self) -> tuple[str, ...]:
        index, shards = self._index, self._index.shards
        by_tensor = shards.by_tensor()
        kinds = {code: _kind(name) for code, name in enumerate(DTYPE_NAMES)}
        as_bytes = []
        for number, name in enumerate(dataset_names(shards.keys)):
            rows = by_tensor.of(number).tolist()
            code, ndim = int(shards.dtype[rows[0]]), int(shards.ndim[rows[0]])
            path, key = f"tensors/{name}", shards.keys[number]
            whole = tuple(shards.global_shape[rows[0], :ndim].tolist())
            if kinds[code] is None:
                as_bytes.append(key)
            kind = kinds[code] or h5py.h5t.STD_U8LE
            if len(rows) == 1:
                dataset = self._external(path, kind, whole, index.shard_extents, rows[0])
            else:
                dataset = self._virtual(path, kind, whole, rows)
            self._describe(dataset, name, key, DTYPE_NAMES[code])
        return tuple(as_bytes)

    def _external(
        self, path: str, kind: Any, shape: tuple[int, ...], extents: Any, row: int
    ) -> Any:
        """A dataset whose elements lie in a subfile; one without any lies nowhere."""
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        length = int(extents.length[row])
        if length:
            name = subfile_name(self._index.save_id, int(extents.subfile[row]))
            file = os.fsencode(os.path.join(self._base, name))
            creation.set_external(file, int(extents.start[row]), length)
        return self._create(path, kind, shape, creation)

    def _virtual(self, path: str, kind: Any, shape: tuple[int, ...], rows: list[int]) -> Any:
        """A dataset made of those of its shards, which are in this file too."""
        shards, ndim = self._index.shards, len(shape)
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        for row in rows:
            part = tuple(shards.shape[row, :ndim].tolist())
            source = f"shards/{row}"
            self._external(source, kind, part, self._index.shard_extents, row)
            if 0 not in part:
                space = h5py.h5s.create_simple(shape)
                space.select_hyperslab(tuple(shards.offset[row, :ndim].tolist()), part)
                creation.set_virtual(
                    space, b".", f"/{source}".encode(), h5py.h5s.create_simple(part)
                )
        return self._create(path, kind, shape, creation)

    def _create(self, path: str, kind: Any, shape: tuple[int, ...], creation: Any) -> Any:
        space = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
        return h5py.h5d.create(
            self._file.id, path.encode(), kind, space, dcpl=creation, lcpl=self._links
        )

    def _describe(self, dataset: Any, name: str, key: str, dtype: str) -> None:
        # not through h5py.Dataset.attrs: it takes as long as all the rest
        if dtype not in self._texts:
            self._texts[dtype] = h5py.h5t.py_create(np.dtype(f"S{len(dtype)}"))
        text = np.array(dtype.encode(), f"S{len(dtype)}")
        h5py.h5a.create(dataset, b"dtype", self._texts[dtype], self._scalar).write(text)
        if name != key:
            attributes = h5py.Dataset(dataset).attrs
            # text that HDF5 cannot hold as text is bytes
            attributes["key"] = key if _is_text(key) else np.void(key.encode(*_SURROGATES))


def _is_text(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in key


def _kind(dtype: str) -> Any:
    """HDF5's type for one of ours; None if it has none."""
    if dtype in _FLOATS:
        bits, exponent, mantissa, bias = _FLOATS[dtype]
        kind = h5py.h5t.IEEE_F64LE.copy() if bits == 64 else h5py.h5t.IEEE_F32LE.copy()
        kind.set_fields(bits - 1, mantissa, exponent, 0, mantissa)
        kind.set_precision(bits)
        kind.set_ebias(bias)
        kind.set_size(bits // 8)
        return kind
    if dtype.startswith("float8"):
        return None
    if dtype == "complex32":
        return h5py.h5t.py_create(np.dtype([("r", "<f2"), ("i", "<f2")]))
    return h5py.h5t.py_create(np.dtype(dtype).newbyteorder("<"), logical=True)
