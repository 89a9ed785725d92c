"""I/O patterns of checkpoints: which bytes of a rank go to which file, at which offset, in how many
submissions.

Each pattern is one short function from the sizes of a rank's tensors to a `Layout`.

Guarantees
----------
- Pure: no I/O, no communication.
- Every byte of every tensor lies in exactly one submission. Where tensors are aligned, submissions
  are rounded up to whole pages, so that they may be direct.
- A byte's place in memory follows from its place in the rank's data, the same in all patterns.
- Where ranks share a file, each has a region of `Place.region_bytes` at `rank * region_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_uring.columns import BoolArray, Int32Array, Int64Array
from megatron_uring.layout import BLOCK_BYTES, round_up

PAGE_BYTES = 4096
PACKED, NONE, BLOCK, STRIPE = "packed", "none", "block", "stripe"
ALIGNMENTS = (PACKED, NONE, BLOCK, STRIPE)


@dataclass(frozen=True)
class Place:
    """Where a rank stands among those that share files.

    Attributes
    ----------
    rank, group, position
        Its number, that of its group (a node), and its place within that.
    region_bytes
        Room of a rank in a shared file; the same for all, see `region_bytes`.
    group_size, ranks
        Ranks of the group, and of all.
    """

    rank: int
    ranks: int
    group: int
    position: int
    group_size: int
    region_bytes: int


@dataclass(frozen=True)
class Rules:
    """How a pattern places and cuts; see `RESULTS.md`.

    Attributes
    ----------
    submission_bytes
        Most that one submission moves; 0: one for each tensor.
    alignment
        ``"packed"``, ``"none"``, ``"block"`` or ``"stripe"``.
    stripe_bytes
        Of the file system.
    chunk_bytes
        Of a file, where a file holds a chunk.
    """

    submission_bytes: int
    alignment: str = PACKED
    stripe_bytes: int = BLOCK_BYTES
    chunk_bytes: int = 128 << 20


@dataclass(frozen=True)
class Layout:
    """Files and submissions of a rank.

    Attributes
    ----------
    files : [F]
        Names within the folder.
    created : bool [F]
        Whether this rank creates the file, and reserves `file_bytes`.
    file_bytes : int64 [F]
    file_number : int32 [S]
        Of each submission, in the order of submission.
    start, length, memory : int64 [S]
        Offset in the file, bytes, and offset in the rank's data.
    shared
        Whether other ranks write to the same file.
    """

    files: tuple[str, ...]
    created: BoolArray
    file_bytes: Int64Array
    file_number: Int32Array
    start: Int64Array
    length: Int64Array
    memory: Int64Array
    shared: bool = False


# -------------------------------------------------------------------------------------------------
# the patterns


def chunk_per_file(tensor_bytes: Int64Array, place: Place, rules: Rules) -> Layout:
    """The rank's data cut into chunks, a file for each."""
    data = _submissions(tensor_bytes, rules, rules.chunk_bytes)
    file_number = data.start // rules.chunk_bytes
    count = -(-extent_bytes(tensor_bytes, rules) // rules.chunk_bytes)
    return _own_files(
        data, file_number, data.start % rules.chunk_bytes, f"rank{place.rank}.chunk", count
    )


def file_per_tensor(tensor_bytes: Int64Array, place: Place, rules: Rules) -> Layout:
    """A file for each tensor, which begins with its first byte."""
    begin = tensor_starts(tensor_bytes, rules)
    data = _cut(begin, _whole(tensor_bytes, rules), rules.submission_bytes)
    start = data.start - begin[data.file_number]
    return _own_files(data, data.file_number, start, f"rank{place.rank}.tensor", len(tensor_bytes))


def file_per_rank(tensor_bytes: Int64Array, place: Place, rules: Rules) -> Layout:
    """One file, in which the rank's data lies as it does in memory."""
    data = _submissions(tensor_bytes, rules)
    none = np.zeros(len(data.start), np.int64)
    return _own_files(data, none, data.start, f"rank{place.rank}.data", 1)


def file_per_group(tensor_bytes: Int64Array, place: Place, rules: Rules) -> Layout:
    """One file for the ranks of a node, a region for each."""
    return _shared_file(
        _submissions(tensor_bytes, rules),
        f"group{place.group}.data",
        place.position,
        place.group_size,
        place.region_bytes,
    )


def one_shared_file(tensor_bytes: Int64Array, place: Place, rules: Rules) -> Layout:
    """One file for all ranks, a region for each."""
    return _shared_file(
        _submissions(tensor_bytes, rules), "all.data", place.rank, place.ranks, place.region_bytes
    )


Pattern = Callable[[Int64Array, Place, Rules], Layout]
PATTERNS: dict[str, Pattern] = {
    "chunk per file": chunk_per_file,
    "file per tensor": file_per_tensor,
    "file per rank": file_per_rank,
    "file per group": file_per_group,
    "one shared file": one_shared_file,
}


# -------------------------------------------------------------------------------------------------
# parts of them


def tensor_starts(tensor_bytes: Int64Array, rules: Rules) -> Int64Array:
    """Where each tensor lies in the rank's data, int64 [tensors]."""
    room, first = tensor_bytes, 0
    if rules.alignment in (BLOCK, STRIPE):
        room = _round_up(tensor_bytes, _alignment_bytes(rules))
    elif rules.alignment == NONE:  # all odd: none at a multiple of anything
        room, first = tensor_bytes + tensor_bytes % 2, 1
    starts: Int64Array = first + np.cumsum(room) - room
    return starts


def extent_bytes(tensor_bytes: Int64Array, rules: Rules) -> int:
    """Bytes from the start of the rank's data to its end, in whole pages."""
    if not len(tensor_bytes):
        return 0
    starts = tensor_starts(tensor_bytes, rules)
    return round_up(int(starts[-1] + tensor_bytes[-1]), PAGE_BYTES)


def region_bytes(extent: int, rules: Rules) -> int:
    """Room for a rank whose data has `extent` bytes, in a shared file: whole stripes."""
    return round_up(extent, max(rules.stripe_bytes, BLOCK_BYTES))


def _alignment_bytes(rules: Rules) -> int:
    return rules.stripe_bytes if rules.alignment == STRIPE else PAGE_BYTES


def _round_up(values: Int64Array, unit: int) -> Int64Array:
    rounded: Int64Array = -(-values // unit) * unit
    return rounded


def _whole(tensor_bytes: Int64Array, rules: Rules) -> Int64Array:
    """What is moved of each tensor."""
    if rules.alignment in (BLOCK, STRIPE):
        return _round_up(tensor_bytes, PAGE_BYTES)
    return tensor_bytes


@dataclass(frozen=True)
class _Cut:
    """Submissions by their place in the rank's data, and the range that each was cut from."""

    start: Int64Array
    length: Int64Array
    file_number: Int64Array


def _submissions(tensor_bytes: Int64Array, rules: Rules, border_bytes: int = 0) -> _Cut:
    """Coalesced: the data in whole submissions, whatever lies in them. Else each tensor by itself.

    None crosses a multiple of `border_bytes`.
    """
    if rules.submission_bytes and rules.alignment == PACKED:
        whole = np.array([extent_bytes(tensor_bytes, rules)], np.int64)
        return _cut(np.zeros(1, np.int64), whole, rules.submission_bytes, border_bytes)
    begin = tensor_starts(tensor_bytes, rules)
    return _cut(begin, _whole(tensor_bytes, rules), rules.submission_bytes, border_bytes)


def _cut(begin: Int64Array, length: Int64Array, most: int, border_bytes: int = 0) -> _Cut:
    """Ranges in pieces of at most `most` bytes (0: whole), none of which crosses a border."""
    number = np.flatnonzero(length > 0)
    data = _Cut(begin[number], length[number], number)
    if border_bytes:
        data = _cut_at(data, np.zeros_like(data.start), border_bytes)
    return _cut_at(data, data.start, most) if most else data


def _cut_at(data: _Cut, origin: Int64Array, unit: int) -> _Cut:
    """Each range cut at `origin` and every `unit` bytes from there."""
    end = data.start + data.length
    first = (data.start - origin) // unit
    pieces = (end - 1 - origin) // unit - first + 1
    row = np.repeat(np.arange(len(first)), pieces)
    step = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    low = np.maximum(origin[row] + step * unit, data.start[row])
    high = np.minimum(origin[row] + (step + 1) * unit, end[row])
    return _Cut(low, high - low, data.file_number[row])


def _own_files(
    data: _Cut, file_number: Int64Array, start: Int64Array, stem: str, count: int
) -> Layout:
    """Files of this rank alone, `stem` and a number each."""
    file_bytes = np.zeros(count, np.int64)
    np.maximum.at(file_bytes, file_number, start + data.length)
    return Layout(
        tuple(f"{stem}{number}" for number in range(count)),
        np.ones(count, np.bool_),
        file_bytes,
        file_number.astype(np.int32),
        start,
        data.length,
        data.start,
    )


def _shared_file(data: _Cut, name: str, position: int, ranks: int, region: int) -> Layout:
    if len(data.start) and int(data.start[-1] + data.length[-1]) > region:
        raise ValueError(f"data of {data.start[-1] + data.length[-1]} bytes in {region}")
    return Layout(
        (name,),
        np.array([position == 0]),
        np.array([ranks * region], np.int64),
        np.zeros(len(data.start), np.int32),
        data.start + position * region,
        data.length,
        data.start,
        shared=True,
    )
