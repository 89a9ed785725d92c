"""Staging: tensors to slabs on the way out, slabs to tensors on the way in.

Guarantees
----------
- The pool of slabs bounds what staging adds in host memory: it is allocated once for each `Config`
  and never grows; native code waits for a free slab. Tensors on a device are copied to the host
  whole, beside it.
- What native threads are given (`Staged`) keeps every address alive that it contains.
- A destination that native code cannot write to (a GPU, another dtype, a subclass) gets its values
  through a scratch tensor and ``copy_``; all others are written in place, once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
import numpy.typing as npt
import torch

from megatron_uring import _engine, tensors
from megatron_uring.columns import BoolArray, Int64Array, Uint8Array, Uint64Array
from megatron_uring.config import Config
from megatron_uring.errors import StorageError, UnsupportedError
from megatron_uring.tables import Boxes, Provided, RestorePlan, Staged, no_pieces

_engines: dict[tuple[object, ...], _engine.Engine] = {}
_engines_lock = threading.Lock()


def open_engine(config: Config) -> _engine.Engine:
    """The engine for these options, set up at the first call of this process and kept.

    Raises
    ------
    StorageError
        If the slabs cannot be had.
    UnsupportedError
        If io_uring is asked for and no ring can be set up.
    """
    key = _engine_key(config)
    with _engines_lock:
        engine = _engines.get(key)
        if engine is None:
            engine = _engines[key] = _new_engine(config)
        return engine


def _engine_key(config: Config) -> tuple[object, ...]:
    return (
        os.getpid(),
        config.engine,
        config.slab_bytes,
        config.slab_count,
        config.queue_depth,
        config.posix_threads,
        config.copy_threads,
    )


def close_engine(config: Config) -> None:
    """Stop the engine for these options, if there is one, and give its slabs back."""
    with _engines_lock:
        engine = _engines.pop(_engine_key(config), None)
    if engine is not None:
        engine.close()


def _new_engine(config: Config) -> _engine.Engine:
    try:
        pool = _engine.SlabPool(config.slab_bytes, config.slab_count)
    except OSError as error:
        raise StorageError(
            "allocate slabs",
            expected=f"{config.slab_count} slabs of {config.slab_bytes} bytes",
            cause=f"{error.strerror}; lower MEGATRON_URING_SLAB_COUNT",
        ) from error
    try:
        return _engine.Engine(
            config.engine,
            pool,
            queue_depth=config.queue_depth,
            posix_threads=config.posix_threads,
            copy_threads=config.copy_threads,
        )
    except OSError as error:
        raise UnsupportedError(
            "set up io_uring",
            cause=f"{error.strerror}; MEGATRON_URING_ENGINE=auto falls back to posix",
        ) from error


def running_engines() -> list[str]:
    """What each engine of this process says of itself: kind, and why."""
    with _engines_lock:
        return [engine.reason for engine in _engines.values()]


def close_engines() -> None:
    """Stop all engines of this process and give their slabs back."""
    with _engines_lock:
        for engine in _engines.values():
            engine.close()
        _engines.clear()


# -------------------------------------------------------------------------------------------------
# tensors -> slabs


@dataclass(frozen=True)
class HostTensors:
    """Owned tensors in host memory: `address` uint64 [N], byte `strides` int64 [N, D], and the
    tensors themselves.
    """

    address: Uint64Array
    strides: Int64Array
    alive: tuple[torch.Tensor, ...]


def host_tensors(provided: Provided) -> HostTensors:
    """The owned tensors where they are, or, for those on a device, a copy in host memory."""
    rows = np.flatnonzero(provided.owner)
    alive: list[torch.Tensor] = list(compress(provided.tensors, provided.owner.tolist()))
    elsewhere = np.flatnonzero(~tensors.on_host(alive))
    for position in elsewhere.tolist():
        tensor = alive[position].detach()
        alive[position] = tensor.to("cpu", memory_format=torch.contiguous_format)
    strides = _with_strides(provided.strides[rows], alive, elsewhere, provided.shards.ndim[rows])
    return HostTensors(tensors.addresses(alive), strides, tuple(alive))


def stage_tensors(
    host: HostTensors,
    boxes: Boxes,
    start: Int64Array,
    length: Int64Array,
    head: bytes | None,
) -> Staged:
    """Pieces that put each tensor at its `start`, bytes from the start of the subfile; empty ones
    are left out.

    `head` is put at offset 0.
    """
    address = host.address
    alive: tuple[object, ...] = host.alive
    if head is not None:
        view = np.frombuffer(head, np.uint8)
        boxes = _with_head(boxes, len(head))
        start, length = np.append(start, 0), np.append(length, len(head))
        address, alive = np.append(address, np.uint64(view.ctypes.data)), (*alive, view)
    filled = np.flatnonzero(length > 0)
    order = filled[np.argsort(start[filled], kind="stable")]
    zeros = np.zeros(len(order), np.int32)
    return Staged(_pieces(zeros, start[order], address[order], boxes.take(order)), alive)


def _with_head(boxes: Boxes, head_bytes: int) -> Boxes:
    """`boxes` and one more of `head_bytes` contiguous bytes."""

    def extended(column: Int64Array, fill: int) -> Int64Array:
        return np.concatenate([column, np.full((1, column.shape[1]), fill, np.int64)])

    return Boxes(
        np.append(boxes.run_bytes, head_bytes),
        extended(boxes.counts, 1),
        extended(boxes.file_strides, 0),
        extended(boxes.memory_strides, 0),
    )


def stage_objects(objects: Sequence[bytes], start: Int64Array) -> Staged:
    """Pieces that put serialized objects at `start`, int64 [objects], bytes from the start of the
    subfile.
    """
    views = [np.frombuffer(data, np.uint8) for data in objects]
    length = np.fromiter(map(len, objects), np.int64, len(objects))
    address = np.fromiter((view.ctypes.data for view in views), np.uint64, len(views))
    filled = np.flatnonzero(length > 0)
    order = filled[np.argsort(start[filled], kind="stable")]
    none = np.zeros((len(objects), 0), np.int64)
    boxes = Boxes(length, none, none, none)
    pieces = _pieces(
        np.zeros(len(order), np.int32), start[order], address[order], boxes.take(order)
    )
    return Staged(pieces, tuple(views))


def _pieces(
    file_number: npt.NDArray[np.int32],
    file_start: Int64Array,
    address: npt.NDArray[np.uint64],
    boxes: Boxes,
) -> _engine.Pieces:
    return _engine.Pieces(
        file_number,
        file_start,
        address,
        boxes.run_bytes,
        np.ascontiguousarray(boxes.counts),
        np.ascontiguousarray(boxes.file_strides),
        np.ascontiguousarray(boxes.memory_strides),
    )


def stage_nothing() -> Staged:
    """No pieces: for reads that only verify."""
    return Staged(no_pieces(), ())


# -------------------------------------------------------------------------------------------------
# slabs -> tensors


@dataclass(frozen=True)
class Destinations:
    """Where requests go: a tensor that native code writes for each, and the copies to make
    afterwards.

    `written[i]` is the caller's tensor itself, or a scratch tensor whose values `finish` copies
    into ``given[i]``. `strides` int64 [requests, D] are those of `written`, in bytes.
    """

    given: tuple[torch.Tensor, ...]
    written: tuple[torch.Tensor, ...]
    strides: Int64Array

    def finish(self) -> None:
        """Copy the scratch tensors to where they were wanted."""
        with torch.no_grad():
            for given, written in zip(self.given, self.written, strict=True):
                if given is not written:
                    given.detach().copy_(written)


def prepare_destinations(
    given: Sequence[torch.Tensor],
    in_place: BoolArray,
    dtype: Uint8Array,
    strides: Int64Array,
    ndim: Uint8Array,
) -> Destinations:
    """Destinations for tensors whose saved dtype codes are `dtype`, uint8 [N]; values already there
    survive a partial restore.

    `in_place` bool [N] says which of them native code may fill as they are
    (`tensors.writable_in_place`, and of the saved dtype); `strides` int64 [N, D] and `ndim` uint8
    [N] are those of `tensors.describe`.
    """
    written = list(given)
    others = np.flatnonzero(~in_place)
    for number in others.tolist():
        saved_dtype = tensors.torch_dtype(int(dtype[number]))
        written[number] = _scratch(given[number].detach(), saved_dtype)
    return Destinations(tuple(given), tuple(written), _with_strides(strides, written, others, ndim))


def _with_strides(
    strides: Int64Array,
    owners: Sequence[torch.Tensor],
    rows: npt.NDArray[np.intp],
    ndim: Uint8Array,
) -> Int64Array:
    """`strides` with those of `owners` in `rows`, whose tensors were replaced."""
    if not len(rows):
        return strides
    changed: Int64Array = strides.copy()
    replaced = [owners[row] for row in rows.tolist()]
    changed[rows] = tensors.byte_strides(replaced, ndim[rows], strides.shape[1])
    return changed


def _scratch(target: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A plain tensor on the CPU with the values of `target`."""
    if type(target) is not torch.Tensor and hasattr(target, "dequantize"):
        target = target.dequantize() if target.numel() else target
    values = target.to("cpu", dtype, copy=True)
    plain = torch.empty(values.shape, dtype=dtype, device="cpu")
    return plain.copy_(values)


def stage_destinations(
    plan: RestorePlan, destinations: Destinations, file_number: npt.NDArray[np.int32]
) -> Staged:
    """Pieces that scatter what the plan reads; `file_number` int32 [pieces] is the place of each
    one's file.
    """
    first_byte = tensors.addresses(destinations.written)
    address = first_byte[plan.request] + plan.memory_offset.astype(np.uint64)
    pieces = _pieces(file_number, plan.piece_start, address, plan.boxes)
    return Staged(pieces, (destinations,))
