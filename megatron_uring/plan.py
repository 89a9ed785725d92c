"""Plans: shards to extents on the way out, requests to ranges and boxes on the way in.

Guarantees
----------
- Pure: no file, no communication, no address is kept; the same input gives the same plan.
- Numpy columns only: time and memory are linear in the number of shards (of shard-request pairs
  when restoring).
- Save: extents of one region never overlap; a shard under 1 MiB starts at a multiple of 64, a
  larger one at a multiple of 4096; no two regions share a checksum block, no two tensor regions a
  stripe. Offsets are fixed before any byte moves.
- Restore: every element of every request is covered by exactly one saved shard, or the key is
  named.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megatron_uring.columns import (
    BoolArray,
    Int32Array,
    Int64Array,
    Uint32Array,
    inner,
    product,
    widen,
)
from megatron_uring.errors import StateMismatchError
from megatron_uring.layout import (
    BLOCK_BYTES,
    DTYPE_BYTES,
    LARGE_SHARD_BYTES,
    PAGE_BYTES,
    SMALL_ALIGNMENT_BYTES,
    SUPERBLOCK_BYTES,
    round_up,
)
from megatron_uring.overlap import candidate_pairs
from megatron_uring.shards import ShardTable, describe_shard
from megatron_uring.tables import Boxes, Extents, Regions, RestorePlan, on_axis

# Comparing a mistyped key with every key of a huge checkpoint would take minutes.
_SIMILAR_AMONG = 20_000


@dataclass(frozen=True)
class RegionPlan:
    """What one rank will write: starts relative to its two regions, and how long they are."""

    shard_start: Int64Array
    object_start: Int64Array
    tensor_bytes: int
    object_bytes: int


@dataclass(frozen=True)
class GroupPlan:
    """Where the regions of a group's members begin in their subfile, int64 [members], and where the
    tail begins.
    """

    tensor_start: Int64Array
    object_start: Int64Array
    footer_start: int


def plan_region(shard_bytes: Int64Array, object_bytes: Int64Array, *, head: bool) -> RegionPlan:
    """Place one rank's shards and objects, each in its region.

    Parameters
    ----------
    shard_bytes, object_bytes : int64 [N], int64 [M]
        Lengths.
    head
        Whether the tensor region opens the subfile, behind the superblock.
    """
    first = SUPERBLOCK_BYTES if head else 0
    large = shard_bytes >= LARGE_SHARD_BYTES
    shard_start = np.empty(len(shard_bytes), np.int64)
    shard_start[large], end = _pack(shard_bytes[large], first, PAGE_BYTES)
    shard_start[~large], end = _pack(shard_bytes[~large], end, SMALL_ALIGNMENT_BYTES)
    object_start, object_end = _pack(object_bytes, 0, SMALL_ALIGNMENT_BYTES)
    return RegionPlan(
        shard_start,
        object_start,
        round_up(end, PAGE_BYTES) if end else 0,
        round_up(object_end, PAGE_BYTES),
    )


def _pack(lengths: Int64Array, first: int, alignment: int) -> tuple[Int64Array, int]:
    steps = -(-lengths // alignment) * alignment
    ends = first + np.cumsum(steps, dtype=np.int64)
    return ends - steps, int(ends[-1]) if len(ends) else first


def plan_group(
    tensor_bytes: Int64Array, object_bytes: Int64Array, *, stripe_bytes: int
) -> GroupPlan:
    """Lay the members' regions one behind the other: all tensor regions, then all object regions,
    then the footer.

    A tensor region begins at a multiple of lcm(`stripe_bytes`, 1 MiB), an object region and the
    footer on a new block.
    """
    alignment = math.lcm(max(stripe_bytes, 1), BLOCK_BYTES)
    tensor_start, end = _pack(tensor_bytes, 0, alignment)
    object_start, end = _pack(object_bytes, end, BLOCK_BYTES)
    return GroupPlan(tensor_start, object_start, end)


def plan_boxes(shards: ShardTable, memory_strides: Int64Array) -> Boxes:
    """Whole shards, as they lie in memory (byte strides int64 [N, D]), against their contiguous
    extents.
    """
    item_bytes = DTYPE_BYTES[shards.dtype]
    strides = contiguous_strides(shards.shape, item_bytes)
    return merge_runs(shards.shape, strides, memory_strides, item_bytes)


def contiguous_strides(shape: Int64Array, item_bytes: Int64Array) -> Int64Array:
    """Byte strides of C-ordered boxes: `shape` int64 [N, D], `item_bytes` int64 [N] -> int64 [N,
    D].
    """
    strides = np.empty_like(shape)
    step = item_bytes.copy()
    for dimension in range(shape.shape[1] - 1, -1, -1):
        strides[:, dimension] = step
        step = step * np.maximum(shape[:, dimension], 1)
    return strides


def merge_runs(
    counts: Int64Array,
    file_strides: Int64Array,
    memory_strides: Int64Array,
    item_bytes: Int64Array,
) -> Boxes:
    """Fold dimensions that are contiguous on both sides into the run; drop dimensions nobody uses.

    All arguments have a row for each box; `item_bytes` is where the run begins to grow from.
    """
    run, counts = item_bytes.copy(), counts.copy()
    growing = np.ones(len(run), bool)
    for dimension in range(counts.shape[1] - 1, -1, -1):
        count = counts[:, dimension]
        single = count == 1
        touching = (file_strides[:, dimension] == run) & (memory_strides[:, dimension] == run)
        fold = growing & (single | touching)
        run = np.where(fold, run * count, run)
        growing = growing & (single | touching)
        counts[:, dimension] = np.where(fold, 1, count)
    used = np.any(counts != 1, axis=0)
    return Boxes(run, counts[:, used], file_strides[:, used], memory_strides[:, used])


# -------------------------------------------------------------------------------------------------
# restore


def plan_restore(
    saved: ShardTable,
    extents: Extents,
    regions: Regions,
    wanted: ShardTable,
    memory_strides: Int64Array,
    *,
    gap_bytes: int,
    partial: BoolArray | None = None,
    steps: Int64Array | None = None,
) -> RestorePlan:
    """Intersect the wanted boxes with the saved ones, and coalesce what must be read.

    Parameters
    ----------
    saved, extents
        The shards of the checkpoint and where they lie, a row each.
    wanted
        Requests: boxes of global tensors (``offset``, ``shape``); their keys are all in `saved`.
    memory_strides : int64 [requests, D]
        Of the destinations, in bytes.
    gap_bytes
        Unneeded bytes that may be read to make one range out of two.
    partial : bool [requests]
        Requests that may reach beyond the saved tensor; only the overlap is restored.
    steps : int64 [requests, D]
        Distance of neighbouring elements of the box, which ``shape`` counts, in the global tensor.
        None: 1 everywhere.
    """
    width = max(saved.shape.shape[1], wanted.shape.shape[1])
    saved, wanted, strides = saved.widened(width), wanted.widened(width), memory_strides
    strides = widen(strides, width, 0)
    steps = None if steps is None else widen(steps, width, 1)
    spanned = _spanned(wanted, steps)
    pair_request, pair_saved = candidate_pairs(saved, spanned)
    box = _intersect(saved, spanned, pair_saved, pair_request, steps)
    hit = box.counts.min(axis=1, initial=1) > 0
    if not hit.all():
        pair_request, pair_saved, box = pair_request[hit], pair_saved[hit], box.take(hit)
    _check_covered(wanted, pair_request, product(box.counts), partial)

    item_bytes = DTYPE_BYTES[saved.dtype]
    file_strides = contiguous_strides(saved.shape, item_bytes).take(pair_saved, axis=0)
    strides = strides.take(pair_request, axis=0)
    piece_start = extents.start[pair_saved] + inner(box.saved_offset, file_strides)
    memory_offset = inner(box.wanted_offset, strides)
    if steps is not None:
        file_strides = file_strides * steps.take(pair_request, axis=0)
    boxes = merge_runs(box.counts, file_strides, strides, item_bytes[pair_saved])
    cut = _cut_at_gaps(piece_start, memory_offset, boxes, max(gap_bytes, BLOCK_BYTES))
    if cut is not None:
        row, piece_start, memory_offset, boxes = cut
        pair_request, pair_saved = pair_request[row], pair_saved[row]

    subfile = extents.subfile[pair_saved]
    order = np.argsort(on_axis(subfile, piece_start), kind="stable")
    last = piece_start + boxes.run_bytes + inner(boxes.counts - 1, boxes.file_strides)
    ranges = _coalesce(subfile[order], piece_start[order], last[order], regions, gap_bytes)
    return RestorePlan(
        *ranges,
        piece_subfile=subfile[order],
        piece_start=piece_start[order],
        request=pair_request[order],
        memory_offset=memory_offset[order],
        boxes=boxes.take(order),
    )


@dataclass(frozen=True)
class _Intersections:
    """Where two boxes meet, int64 [P, D] each: from where in the saved one, from where in the
    wanted one, and how far; a count below 1 says that they do not.
    """

    saved_offset: Int64Array
    wanted_offset: Int64Array
    counts: Int64Array

    def take(self, rows: BoolArray) -> _Intersections:
        return _Intersections(self.saved_offset[rows], self.wanted_offset[rows], self.counts[rows])


def _spanned(wanted: ShardTable, steps: Int64Array | None) -> ShardTable:
    """`wanted` with what lies between the elements of its steps."""
    if steps is None:
        return wanted
    return replace(wanted, shape=np.where(wanted.shape > 0, (wanted.shape - 1) * steps + 1, 0))


def _intersect(
    saved: ShardTable,
    spanned: ShardTable,
    pair_saved: Int64Array,
    pair_request: Int64Array,
    steps: Int64Array | None,
) -> _Intersections:
    saved_low = saved.offset.take(pair_saved, axis=0)
    wanted_low = spanned.offset.take(pair_request, axis=0)
    low = np.maximum(saved_low, wanted_low)
    high = np.minimum(
        saved_low + saved.shape.take(pair_saved, axis=0),
        wanted_low + spanned.shape.take(pair_request, axis=0),
    )
    if steps is None:
        return _Intersections(low - saved_low, low - wanted_low, high - low)
    step = steps.take(pair_request, axis=0)
    low += (wanted_low - low) % step  # up to an element that is wanted
    return _Intersections(low - saved_low, (low - wanted_low) // step, -((low - high) // step))


def _cut_at_gaps(
    start: Int64Array, memory_offset: Int64Array, boxes: Boxes, gap_bytes: int
) -> tuple[npt.NDArray[np.intp], Int64Array, Int64Array, Boxes] | None:
    """Pieces without a gap of more than `gap_bytes` between their runs, so that nothing need be
    read there: a piece is read from its first byte to its last one.

    Returns the row that each piece comes from, and start, offset in memory and box of each; None if
    nothing is to be cut. Every cut passes over a gap: there are no more pieces than such gaps fit
    into the files.
    """
    counts, file_strides = boxes.counts, boxes.file_strides
    cut = np.zeros(counts.shape, np.bool_)
    wide = np.zeros(len(start), np.bool_)
    span = boxes.run_bytes.copy()
    for dimension in range(counts.shape[1] - 1, -1, -1):
        several = counts[:, dimension] > 1
        # around a dimension that is cut, each one is: else a piece would span the others
        wide |= several & (file_strides[:, dimension] - span > gap_bytes)
        cut[:, dimension] = wide
        span += (counts[:, dimension] - 1) * file_strides[:, dimension]
    if not wide.any():
        return None
    parts = np.where(cut, counts, 1)
    total = product(parts)
    row = np.repeat(np.arange(len(start)), total)
    place = np.arange(len(row)) - np.repeat(np.cumsum(total) - total, total)
    start, memory_offset = start[row], memory_offset[row]
    for dimension in range(counts.shape[1] - 1, -1, -1):
        place, number = np.divmod(place, parts[row, dimension])
        start += number * file_strides[row, dimension]
        memory_offset += number * boxes.memory_strides[row, dimension]
    kept = replace(boxes, counts=np.where(cut, 1, counts)).take(row)
    return row, start, memory_offset, kept


def _check_covered(
    wanted: ShardTable,
    pair_request: Int64Array,
    volume: Int64Array,
    partial: BoolArray | None,
) -> None:
    need = product(wanted.shape)
    have = np.zeros(len(wanted), np.int64)
    np.add.at(have, pair_request, volume)
    short = need != have
    if partial is not None:
        short &= ~partial
    if np.any(short):
        row = int(np.argmax(short))
        raise StateMismatchError(
            f"plan restore: tensor {wanted.keys[wanted.tensor[row]]!r}",
            expected=describe_shard(wanted, row),
            found=f"{have[row]} of its {need[row]} elements in the checkpoint",
        )


def _coalesce(
    subfile: Int32Array, start: Int64Array, end: Int64Array, regions: Regions, gap_bytes: int
) -> tuple[Int32Array, Int64Array, Int64Array, Uint32Array]:
    """Ranges of whole blocks, each within one region, that hold every [start, end) of the sorted
    pieces.
    """
    order = np.lexsort((regions.start, regions.subfile))
    first_block = regions.first_block()
    axis = on_axis(regions.subfile[order], regions.start[order])
    owner = order[np.searchsorted(axis, on_axis(subfile, start), "right") - 1]
    base = regions.start[owner]
    begin = base + (start - base) // BLOCK_BYTES * BLOCK_BYTES
    stop = np.minimum(
        base + -(-(end - base) // BLOCK_BYTES) * BLOCK_BYTES, base + regions.length[owner]
    )
    if not len(start):
        return subfile, begin, stop - begin, np.zeros(0, np.uint32)
    new_owner = np.concatenate([[True], owner[1:] != owner[:-1]])
    group = np.cumsum(new_owner) - 1
    # furthest byte that any earlier piece of the same region needs: pieces may nest
    reach = np.maximum.accumulate(stop + (group << 44)) - (group << 44)
    cut = new_owner.copy()
    cut[1:] |= begin[1:] > reach[:-1] + gap_bytes
    firsts = np.flatnonzero(cut)
    lasts = np.append(firsts[1:], len(start)) - 1
    range_start, range_length = begin[firsts], reach[lasts] - begin[firsts]
    block = first_block[owner[firsts]] + (range_start - base[firsts]) // BLOCK_BYTES
    counts = -(-range_length // BLOCK_BYTES)
    rows = np.repeat(block - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
    return subfile[firsts], range_start, range_length, regions.crc32c[rows]


def similar_keys(key: str, keys: Sequence[str]) -> str:
    """For messages: the keys most like `key`, and how many there are in all."""
    if not keys:
        return "none in the checkpoint"
    below = [name for name in keys if name.startswith(f"{key}/")]
    if below:
        return f"{len(below)} keys below it: {', '.join(map(repr, below[:3]))}, ..."
    if len(keys) > _SIMILAR_AMONG:  # those first that begin and end as `key` does
        quarters = [-(-len(key) * part // 4) for part in (1, 2, 3)]
        heads, tails = [key[:n] for n in quarters], [key[-n:] for n in quarters]
        keys = sorted(
            keys,
            key=lambda name: -sum(map(name.startswith, heads)) - sum(map(name.endswith, tails)),
        )
    close = difflib.get_close_matches(key, keys[:_SIMILAR_AMONG], n=3, cutoff=0.7)
    near = f"; similar: {', '.join(map(repr, close))}" if close else ""
    return f"{len(keys)} others{near}"
