"""The pickles of torch.distributed.checkpoint, read without running anything that they name.

Guarantees
----------
- A pickle may name the classes of DCP's metadata, which hold data alone, and nothing else. What
  Megatron adds and no conversion needs becomes an empty stand-in; Megatron is not imported.
- Of a saved tensor only its description is read here: where in the file its elements lie.
"""

from __future__ import annotations

import collections
import io
import pathlib
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import filesystem, metadata

from megatron_uring.errors import CorruptionError, UnsupportedError

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_HEADER_BYTES = 30  # of an entry in a zip archive, before its name


class _Ignored:
    """Stands for a class whose objects are not looked at."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _layout(name: str) -> Any:
    """What ``torch.serialization._get_layout`` gives."""
    found = getattr(torch, str(name).rpartition(".")[2], None)
    return found if isinstance(found, torch.layout) else None


_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        (_METADATA, name): getattr(metadata, name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "_MEM_FORMAT_ENCODING",
            "StorageMeta",
        )
        if hasattr(metadata, name)
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    ("collections", "OrderedDict"): collections.OrderedDict,
    **{
        (module, name): pathlib.PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath")
    },
    # plans of all ranks, which Megatron keeps to save again in the same way
    **{
        (_PLANNER, name): _Ignored
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
    },
    (_PLANNER, "BytesIOWriteData"): _Ignored,
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"): _Ignored,
    (_MEGATRON, "MCoreSavePlan"): _Ignored,
    (_MEGATRON, "MCoreMetadata"): metadata.Metadata,
}


class _Unpickler(pickle._Unpickler):
    """The one in Python: that in C takes memory for any number that a damaged memo entry has."""

    def __init__(self, file: io.BytesIO, path: str, known: dict[tuple[str, str], Any]) -> None:
        super().__init__(file)
        self._path, self._known = path, known

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._known:
            return self._known[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise UnsupportedError(
            "read pickle",
            path=self._path,
            expected="classes of torch.distributed.checkpoint's metadata",
            found=f"{module}.{name}",
            cause="it was not loaded: nothing of a checkpoint is run",
        )


def read_metadata(data: bytes, path: str) -> Any:
    """The ``Metadata`` that ``.metadata`` holds.

    Raises
    ------
    UnsupportedError
        Naming the class, if it holds any other.
    CorruptionError
        If it is no pickle, or not of a ``Metadata``.
    """
    found = _guarded(lambda: _Unpickler(io.BytesIO(data), path, _ALLOWED).load(), path)
    if not isinstance(found, metadata.Metadata):
        raise CorruptionError(
            "read pickle", path=path, expected="Metadata", found=type(found).__name__
        )
    return found


def _guarded(load: Callable[[], Any], path: str, offset: int | None = None) -> Any:
    try:
        return load()
    except UnsupportedError:
        raise
    except Exception as error:  # whatever damaged bytes make a pickle do
        raise CorruptionError(
            "read pickle", path=path, offset=offset, cause=f"{type(error).__name__}: {error}"
        ) from error


# -------------------------------------------------------------------------------------------------
# a tensor that torch.save wrote


@dataclass(frozen=True)
class ArchivedTensor:
    """Where the elements of a saved tensor lie: `start` in bytes from the start of its archive,
    None if they are not one run in row-major order.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int | None


@dataclass(frozen=True)
class _Storage:
    name: str
    dtype: torch.dtype | None
    count: int


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    dtype: torch.dtype | None
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _tensor(storage: Any, offset: int, shape: Any, stride: Any, *rest: Any) -> _Tensor:
    """In the place of ``_rebuild_tensor_v2`` and ``_v3``, whose last argument is the dtype."""
    dtype = next((one for one in rest if isinstance(one, torch.dtype)), storage.dtype)
    return _Tensor(storage, dtype, int(offset), tuple(shape), tuple(stride))


def _parameter(tensor: _Tensor, *rest: Any) -> _Tensor:
    return tensor


# By name, as old and new versions of torch pickle them; `UntypedStorage` comes with a dtype apart.
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
_OF_TENSORS: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch.storage", "UntypedStorage"): None,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
}


class _TensorUnpickler(_Unpickler):
    def persistent_load(self, identity: Any) -> _Storage:
        _, dtype, name, _, count = identity
        return _Storage(str(name), dtype, int(count))


def read_tensor(archive: BinaryIO, path: str, offset: int) -> ArchivedTensor:
    """What a ``torch.save`` archive of one tensor says of it.

    Parameters
    ----------
    archive
        Seekable; the archive alone.
    path, offset
        Where it lies, for messages.

    Raises
    ------
    CorruptionError, UnsupportedError
        If it is not such an archive.
    """
    return _guarded(lambda: _read_tensor(archive, path), path, offset)  # type: ignore[no-any-return]


def _read_tensor(archive: BinaryIO, path: str) -> ArchivedTensor:
    with zipfile.ZipFile(archive) as entries:
        names = {name.partition("/")[2]: name for name in entries.namelist()}
        if "byteorder" in names and entries.read(names["byteorder"]) != b"little":
            raise UnsupportedError("read tensor", path=path, expected="little-endian elements")
        data = io.BytesIO(entries.read(names["data.pkl"]))
        found = _TensorUnpickler(data, path, _OF_TENSORS).load()
        if not isinstance(found, _Tensor) or found.dtype is None:
            raise ValueError(f"no tensor, but {type(found).__name__}")
        entry = entries.getinfo(names[f"data/{found.storage.name}"])
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError("compressed elements")
    archive.seek(entry.header_offset)
    header = archive.read(_HEADER_BYTES)
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    item = found.dtype.itemsize
    start = entry.header_offset + _HEADER_BYTES + lengths + found.offset * item
    count, is_run = 1, True
    for size, step in zip(reversed(found.shape), reversed(found.stride), strict=True):
        is_run = is_run and (size == 1 or step == count)
        count *= size
    if (found.offset + count) * item > entry.file_size and is_run:
        raise ValueError(f"{count} elements in {entry.file_size} bytes")
    return ArchivedTensor(found.dtype, found.shape, start if is_run or not count else None)
