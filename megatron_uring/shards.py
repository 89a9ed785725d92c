"""The table of shards: what is saved or wanted, as columns.

Guarantees
----------
- Frozen; row i of every column belongs to shard i. There is no Python object for a shard beyond its
  key.
- Dimensions past a row's `ndim` hold 1 (shapes) and 0 (offsets), so that products and sums over all
  columns are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_uring.columns import (
    BoolArray,
    Int32Array,
    Int64Array,
    Uint8Array,
    every,
    format_box,
    join,
    pack_keys,
    product,
    unpack_keys,
    widen,
)
from megatron_uring.layout import DTYPE_BYTES, DTYPE_NAMES


@dataclass(frozen=True)
class ShardTable:
    """Shards as columns, one row each.

    Attributes
    ----------
    keys
        Names of the global tensors that the rows refer to.
    tensor : int32 [N]
        Position in `keys`.
    dtype : uint8 [N]
        Position in `DTYPE_NAMES`.
    ndim : uint8 [N]
    global_shape, offset, shape : int64 [N, D]
        Of the global tensor, of the shard in it, of the shard. Dimensions past `ndim` hold 1, 0 and
        1.
    """

    keys: tuple[str, ...]
    tensor: Int32Array
    dtype: Uint8Array
    ndim: Uint8Array
    global_shape: Int64Array
    offset: Int64Array
    shape: Int64Array

    def __len__(self) -> int:
        return len(self.tensor)

    def lengths(self) -> Int64Array:
        """Bytes of each shard, int64 [N]."""
        return product(self.shape) * DTYPE_BYTES[self.dtype]

    def inside(self) -> BoolArray:
        """Which lie inside their tensor, bool [N]; shapes are not negative."""
        return every((self.offset >= 0) & (self.offset <= self.global_shape - self.shape))

    def first_rows(self) -> npt.NDArray[np.intp]:
        """Row of the first shard of each key, intp [keys]; every key has one."""
        first = np.full(len(self.keys), -1, np.intp)
        # of several rows for one key the last assignment stays: that of the first row
        first[self.tensor[::-1]] = np.arange(len(self) - 1, -1, -1)
        assert (first >= 0).all(), "a key without a row"
        return first

    def by_tensor(self) -> RowsByTensor:
        """The rows of each key."""
        order = np.argsort(self.tensor, kind="stable")
        numbers = np.arange(len(self.keys) + 1, dtype=self.tensor.dtype)
        return RowsByTensor(order, np.searchsorted(self.tensor[order], numbers))

    def widened(self, width: int) -> ShardTable:
        """The same table with `width` columns of dimensions."""
        return replace(
            self,
            global_shape=widen(self.global_shape, width, 1),
            offset=widen(self.offset, width, 0),
            shape=widen(self.shape, width, 1),
        )

    def take(self, rows: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> ShardTable:
        """The same table with only `rows`; keys stay as they are."""
        return ShardTable(
            self.keys,
            self.tensor[rows],
            self.dtype[rows],
            self.ndim[rows],
            self.global_shape[rows],
            self.offset[rows],
            self.shape[rows],
        )

    def compact(self) -> ShardTable:
        """The same rows without the keys that no row refers to."""
        used = np.zeros(len(self.keys), np.bool_)
        used[self.tensor] = True
        if used.all():
            return self
        keys = tuple(compress(self.keys, used.tolist()))
        number = np.cumsum(used, dtype=np.int32) - np.int32(1)
        return replace(self, keys=keys, tensor=number[self.tensor])

    @staticmethod
    def of_bytes(keys: tuple[str, ...], length: Int64Array) -> ShardTable:
        """Whole one-dimensional uint8 tensors of these lengths, int64 [keys]."""
        count, column = len(keys), length[:, None]
        return ShardTable(
            keys,
            np.arange(count, dtype=np.int32),
            np.full(count, DTYPE_NAMES.index("uint8"), np.uint8),
            np.ones(count, np.uint8),
            column,
            np.zeros((count, 1), np.int64),
            column,
        )

    @staticmethod
    def concatenate(tables: Sequence[ShardTable]) -> ShardTable:
        """One table of all rows; a key that several tables use is kept once."""
        keys, tensor = _join_keys(tables)
        width = max((table.shape.shape[1] for table in tables), default=0)
        return ShardTable(
            keys,
            join(tensor, np.int32),
            join([table.dtype for table in tables], np.uint8),
            join([table.ndim for table in tables], np.uint8),
            join([widen(table.global_shape, width, 1) for table in tables], np.int64, width),
            join([widen(table.offset, width, 0) for table in tables], np.int64, width),
            join([widen(table.shape, width, 1) for table in tables], np.int64, width),
        )

    def columns(self) -> list[npt.NDArray[Any]]:
        """The table as plain arrays, for `pack_arrays`."""
        return [
            *pack_keys(self.keys),
            self.tensor,
            self.dtype,
            self.ndim,
            self.global_shape,
            self.offset,
            self.shape,
        ]

    @staticmethod
    def from_columns(columns: Sequence[npt.NDArray[Any]]) -> ShardTable:
        """Inverse of `columns`."""
        keys = unpack_keys(columns[0], columns[1])
        return ShardTable(keys, *columns[2:8])


@dataclass(frozen=True)
class RowsByTensor:
    """Rows of a table, those of the same tensor together."""

    _order: npt.NDArray[np.intp]
    _bounds: npt.NDArray[np.intp]

    def of(self, tensor: int) -> npt.NDArray[np.intp]:
        """Rows of a tensor, by its position in `ShardTable.keys`; ascending."""
        return self._order[self._bounds[tensor] : self._bounds[tensor + 1]]


def _join_keys(tables: Sequence[ShardTable]) -> tuple[tuple[str, ...], list[Int32Array]]:
    """The keys of all tables, each once, and the `tensor` column of each table in their terms."""
    if all(table.keys == tables[0].keys for table in tables[1:]):
        return (tables[0].keys if tables else ()), [table.tensor for table in tables]
    keys = tuple(dict.fromkeys(chain.from_iterable(table.keys for table in tables)))
    columns: list[Int32Array] = []
    if len(keys) == sum(len(table.keys) for table in tables):  # none is in two tables
        base = 0
        for table in tables:
            columns.append(table.tensor + np.int32(base))
            base += len(table.keys)
        return keys, columns
    position = dict(zip(keys, range(len(keys)), strict=True))
    for table in tables:
        number = np.fromiter(map(position.__getitem__, table.keys), np.int32, len(table.keys))
        columns.append(number[table.tensor] if len(table) else table.tensor)
    return keys, columns


def describe_shard(shards: ShardTable, row: int) -> str:
    """A row for messages: ``shard [2, 3] at [0, 3]``."""
    ndim = shards.ndim[row]
    return f"shard {format_box(shards.shape[row], ndim)} at {format_box(shards.offset[row], ndim)}"
