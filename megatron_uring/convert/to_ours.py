"""Our own format as the target of a conversion.

Guarantees
----------
- It is a save like any other: the same steps, the same proof of ownership, the same commit
  (`saving`, `pending`). What differs is that a region is written window by window, each read from
  the source right before, so that the state is never in memory.
- Objects that could not be loaded again without running code are refused, by key and class.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_uring import commit, stage, write
from megatron_uring.columns import Uint8Array, Uint32Array
from megatron_uring.convert import parts as parts_module
from megatron_uring.convert.job import Job
from megatron_uring.convert.parts import Scratch, part_of, share
from megatron_uring.dcp import PLANNER_KEY
from megatron_uring.drain import Drain
from megatron_uring.layout import (
    BACKEND,
    BACKEND_VERSION,
    DTYPE_BYTES,
    METADATA_NAME,
    Superblock,
)
from megatron_uring.objects import serialize_object
from megatron_uring.pending import PendingSave
from megatron_uring.progress import Clock, step, together
from megatron_uring.saving import Placed, Saving
from megatron_uring.shards import ShardTable
from megatron_uring.tables import Provided, Staged


def write_checkpoint(job: Job) -> None:
    """Write and commit the checkpoint; collective."""
    world, catalog = job.world, job.catalog
    clock = Clock()
    with together(world):
        with step(world, "collect objects"):
            provided = _provide(job)
        saving = Saving.begin(world, job.directory, job.config, provided, clock)
        placed = saving.place(provided)
        with step(world, "open engine"):
            engine = stage.open_engine(saving.config)
        try:
            saving.open_subfile(engine, placed)
            saving.drain = _Windows(job, saving, placed, provided.shards)
        except BaseException:
            saving.discard()
            raise
    report = PendingSave(saving, placed, catalog.common, clock.began).wait()
    with step(world, "write metadata.json"):
        if world.rank == 0 and catalog.megatron is not None:
            text = job.metadata_bytes(BACKEND, BACKEND_VERSION)
            commit.replace_file(job.directory, METADATA_NAME, text, report.save_id)
            if catalog.common is not None:
                commit.replace_common(job.directory, catalog.common, report.save_id)


def _provide(job: Job) -> Provided:
    """This rank's shards, whose elements are nowhere yet, and its objects."""
    catalog, world = job.catalog, job.world
    shards = catalog.shards
    rows = np.flatnonzero(share(shards.lengths(), world.size) == world.rank)
    objects = {key: job.object_bytes(key, wrapped=False, proved=True) for key in job.own_objects}
    if catalog.planner_data is not None and world.rank == 0:
        known = {*catalog.shards.keys, *catalog.object_keys}
        paths = {key: path for key, path in catalog.planner_data.items() if key in known}
        if any(tuple(path) != (key,) for key, path in paths.items()):  # else it says nothing
            objects[PLANNER_KEY] = serialize_object(PLANNER_KEY, {"planner_data": paths})
    own = shards.take(rows).compact()
    return Provided(
        own,
        np.ones(len(own), bool),
        (),
        np.zeros(own.shape.shape, np.int64),
        tuple(objects),
        tuple(objects.values()),
    )


class _Windows(Drain):
    """A drain that writes each of its regions window by window, when it is waited for."""

    def __init__(self, job: Job, saving: Saving, placed: Placed, shards: ShardTable) -> None:
        syncs = not saving.is_aggregator
        super().__init__(saving.engine, saving.file, saving.config, syncs=syncs, clock=saving.clock)
        self._job, self._saving, self._placed, self._shards = job, saving, placed, shards
        start = placed.region.shard_start + placed.tensor_start
        filled = np.flatnonzero(shards.lengths() > 0)
        self._rows = filled[np.argsort(start[filled], kind="stable")]
        self._start = start[self._rows]
        self._stop = self._start + shards.lengths()[self._rows]
        self._spare = [Scratch(), Scratch()]
        self._written: list[tuple[int, int, Uint32Array]] = []

    def wait(self, report: Callable[[int], None]) -> None:
        """Read and write all of it, and sync what nobody else syncs."""
        self._write_tensors()
        placed = self._placed
        if placed.region.object_bytes:
            staged = stage.stage_objects(
                placed.objects, placed.region.object_start + placed.object_start
            )
            start, length = placed.object_start, placed.region.object_bytes
            self._written.append((start, length, self._write(start, length, staged)))
        if self._syncs:
            write.sync_subfile(self.engine, self.file, self.config.timeout_s)
        self.advance()

    @property
    def regions(self) -> list[tuple[int, int, Uint32Array]]:
        """Start, length and checksums of each region."""
        return self._written

    def _write_tensors(self) -> None:
        start, length = self._placed.tensor_start, self._placed.region.tensor_bytes
        step_bytes = parts_module.WINDOW_BYTES
        windows = [
            (at, min(step_bytes, start + length - at))
            for at in range(start, start + length, step_bytes)
        ]
        checksums = []
        waiting = [self._read(*windows[0])] if windows else []
        for number, (at, count) in enumerate(windows):
            staged = stage.stage_objects([waiting.pop()], np.array([at], np.int64))  # type: ignore[list-item]

            def read_next(number: int = number) -> None:
                if number + 1 < len(windows):
                    waiting.append(self._read(*windows[number + 1]))

            checksums.append(self._write(at, count, staged, read_next))
        if windows:
            self._written.append((start, length, np.concatenate(checksums)))

    def _read(self, at: int, count: int) -> Uint8Array:
        """The bytes of the window [at, at + count) of the subfile."""
        self._spare.reverse()  # of the two one is being written
        buffer = self._spare[0].take(count)
        buffer[:] = 0
        if not at and self._saving.is_aggregator:
            head = Superblock(self._saving.save_id, self._saving.number).pack()
            buffer[: len(head)] = np.frombuffer(head, np.uint8)
        first = int(np.searchsorted(self._stop, at, side="right"))
        last = int(np.searchsorted(self._start, at + count))
        parts, places = [], []
        for position in range(first, last):
            start, end = int(self._start[position]), int(self._stop[position])
            row = int(self._rows[position])
            item = int(DTYPE_BYTES[self._shards.dtype[row]])
            begin = max(start, at)
            stop = min(end, at + count)
            part = part_of(self._shards, row, (begin - start) // item, (stop - start) // item)
            parts.append(part)
            places.append(begin - at)
        self._job.read(parts, places, buffer)
        return buffer

    def _write(
        self, at: int, count: int, staged: Staged, meanwhile: Callable[[], None] | None = None
    ) -> Uint32Array:
        job = write.write_region(
            self.engine,
            self.file,
            at,
            count,
            staged,
            timeout_s=self.config.timeout_s,
            report=lambda done: self._job.moved(0),
            meanwhile=meanwhile,
        )
        self._job.moved(count)
        return job.checksums()
