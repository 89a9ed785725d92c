"""DTensor: which piece of its global tensor this rank holds, and whether this rank writes it.

Guarantees
----------
- The local tensor is the DTensor's own memory, never a copy: what is restored into it is seen
  through the DTensor.
- Of the ranks that hold the same piece exactly one owns it, another one from key to key, so that
  replicas share the work. For a mesh of all ranks that is found without communication; what ranks
  outside of a mesh hold nobody can know, and it is left open.
- What is no single box of the global tensor, or no value at all (``Partial``), is refused by name.
- A process that uses no DTensor does not import them.
"""

from __future__ import annotations

import sys
import zlib
from dataclasses import dataclass
from typing import Any

import torch

from megatron_uring.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class LocalShard:
    """This rank's piece of a DTensor; the fields are those of `providers.Shard`."""

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    owner: bool | None


def is_dtensor(value: object) -> bool:
    """Whether `value` is a DTensor."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def local_shard(key: str, dtensor: Any, *, operation: str = "save") -> LocalShard | None:
    """This rank's piece of `dtensor`; None on a rank outside its mesh.

    Raises
    ------
    UnsupportedError
        For ``Partial`` placements, and for a piece whose rows do not lie together in the global
        tensor.
    """
    placements, mesh = dtensor.placements, dtensor.device_mesh
    if any(placement.is_partial() for placement in placements):
        raise UnsupportedError(
            f"{operation} tensor {key!r}",
            expected="placements Shard and Replicate",
            found=tuple(placements),
            cause="a partial sum is no value yet; redistribute() it first",
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    global_shape = tuple(dtensor.shape)
    return LocalShard(
        local_tensor(dtensor),
        global_shape,
        _offset(f"{operation} tensor {key!r}", dtensor, coordinate),
        _is_owner(key, placements, mesh.shape, coordinate) if _spans_all(mesh) else None,
    )


def local_tensor(value: Any) -> torch.Tensor:
    """The memory behind a DTensor on this rank; any other tensor is its own."""
    if not is_dtensor(value):
        plain: torch.Tensor = value
        return plain
    with torch.no_grad():  # else it would be a view of it, made for autograd
        local = value.to_local()
    waiting = getattr(local, "wait", None)  # the result of a collective that is still under way
    tensor: torch.Tensor = local if waiting is None else waiting()
    return tensor


def _spans_all(mesh: Any) -> bool:
    size: int = torch.distributed.get_world_size()
    return bool(mesh.size() == size)


def _is_owner(key: str, placements: Any, mesh_shape: Any, coordinate: list[int]) -> bool:
    """Whether this rank is the one of those with the same piece that `key` chooses."""
    number, count = 0, 1
    for placement, size, place in zip(placements, mesh_shape, coordinate, strict=True):
        if placement.is_replicate():
            number, count = number * size + place, count * size
    return number == zlib.crc32(key.encode(errors="surrogatepass")) % count


def _offset(operation: str, dtensor: Any, coordinate: list[int]) -> tuple[int, ...]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements, mesh = dtensor.placements, dtensor.device_mesh
    strided = {
        placement.dim
        for placement in placements
        if not placement.is_replicate() and hasattr(placement, "split_factor")
    }
    if not strided:
        _, offset = compute_local_shape_and_global_offset(dtensor.shape, mesh, placements)
        return tuple(offset)
    # FSDP over tensor parallelism: cut from the right to the left. What lies where is asked of the
    # placements themselves, row by row.
    return tuple(
        _first_row(operation, dtensor, coordinate, dimension) for dimension in range(dtensor.ndim)
    )


def _first_row(operation: str, dtensor: Any, coordinate: list[int], dimension: int) -> int:
    """Where the local rows of one dimension begin in the global tensor."""
    size = dtensor.shape[dimension]
    rows = torch.arange(size).view([1] * dimension + [size])
    for placement, chunks, place in zip(
        dtensor.placements, dtensor.device_mesh.shape, coordinate, strict=True
    ):
        if not placement.is_replicate() and placement.dim == dimension:
            parts, _ = placement._split_tensor(rows, chunks, with_padding=False, contiguous=False)
            rows = parts[place]
    found = rows.flatten().tolist()
    if not found:
        return int(size)
    if found[-1] - found[0] + 1 != len(found):
        raise UnsupportedError(
            operation,
            expected="rows that lie together in the global tensor",
            found=f"{len(found)} of rows {found[0]} to {found[-1]} of dimension {dimension}, "
            f"placements {tuple(dtensor.placements)}",
            cause="redistribute() it to Shard placements first",
        )
    return int(found[0])
