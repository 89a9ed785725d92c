"""``torch_dist`` as the target of a conversion: what DCP's own readers and Megatron's read.

Guarantees
----------
- ``.metadata`` is made of DCP's own classes and written by DCP's own writer; pieces are what
  ``torch.save`` makes of a tensor, as there.
- A piece that is larger than a window becomes several: DCP's readers take any cut.
- Of a checkpoint of Megatron ``common.pt`` and ``metadata.json`` are written as well, and objects
  are lists of one element, so that `dist_checkpointing.load` of every version reads it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from megatron_uring import _engine, tensors
from megatron_uring.convert import parts as parts_module
from megatron_uring.convert.job import Job
from megatron_uring.convert.parts import Part, batches, part_of, row_pieces, share
from megatron_uring.layout import COMMON_NAME, METADATA_NAME
from megatron_uring.objects import serialize_object
from megatron_uring.progress import step
from megatron_uring.shards import ShardTable

_BACKEND, _VERSION = "torch_dist", 1
# Where one entry lies: key, offset in the tensor or nothing, file, offset, length.
_Entry = tuple[str, list[int] | None, str, int, int]


def write(job: Job) -> None:
    """Write all files; collective."""
    world = job.world
    pieces = row_pieces(job.catalog.shards, parts_module.WINDOW_BYTES)
    mine = np.flatnonzero(share(pieces.lengths(), world.size) == world.rank)
    entries: list[_Entry] = []
    with step(world, "write .distcp files"):
        if len(mine) or job.own_objects:
            entries = _write_file(job, [part_of(pieces, row) for row in mine.tolist()])
    gathered = world.gather(json.dumps(entries).encode())
    with step(world, "write .metadata"):
        if gathered is not None:
            every = [entry for data in gathered for entry in json.loads(data.tobytes())]
            _write_metadata(job, pieces, every)


def _write_file(job: Job, parts: list[Part]) -> list[_Entry]:
    """This rank's objects and pieces, one after the other in one file."""
    name = f"__{job.world.rank}_0.distcp"
    entries: list[_Entry] = []
    with job.new_file(name, ".distcp") as file:
        for key in job.own_objects:
            at = file.tell()
            wrapped = job.catalog.megatron is not None
            file.write(job.object_bytes(key, wrapped=wrapped, proved=False))
            entries.append((key, None, name, at, file.tell() - at))
        for part, tensor in _tensors(job, parts):
            at = file.tell()
            _save(tensor, file)
            entries.append((part.key, list(part.offset), name, at, file.tell() - at))
    return entries


def _save(tensor: torch.Tensor, file: BinaryIO) -> None:
    # torch saves the whole storage that a tensor is a view of: here there is no more of it
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    archive = io.BytesIO()  # straight to a file, torch would hide why a write has failed
    torch.save(tensor, archive)
    file.write(archive.getbuffer())


def _tensors(job: Job, parts: list[Part]) -> Iterator[tuple[Part, torch.Tensor]]:
    for batch, at, size in batches(parts, parts_module.WINDOW_BYTES):
        buffer = job.scratch.take(size)
        job.read(batch, at, buffer)
        for part, place in zip(batch, at, strict=True):
            own = torch.from_numpy(buffer[place : place + part.nbytes])
            yield part, own.view(tensors.torch_dtype(part.dtype)).view(part.shape)


def _write_metadata(job: Job, pieces: ShardTable, entries: list[Any]) -> None:
    catalog = job.catalog
    described: dict[str, Any] = {}
    for row, number in enumerate(pieces.tensor.tolist()):
        key, part = pieces.keys[number], part_of(pieces, row)
        if key not in described:
            properties = TensorProperties(dtype=tensors.torch_dtype(part.dtype))
            described[key] = TensorStorageMetadata(properties, torch.Size(part.global_shape), [])
        chunk = ChunkStorageMetadata(torch.Size(part.offset), torch.Size(part.shape))
        described[key].chunks.append(chunk)
    described.update((key, BytesStorageMetadata()) for key in catalog.object_keys)
    planner_data = None
    if catalog.megatron is None:
        known = catalog.planner_data or {}
        planner_data = {key: known.get(key, (key,)) for key in described}
    results = [
        WriteResult(
            MetadataIndex(key, None if offset is None else torch.Size(offset)),
            length,
            _StorageInfo(name, at, length),
        )
        for key, offset, name, at, length in entries
    ]
    if catalog.megatron is not None or catalog.common is not None:
        common = catalog.common
        data = serialize_object("common state", {}) if common is None else common
        _engine.write_file(job.path(COMMON_NAME), data)
    if catalog.megatron is not None:
        _engine.write_file(job.path(METADATA_NAME), job.metadata_bytes(_BACKEND, _VERSION))
    FileSystemWriter(job.directory).finish(Metadata(described, planner_data), [results])
