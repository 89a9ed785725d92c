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
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_uring import _engine, aggregate, commit, plan, probing, stage, write
from megatron_uring import index as index_module
from megatron_uring.comm import Communicator
from megatron_uring.config import Config
from megatron_uring.drain import Drain
from megatron_uring.errors import StorageError
from megatron_uring.index_rules import assemble_index, check_objects, with_common
from megatron_uring.layout import PAGE_BYTES, Superblock, Trailer, round_up, subfile_name
from megatron_uring.progress import Clock, announce, step
from megatron_uring.report import Totals, loaded_versions
from megatron_uring.structures import KnownStructure, group_communicator, share_structure
from megatron_uring.tables import Contents, Extents, Groups, Provided, Regions, Structure
from megatron_uring.tier import Place
from megatron_uring.tiered import TieredDrain, open_drain

_log = logging.getLogger(__name__)
# The slowest rank is found by one number: microseconds above, the rank in the lower bits.
_RANK_BITS = 24
_LONGEST_US = (1 << 62 - _RANK_BITS) - 1


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
        announce(f"save {self.save_id} to {directory}", world.rank)
        self.direct = self.probed_engine = self.lazy = False
        self.engine: _engine.Engine
        self.drain: Drain | TieredDrain | None = None
        self.timeline: bool = setting["timeline"]
        self.lazy_bytes = 0
        self.own_s = 0.0
        self.page_locking = ""
        self._file: _engine.File | None = None
        self._regions: list[tuple[int, int, Any]] = []
        self.totals = Totals()

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
                    "timeline": config.timeline,
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

    def choose_engine(self, placed: Placed, host: stage.HostTensors) -> _engine.Engine:
        """The engine of this configuration; of an asynchronous save one with a pool of its own."""
        engine = self._staging_engine(placed) if self.lazy else stage.open_engine(self.config)
        self.page_locking = stage.page_lock(engine, host)
        return engine

    def _staging_engine(self, placed: Placed) -> _engine.Engine:
        node = self.world.node_of_rank[self.world.rank]
        ranks_here = int(np.count_nonzero(self.world.node_of_rank == node))
        state_bytes = placed.region.tensor_bytes + placed.region.object_bytes
        if self.config.staging_directory and not self.config.staging_bytes:
            state_bytes = 0  # fences wait for the node's disk: memory beside it would gain nothing
        return stage.open_staging_engine(self.config, state_bytes, ranks_here)

    def open_subfile(self, engine: _engine.Engine, placed: Placed) -> None:
        """The group's subfile, open for writing on each member."""
        self.engine = engine
        with step(self.world, "create subfile"):
            if self.is_aggregator:
                self._file = write.create_subfile(
                    engine,
                    self.path,
                    placed.footer_start,
                    direct=self.config.direct,
                    timeout_s=self.config.timeout_s,
                    proved=self.lazy,
                )
        if self.group.size > 1:
            mode = b"\1" if self._file is not None and self._file.direct else b"\0"
            mode = self.group.broadcast(mode if self.is_aggregator else None)
        if self.groups.mode != "rank":
            with step(self.world, "open subfile"):
                if self._file is None:
                    self._file = write.open_subfile(self.path, direct=mode == b"\1")
        self.direct = self.file.direct

    @property
    def file(self) -> _engine.File:
        """Of the group; open from `open_subfile` on."""
        assert self._file is not None
        return self._file

    def discard(self) -> None:
        """Stop writing; whoever created the subfile removes it. Not collective."""
        if self.drain is not None and not self.drain.advance():
            self.drain.give_up(StorageError("write subfile", path=self.path, cause="given up"))
        self.settle(committed=False)
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
                if self.is_aggregator:
                    _engine.remove(self.path)

    def begin_drain(self, placed: Placed, provided: Provided, host: stage.HostTensors) -> None:
        """Begin to write this rank's two regions, synced unless a footer follows at once."""
        rows = np.flatnonzero(provided.owner)
        shards = provided.shards.take(rows)
        start = placed.region.shard_start + placed.tensor_start
        lengths = shards.lengths()
        head = Superblock(self.save_id, self.number).pack() if self.is_aggregator else None

        def keys_at(begin: int, end: int) -> list[str]:
            inside = np.flatnonzero((start < end) & (start + lengths > begin) & (lengths > 0))
            return [shards.keys[number] for number in shards.tensor[inside].tolist()]

        with step(self.world, "begin to write subfile"):
            boxes = plan.plan_boxes(shards, host.strides)
            staged = stage.stage_tensors(host, boxes, start, lengths, head=head)
            objects = stage.stage_objects(
                placed.objects, placed.region.object_start + placed.object_start
            )
            self.lazy_bytes = host.lazy_bytes
            region = placed.region
            if self.lazy:
                where = Place(self.directory, self.save_id, self.number, self.world.rank)
                length = region.tensor_bytes + region.object_bytes
                self.drain = open_drain(
                    self.engine, self.file, self.config, where, length, self.clock
                )
            else:
                syncs = not self.is_aggregator
                self.drain = Drain(
                    self.engine, self.file, self.config, syncs=syncs, clock=self.clock
                )
            self.drain.add(placed.tensor_start, placed.region.tensor_bytes, staged, keys_at)
            self.drain.add(placed.object_start, placed.region.object_bytes, objects)
        if self.lazy:
            self.drain.watch()
        self.clock.lap("begin to write")

    def settle(self, committed: bool) -> None:
        """Keep or remove what is in the node's staging directory. Not collective."""
        if isinstance(self.drain, TieredDrain):
            self.drain.settle(committed)

    def finish_drain(self, placed: Placed) -> None:
        """Wait until this rank's regions are on disk."""
        assert self.drain is not None
        # with its id: ranks that wait for different saves must not take each other's checksums
        with step(self.world, f"write subfile of save {self.save_id}"):
            placed.known.encode()
            self.drain.wait(self.world.report_progress)
            self._regions += self.drain.regions
        self.own_s = self.drain.drained_s - self.clock.met_s
        self.clock.lap("drain" if self.lazy else "write", "drain wait")

    def finish_subfile(self, placed: Placed) -> Contents | None:
        """Gather the group's checksums; the aggregator ends the subfile with its rows of the index
        and syncs it; it is closed.
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
                began_s = self.clock.seconds
                self._write_footer(placed, contents)
                with self.clock.span("sync"):
                    write.sync_subfile(self.engine, self.file, self.config.timeout_s)
                if not self.lazy:  # else its own part is durable already
                    self.own_s += self.clock.seconds - began_s
                contents = Contents(
                    contents.object_keys,
                    contents.object_extents,
                    Regions.concatenate([contents.regions, self._own_regions()]),
                    contents.replicas,
                )
        with step(self.world, "close subfile"):
            self.file.close()
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

    def _write_footer(self, placed: Placed, contents: Contents) -> None:
        group = placed.known.group
        assert group is not None
        part = assemble_index(self.save_id, group.rows, contents, {}, placed.footer_start)
        image = index_module.encode(part, group.encoded())
        length = round_up(len(image) + Trailer.SIZE_BYTES, PAGE_BYTES)
        trailer = index_module.seal(image, self.save_id, placed.footer_start)
        footer = image.ljust(length - Trailer.SIZE_BYTES, b"\0") + trailer
        staged = stage.stage_objects([footer], np.array([placed.footer_start], np.int64))
        job = write.write_region(
            self.engine,
            self.file,
            placed.footer_start,
            length,
            staged,
            timeout_s=self.config.timeout_s,
            report=self.world.report_progress,
        )
        self._regions.append((placed.footer_start, length, job.checksums()))
        self.file.truncate(placed.footer_start + length)

    def commit(self, placed: Placed, contents: Contents | None, common: bytes | None) -> None:
        """Hand the rows to rank 0, which builds the index and publishes it."""
        parts = aggregate.gather(self.world, contents.pack() if contents is not None else None)
        published = [0, 0, 0]
        with step(self.world, "commit"):
            if self.world.rank == 0:
                everything = Contents.concatenate([Contents.unpack(part) for part in parts])
                published = self._publish(placed, everything, common)
        own_us = min(int(self.own_s * 1e6), _LONGEST_US)
        slowest = own_us << _RANK_BITS | self.world.rank
        most = self.world.allreduce(np.array([*published, slowest], np.int64), "max").tolist()
        state_bytes, file_bytes, files, slowest = most
        slowest_us, slowest_rank = divmod(slowest, 1 << _RANK_BITS)
        self.totals = Totals(state_bytes, file_bytes, files, slowest_rank, slowest_us / 1e6)
        self.clock.lap("commit")

    def _publish(self, placed: Placed, contents: Contents, common: bytes | None) -> list[int]:
        world = placed.known.world
        assert world is not None
        facts = _facts(self.groups, self.world)
        began = time.perf_counter()
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
        self.clock.add("index", began, time.perf_counter(), len(sealed))
        with self.clock.span("publish"):
            commit.publish(self.directory, self.save_id, sealed, replaces=self.replaces)
        with self.clock.span("sweep"):
            removed = commit.sweep(self.directory, self.save_id)
        if removed:
            _log.info("removed %d files of earlier saves from %s", len(removed), self.directory)
        state_bytes = int(index.shard_extents.length.sum() + index.object_extents.length.sum())
        extra = 1 if common is None else 2
        file_bytes = int(index.subfile_length.sum()) + len(sealed) + len(common or b"")
        return [state_bytes, file_bytes, len(index.subfile_number) + extra]


def _facts(groups: Groups, world: Communicator) -> dict[str, str]:
    return {
        "versions": json.dumps(loaded_versions()),
        "aggregation": groups.mode,
        "communicator": world.kind,
        "world_size": str(world.size),
    }
