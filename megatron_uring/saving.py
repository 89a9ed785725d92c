"""The steps of one save, in the order in which `checkpoint.save` takes them.

Guarantees
----------
- Between two collectives every rank's errors are reduced (`step`): no rank goes on alone, none
  waits for one that gave up.
- What the election depends on (mode, file system, stripe) is decided by rank 0 and sent to all.
- Whoever created a file removes it if the save fails before the commit; from the commit on only
  rank 0 does, which alone knows whether the index was renamed (`commit.publish`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from megatron_uring import _engine, aggregate, commit, plan, probing, stage, write
from megatron_uring import index as index_module
from megatron_uring.comm import Communicator
from megatron_uring.config import Config
from megatron_uring.index_rules import assemble_index, check_objects, with_common
from megatron_uring.layout import PAGE_BYTES, Superblock, Trailer, round_up, subfile_name
from megatron_uring.progress import Clock, step
from megatron_uring.structures import KnownStructure, group_communicator, share_structure
from megatron_uring.tables import Contents, Extents, Groups, Provided, Regions, Staged, Structure

_log = logging.getLogger(__name__)
_Report = TypeVar("_Report")


@dataclass(frozen=True)
class Placed:
    """Where this rank's state will lie in its group's subfile, and what all ranks of the group
    hold.
    """

    region: plan.RegionPlan
    tensor_start: int
    object_start: int
    footer_start: int
    object_keys: tuple[str, ...]
    objects: tuple[bytes, ...]
    replicas: tuple[str, ...]
    known: KnownStructure


class Saving:
    """One save in progress on this rank."""

    def __init__(
        self,
        world: Communicator,
        directory: str,
        config: Config,
        setting: dict[str, Any],
        clock: Clock,
    ) -> None:
        self.world, self.directory, self.config, self.clock = world, directory, config, clock
        self.save_id: str = setting["save_id"]
        self.replaces: str | None = setting["replaces"]
        self.stripe_bytes: int = setting["stripe_bytes"]
        self.groups: Groups = aggregate.elect(
            world.node_of_rank,
            aggregation=setting["aggregation"],
            probed=setting["probed_aggregation"],
            aggregators_per_node=setting["aggregators_per_node"],
            file_system=setting["file_system"],
        )
        self.group = group_communicator(world, self.groups)
        self.number = int(self.groups.group_of_rank[world.rank])
        self.is_aggregator = bool(self.groups.aggregator[self.number] == world.rank)
        self.path = os.path.join(directory, subfile_name(self.save_id, self.number))
        self.direct = False
        self.probed_engine = False
        self._regions: list[tuple[int, int, Any]] = []
        self._totals = (0, 0, 0)
        self._copy_s = self._checksum_s = 0.0

    @classmethod
    def begin(
        cls, world: Communicator, directory: str, config: Config, provided: Provided, clock: Clock
    ) -> Saving:
        """Make the directory, agree on the setting, elect aggregators."""
        setting: dict[str, Any] = {}
        with step(world, "open checkpoint directory"):
            if world.rank == 0:
                commit.prepare_directory(directory)
                commit.sweep_debris(directory)
                storage = write.describe_storage(directory, config.stripe_bytes)
                own_bytes = int(provided.shards.lengths()[provided.owner].sum())
                tuned = probing.tune(directory, config, own_bytes)
                setting = {
                    "tuned": probing.difference(config, tuned),
                    "save_id": commit.new_save_id(),
                    "replaces": commit.committed_save_id(directory),
                    "stripe_bytes": storage.stripe_bytes,
                    "file_system": storage.file_system,
                    "aggregation": config.aggregation,
                    "probed_aggregation": tuned.aggregation,
                    "aggregators_per_node": config.aggregators_per_node,
                }
        message = json.dumps(setting).encode() if world.rank == 0 else None
        setting = json.loads(world.broadcast(message))
        tuned = probing.adopt(config, setting["tuned"])
        clock.lap("begin")
        saving = cls(world, directory, tuned, setting, clock)
        saving.probed_engine = tuned.engine != config.engine
        return saving

    def place(self, provided: Provided) -> Placed:
        """Fix every offset, and prove on rank 0 that each element of each tensor has one owner."""
        rows = np.flatnonzero(provided.owner)
        lengths = provided.shards.lengths()
        object_bytes = np.fromiter(map(len, provided.objects), np.int64, len(provided.objects))
        region = plan.plan_region(lengths[rows], object_bytes, head=self.is_aggregator)
        sizes = self.group.allgather(np.array([region.tensor_bytes, region.object_bytes], np.int64))
        grouped = plan.plan_group(sizes[:, 0], sizes[:, 1], stripe_bytes=self.stripe_bytes)
        tensor_start = int(grouped.tensor_start[self.group.rank])
        structure = self._structure(provided, rows, lengths, region.shard_start + tensor_start)
        known = share_structure(
            self.world, self.group, structure, self.groups.group_of_rank.tobytes()
        )
        self.clock.lap("plan")
        return Placed(
            region,
            tensor_start,
            int(grouped.object_start[self.group.rank]),
            grouped.footer_start,
            provided.object_keys,
            provided.objects,
            provided.replicas,
            known,
        )

    def _structure(
        self, provided: Provided, rows: Any, lengths: Any, owned_start: Any
    ) -> Structure:
        count = len(provided.shards)
        start, length = np.zeros(count, np.int64), np.zeros(count, np.int64)
        start[rows], length[rows] = owned_start, lengths[rows]
        return Structure(
            provided.shards,
            np.full(count, self.world.rank, np.int32),
            provided.owner,
            Extents(np.full(count, self.number, np.int32), start, length),
        )

    @contextlib.contextmanager
    def subfile(self, engine: _engine.Engine, placed: Placed) -> Iterator[_engine.File]:
        """The group's subfile, open for writing on each member; removed by its creator if the body
        fails.
        """
        file: _engine.File | None = None
        try:
            with step(self.world, "create subfile"):
                if self.is_aggregator:
                    file = write.create_subfile(
                        engine,
                        self.path,
                        placed.footer_start,
                        direct=self.config.direct,
                        timeout_s=self.config.timeout_s,
                    )
            if self.group.size > 1:
                mode = b"\1" if file is not None and file.direct else b"\0"
                mode = self.group.broadcast(mode if self.is_aggregator else None)
            if self.groups.mode != "rank":
                with step(self.world, "open subfile"):
                    if file is None:
                        file = write.open_subfile(self.path, direct=mode == b"\1")
            assert file is not None
            self.direct = file.direct
            yield file
            with step(self.world, "close subfile"):
                file.close()
        except BaseException:
            with contextlib.suppress(OSError):
                if file is not None:
                    file.close()
                    if self.is_aggregator:
                        _engine.remove(self.path)
            raise

    def write(
        self,
        engine: _engine.Engine,
        file: _engine.File,
        placed: Placed,
        provided: Provided,
        host: stage.HostTensors,
    ) -> None:
        """Write this rank's two regions, and, unless a footer follows, sync them."""
        rows = np.flatnonzero(provided.owner)
        shards = provided.shards.take(rows)
        start = placed.region.shard_start + placed.tensor_start
        boxes = plan.plan_boxes(shards, host.strides)
        head = Superblock(self.save_id, self.number).pack() if self.is_aggregator else None
        with step(self.world, "write subfile"):
            staged = stage.stage_tensors(host, boxes, start, shards.lengths(), head=head)
            self._write_region(
                engine,
                file,
                placed.tensor_start,
                placed.region.tensor_bytes,
                staged,
                placed.known.encode,
            )
            objects = stage.stage_objects(
                placed.objects, placed.region.object_start + placed.object_start
            )
            self._write_region(
                engine, file, placed.object_start, placed.region.object_bytes, objects
            )
            self.clock.lap("write")
            if not self.is_aggregator:
                write.sync_subfile(engine, file, self.config.timeout_s)
        self.clock.lap("sync")

    def _write_region(
        self,
        engine: _engine.Engine,
        file: _engine.File,
        start: int,
        length: int,
        staged: Staged,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        if not length:
            return
        job = write.write_region(
            engine,
            file,
            start,
            length,
            staged,
            timeout_s=self.config.timeout_s,
            report=self.world.report_progress,
            meanwhile=meanwhile,
        )
        self._regions.append((start, length, job.checksums()))
        self._copy_s += job.copy_s
        self._checksum_s += job.checksum_s

    def finish_subfile(
        self, engine: _engine.Engine, file: _engine.File, placed: Placed
    ) -> Contents | None:
        """Gather the group's checksums; the aggregator ends the subfile with its rows of the index
        and syncs it.
        """
        own = Contents(
            placed.object_keys,
            Extents(
                np.full(len(placed.objects), self.number, np.int32),
                placed.region.object_start + placed.object_start,
                np.fromiter(map(len, placed.objects), np.int64, len(placed.objects)),
            ),
            self._own_regions(),
            placed.replicas,
        )
        parts = aggregate.gather(self.group, own.pack())
        self._regions.clear()
        contents = None
        with step(self.world, "finish subfile"):
            if self.is_aggregator:
                contents = Contents.concatenate([Contents.unpack(part) for part in parts])
                self._write_footer(engine, file, placed, contents)
                write.sync_subfile(engine, file, self.config.timeout_s)
                contents = Contents(
                    contents.object_keys,
                    contents.object_extents,
                    Regions.concatenate([contents.regions, self._own_regions()]),
                    contents.replicas,
                )
        self.clock.lap("footer")
        return contents

    def _own_regions(self) -> Regions:
        count = len(self._regions)
        checksums = [np.zeros(0, np.uint32), *(region[2] for region in self._regions)]
        return Regions(
            np.full(count, self.world.rank, np.int32),
            np.full(count, self.number, np.int32),
            np.array([region[0] for region in self._regions], np.int64),
            np.array([region[1] for region in self._regions], np.int64),
            np.concatenate(checksums),
        )

    def _write_footer(
        self, engine: _engine.Engine, file: _engine.File, placed: Placed, contents: Contents
    ) -> None:
        group = placed.known.group
        assert group is not None
        part = assemble_index(self.save_id, group.rows, contents, {}, placed.footer_start)
        image = index_module.encode(part, group.encoded())
        length = round_up(len(image) + Trailer.SIZE_BYTES, PAGE_BYTES)
        trailer = index_module.seal(image, self.save_id, placed.footer_start)
        footer = image.ljust(length - Trailer.SIZE_BYTES, b"\0") + trailer
        staged = stage.stage_objects([footer], np.array([placed.footer_start], np.int64))
        self._write_region(engine, file, placed.footer_start, length, staged)
        file.truncate(placed.footer_start + length)

    def commit(self, placed: Placed, contents: Contents | None, common: bytes | None) -> None:
        """Hand the rows to rank 0, which builds the index and publishes it."""
        parts = aggregate.gather(self.world, contents.pack() if contents is not None else None)
        totals = np.zeros(3, np.int64)
        with step(self.world, "commit"):
            if self.world.rank == 0:
                everything = Contents.concatenate([Contents.unpack(part) for part in parts])
                totals[:] = self._publish(placed, everything, common)
        self._totals = tuple(self.world.allreduce(totals, "max").tolist())
        self.clock.lap("commit")

    def _publish(self, placed: Placed, contents: Contents, common: bytes | None) -> list[int]:
        world = placed.known.world
        assert world is not None
        facts = _facts(self.groups, self.world)
        index = assemble_index(self.save_id, world.rows, contents, facts, None)
        try:
            check_objects(contents, index.shards.keys)
            commit.require_subfiles(
                self.directory,
                self.save_id,
                index.subfile_number.tolist(),
                index.subfile_length.tolist(),
            )
            if common is not None:
                crc32c = commit.write_common(self.directory, self.save_id, common)
                index = with_common(index, len(common), crc32c)
            sealed = index_module.sealed(index, world.encoded())
        except BaseException:
            commit.discard(self.directory, self.save_id)
            raise
        commit.publish(self.directory, self.save_id, sealed, replaces=self.replaces)
        removed = commit.sweep(self.directory, self.save_id)
        if removed:
            _log.info("removed %d files of earlier saves from %s", len(removed), self.directory)
        state_bytes = int(index.shard_extents.length.sum() + index.object_extents.length.sum())
        extra = 1 if common is None else 2
        file_bytes = int(index.subfile_length.sum()) + len(sealed) + len(common or b"")
        return [state_bytes, file_bytes, len(index.subfile_number) + extra]

    def report(self, make: Callable[..., _Report], engine: _engine.Engine) -> _Report:
        """What this save did."""
        state_bytes, file_bytes, files = self._totals
        return make(
            directory=self.directory,
            save_id=self.save_id,
            state_bytes=state_bytes,
            file_bytes=file_bytes,
            files=files,
            seconds=self.clock.seconds,
            phases_s=dict(self.clock.phases_s),
            engine=f"{engine.kind}: a probe found it faster here"
            if self.probed_engine
            else engine.reason,
            communicator=self.world.reason,
            aggregation=f"{self.groups.mode}: {self.groups.reason}",
            staging=f"{self.config.slab_count} slabs of {self.config.slab_bytes >> 20} MiB, "
            f"depth {self.config.queue_depth}",
            direct=self.direct,
            copy_s=self._copy_s,
            checksum_s=self._checksum_s,
        )


def _facts(groups: Groups, world: Communicator) -> dict[str, str]:
    versions = {
        name: str(getattr(sys.modules[name], "__version__", "unknown"))
        for name in ("megatron_uring", "torch", "numpy", "h5py", "mpi4py", "megatron.core")
        if name in sys.modules
    }
    return {
        "versions": json.dumps(versions),
        "aggregation": groups.mode,
        "communicator": world.kind,
        "world_size": str(world.size),
    }
