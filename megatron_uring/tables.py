"""Tables: what the steps hand to each other.

Guarantees
----------
- Frozen; numpy columns, of which row i belongs together, and tuples of keys. There is no Python
  object for each shard beyond its key and its tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_uring import _engine
from megatron_uring.columns import (
    BoolArray,
    Int32Array,
    Int64Array,
    Uint32Array,
    join,
    pack_arrays,
    pack_keys,
    unpack_arrays,
    unpack_keys,
)
from megatron_uring.layout import BLOCK_BYTES
from megatron_uring.shards import ShardTable

SUBFILES_LIMIT, SUBFILE_BYTES_LIMIT = 1 << 17, 1 << 46
"""Above the number of any subfile and the bytes of it that `on_axis` takes."""


def on_axis(subfile: Int32Array, start: Int64Array) -> Int64Array:
    """One number for each (subfile, offset in it), in their order: int64 [N]."""
    axis: Int64Array = subfile * np.int64(SUBFILE_BYTES_LIMIT) + start
    return axis


@dataclass(frozen=True)
class Extents:
    """Where N shards or objects lie: `subfile` int32 [N], `start` and `length` int64 [N], in
    bytes.
    """

    subfile: Int32Array
    start: Int64Array
    length: Int64Array

    def __len__(self) -> int:
        return len(self.start)

    def take(self, rows: npt.NDArray[np.intp]) -> Extents:
        """Only `rows`, in that order."""
        return Extents(self.subfile[rows], self.start[rows], self.length[rows])

    @staticmethod
    def concatenate(parts: Sequence[Extents]) -> Extents:
        """All rows, in order."""
        return Extents(
            join([part.subfile for part in parts], np.int32),
            join([part.start for part in parts], np.int64),
            join([part.length for part in parts], np.int64),
        )


@dataclass(frozen=True)
class Regions:
    """Stripe-aligned ranges and the CRC32C of their blocks.

    Attributes
    ----------
    rank : int32 [M]
        Who wrote it.
    subfile : int32 [M]
    start, length : int64 [M]
        `start` is a multiple of `BLOCK_BYTES`, `length` of `PAGE_BYTES`.
    crc32c : uint32 [sum of block_count(length)]
        Of each block, region after region.
    """

    rank: Int32Array
    subfile: Int32Array
    start: Int64Array
    length: Int64Array
    crc32c: Uint32Array

    def __len__(self) -> int:
        return len(self.start)

    def first_block(self) -> Int64Array:
        """Row of `crc32c` at which each region begins, int64 [M + 1]; the last entry is the
        total.
        """
        counts = -(-self.length // BLOCK_BYTES)
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])

    @staticmethod
    def concatenate(parts: Sequence[Regions]) -> Regions:
        """All regions, in order."""
        return Regions(
            join([part.rank for part in parts], np.int32),
            join([part.subfile for part in parts], np.int32),
            join([part.start for part in parts], np.int64),
            join([part.length for part in parts], np.int64),
            join([part.crc32c for part in parts], np.uint32),
        )


@dataclass(frozen=True)
class Structure:
    """What one rank, one group or all ranks hold, and where it will lie: the part that saves have
    in common.

    Attributes
    ----------
    shards
        A row for each shard, replicas included.
    rank : int32 [N]
        Who holds it.
    owner : bool [N]
        Whether that rank writes it.
    extents
        Where; of replicas the columns hold zeros.
    """

    shards: ShardTable
    rank: Int32Array
    owner: BoolArray
    extents: Extents

    def pack(self) -> bytes:
        """The columns, to send."""
        extents = self.extents
        where = (extents.subfile, extents.start, extents.length)
        return pack_arrays([self.rank, self.owner, *where, *self.shards.columns()])

    @staticmethod
    def unpack(data: bytes) -> Structure:
        """Inverse of `pack`."""
        rank, owner, subfile, start, length, *shards = unpack_arrays(data)
        table = ShardTable.from_columns(shards)
        return Structure(table, rank, owner, Extents(subfile, start, length))

    @staticmethod
    def concatenate(parts: Sequence[Structure]) -> Structure:
        """All rows, in order."""
        return Structure(
            ShardTable.concatenate([part.shards for part in parts]),
            join([part.rank for part in parts], np.int32),
            join([part.owner for part in parts], np.bool_),
            Extents.concatenate([part.extents for part in parts]),
        )


@dataclass(frozen=True)
class Contents:
    """What one rank, one group or all ranks wrote in this save: objects, and regions with their
    checksums.
    """

    object_keys: tuple[str, ...]
    object_extents: Extents
    regions: Regions
    replicas: tuple[str, ...] = ()

    def pack(self) -> bytes:
        """The columns, to send."""
        objects, regions = self.object_extents, self.regions
        where = (objects.subfile, objects.start, objects.length)
        ranges = (regions.rank, regions.subfile, regions.start, regions.length, regions.crc32c)
        keys, replicas = pack_keys(self.object_keys), pack_keys(self.replicas)
        return pack_arrays([*keys, *where, *ranges, *replicas])

    @staticmethod
    def unpack(data: bytes) -> Contents:
        """Inverse of `pack`."""
        text, lengths, *columns = unpack_arrays(data)
        return Contents(
            unpack_keys(text, lengths),
            Extents(*columns[:3]),
            Regions(*columns[3:8]),
            unpack_keys(*columns[8:]),
        )

    @staticmethod
    def concatenate(parts: Sequence[Contents]) -> Contents:
        """All rows, in order."""
        return Contents(
            tuple(key for part in parts for key in part.object_keys),
            Extents.concatenate([part.object_extents for part in parts]),
            Regions.concatenate([part.regions for part in parts]),
            tuple({key: None for part in parts for key in part.replicas}),
        )


@dataclass(frozen=True)
class Provided:
    """A part of the state, ready to plan.

    Attributes
    ----------
    shards
        One row for each shard, replicas included.
    owner : bool [N]
        Rows that this rank writes.
    tensors
        The plain tensors behind the rows, in order; they keep the memory alive.
    strides : int64 [N, D]
        Of the tensors, in bytes, aligned with the columns of `shards`.
    object_keys, objects
        Names and serialized bytes of the objects that this rank writes.
    replicas
        Names of objects that this rank holds and another one writes.
    claims : int64 [N] or [0]
        Of rows that one of the ranks which hold the piece is to own (`claims.claim`); 0: `owner`
        says it.
    """

    shards: ShardTable
    owner: BoolArray
    tensors: tuple[Any, ...]
    strides: Int64Array
    object_keys: tuple[str, ...]
    objects: tuple[bytes, ...]
    replicas: tuple[str, ...] = ()
    claims: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(frozen=True)
class Groups:
    """Groups of ranks.

    Attributes
    ----------
    mode
        ``"rank"`` or ``"shared"``.
    reason
        Why this mode.
    group_of_rank : int32 [size]
        Group, and so subfile, of each rank.
    aggregator : int32 [groups]
        Rank that creates, sizes and syncs the group's subfile.
    """

    mode: str
    reason: str
    group_of_rank: Int32Array
    aggregator: Int32Array

    def members(self, group: int) -> Int32Array:
        """Ranks of a group, ascending."""
        return np.flatnonzero(self.group_of_rank == group).astype(np.int32)


@dataclass(frozen=True)
class Boxes:
    """N boxes of memory against N boxes of a contiguous file image, in bytes.

    `run_bytes` int64 [N] contiguous bytes at a time; `counts`, `file_strides`, `memory_strides`
    int64 [N, D] for the dimensions around the run.
    """

    run_bytes: Int64Array
    counts: Int64Array
    file_strides: Int64Array
    memory_strides: Int64Array

    def take(self, rows: npt.NDArray[np.intp]) -> Boxes:
        """The same boxes in the order `rows`, or only some of them."""
        return Boxes(
            self.run_bytes[rows],
            self.counts.take(rows, axis=0),
            self.file_strides.take(rows, axis=0),
            self.memory_strides.take(rows, axis=0),
        )


@dataclass(frozen=True)
class Ranges:
    """What to read: whole blocks of R ranges.

    `file_number` int32 [R] among the open files; `start` and `length` int64 [R] in bytes; `crc32c`
    uint32 [blocks] expected of each block, range after range.
    """

    file_number: Int32Array
    start: Int64Array
    length: Int64Array
    crc32c: Uint32Array


@dataclass(frozen=True)
class RestorePlan:
    """What to read and where each part goes.

    Ranges are int64/int32 [R] sorted by (subfile, start), whole blocks of one region each, `crc32c`
    their expected checksums. Pieces are sorted by (subfile, file_start); `request` says which
    request each belongs to and `memory_offset` is in bytes from the first element of that request's
    destination.
    """

    range_subfile: Int32Array
    range_start: Int64Array
    range_length: Int64Array
    crc32c: npt.NDArray[np.uint32]
    piece_subfile: Int32Array
    piece_start: Int64Array
    request: Int64Array
    memory_offset: Int64Array
    boxes: Boxes


@dataclass(frozen=True)
class Staged:
    """Pieces for the engine, and what keeps their memory alive until the job is done."""

    pieces: _engine.Pieces
    alive: tuple[object, ...]


def no_pieces() -> _engine.Pieces:
    """Nothing to move: for writes of zeros and for reads that only verify."""
    none, columns = np.zeros(0, np.int64), np.zeros((0, 0), np.int64)
    return _engine.Pieces(
        np.zeros(0, np.int32), none, np.zeros(0, np.uint64), none, columns, columns, columns
    )
