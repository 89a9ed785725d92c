"""The layout of safetensors files: eight bytes of length, a header in JSON, elements end to end.

Guarantees
----------
- What is planned is what other readers take: names in the header unique, elements in order of
  offset without gaps, the larger dtypes first so that each tensor is aligned.
- What is read is checked against the file's size before any of it is believed.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_uring import columns
from megatron_uring.convert.files import Files
from megatron_uring.errors import CorruptionError, UnsupportedError, as_checkpoint_error
from megatron_uring.layout import DTYPE_BYTES, DTYPE_NAMES, MAXIMUM_DIMENSIONS
from megatron_uring.regular import open_regular
from megatron_uring.shards import ShardTable

INDEX_NAME = "model.safetensors.index.json"
SUFFIX = ".safetensors"
METADATA_KEY = "__metadata__"
_SIZE_MAXIMUM = 1 << 62
# What a header makes Python raise that is no header.
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
HEADER_BYTES_MAXIMUM = 100_000_000
"""The most that the safetensors library reads."""
_HEADER_BYTES_PLANNED = 80_000_000
_LENGTH_BYTES = 8
_HEADER_ALIGNMENT_BYTES = 64

NAME_OF_DTYPE = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
_CODE_OF_NAME = {name: DTYPE_NAMES.index(dtype) for dtype, name in NAME_OF_DTYPE.items()}


@dataclass(frozen=True)
class PlannedFile:
    """A file that is to be written.

    Attributes
    ----------
    name
    header
        With its length before it: the first bytes of the file.
    rows
        Of the table of tensors, in order; their elements follow the header end to end.
    starts
        Offset of each row's elements in the file.
    length
        Bytes of the file.
    """

    name: str
    header: bytes
    rows: tuple[int, ...]
    starts: tuple[int, ...]
    length: int


def plan_files(tensors: ShardTable, most_bytes: int, files_wanted: int) -> list[PlannedFile]:
    """Divide whole tensors, in their order, into files of at most `most_bytes` of elements (a
    larger tensor has a file of its own), about `files_wanted` or more.

    Raises
    ------
    UnsupportedError
        For a dtype or a key that safetensors cannot hold, naming the tensor.
    """
    _check_names(tensors)
    lengths = tensors.lengths().tolist()
    most_bytes = min(most_bytes, max(-(-sum(lengths) // max(files_wanted, 1)), 1))
    groups: list[list[int]] = []
    filled = header = 0
    for row, length in enumerate(lengths):
        entry = len(tensors.keys[tensors.tensor[row]].encode()) * 6 + 512
        if not groups or filled + length > most_bytes or header + entry > _HEADER_BYTES_PLANNED:
            groups.append([])
            filled = header = 0
        groups[-1].append(row)
        filled, header = filled + length, header + entry
    count = len(groups)
    return [
        _plan_file(tensors, rows, f"model-{number:05d}-of-{count:05d}{SUFFIX}")
        for number, rows in enumerate(groups, 1)
    ]


def _check_names(tensors: ShardTable) -> None:
    for row in range(len(tensors)):
        key, dtype = tensors.keys[tensors.tensor[row]], DTYPE_NAMES[tensors.dtype[row]]
        problem: dict[str, Any] = {}
        if dtype not in NAME_OF_DTYPE:
            problem = {"expected": f"a dtype of {', '.join(NAME_OF_DTYPE)}", "found": dtype}
        elif key == METADATA_KEY:
            problem = {"expected": "another key", "cause": "safetensors uses it for itself"}
        elif not _is_unicode(key):
            problem = {"expected": "a key that is Unicode text", "found": ascii(key)}
        if problem:
            raise UnsupportedError(f"write tensor {key!a} to safetensors", **problem)


def _is_unicode(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plan_file(tensors: ShardTable, rows: Sequence[int], name: str) -> PlannedFile:
    item = DTYPE_BYTES[tensors.dtype]
    ordered = sorted(rows, key=lambda row: -int(item[row]))
    entries: dict[str, Any] = {METADATA_KEY: {"format": "pt"}}
    lengths, end = tensors.lengths(), 0
    starts = []
    for row in ordered:
        begin, end = end, end + int(lengths[row])
        starts.append(begin)
        entries[tensors.keys[tensors.tensor[row]]] = {
            "dtype": NAME_OF_DTYPE[DTYPE_NAMES[tensors.dtype[row]]],
            "shape": tensors.shape[row, : tensors.ndim[row]].tolist(),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    padded = -(-(_LENGTH_BYTES + len(text)) // _HEADER_ALIGNMENT_BYTES) * _HEADER_ALIGNMENT_BYTES
    header = struct.pack("<Q", padded - _LENGTH_BYTES) + text.ljust(padded - _LENGTH_BYTES)
    return PlannedFile(
        name, header, tuple(ordered), tuple(padded + start for start in starts), padded + end
    )


# -------------------------------------------------------------------------------------------------
# reading


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file: `start` is the offset of its elements there."""

    key: str
    code: int
    shape: tuple[int, ...]
    file: str
    start: int


