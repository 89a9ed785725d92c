"""The steps of one restore, in the order in which `checkpoint.restore` takes them.

Guarantees
----------
- No collective, no lock, nothing is written but the destinations; what is removed are leftovers in
  the node's staging directory (`nearest`).
- What does not fit (a missing key, another shape or dtype) is refused before the first byte is
  read.
- Objects are read, checked and coalesced as tensors are: here they are one-dimensional uint8
  tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_uring import _engine, nearest, plan, probing, read, stage, tensors
from megatron_uring.columns import BoolArray, Int64Array, every, format_box, widen
from megatron_uring.config import Config
from megatron_uring.errors import StateMismatchError, UnsupportedError
from megatron_uring.index_rules import Index
from megatron_uring.layout import BLOCK_BYTES, DTYPE_NAMES
from megatron_uring.objects import deserialize_object
from megatron_uring.overlap import in_terms_of
from megatron_uring.progress import Clock
from megatron_uring.shards import ShardTable
from megatron_uring.tables import Extents, Ranges, RestorePlan


@dataclass(frozen=True)
class Request:
    """A box of a global tensor, and the tensor that it is restored into.

    Parameters
    ----------
    key
    tensor
        Destination; its shape is that of the box, without leading dimensions of size 1.
    global_shape, offset
        As in `providers.Shard`.
    partial
        The saved tensor may have another global shape, and another dtype; what overlaps is
        restored, the rest of `tensor` stays.
    step
        Distance of neighbouring elements of `tensor` in the global tensor, for each dimension.
        None: 1 everywhere.
    """

    key: str
    tensor: Any
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    partial: bool = False
    step: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Restored:
    """What came back: objects by key, how much of it was asked for, read from files and taken from
    other ranks of the node, how much of what was read came from the node's staging directory, and
    the native threads' seconds.
    """

    objects: dict[str, Any]
    state_bytes: int
    read_bytes: int
    shared_bytes: int
    local_bytes: int
    files: int
    direct: bool
    copy_s: float
    checksum_s: float


def restore_requests(
    directory: str,
    index: Index,
    requests: Sequence[Request],
    object_keys: Sequence[str],
    engine: _engine.Engine,
    config: Config,
    clock: Clock,
) -> Restored:
    """Fill the tensors of `requests` in place, and load the objects.

    Raises
    ------
    CheckpointError
        A missing key, another shape or dtype, damage; naming key, file and offset.
    """
    prefix = _object_prefix(index)
    clock.lap("index")
    buffers = _object_buffers(index, object_keys, directory, prefix)
    clock.lap("allocate")
    _check_keys(directory, index, requests)
    everything = [*requests, *buffers]
    restoring, destinations, state_bytes = _plan(
        directory, index, everything, prefix, config, clock
    )
    jobs, near_jobs, direct = _execute(directory, index, engine, restoring, destinations, config)
    jobs += near_jobs
    clock.lap("read")
    destinations.finish()
    objects = {
        key: deserialize_object(key, buffer.tensor.numpy().tobytes(), config.allowed_globals)
        for key, buffer in zip(object_keys, buffers, strict=True)
    }
    clock.lap("finish")
    shared_bytes = sum(job.bytes_shared for job in jobs)
    return Restored(
        objects,
        state_bytes,
        sum(job.bytes_total for job in jobs) - shared_bytes,
        shared_bytes,
        sum(job.bytes_total for job in near_jobs),
        len(np.unique(restoring.range_subfile)),
        direct,
        sum(job.copy_s for job in jobs),
        sum(job.checksum_s for job in jobs),
    )


def _plan(
    directory: str,
    index: Index,
    requests: Sequence[Request],
    prefix: str,
    config: Config,
    clock: Clock,
) -> tuple[RestorePlan, stage.Destinations, int]:
    """Refuse what does not fit; what to read for the requests, where it goes, and the bytes that
    are asked for.
    """
    saved, extents = _with_objects(index, prefix)
    given = [request.tensor for request in requests]
    partial = np.fromiter((request.partial for request in requests), bool, len(requests))
    wanted, strides = tensors.describe(
        [request.key for request in requests],
        given,
        [request.global_shape for request in requests],
        [request.offset for request in requests],
        operation="restore",
    )
    wanted = in_terms_of(saved, wanted)
    saved_row = saved.first_rows()[wanted.tensor]
    in_place = tensors.writable_in_place(given, wanted, strides)
    _check_memory(directory, requests, in_place)
    _check_fit(directory, saved, saved_row, wanted, partial, config)
    in_place &= saved.dtype[saved_row] == wanted.dtype
    clock.lap("plan")
    destinations = stage.prepare_destinations(
        given, in_place, saved.dtype[saved_row], strides, wanted.ndim
    )
    clock.lap("allocate")
    restoring = plan.plan_restore(
        saved,
        extents,
        index.regions,
        wanted,
        destinations.strides,
        gap_bytes=config.gap_bytes,
        partial=partial,
        steps=_steps(requests, wanted.shape.shape[1]),
    )
    clock.lap("plan")
    return restoring, destinations, int(wanted.lengths().sum())


def _steps(requests: Sequence[Request], width: int) -> Int64Array | None:
    """Of each request and dimension, int64 [requests, width]; None where no request has any."""
    stepped = [row for row, request in enumerate(requests) if request.step is not None]
    if not stepped:
        return None
    steps = np.ones((len(requests), width), np.int64)
    for row in stepped:
        step = requests[row].step or ()
        steps[row, : len(step)] = step
    return steps


def _execute(
    directory: str,
    index: Index,
    engine: _engine.Engine,
    restoring: RestorePlan,
    destinations: stage.Destinations,
    config: Config,
) -> tuple[list[_engine.Job], list[_engine.Job], bool]:
    """Read, verify and scatter; returns the jobs that did it from subfiles and from local copies,
    and whether all subfiles were direct.
    """
    near = nearest.find(config, directory, index, restoring)
    checked = None
    if near is not None and config.verify_first:
        checked = near.read(engine, stage.stage_nothing(), config)
        near = near if checked is not None else None
    rest = restoring if near is None else near.rest
    jobs: list[_engine.Job] = []
    direct = False
    if near is None or len(rest.range_start):
        jobs, direct = _read(directory, index, engine, rest, destinations, config)
    if near is None:
        return jobs, [], direct
    pieces = stage.stage_destinations(near.plan, destinations, near.piece_file)
    job = near.read(engine, pieces, config)
    if job is not None:
        return jobs, [job] if checked is None else [checked, job], direct
    others, other_direct = _read(
        directory, index, engine, near.plan, destinations, config, touched=True
    )
    return [*jobs, *others], [], other_direct and (direct or not jobs)


def _read(
    directory: str,
    index: Index,
    engine: _engine.Engine,
    restoring: RestorePlan,
    destinations: stage.Destinations,
    config: Config,
    *,
    touched: bool = False,
) -> tuple[list[_engine.Job], bool]:
    """The same from subfiles alone; `touched` says that destinations have been written to."""
    numbers, file_number = read.dense_file_numbers(restoring.range_subfile)
    lengths = index.subfile_length[np.searchsorted(index.subfile_number, numbers)]
    total = int(restoring.range_length.sum())
    pieces_file = np.searchsorted(numbers, restoring.piece_subfile).astype(np.int32)
    passes = [stage.stage_destinations(restoring, destinations, pieces_file)]
    if config.verify_first:
        passes.insert(0, stage.stage_nothing())
    direct = config.direct
    if total >= BLOCK_BYTES:
        direct = probing.direct_reads(directory, config, total)
    jobs = []
    with (
        read.open_subfiles(
            directory, index.save_id, numbers, lengths, direct=direct, read_bytes=total
        ) as files,
        read.node_cache(config, index.save_id, total) as cache,
    ):
        for number, staged in enumerate(passes):
            bad, job = read.read_ranges(
                engine,
                files,
                Ranges(
                    file_number,
                    restoring.range_start,
                    restoring.range_length,
                    restoring.crc32c,
                ),
                staged,
                timeout_s=config.timeout_s,
                shared=None if cache is None else (cache, numbers.tolist()),
            )
            jobs.append(job)
            half_written = touched or number == len(passes) - 1
            read.raise_bad_block(
                files, file_number, numbers, bad, index.names_in, half_written=half_written
            )
        all_direct = bool(files) and all(file.direct for file in files)
    return jobs, all_direct


def _object_prefix(index: Index) -> str:
    """What keeps object keys apart from tensor keys in one plan: no tensor key begins with it."""
    prefix = "object:"
    while any(key.startswith(prefix) for key in index.shards.keys):
        prefix = "-" + prefix
    return prefix


def _object_buffers(
    index: Index, keys: Sequence[str], directory: str, prefix: str
) -> list[Request]:
    row = {key: number for number, key in enumerate(index.object_keys)}
    buffers = []
    for key in keys:
        if key not in row:
            raise StateMismatchError(
                f"restore object {key!r}",
                path=directory,
                expected="an object of that key",
                found="a tensor of that key"
                if key in index.shards.keys
                else plan.similar_keys(key, [*index.object_keys, *index.shards.keys]),
            )
        length = int(index.object_extents.length[row[key]])
        tensor = tensors.new_tensor(DTYPE_NAMES.index("uint8"), [length])
        buffers.append(Request(prefix + key, tensor, (length,), (0,)))
    return buffers


def _with_objects(index: Index, prefix: str) -> tuple[ShardTable, Extents]:
    """Shards and objects in one table, the objects as one-dimensional uint8 tensors."""
    keys = tuple(prefix + key for key in index.object_keys)
    objects = ShardTable.of_bytes(keys, index.object_extents.length)
    return (
        ShardTable.concatenate([index.shards, objects]),
        Extents.concatenate([index.shard_extents, index.object_extents]),
    )


def _check_keys(directory: str, index: Index, requests: Sequence[Request]) -> None:
    known = set(index.shards.keys)
    for request in requests:
        if request.key not in known:
            raise StateMismatchError(
                f"restore tensor {request.key!r}",
                path=directory,
                expected="a tensor of that key",
                found="an object of that key"
                if request.key in index.object_keys
                else plan.similar_keys(request.key, index.shards.keys),
            )


def _check_memory(directory: str, requests: Sequence[Request], in_place: BoolArray) -> None:
    """Refuse destinations that cannot hold a value of their own for each element."""
    for number in np.flatnonzero(~in_place).tolist():
        request = requests[number]
        operation = f"restore tensor {request.key!r}"
        if not tensors.has_memory(request.tensor) and not tensors.is_quantized(request.tensor):
            raise UnsupportedError(
                operation,
                expected="a destination with memory of its own",
                found=f"{type(request.tensor).__name__} on {request.tensor.device}",
            )
        if tensors.shares_elements(request.tensor):
            raise StateMismatchError(
                operation,
                path=directory,
                expected="a destination whose elements have their own memory",
                found=f"strides {list(request.tensor.stride())}",
                cause="an expanded tensor cannot be filled; pass a clone of it",
            )


def _check_fit(
    directory: str,
    saved: ShardTable,
    saved_row: npt.NDArray[np.intp],
    wanted: ShardTable,
    partial: BoolArray,
    config: Config,
) -> None:
    """Refuse requests whose global shape or dtype is not that of the saved tensor."""
    width = max(saved.shape.shape[1], wanted.shape.shape[1])
    shape = widen(saved.global_shape, width, 1).take(saved_row, axis=0)
    same_shape = every(shape == widen(wanted.global_shape, width, 1))
    same_shape &= saved.ndim[saved_row] == wanted.ndim
    odd_shape = np.flatnonzero(~same_shape & ~partial)
    converts = partial | config.allow_dtype_conversion
    odd_dtype = np.flatnonzero((saved.dtype[saved_row] != wanted.dtype) & ~converts)
    for number in odd_shape[:1].tolist():
        row = int(saved_row[number])
        raise StateMismatchError(
            f"restore tensor {wanted.keys[wanted.tensor[number]]!r}",
            path=directory,
            expected=f"global shape {format_box(wanted.global_shape[number], wanted.ndim[number])}",
            found=f"{format_box(saved.global_shape[row], saved.ndim[row])} in the checkpoint",
        )
    for number in odd_dtype[:1].tolist():
        raise StateMismatchError(
            f"restore tensor {wanted.keys[wanted.tensor[number]]!r}",
            path=directory,
            expected=f"dtype {DTYPE_NAMES[wanted.dtype[number]]}",
            found=f"{DTYPE_NAMES[saved.dtype[saved_row[number]]]} in the checkpoint",
            cause="MEGATRON_URING_ALLOW_DTYPE_CONVERSION=1 converts",
        )
