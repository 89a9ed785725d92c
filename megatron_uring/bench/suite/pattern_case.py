"""A pattern as a case: its layout on this rank, and the memory that all patterns share.

Guarantees
----------
- Files that are read are in no page cache, and were written by a case with the same layout.
- What was written is read back and compared in the warm-up; what was read is compared there too.
- What is aligned in a rank's data is aligned in memory, however little of that there is.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np

from megatron_uring.bench import cache
from megatron_uring.bench.suite import patterns
from megatron_uring.bench.suite.cases import Case, Shelf, total_bytes
from megatron_uring.bench.suite.patterns import Layout, Place, Rules
from megatron_uring.bench.suite.results import PATTERN, WRITE, Axis
from megatron_uring.bench.suite.transfers import ARENA_BYTES, SLABS, Arena, Options, Transfer
from megatron_uring.bench.suite.workloads import Workload
from megatron_uring.comm import Communicator
from megatron_uring.progress import step

_LAP_UNIT_BYTES = 2 << 20


@dataclass(frozen=True)
class Spec:
    """A pattern with a workload; see `RESULTS.md` for what its parts mean."""

    group: str
    case: str
    operation: str
    workload: Workload
    pattern: str
    rules: Rules
    options: Options

    @property
    def axes(self) -> dict[str, Axis]:
        """As records hold them."""
        options = asdict(self.options)
        slab_bytes = options.pop("slab_bytes")
        through_slabs = self.options.staging == SLABS
        return {
            "pattern": self.pattern,
            "alignment": self.rules.alignment,
            "chunk_bytes": self.rules.chunk_bytes,
            "submission_bytes": slab_bytes if through_slabs else self.rules.submission_bytes,
            **options,
        }

    @property
    def extent_bytes(self) -> int:
        """Of this rank's data in memory."""
        return patterns.extent_bytes(self.workload.tensor_bytes, self.rules)


@dataclass
class Memory:
    """What all patterns write from and read to."""

    source: Arena
    target: Arena

    @classmethod
    def of(cls, specs: list[Spec], rank: int, most_bytes: int) -> Memory:
        """As large as the largest of them needs; of more than `most_bytes` for each direction, the
        data lies there several times over.
        """
        extent = max((spec.extent_bytes for spec in specs), default=1)
        # whole huge pages, so that what is aligned in the data is aligned in memory
        lap = min(extent, max(most_bytes // _LAP_UNIT_BYTES, 1) * _LAP_UNIT_BYTES)
        room = max(map(_piece_bytes, specs), default=1) if extent > lap else 0
        return cls(Arena(lap, room, rank), Arena(lap, room, None))


def _piece_bytes(spec: Spec) -> int:
    """Of the longest submission, at most."""
    rules = spec.rules
    if rules.submission_bytes and rules.alignment == patterns.PACKED:
        return rules.submission_bytes
    tensor = int(spec.workload.tensor_bytes.max(initial=1))
    return min(tensor, rules.submission_bytes or tensor) + patterns.PAGE_BYTES


@dataclass
class PatternCase:
    """A `Spec` on this rank."""

    world: Communicator
    shelf: Shelf
    memory: Memory
    spec: Spec

    def case(self) -> Case:
        """Collective."""
        spec, writes = self.spec, self.spec.operation == WRITE
        total = total_bytes(self.world, spec.workload.total_bytes)
        size: dict[str, Axis] = {
            "workload": spec.workload.name,
            "bytes_per_rank": total // self.world.size,
        }
        transfer = self._transfer
        return Case(
            spec.group,
            spec.case,
            PATTERN,
            spec.operation,
            {**size, **spec.axes},
            total,
            self._prepare_write if writes else self._prepare_read,
            self._write if writes else transfer.read,
            self._check_write if writes else transfer.check,
            transfer.close,
            transfer.release,
            self.shelf.empty,
            lambda: transfer.outcome.phases_s,
            lambda: transfer.outcome.submit_calls,
        )

    @cached_property
    def _transfer(self) -> Transfer:
        memory = self.memory
        return Transfer(
            self.world,
            self.shelf.folder,
            self._layout(),
            self.spec.options,
            memory.source,
            memory.target,
        )

    def _layout(self) -> Layout:
        """Collective."""
        world, spec = self.world, self.spec
        extent = int(world.allreduce(np.array([spec.extent_bytes], np.int64), "max")[0])
        node = world.node_of_rank[world.rank]
        members = np.flatnonzero(world.node_of_rank == node)
        place = Place(
            world.rank,
            world.size,
            int(node),
            int(np.searchsorted(members, world.rank)),
            len(members),
            patterns.region_bytes(extent, spec.rules),
        )
        return patterns.PATTERNS[spec.pattern](spec.workload.tensor_bytes, place, spec.rules)

    @property
    def _key(self) -> object:
        """What is the same for cases that can read what this one writes."""
        spec = self.spec
        return spec.workload.name, spec.extent_bytes, spec.pattern, spec.rules

    def _prepare_write(self) -> None:
        self.shelf.empty()
        self._touch_cache()
        self._transfer.prepare()

    def _touch_cache(self) -> None:
        if not self.spec.options.direct:
            folder = os.path.dirname(self.shelf.folder)
            cache.touch(self.world, folder, min(self.spec.workload.total_bytes, ARENA_BYTES))

    def _write(self) -> None:
        self._transfer.write()
        self.shelf.holds = self._key

    def _prepare_read(self) -> None:
        # through slabs the reader compares with checksums, which it only has of its own writing
        if not self.shelf.has(self._key) or self.spec.options.staging == SLABS:
            self._prepare_write()
            with step(self.world, "write what is to be read"):
                self._write()
        cache.drop_caches(self.world, self.shelf.folder)
        self._touch_cache()
        self._transfer.prepare()

    def _check_write(self) -> None:
        timed = self._transfer.outcome
        self._transfer.prepare()
        self._transfer.read()
        self._transfer.check()
        self._transfer.outcome = timed
