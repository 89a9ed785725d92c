"""A checkpoint of torch.distributed.checkpoint, as Megatron's ``torch_dist`` is one, as a source.

Guarantees
----------
- ``.metadata`` is read as data (`dcp_pickles`), objects and the common state with
  ``torch.load(weights_only=True)``: no code of the checkpoint is run.
- Elements are read straight from their place in the ``.distcp`` files, in parts. A tensor whose
  elements do not lie in row-major order is the exception: it is loaded whole.
- A path that leads out of the directory is refused.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron_uring import commit, flattened, tensors
from megatron_uring.columns import Uint8Array, table_of
from megatron_uring.config import Config
from megatron_uring.convert import dcp_pickles
from megatron_uring.convert.files import Files, FileSource
from megatron_uring.convert.parts import Catalog
from megatron_uring.errors import CorruptionError, UnsupportedError
from megatron_uring.layout import COMMON_NAME, DTYPE_BYTES
from megatron_uring.objects import deserialize_object, serialize_object
from megatron_uring.shards import ShardTable

DCP_METADATA_NAME = ".metadata"
COMMON_OBJECT = "common_state/shard_0_1"
"""Object that holds the common state from Megatron-Core 0.19 on."""
_ORIGINAL_SHAPE = "nd_reformulated_orig_global_shape"


class TorchDistSource(FileSource):
    """A `parts.Source` over ``.metadata`` and ``.distcp`` files.

    Raises
    ------
    CheckpointError
        If it cannot be read, or holds what is not known.
    """

    def __init__(self, directory: str, config: Config) -> None:
        self._directory, self._config = directory, config
        path = os.path.join(directory, DCP_METADATA_NAME)
        files = Files(directory)
        try:
            data = files.read_file(DCP_METADATA_NAME)
            megatron = commit.read_metadata(directory, "read source")
            common = None
            if os.path.exists(os.path.join(directory, COMMON_NAME)):
                common = files.read_file(COMMON_NAME)
        finally:
            files.close()
        metadata = dcp_pickles.read_metadata(data, path)
        self._stored: dict[Any, Any] = metadata.storage_data
        self._check_stored(path)
        shards, self._places = _rows(metadata, path)
        objects = [
            key
            for key, each in metadata.state_dict_metadata.items()
            if isinstance(each, BytesStorageMetadata)
        ]
        self.wraps_objects = megatron is not None
        self._located: dict[MetadataIndex, int | None] = {}
        self._whole: tuple[MetadataIndex, Uint8Array] | None = None
        super().__init__(directory, Catalog(shards))
        if megatron is not None and common is None and COMMON_OBJECT in objects:
            common = self._common_object()
            objects.remove(COMMON_OBJECT)
        planner_data = metadata.planner_data if isinstance(metadata.planner_data, dict) else None
        self.catalog = Catalog(
            shards, tuple(objects), common, megatron, planner_data if megatron is None else None
        )

    def _check_stored(self, path: str) -> None:
        """Refuse entries that lead elsewhere, or that are stored in ways that are not known."""
        if not isinstance(self._stored, dict):
            raise CorruptionError("read source", path=path, found="no storage data")
        for index, info in self._stored.items():
            name = str(info.relative_path)
            if os.path.isabs(name) or ".." in name.split("/"):
                raise UnsupportedError(
                    f"read {index.fqn!r}", path=path, expected="a file beside it", found=name
                )
            if getattr(info, "transform_descriptors", None):
                raise UnsupportedError(
                    f"read {index.fqn!r}",
                    path=path,
                    expected="elements as they are",
                    found=f"transformed by {list(info.transform_descriptors)}",
                )

    def _common_object(self) -> bytes:
        allowed = self._config.allowed_globals
        held: Any = deserialize_object(COMMON_OBJECT, self.object_bytes(COMMON_OBJECT), allowed)
        return serialize_object("common state", held[0], allowed)

    def object_bytes(self, key: str) -> bytes:
        """The ``torch.save`` archive of an object, as it is stored."""
        info = self._info(MetadataIndex(key))
        return self.files.read_bytes(info.relative_path, info.offset, info.length)

    def read_run(self, row: int, start_bytes: int, into: Uint8Array) -> None:
        """Fill `into` with the bytes from `start_bytes` of the piece in this row of the catalog."""
        place = self._places[row]
        info = self._info(place.index)
        if place.index not in self._located:
            self._located[place.index] = self._locate(row, info)
        begin = start_bytes + place.first * int(DTYPE_BYTES[self.catalog.shards.dtype[row]])
        start = self._located[place.index]
        if start is not None:
            self.files.read(info.relative_path, info.offset + start + begin, into)
            return
        if self._whole is None or self._whole[0] != place.index:
            self._whole = None
            self._whole = place.index, self._load(info)
        into[:] = self._whole[1][begin : begin + len(into)]

    def _info(self, index: MetadataIndex) -> Any:
        info = self._stored.get(index) or self._stored.get(MetadataIndex(index.fqn))
        if info is None:
            raise CorruptionError(
                f"read {index.fqn!r}",
                path=os.path.join(self._directory, DCP_METADATA_NAME),
                expected=f"a place for the piece at {list(index.offset or ())}",
                found="none",
            )
        return info

    def _locate(self, row: int, info: Any) -> int | None:
        """Where in its archive a piece begins; None if it is not one run."""
        place = self._places[row]
        path = os.path.join(self._directory, info.relative_path)
        view = io.BufferedReader(_View(self.files, info), 1 << 16)
        found = dcp_pickles.read_tensor(view, path, info.offset)
        dtype = tensors.torch_dtype(int(self.catalog.shards.dtype[row]))
        if found.shape != place.sizes or found.dtype != dtype:
            raise CorruptionError(
                f"read tensor {place.index.fqn!r}",
                path=path,
                offset=info.offset,
                expected=f"{list(place.sizes)} of {dtype}, as {DCP_METADATA_NAME} says",
                found=f"{list(found.shape)} of {found.dtype}",
            )
        return found.start

    def _load(self, info: Any) -> Uint8Array:
        data = self.files.read_bytes(info.relative_path, info.offset, info.length)
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        flat = loaded.detach().contiguous().reshape(-1).view(torch.uint8)
        elements: Uint8Array = flat.numpy()
        return elements


class _View(io.RawIOBase):
    """The bytes of one entry of a ``.distcp`` file."""

    def __init__(self, files: Files, info: Any) -> None:
        super().__init__()
        self._files, self._info = files, info
        self._at: int = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        length = int(self._info.length)
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: length}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), int(self._info.length) - self._at)
        if count <= 0:
            return 0
        into = np.frombuffer(buffer, np.uint8)[:count]
        self._files.read(self._info.relative_path, self._info.offset + self._at, into)
        self._at += count
        return count


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a row of the catalog is: elements from `first` on, in row-major order, of a chunk."""

    index: MetadataIndex
    sizes: tuple[int, ...]
    first: int = 0