def read_header(files: Files, name: str) -> list[StoredTensor]:
    """The tensors of a file, in order of their elements.

    Raises
    ------
    CorruptionError
        If the header contradicts itself or the file's size.
    UnsupportedError
        For a dtype that is not known.
    """
    path, size = os.path.join(files.directory, name), files.size(name)
    (length,) = struct.unpack("<Q", files.read_bytes(name, 0, _LENGTH_BYTES))
    if not 2 <= length <= min(HEADER_BYTES_MAXIMUM, size - _LENGTH_BYTES):
        raise _damaged(path, f"a header of {length} bytes in {size}")
    try:
        header = json.loads(files.read_bytes(name, _LENGTH_BYTES, length))
        tensors = sorted(_entries(header, name, _LENGTH_BYTES + length), key=lambda one: one[0])
    except UnsupportedError:
        raise
    except _DAMAGE as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    at = _LENGTH_BYTES + length
    for begin, end, tensor in tensors:
        wanted = math.prod(tensor.shape) * int(DTYPE_BYTES[tensor.code])
        if begin != at or end - begin != wanted or min(tensor.shape, default=0) < 0:
            raise _damaged(path, f"{tensor.key!r} from {begin} to {end}, not {wanted} from {at}")
        at = end
    if at != size:
        raise CorruptionError(
            "read source",
            path=path,
            offset=min(at, size),
            expected=f"{at} bytes",
            found=f"{size} bytes",
            cause="the file was cut, or is no safetensors file",
        )
    return [tensor for _, _, tensor in tensors]


def _entries(header: Any, name: str, base: int) -> Iterator[tuple[int, int, StoredTensor]]:
    for key, entry in header.items():
        if key == METADATA_KEY:
            continue
        if entry["dtype"] not in _CODE_OF_NAME:
            raise UnsupportedError(
                f"read tensor {key!r}",
                path=name,
                expected=f"a dtype of {', '.join(_CODE_OF_NAME)}",
                found=entry["dtype"],
            )
        begin, end = (base + int(offset) for offset in entry["data_offsets"])
        shape = tuple(int(size) for size in entry["shape"])
        if len(shape) > MAXIMUM_DIMENSIONS or max(shape, default=0) > _SIZE_MAXIMUM:
            raise ValueError(f"{key!r} has shape {shape}")
        yield begin, end, StoredTensor(key, _CODE_OF_NAME[entry["dtype"]], shape, name, begin)


def read_names(directory: str) -> list[str]:
    """Names of the files that make up the model: those of the index, else all in the directory.

    Raises
    ------
    CorruptionError
        If the index is damaged, or names what is not in the directory.
    """
    path = os.path.join(directory, INDEX_NAME)
    if not os.path.exists(path):
        return sorted(name for name in os.listdir(directory) if name.endswith(SUFFIX))
    try:
        with open_regular(path, "read source") as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
    except OSError as error:
        raise as_checkpoint_error(error, "read source", path) from error
    except _DAMAGE as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    for name in names:
        plain = isinstance(name, str) and os.path.basename(name) == name
        if not plain or not os.path.exists(os.path.join(directory, name)):
            raise CorruptionError(
                "read source", path=path, expected="files beside it", found=repr(name)
            )
    return names


def _damaged(path: str, found: str) -> CorruptionError:
    return CorruptionError("read safetensors header", path=path, found=found)


def table_of(tensors: Sequence[StoredTensor]) -> ShardTable:
    """A row for each tensor, whole."""
    shape = columns.table_of([tensor.shape for tensor in tensors], 1)
    return ShardTable(
        tuple(tensor.key for tensor in tensors),
        np.arange(len(tensors), dtype=np.int32),
        np.array([tensor.code for tensor in tensors], np.uint8),
        np.array([len(tensor.shape) for tensor in tensors], np.uint8),
        shape,
        np.zeros_like(shape),
        shape,
    )
