"""A checkpoint of our own format as a source of a conversion.

Guarantees
----------
- Every block that is read is checked against its checksum.
- A read looks at the rows of the index that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_uring import checkpoint, commit, tensors
from megatron_uring import index as index_module
from megatron_uring.columns import Uint8Array
from megatron_uring.config import Config
from megatron_uring.convert.parts import Catalog, Part
from megatron_uring.dcp import PLANNER_KEY
from megatron_uring.index_rules import Index
from megatron_uring.objects import deserialize_object
from megatron_uring.restoring import Request
from megatron_uring.shards import ShardTable
from megatron_uring.tables import Extents


class OurSource:
    """A `parts.Source` over a committed checkpoint of ours.

    Raises
    ------
    CheckpointError
        If it cannot be read.
    """

    wraps_objects = False

    def __init__(self, directory: str, config: Config) -> None:
        self._directory = directory
        self._index = index = index_module.read_index(directory)
        # ranks read different bytes, each once
        self._config = replace(config, node_sharing="off", allow_dtype_conversion=False)
        self._rows = index.shards.by_tensor()
        self._number = dict(zip(index.shards.keys, range(len(index.shards.keys)), strict=True))
        self._object_row = {key: row for row, key in enumerate(index.object_keys)}
        self.catalog = Catalog(
            index.shards,
            tuple(key for key in index.object_keys if key != PLANNER_KEY),
            self._common(),
            commit.megatron_metadata(directory),
            self._planner_data(),
        )

    def _common(self) -> bytes | None:
        index = self._index
        if index.common_length < 0:
            return None
        return commit.read_common(
            self._directory, index.save_id, index.common_length, index.common_crc32c
        )

    def _planner_data(self) -> dict[str, Any] | None:
        if PLANNER_KEY not in self._object_row:
            return None
        data = self.object_bytes(PLANNER_KEY)
        saved: Any = deserialize_object(PLANNER_KEY, data, self._config.allowed_globals)
        planner_data: dict[str, Any] = saved["planner_data"]
        return planner_data

    def fill(self, parts: Sequence[Part], buffer: Uint8Array, at: Sequence[int]) -> None:
        """Read each part to its place in `buffer`, bytes from its start."""
        requests = []
        for part, place in zip(parts, at, strict=True):
            dtype = tensors.torch_dtype(part.dtype)
            for offset, shape, where in part.boxes(place):
                box = torch.from_numpy(buffer[where]).view(dtype).view(shape)
                requests.append(Request(part.key, box, part.global_shape, offset))
        if requests:
            self._restore(self._rows_of({self._number[part.key] for part in parts}), requests)

    def object_bytes(self, key: str) -> bytes:
        """The ``torch.save`` archive of an object, as it is stored."""
        extents = self._index.object_extents.take(np.array([self._object_row[key]], np.intp))
        length = int(extents.length[0])
        data = np.empty(length, np.uint8)
        request = Request(key, torch.from_numpy(data), (length,), (0,))
        table = ShardTable.of_bytes((key,), extents.length)
        self._restore(self._part(table, extents), [request])
        return data.tobytes()

    def _rows_of(self, numbers: set[int]) -> Index:
        rows: npt.NDArray[np.intp] = np.concatenate([self._rows.of(n) for n in sorted(numbers)])
        index = self._index
        return self._part(index.shards.take(rows).compact(), index.shard_extents.take(rows))

    def _part(self, shards: ShardTable, extents: Extents) -> Index:
        nothing = extents.take(np.zeros(0, np.intp))
        return replace(
            self._index,
            shards=shards,
            shard_extents=extents,
            object_keys=(),
            object_extents=nothing,
        )

    def _restore(self, index: Index, requests: list[Request]) -> None:
        checkpoint.restore_into(self._directory, requests, index=index, config=self._config)

    def close(self) -> None:
        """Nothing is held open."""
