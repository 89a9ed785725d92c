"""The storage reader: DCP's metadata made of our index, and a restore of ours of what it plans.

Guarantees
----------
- Not collective, and the same for any mesh and number of ranks, or one process without a group.
- Nothing of the checkpoint meets an unpickler that runs code: the planner, whose own one does, is
  given what we have loaded safely, written anew.
- Tensors are filled in place.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron_uring import checkpoint, roots, tensors
from megatron_uring import index as index_module
from megatron_uring.config import Config
from megatron_uring.dcp.place import Place
from megatron_uring.dcp.writer import PLANNER_KEY
from megatron_uring.errors import StateMismatchError
from megatron_uring.index_rules import Index
from megatron_uring.layout import subfile_name
from megatron_uring.restoring import Request
from megatron_uring.tables import Extents


@dataclass(frozen=True)
class StoredPiece:
    """Where a piece of a tensor, or an object, lies: `Metadata.storage_data` by `MetadataIndex`.

    Parameters
    ----------
    relative_path
        Subfile, in the checkpoint directory.
    offset, length
        In bytes. Elements of a tensor lie in C order, an object as a ``torch.save`` archive.
    """

    relative_path: str
    offset: int
    length: int


class StorageReader(Place, storage.StorageReader):
    """Reads our checkpoints for ``dcp.load``, whatever mesh or world size they were saved by.

    Parameters
    ----------
    directory
        A checkpoint, or a save root with ``iter_*`` directories, of which the newest committed one
        is taken. May be left out if each ``dcp.load`` names its ``checkpoint_id``.
    config
        Default: from the ``MEGATRON_URING_*`` variables, with ``allow_dtype_conversion`` on, since
        DCP's own reader converts.

    Raises
    ------
    torch.distributed.checkpoint.CheckpointException
        As for `StorageWriter`.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, *, config: Config | None = None
    ) -> None:
        super().__init__(directory)
        self._config = config
        self._read: tuple[str, Index] | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take `checkpoint_id` as the directory from now on."""
        self._read = None
        super().reset(checkpoint_id)

    def read_metadata(self) -> Metadata:
        """DCP's metadata, made of the index: tensors, their pieces, objects, flattened keys."""
        directory = roots.resolve_latest(self.chosen_directory())
        index = index_module.read_index(directory)
        self._read = directory, index
        described, pieces = _describe_tensors(index)
        extents = index.object_extents
        for row, key in enumerate(index.object_keys):
            if key != PLANNER_KEY:
                described[key] = BytesStorageMetadata()
                pieces[MetadataIndex(key)] = _piece(index, extents, row)
        return Metadata(
            described,
            self._planner_data(directory, index),
            pieces,
            StorageMeta(checkpoint_id=directory, save_id=index.save_id),
        )

    def _planner_data(self, directory: str, index: Index) -> Any:
        if PLANNER_KEY not in index.object_keys:
            return {key: (key,) for key in (*index.shards.keys, *index.object_keys)}
        saved = checkpoint.restore_into(
            directory, (), [PLANNER_KEY], index=index, config=self._options()
        )
        return saved.objects[PLANNER_KEY]["planner_data"]

    def _options(self) -> Config:
        if self._config is not None:
            return self._config
        return replace(Config.from_environment(), allow_dtype_conversion=True)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing: `read_metadata` has read all there is."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors in place, and give it the objects; not collective."""
        if self._read is None:
            self.read_metadata()
        assert self._read is not None
        directory, index = self._read
        shapes = _global_shapes(index)
        items, filled, requests = [], [], []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                items.append(item)
                continue
            tensor = planner.resolve_tensor(item).detach()
            requests.append(_request(item, tensor, shapes))
            filled.append((item, tensor))
        keys = list(dict.fromkeys(item.storage_index.fqn for item in items))
        objects = checkpoint.restore_into(
            directory, requests, keys, index=index, config=self._options()
        ).objects
        for item, tensor in filled:
            planner.commit_tensor(item, tensor)
        for item in items:
            # written anew: the planner may load it with code and all
            data = io.BytesIO()
            torch.save(objects[item.storage_index.fqn], data)
            data.seek(0)
            planner.load_bytes(item, data)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _describe_tensors(
    index: Index,
) -> tuple[dict[str, Any], dict[MetadataIndex, StoredPiece]]:
    """DCP's description of each tensor by key, and where each piece lies."""
    shards = index.shards
    described: dict[str, Any] = {}
    pieces: dict[MetadataIndex, StoredPiece] = {}
    for row, number in enumerate(shards.tensor.tolist()):
        key, ndim = shards.keys[number], int(shards.ndim[row])
        if key not in described:
            described[key] = TensorStorageMetadata(
                TensorProperties(dtype=tensors.torch_dtype(int(shards.dtype[row]))),
                torch.Size(shards.global_shape[row, :ndim].tolist()),
                [],
            )
        offset = torch.Size(shards.offset[row, :ndim].tolist())
        shape = torch.Size(shards.shape[row, :ndim].tolist())
        described[key].chunks.append(ChunkStorageMetadata(offset, shape))
        where = MetadataIndex(key, offset, len(described[key].chunks) - 1)
        pieces[where] = _piece(index, index.shard_extents, row)
    return described, pieces


def _piece(index: Index, extents: Extents, row: int) -> StoredPiece:
    name = subfile_name(index.save_id, int(extents.subfile[row]))
    return StoredPiece(name, int(extents.start[row]), int(extents.length[row]))


def _global_shapes(index: Index) -> dict[str, tuple[int, ...]]:
    shards = index.shards
    first = shards.first_rows().tolist()
    return {
        key: tuple(shards.global_shape[row, : shards.ndim[row]].tolist())
        for key, row in zip(shards.keys, first, strict=True)
    }


def _request(
    item: ReadItem, tensor: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]
) -> Request:
    """A read of DCP, which counts from the beginning of a saved piece, as one of ours."""
    key, shape = item.storage_index.fqn, tuple(item.lengths)
    if tuple(tensor.shape) != shape:
        raise StateMismatchError(
            f"restore tensor {key!r}",
            expected=f"a destination of {list(shape)}, as planned",
            found=list(tensor.shape),
        )
    begin = item.storage_index.offset or (0,) * len(shape)
    offset = tuple(a + b for a, b in zip(begin, item.storage_offsets, strict=True))
    return Request(key, tensor, shapes.get(key, shape), offset)
