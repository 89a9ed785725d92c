"""Columns: numpy arrays as the carriers of everything that there is many of.

Guarantees
----------
- `pack_arrays` and `unpack_arrays` carry columns between ranks without pickle.
- Keys are two columns: their UTF-8 bytes end to end, and the length of each.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Uint8Array = npt.NDArray[np.uint8]
Uint32Array = npt.NDArray[np.uint32]
Uint64Array = npt.NDArray[np.uint64]
_Number = TypeVar("_Number", np.int64, np.float64)


def widen(column: Int64Array, width: int, fill: int) -> Int64Array:
    """[N, D] padded on the right with `fill` to [N, width]."""
    missing = width - column.shape[1]
    return np.pad(column, ((0, 0), (0, missing)), constant_values=fill) if missing else column


def unravel(flat: Int64Array, ndim: npt.NDArray[Any], width: int, fill: int) -> Int64Array:
    """Rows of `ndim` [N] numbers each, end to end in `flat`, as a table [N, width] with `fill`."""
    if len(flat) != int(ndim.sum(dtype=np.int64)):  # one number alone would be spread over all
        raise ValueError(f"{len(flat)} numbers for {int(ndim.sum(dtype=np.int64))} dimensions")
    table = np.full((len(ndim), width), fill, np.int64)
    table[np.arange(width) < ndim[:, None]] = flat
    return table


def table_of(rows: Sequence[Sequence[int]], fill: int) -> Int64Array:
    """Rows of any length as a table int64 [N, D] padded with `fill`."""
    ndim = np.fromiter(map(len, rows), np.int64, len(rows))
    flat = np.fromiter(chain.from_iterable(rows), np.int64, int(ndim.sum()))
    return unravel(flat, ndim, int(ndim.max(initial=0)), fill)


# Column by column: numpy's reductions along a short last axis take ten times as long.


def product(table: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    """Product of each row: [N, D] -> [N] of the same dtype."""
    result = np.ones(len(table), table.dtype)
    for dimension in range(table.shape[1]):
        result *= table[:, dimension]
    return result


def volume(shape: Int64Array) -> npt.NDArray[np.float64]:
    """Elements of each row's box, as a float: a wrong shape must not overflow into a right one."""
    return product(shape.astype(np.float64))


def inner(left: Int64Array, right: Int64Array) -> Int64Array:
    """Sum of products of each row: int64 [N, D] twice -> [N]."""
    result = np.zeros(len(left), np.int64)
    for dimension in range(left.shape[1]):
        result += left[:, dimension] * right[:, dimension]
    return result


def every(table: BoolArray) -> BoolArray:
    """Whether all of each row are true: bool [N, D] -> [N]."""
    result = np.ones(len(table), np.bool_)
    for dimension in range(table.shape[1]):
        result &= table[:, dimension]
    return result


def join(columns: Sequence[npt.NDArray[Any]], dtype: Any, width: int | None = None) -> Any:
    """Columns end to end; the caller names the dtype, also for no column at all."""
    empty = np.zeros((0,) if width is None else (0, width), dtype)
    return np.concatenate([empty, *columns]).astype(dtype, copy=False)


def pack_keys(keys: Sequence[str]) -> list[npt.NDArray[Any]]:
    """Keys as two columns: their UTF-8 bytes end to end, and the length of each (int64)."""
    text = "".join(keys)
    if text.isascii():  # a character is a byte: one encoding for all of them
        lengths = np.fromiter(map(len, keys), np.int64, len(keys))
        return [np.frombuffer(text.encode("ascii"), np.uint8), lengths]
    encoded = [key.encode("utf-8", "surrogatepass") for key in keys]
    return [
        np.frombuffer(b"".join(encoded), np.uint8),
        np.fromiter(map(len, encoded), np.int64, len(encoded)),
    ]


def unpack_keys(text: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> tuple[str, ...]:
    """Inverse of `pack_keys`; raises ValueError where the columns do not fit each other."""
    ends = np.cumsum(lengths, dtype=np.int64)
    if len(lengths) and (int(np.min(lengths)) < 0 or int(ends[-1]) != len(text)):
        raise ValueError("key lengths do not add up to the key text")
    data, bounds = text.tobytes(), [0, *ends.tolist()]
    if data.isascii():
        letters = data.decode("ascii")
        return tuple([letters[begin:end] for begin, end in pairwise(bounds)])
    return tuple(
        [data[begin:end].decode("utf-8", "surrogatepass") for begin, end in pairwise(bounds)]
    )


def pack_arrays(arrays: Sequence[npt.NDArray[Any]]) -> bytes:
    """Arrays end to end in numpy's own `.npy` encoding, without pickle."""
    out = io.BytesIO()
    out.write(struct.pack("<q", len(arrays)))
    for array in arrays:
        np.lib.format.write_array(out, np.ascontiguousarray(array), allow_pickle=False)
    return out.getvalue()


def unpack_arrays(data: bytes) -> list[npt.NDArray[Any]]:
    """Inverse of `pack_arrays`."""
    source = io.BytesIO(data)
    (count,) = struct.unpack("<q", source.read(8))
    return [np.lib.format.read_array(source, allow_pickle=False) for _ in range(count)]


def format_box(values: Int64Array, ndim: int) -> str:
    """The first `ndim` values, for messages."""
    return "[" + ", ".join(str(value) for value in values[:ndim].tolist()) + "]"
