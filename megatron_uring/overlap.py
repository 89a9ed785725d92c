"""Overlap: which boxes of one table meet which boxes of another.

Guarantees
----------
- Pure; numpy columns only. Every pair of boxes of the same tensor that share an element is found;
  most pairs that do not are never looked at: time and memory follow the number of pairs that meet
  along the dimension in which the tensor is cut most, not the product of both tables.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megatron_uring.columns import Int32Array, Int64Array
from megatron_uring.shards import ShardTable

# All tensors are laid end to end on one axis; past this it would not fit into 64 bits.
_AXIS_LIMIT = 1 << 62


def in_terms_of(saved: ShardTable, wanted: ShardTable) -> ShardTable:
    """`wanted` with the keys of `saved`, among which all of its own are, and their numbers."""
    if saved.keys is wanted.keys:
        return wanted
    number = _positions(saved.keys, wanted.keys)
    tensor = number[wanted.tensor] if len(wanted) else wanted.tensor
    return replace(wanted, keys=saved.keys, tensor=tensor)


def _positions(keys: tuple[str, ...], wanted: tuple[str, ...]) -> Int32Array:
    """Of each key of `wanted` in `keys`; int32 [wanted]."""
    if wanted:  # in most restores a run of them, in order: to compare is cheaper than to hash
        start = keys.index(wanted[0])
        if keys[start : start + len(wanted)] == wanted:
            return np.arange(start, start + len(wanted), dtype=np.int32)
    position = dict(zip(keys, range(len(keys)), strict=True))
    return np.fromiter(map(position.__getitem__, wanted), np.int32, len(wanted))


def candidate_pairs(saved: ShardTable, wanted: ShardTable) -> tuple[Int64Array, Int64Array]:
    """Pairs (wanted row, saved row) of the same tensor that may share an element, int64 [P] each,
    in order of the wanted row.

    Every pair that does is among them. Both tables have the same number of dimensions.
    """
    wanted = in_terms_of(saved, wanted)
    if not len(wanted) or not len(saved):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if len(saved) == len(saved.keys):  # one shard for each tensor: nothing to look for
        return np.arange(len(wanted), dtype=np.int64), saved.first_rows()[wanted.tensor]
    begin, end, low, high = _on_one_axis(saved, wanted)
    if (np.diff(begin) >= 0).all():
        order = np.arange(len(begin))
    else:
        order = np.argsort(begin, kind="stable")
        begin, end = begin[order], end[order]
    # Shards may nest: the furthest end so far is what rises with the position.
    reach = np.maximum.accumulate(end)
    first = _search(reach, low, "right")
    counts = np.maximum(_search(begin, high, "left") - first, 0)
    request = np.repeat(np.arange(len(wanted), dtype=np.int64), counts)
    within = np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts)
    return request, order[np.repeat(first, counts) + within].astype(np.int64)


def _on_one_axis(
    saved: ShardTable, wanted: ShardTable
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Begin and end of each saved and of each wanted box on one axis, on which no two tensors meet.

    Of each tensor the axis shows the dimension that its first shard cuts into most parts.
    """
    row = saved.first_rows()
    extent = saved.global_shape[row]
    parts = extent // np.maximum(saved.shape[row], 1)
    if not extent.shape[1]:  # no dimension at all: one element each
        own, other = saved.tensor.astype(np.int64), wanted.tensor.astype(np.int64)
        return own, own + 1, other, other + 1
    cut = np.argmax(parts, axis=1)
    # A wanted box may reach beyond the saved tensor (partial restores), on both sides.
    room = np.take_along_axis(extent, cut[:, None], axis=1)[:, 0]
    if float(np.sum(room, dtype=np.float64)) + len(room) >= _AXIS_LIMIT:
        room = np.ones(len(room), np.int64)  # compare all with all
        cut = np.full(len(room), -1)
    base = np.cumsum(room + 1) - (room + 1)  # apart, so that no empty box lies in another tensor

    def placed(table: ShardTable) -> tuple[Int64Array, Int64Array]:
        number = table.tensor
        chosen, limit, start = cut[number], room[number], base[number]
        begin, end = np.zeros(len(number), np.int64), limit.copy()
        for dimension in range(table.shape.shape[1]):
            here = chosen == dimension
            offset = table.offset[:, dimension]
            stop = np.clip(offset + table.shape[:, dimension], 0, limit)
            begin = np.where(here, np.clip(offset, 0, limit), begin)
            end = np.where(here, stop, end)
        return start + begin, start + end

    return *placed(saved), *placed(wanted)


def _search(axis: Int64Array, values: Int64Array, side: str) -> npt.NDArray[np.intp]:
    """`np.searchsorted`, with the values in order: a random one misses the cache at each step."""
    if (np.diff(values) >= 0).all():
        return np.searchsorted(axis, values, side)  # type: ignore[call-overload, no-any-return]
    order = np.argsort(values)
    found = np.empty(len(values), np.intp)
    found[order] = np.searchsorted(axis, values[order], side)  # type: ignore[call-overload]
    return found
