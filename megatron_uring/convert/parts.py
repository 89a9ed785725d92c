"""Parts: what is read and written at a time, cut so that memory stays bounded.

Guarantees
----------
- Parts of a piece follow each other in its row-major order, and are not longer than they were asked
  to be.
- A part is at most twice as many boxes as it has dimensions; in the piece each of them is one
  contiguous run, and so is what any other cut of the same tensor has of it.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from megatron_uring import flattened
from megatron_uring.columns import BoolArray, Int32Array, Int64Array, Uint8Array
from megatron_uring.layout import DTYPE_BYTES
from megatron_uring.shards import ShardTable

WINDOW_BYTES = 64 << 20
"""Bytes of tensors that are read and written at a time; a multiple of 1 MiB."""
_ALIGNMENT_BYTES = 16  # of a part in a buffer: the largest element


@dataclass(frozen=True)
class Catalog:
    """What a checkpoint holds, in terms of no format.

    Attributes
    ----------
    shards
        A row for each piece that was saved.
    object_keys
        Of what is no tensor.
    common
        ``torch.save`` archive of the state common to all ranks, if there is one.
    megatron
        Megatron's ``metadata.json``; None if Megatron did not write it.
    planner_data
        Path of each key in the nested state, of a checkpoint of torch.distributed.checkpoint.
    notes
        What is worth knowing, and no error.
    """

    shards: ShardTable
    object_keys: tuple[str, ...] = ()
    common: bytes | None = None
    megatron: Mapping[str, Any] | None = None
    planner_data: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    def filtered(self, patterns: Sequence[str]) -> Catalog:
        """Only keys that match one of the shell patterns; all of them without any pattern."""
        if not patterns:
            return self
        stays = np.array([_matches(key, patterns) for key in self.shards.keys], bool)
        rows = np.flatnonzero(stays[self.shards.tensor]) if len(stays) else np.zeros(0, np.intp)
        return replace(
            self,
            shards=self.shards.take(rows).compact(),
            object_keys=tuple(key for key in self.object_keys if _matches(key, patterns)),
        )


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


class Source(Protocol):
    """A checkpoint that is read.

    Attributes
    ----------
    catalog
    wraps_objects
        Whether an object is saved as the one element of a list, as Megatron's ``torch_dist`` does.
    """

    catalog: Catalog
    wraps_objects: bool

    def fill(self, parts: Sequence[Part], buffer: Uint8Array, at: Sequence[int]) -> None:
        """Read each part to its place in `buffer`, bytes from its start."""
        ...

    def object_bytes(self, key: str) -> bytes:
        """The ``torch.save`` archive of an object, as it is stored."""
        ...

    def close(self) -> None:
        """Give back what is open."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """Elements [`start`, `stop`), in row-major order, of a piece of a tensor: `offset` and `shape`
    are those of the piece, `dtype` is a code of `layout.DTYPE_NAMES`.
    """

    key: str
    dtype: int
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def item_bytes(self) -> int:
        """Of an element."""
        return int(DTYPE_BYTES[self.dtype])

    @property
    def nbytes(self) -> int:
        """Of all its elements."""
        return (self.stop - self.start) * self.item_bytes

    def boxes(self, at: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], slice]]:
        """Offset in the tensor, shape, and place in a buffer of each box that it fills, in its
        order; the part begins in the buffer `at` so many bytes.
        """
        for offset, shape in flattened.boxes(self.shape, self.start, self.stop):
            begin, at = at, at + math.prod(shape) * self.item_bytes
            within = tuple(a + b for a, b in zip(self.offset, offset, strict=True))
            yield within, shape, slice(begin, at)


class Scratch:
    """Memory for one window at a time, kept: what is taken is only good until the next is."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def take(self, size: int) -> Uint8Array:
        """So many bytes, of any content."""
        if len(self._buffer) < size:
            self._buffer = np.empty(0, np.uint8)  # not both at once
            self._buffer = np.empty(size, np.uint8)
        return self._buffer[:size]


def part_of(table: ShardTable, row: int, start: int = 0, stop: int | None = None) -> Part:
    """Elements of a row of `table`; all of them by default."""
    ndim = int(table.ndim[row])
    shape = tuple(table.shape[row, :ndim].tolist())
    return Part(
        table.keys[table.tensor[row]],
        int(table.dtype[row]),
        tuple(table.global_shape[row, :ndim].tolist()),
        tuple(table.offset[row, :ndim].tolist()),
        shape,
        start,
        math.prod(shape) if stop is None else stop,
    )


def cut(part: Part, most_bytes: int) -> Iterator[Part]:
    """`part` in pieces of at most `most_bytes`, one after the other; an empty one as it is."""
    step = most_bytes // part.item_bytes
    if part.stop - part.start <= step:
        yield part
        return
    for start in range(part.start, part.stop, step):
        yield replace(part, start=start, stop=min(start + step, part.stop))


def whole_tensors(shards: ShardTable) -> ShardTable:
    """A row for each tensor, as one piece."""
    whole = shards.take(shards.first_rows())
    return replace(whole, offset=np.zeros_like(whole.offset), shape=whole.global_shape)


def row_pieces(shards: ShardTable, most_bytes: int) -> ShardTable:
    """The same shards, those of more than `most_bytes` cut into pieces that are boxes of at most as
    many.
    """
    table = shards
    while (large := table.lengths() > most_bytes).any():
        table = _halved(table, large)
    return table


def _halved(table: ShardTable, large: BoolArray) -> ShardTable:
    """The `large` rows cut in two along their first dimension of more than one element."""
    rows = np.repeat(np.arange(len(table)), 1 + large)
    second = np.append(False, rows[1:] == rows[:-1])
    halves = np.flatnonzero(large[rows])
    table = table.take(rows)
    dimension = np.argmax(table.shape[halves] > 1, axis=1)
    shape, offset = table.shape.copy(), table.offset.copy()
    size = shape[halves, dimension]
    shape[halves, dimension] = np.where(second[halves], size - size // 2, size // 2)
    offset[halves, dimension] += np.where(second[halves], size // 2, 0)
    return replace(table, shape=shape, offset=offset)


def share(lengths: Int64Array, size: int) -> Int32Array:
    """Rank of each of N things of these lengths, int32 [N]: ascending, and about the same number of
    bytes for each of `size` ranks.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    middle = ends - lengths // 2
    ranks: Int32Array = np.minimum(middle * size // max(total, 1), size - 1).astype(np.int32)
    return ranks


def batches(
    parts: Iterable[Part], most_bytes: int, alignment_bytes: int = _ALIGNMENT_BYTES
) -> Iterator[tuple[list[Part], list[int], int]]:
    """Neighbouring parts together, the place of each in a buffer, and the buffer's size, which is
    at most `most_bytes`, or that of one part.
    """
    batch: list[Part] = []
    at: list[int] = []
    end = 0
    for part in parts:
        start = -(-end // alignment_bytes) * alignment_bytes
        if batch and start + part.nbytes > most_bytes:
            yield batch, at, end
            batch, at, start = [], [], 0
        batch.append(part)
        at.append(start)
        end = start + part.nbytes
    if batch:
        yield batch, at, end
