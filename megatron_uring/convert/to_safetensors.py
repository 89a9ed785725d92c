"""Safetensors files as the target of a conversion.

Guarantees
----------
- Each file has one writer, which writes it from its beginning to its end: where everything lies is
  known before the first byte is written.
- A tensor that was saved in shards is whole. Objects are left out, and named in a note.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from megatron_uring import _engine
from megatron_uring.convert import parts as parts_module
from megatron_uring.convert import safetensors_layout as layout
from megatron_uring.convert.job import Job
from megatron_uring.convert.parts import Part, batches, cut, part_of, share, whole_tensors
from megatron_uring.errors import CheckpointError
from megatron_uring.objects import deserialize_object
from megatron_uring.progress import step
from megatron_uring.shards import ShardTable


def write(job: Job) -> None:
    """Write all files; collective."""
    world, tensors = job.world, whole_tensors(job.catalog.shards)
    files: list[layout.PlannedFile] = []
    with step(world, "plan safetensors files"):
        files = layout.plan_files(tensors, job.max_file_bytes, world.size)
    ranks = share(np.array([file.length for file in files], np.int64), world.size)
    with step(world, "write safetensors files"):
        for file, rank in zip(files, ranks.tolist(), strict=True):
            if rank == world.rank:
                _write_file(job, tensors, file)
        if world.rank == 0:
            _write_index(job, tensors, files)
    if job.catalog.object_keys:
        names = ", ".join(job.catalog.object_keys[:5])
        more = ", ..." if len(job.catalog.object_keys) > 5 else ""
        count = len(job.catalog.object_keys)
        job.notes.append(f"safetensors holds no objects: {count} left out ({names}{more})")


def _write_file(job: Job, tensors: ShardTable, file: layout.PlannedFile) -> None:
    def parts() -> Iterator[Part]:
        for row in file.rows:
            yield from cut(part_of(tensors, row), parts_module.WINDOW_BYTES)

    with job.new_file(file.name, "safetensors") as written:
        written.write(file.header)
        for batch, at, size in batches(parts(), parts_module.WINDOW_BYTES, 1):
            buffer = job.scratch.take(size)
            job.read(batch, at, buffer)
            written.write(buffer.data)


def _write_index(job: Job, tensors: ShardTable, files: list[layout.PlannedFile]) -> None:
    metadata: dict[str, Any] = {"total_size": int(tensors.lengths().sum())}
    if job.catalog.common is not None:
        plain = _plain_common(job, job.catalog.common)
        if plain:
            metadata["common"] = json.dumps(plain)
    weights = {tensors.keys[tensors.tensor[row]]: file.name for file in files for row in file.rows}
    text = json.dumps({"metadata": metadata, "weight_map": weights}, indent=1)
    _engine.write_file(job.path(layout.INDEX_NAME), text.encode())


def _plain_common(job: Job, data: bytes) -> Any:
    """What JSON can say of the common state; nothing, and a note, if it cannot be loaded."""
    try:
        common = deserialize_object("common state", data, job.config.allowed_globals)
    except CheckpointError as error:
        job.notes.append(f"the common state is left out: {error}")
        return None
    return _plain(common)


def _plain(value: Any) -> Any:
    """`value` with what JSON knows; `...` for the rest, which is dropped from its dict or list."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, dict):
        pairs = ((str(key), _plain(each)) for key, each in value.items())
        return {key: each for key, each in pairs if each is not ...}
    if isinstance(value, list | tuple):
        return [each for each in map(_plain, value) if each is not ...]
    return value if value is None or isinstance(value, str | int | float | bool) else ...
