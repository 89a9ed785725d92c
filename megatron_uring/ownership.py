"""Ownership: the proof that every element of every global tensor is written exactly once.

Guarantees
----------
- Pure, vectorised over all shards; only tensors that are cut irregularly are looked at one by one.
- What is wrong is named: the key, the shards, the ranks.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from megatron_uring.columns import BoolArray, Int32Array, Int64Array, every, format_box, volume
from megatron_uring.errors import StateMismatchError
from megatron_uring.layout import DTYPE_NAMES
from megatron_uring.shards import ShardTable, describe_shard

_PAINT_CELLS_MAXIMUM = 1 << 22


def check_ownership(
    shards: ShardTable, rank: Int32Array, owner: BoolArray, operation: str = "plan save"
) -> None:
    """Prove that the shards with `owner` set cover every global tensor exactly once.

    Parameters
    ----------
    shards
        Of all ranks, replicas included.
    rank : int32 [N]
        Who holds each shard, for the message.
    owner : bool [N]
        Whether that rank writes it.
    operation
        For the message.

    Raises
    ------
    StateMismatchError
        Naming the first key with two dtypes or global shapes, a shard outside its tensor, an
        element that nobody owns, or one that two ranks own.
    """
    first = shards.first_rows()
    _check_same_tensor(shards, rank, first, operation)
    _check_inside(shards, rank, operation)
    owned = shards.take(owner)
    covered = np.bincount(owned.tensor, weights=volume(owned.shape), minlength=len(shards.keys))
    wanted = volume(shards.global_shape.take(first, axis=0))
    suspects = np.flatnonzero((covered != wanted) | _irregular(owned, wanted > 0))
    # zero-size tensors hold no element; some row of theirs must still be owned, or the key would be
    # lost
    ownerless = np.flatnonzero(
        (wanted == 0) & (np.bincount(owned.tensor, minlength=len(first)) == 0)
    )
    if len(ownerless):
        _raise_uncovered(shards, int(ownerless[0]), 0, operation)
    if not len(suspects):
        return
    by_tensor = owned.by_tensor()
    for tensor in suspects.tolist():
        rows = by_tensor.of(tensor)
        _check_exact_cover(owned, rank[owner], rows, shards, tensor, int(first[tensor]), operation)


def _irregular(owned: ShardTable, filled: BoolArray) -> BoolArray:
    """Which tensors are not cut by a regular grid of distinct cells, and so may overlap: bool
    [tensors].
    """
    several = np.bincount(owned.tensor, minlength=len(filled)) > 1
    owned = owned.take(np.flatnonzero((several & filled)[owned.tensor]))
    if not len(owned):
        return np.zeros(len(filled), bool)
    order = np.lexsort((*owned.offset.T, owned.tensor))
    tensor = owned.tensor[order]
    offset, shape = owned.offset.take(order, axis=0), owned.shape.take(order, axis=0)
    same_tensor = tensor[1:] == tensor[:-1]
    odd = np.zeros(len(owned), bool)
    odd[1:] = same_tensor & (~every(shape[1:] == shape[:-1]) | every(offset[1:] == offset[:-1]))
    odd |= ~every(offset % np.maximum(shape, 1) == 0)
    return np.bincount(tensor[odd], minlength=len(filled)) > 0


def _check_same_tensor(
    shards: ShardTable, rank: Int32Array, first: npt.NDArray[np.intp], operation: str
) -> None:
    reference = first[shards.tensor]
    same = (
        (shards.dtype == shards.dtype[reference])
        & (shards.ndim == shards.ndim[reference])
        & every(shards.global_shape == shards.global_shape.take(reference, axis=0))
    )
    if not np.all(same):
        row = int(np.argmin(same))
        other = int(reference[row])
        raise StateMismatchError(
            f"{operation}: tensor {shards.keys[shards.tensor[row]]!r}",
            expected=f"{_describe_tensor(shards, other)} as on rank {rank[other]}",
            found=f"{_describe_tensor(shards, row)} on rank {rank[row]}",
        )


def _check_inside(shards: ShardTable, rank: Int32Array, operation: str) -> None:
    inside = shards.inside()
    if not np.all(inside):
        row = int(np.argmin(inside))
        raise StateMismatchError(
            f"{operation}: tensor {shards.keys[shards.tensor[row]]!r}",
            expected=f"a shard inside {format_box(shards.global_shape[row], shards.ndim[row])}",
            found=f"{describe_shard(shards, row)} on rank {rank[row]}",
        )


def _check_exact_cover(
    owned: ShardTable,
    rank: Int32Array,
    rows: npt.NDArray[np.intp],
    shards: ShardTable,
    tensor: int,
    first: int,
    operation: str,
) -> None:
    low = owned.offset[rows]
    high = low + owned.shape[rows]
    filled = np.all(high > low, axis=1)
    rows, low, high = rows[filled], low[filled], high[filled]
    pair = _overlapping_pair(low, high)
    if pair is not None:
        left, right = int(rows[pair[0]]), int(rows[pair[1]])
        raise StateMismatchError(
            f"{operation}: tensor {shards.keys[tensor]!r}",
            expected="exactly one owner of each element",
            found=f"two: {describe_shard(owned, left)} on rank {rank[left]} and "
            f"{describe_shard(owned, right)} on rank {rank[right]}",
            cause="both write it: of a Shard that several ranks hold one has owner=True; or "
            "check Megatron's replica_id",
        )
    covered = int(np.prod(high - low, axis=1, dtype=np.int64).sum()) if len(rows) else 0
    wanted = math.prod(shards.global_shape[first].tolist())
    if covered != wanted:
        _raise_uncovered(shards, tensor, wanted - covered, operation)


def _overlapping_pair(low: Int64Array, high: Int64Array) -> tuple[int, int] | None:
    """Positions of two boxes that share an element, or None.

    Boxes are painted on the grid of all their edges where that grid is small (regular sharding),
    else compared with their neighbours in order of the first dimension.
    """
    count, width = low.shape
    if count < 2:
        return None
    if not width:  # tensors without dimensions have one element each
        return 0, 1
    edges = [np.unique(np.concatenate([low[:, d], high[:, d]])) for d in range(width)]
    if math.prod(len(edge) for edge in edges) <= _PAINT_CELLS_MAXIMUM:
        begin = np.stack([np.searchsorted(edges[d], low[:, d]) for d in range(width)], axis=1)
        end = np.stack([np.searchsorted(edges[d], high[:, d]) for d in range(width)], axis=1)
        canvas = np.full([len(edge) for edge in edges], -1, np.int64)
        for position in range(count):
            box = tuple(slice(b, e) for b, e in zip(begin[position], end[position], strict=True))
            before = canvas[box].max()
            if before >= 0:
                return int(before), position
            canvas[box] = position
        return None
    order = np.argsort(low[:, 0], kind="stable")
    low, high = low[order], high[order]
    for position in range(count - 1):
        after = int(np.searchsorted(low[:, 0], high[position, 0]))
        rest = slice(position + 1, after)
        shared = np.all((low[rest] < high[position]) & (high[rest] > low[position]), axis=1)
        if np.any(shared):
            return int(order[position]), int(order[position + 1 + int(np.argmax(shared))])
    return None


def _raise_uncovered(shards: ShardTable, tensor: int, missing: int, operation: str) -> None:
    raise StateMismatchError(
        f"{operation}: tensor {shards.keys[tensor]!r}",
        expected="exactly one owner of each element",
        found=f"none for {missing} elements" if missing else "none",
        cause="check each Shard's owner and offset; the plain tensors of a dict are rank 0's to "
        "write; or check Megatron's replica_id",
    )


def _describe_tensor(shards: ShardTable, row: int) -> str:
    shape = format_box(shards.global_shape[row], shards.ndim[row])
    return f"{DTYPE_NAMES[shards.dtype[row]]} {shape}"
