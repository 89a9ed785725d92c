"""Staging: tensors to slabs on the way out, slabs to tensors on the way in.

Guarantees
----------
- The pool of slabs bounds what staging adds in host memory: it is allocated once for each `Config`
  and never grows; native code waits for a free slab. Pools of few others are kept. Contiguous
  tensors on a GPU go through it as those of the host do; others are copied to the host whole.
- What native threads are given (`Staged`) keeps every address alive that it contains.
- A destination that native code cannot write to (a GPU, another dtype, a subclass) gets its values
  through a scratch tensor and ``copy_``; all others are written in place, once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from megatron_uring import _engine, devices, lazy, tensors
from megatron_uring.columns import BoolArray, Int32Array, Int64Array, Uint8Array, Uint64Array
from megatron_uring.config import Config
from megatron_uring.errors import StorageError, UnsupportedError
from megatron_uring.tables import Boxes, Provided, RestorePlan, Staged, no_pieces

_Kept = TypeVar("_Kept")
_Key = tuple[object, ...]
_engines: dict[_Key, _engine.Engine] = {}
_staging_engines: dict[_Key, tuple[_engine.Engine, int]] = {}
_engines_lock = threading.Lock()
_SLABS_BESIDE = 2  # a state is written in two regions, each of which may end within a slab
_SLABS_MAXIMUM = 65536
_ENGINES_KEPT, _STAGING_ENGINES_KEPT = 4, 2  # of the latter each may hold the whole state


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
        engine = _engines.pop(key, None) or _new_engine(config)
        _keep(_engines, key, engine, _ENGINES_KEPT)
        return engine


def _engine_key(config: Config) -> _Key:
    return (
        os.getpid(),
        config.engine,
        config.slab_bytes,
        config.slab_count,
        config.queue_depth,
        config.posix_threads,
        config.copy_threads,
    )


def open_staging_engine(config: Config, state_bytes: int, ranks_here: int) -> _engine.Engine:
    """The engine of asynchronous saves: its pool holds `state_bytes`, as far as memory allows it.

    It is kept for later saves, and made anew for a state that has outgrown it. Its memory is
    touched by those who fill it, not here.

    Parameters
    ----------
    config
        ``staging_bytes`` bounds the pool; 0: a quarter of what the node has free, divided by
        `ranks_here`.
    """
    wanted = -(-state_bytes // config.slab_bytes) + _SLABS_BESIDE
    limit_bytes = config.staging_bytes or free_memory_bytes() // 4 // ranks_here
    most = min(max(limit_bytes // config.slab_bytes, config.slab_count), _SLABS_MAXIMUM)
    key = ("staging", config.staging_bytes, *_engine_key(config))
    with _engines_lock:
        engine, count = _staging_engines.get(key, (None, 0))
        if engine is None or count < min(wanted, most):
            count = max(min(wanted, most), config.slab_count)
            engine = _new_engine(replace(config, slab_count=count), touched=False)
        _keep(_staging_engines, key, (engine, count), _STAGING_ENGINES_KEPT)
        return engine


def _keep(engines: dict[_Key, _Kept], key: _Key, one: _Kept, most: int) -> None:
    """Keep `one` as the last used, of `most`; what goes lives on until what it does is done."""
    engines.pop(key, None)
    engines[key] = one
    while len(engines) > most:
        del engines[next(iter(engines))]


def free_memory_bytes() -> int:
    """What the node has left, with what it can give up."""
    with open("/proc/meminfo", encoding="ascii") as table:
        for line in table:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def close_engine(config: Config) -> None:
    """Stop the engine for these options, if there is one, and give its slabs back."""
    with _engines_lock:
        engine = _engines.pop(_engine_key(config), None)
    if engine is not None:
        engine.close()


def _new_engine(config: Config, *, touched: bool = True) -> _engine.Engine:
    try:
        pool = _engine.SlabPool(config.slab_bytes, config.slab_count, touched=touched)
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
        staging = [engine for engine, _ in _staging_engines.values()]
        return [engine.reason for engine in (*_engines.values(), *staging)]


def close_engines() -> None:
    """Stop all engines of this process and give their slabs back."""
    with _engines_lock:
        staging = [engine for engine, _ in _staging_engines.values()]
        for engine in (*_engines.values(), *staging):
            engine.close()
        _engines.clear()
        _staging_engines.clear()


# -------------------------------------------------------------------------------------------------
# tensors -> slabs


@dataclass(frozen=True)
class HostTensors:
    """Owned tensors where native code copies them from: `address` uint64 [N], byte `strides` int64
    [N, D], and the tensors themselves; `lazy_bytes` of them are the caller's own, to be copied
    while it goes on.

    Some may lie on GPUs: then `device_number` int32 [N] says on which, and `device_events` what has
    to be over there before.
    """

    address: Uint64Array
    strides: Int64Array
    alive: tuple[torch.Tensor, ...]
    lazy_bytes: int = 0
    device_number: Int32Array | None = None
    device_events: _engine.DeviceEvents | None = None


def host_tensors(provided: Provided, *, lazily: bool = False) -> HostTensors:
    """The owned tensors where they are, or, for those that native code cannot copy from there
    (`devices.readable`), a copy in host memory.

    With `lazily` also a copy of each that may change before the next fence (`lazy.may_wait`).
    """
    rows = np.flatnonzero(provided.owner)
    alive: list[torch.Tensor] = list(compress(provided.tensors, provided.owner.tolist()))
    stays = tensors.on_host(alive)
    all_on_host = stays.all()
    if not all_on_host:
        stays |= devices.readable(alive)
    if lazily:
        stays[stays] = lazy.may_wait(list(compress(alive, stays.tolist())))
        for position in np.flatnonzero(stays).tolist():
            # a handle of our own, which keeps the memory if the caller gives the tensor another
            alive[position] = alive[position].detach()
    copied = ~stays
    for position in np.flatnonzero(copied).tolist():
        tensor = alive[position].detach()
        alive[position] = tensor.to("cpu", memory_format=torch.contiguous_format, copy=True)
    where = np.flatnonzero(copied)
    strides = _with_strides(provided.strides[rows], alive, where, provided.shards.ndim[rows])
    lazy_bytes = int(provided.shards.lengths()[rows[~copied]].sum()) if lazily else 0
    host = HostTensors(tensors.addresses(alive), strides, tuple(alive), lazy_bytes)
    if all_on_host:
        return host
    number = tensors.device_numbers(alive)
    if number.max() < 0:
        return host
    # last, so that what had to be copied, made contiguous or gathered for this save comes before
    return replace(host, device_number=number, device_events=devices.order(number[number >= 0]))


def page_lock(engine: _engine.Engine, host: HostTensors) -> str:
    """Of the pool, if some of the tensors lie on a GPU; in words."""
    if host.device_number is None:
        return ""
    return devices.page_lock(engine, host.device_number[host.device_number >= 0])


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
    address, device_number = host.address, host.device_number
    alive: tuple[object, ...] = host.alive
    if head is not None:
        view = np.frombuffer(head, np.uint8)
        boxes = _with_head(boxes, len(head))
        start, length = np.append(start, 0), np.append(length, len(head))
        address, alive = np.append(address, np.uint64(view.ctypes.data)), (*alive, view)
        if device_number is not None:
            device_number = np.append(device_number, np.int32(-1))
    filled = np.flatnonzero(length > 0)
    order = filled[np.argsort(start[filled], kind="stable")]
    zeros = np.zeros(len(order), np.int32)
    if device_number is not None:
        device_number = device_number[order]
    pieces = _pieces(
        zeros,
        start[order],
        address[order],
        boxes.take(order),
        device_number=device_number,
        device_events=host.device_events,
    )
    return Staged(pieces, alive)


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
    *,
    device_number: Int32Array | None = None,
    device_events: _engine.DeviceEvents | None = None,
) -> _engine.Pieces:
    return _engine.Pieces(
        file_number,
        file_start,
        address,
        boxes.run_bytes,
        np.ascontiguousarray(boxes.counts),
        np.ascontiguousarray(boxes.file_strides),
        np.ascontiguousarray(boxes.memory_strides),
        device_number=device_number,
        device_events=device_events,
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
                    tensors.overwrite(given, written)


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
    if tensors.is_quantized(target) and target.numel():
        target = target.dequantize()
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