def _rows(metadata: Any, path: str) -> tuple[ShardTable, list[_Place]]:
    """A row for each chunk of each tensor, and where it is."""
    flattened_shapes = getattr(metadata, "mcore_data", None) or {}
    keys: list[str] = []
    places: list[_Place] = []
    number, dtypes, shapes, offsets, sizes = [], [], [], [], []
    for key, each in metadata.state_dict_metadata.items():
        if not isinstance(each, TensorStorageMetadata):
            continue
        code = tensors.DTYPE_CODE.get(each.properties.dtype)
        if code is None:
            raise UnsupportedError(f"read tensor {key!r}", path=path, found=each.properties.dtype)
        whole = tuple(flattened_shapes.get(key, {}).get(_ORIGINAL_SHAPE, each.size))
        for chunk in each.chunks:
            index = MetadataIndex(key, chunk.offsets)
            for offset, shape, first in _boxes(chunk, each.size, whole, index):
                number.append(len(keys))
                dtypes.append(code)
                shapes.append(whole)
                offsets.append(offset)
                sizes.append(shape)
                places.append(_Place(index, tuple(chunk.sizes), first))
        if not number or number[-1] != len(keys):
            raise CorruptionError(f"read tensor {key!r}", path=path, found="no chunk of it")
        keys.append(key)
    table = ShardTable(
        tuple(keys),
        np.array(number, np.int32),
        np.array(dtypes, np.uint8),
        np.array([len(shape) for shape in shapes], np.uint8),
        table_of(shapes, 1),
        table_of(offsets, 0),
        table_of(sizes, 1),
    )
    return table, places


def _boxes(
    chunk: Any, size: Any, whole: tuple[int, ...], index: MetadataIndex
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Offset and shape in the tensor of each box that a chunk fills, and its first element there.

    Megatron-Core up to 0.15 saves optimizer state as ranges of flattened shards: what is
    [X, Y] in shards of [x, y] is stored as [X/x, Y/y, x*y], cut along the last dimension.
    """
    if len(size) == len(whole):
        yield tuple(chunk.offsets), tuple(chunk.sizes), 0
        return
    *grid, length = size
    local = tuple(every // parts for every, parts in zip(whole, grid, strict=True))
    if math.prod(local) != length or any(one != 1 for one in chunk.sizes[:-1]):
        raise UnsupportedError(
            f"read tensor {index.fqn!r}",
            expected="ranges of flattened shards of one shape",
            found=f"{list(size)} for {list(whole)}",
        )
    corner = [place * step for place, step in zip(chunk.offsets[:-1], local, strict=True)]
    start, first = chunk.offsets[-1], 0
    for offset, shape in flattened.boxes(local, start, start + chunk.sizes[-1]):
        yield tuple(a + b for a, b in zip(corner, offset, strict=True)), shape, first
        first += math.prod(shape)
