"""A run of a suite: all cases in turn, round after round, a record for each trial.

Guarantees
----------
- Rounds are interleaved: every case has its n-th trial before any has the next, and each round has
  an order of its own. The first round is a warm-up. A case that failed is not tried again.
- A run may be ended at any time: what was measured is in the results file, and the folder that was
  written to is removed (`sections.removed_in_the_end`). It can be resumed: trials that are in the
  file are not measured again.
- A full disk ends the run on all ranks with `DiskFullError`, which says what to do.
- With a budget of time no round is begun that would not end within it, beyond the first two.
"""

from __future__ import annotations

import json
import os
import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_uring import stage
from megatron_uring.bench import cache, formats, measure, peers, state
from megatron_uring.bench.sections import FOLDER, removed_in_the_end
from megatron_uring.bench.suite import emulations, results, suites
from megatron_uring.bench.suite.cases import PHASES, Case, Shelf
from megatron_uring.bench.suite.counting import OPERATIONS
from megatron_uring.bench.suite.format_case import FormatCase
from megatron_uring.bench.suite.pattern_case import Memory, PatternCase
from megatron_uring.bench.suite.results import Record
from megatron_uring.bench.suite.resuming import FULL, Before
from megatron_uring.bench.suite.suites import Ground, Suite
from megatron_uring.bench.suite.transfers import ARENA_BYTES
from megatron_uring.bench.suite.workloads import Workload
from megatron_uring.comm import Communicator
from megatron_uring.config import Config
from megatron_uring.errors import StorageError
from megatron_uring.progress import step

# Of free memory, what the two arenas of all ranks of a node may take.
_MEMORY_SHARE = 0.4
# What they and all states of whole saves and restores may take.
_MEMORY_SHARE_OF_ALL = 0.85
# Copies of a state that libraries keep from one save to the next, all of them together.
_KEPT_BY_PEERS = 2
# Of the free disk, what one case may write.
_DISK_SHARE = 0.8
# What a suite that is not thorough measures of our own saves.
_OURS_AT_LEAST = (formats.DEFAULT, formats.SHARED_IO_URING, formats.RANK_POSIX)


class DiskFullError(StorageError):
    """There is no room for what the suite writes."""


class Watcher:
    """Is told how a run goes; these do nothing."""

    def plan(self, trials: int) -> None:
        """So many trials are to come, some of them perhaps not."""

    def begin(self, case: str, trial: int) -> None:
        """A trial begins."""

    def end(self, record: Record) -> None:
        """It is over."""

    def note(self, text: str) -> None:
        """Something that the reader should know."""


@dataclass
class Run:
    """What is to be measured, where, and what is known of it already.

    Attributes
    ----------
    directory
        On the file system that is measured.
    path
        Of the results file, on rank 0.
    groups
        Of `suite.GROUPS`.
    budget_s
        Seconds after which no further round is begun; 0: no limit.
    extra
        Workloads of this rank beside the suite's.
    no_group
        Why torch.distributed is not initialised, if it is not.
    number
        Of the run, to resume it; empty: a new one.
    different
        Cases whose bytes came back different.
    """

    world: Communicator
    directory: str
    path: str
    suite: Suite
    groups: Sequence[str]
    peers: Sequence[str]
    trials: int
    budget_s: float = 0.0
    extra: Sequence[Workload] = ()
    no_group: str = ""
    watcher: Watcher = field(default_factory=Watcher)
    number: str = ""
    different: list[str] = field(default_factory=list)
    _before: Before = field(default_factory=Before)
    _environment: dict[str, Any] = field(default_factory=dict)
    _memory_left: int = 0

    def execute(self) -> None:
        """Measure all that is not in the results file yet; collective.

        Raises
        ------
        DiskFullError
            If the disk is, or would be, full.
        """
        folder = os.path.join(os.path.abspath(self.directory), FOLDER)
        with removed_in_the_end(self.world, folder):
            shelf = Shelf(self.world, os.path.join(folder, "files"))
            shelf.empty()
            self._know(folder)
            units = self._units(shelf)
            self._before.require_the_same([case for unit in units for case in unit])
            self._rounds(units)

    # ---------------------------------------------------------------------------------------------
    # what there is to measure

    def _know(self, folder: str) -> None:
        """The environment and what was measured before, the same on all ranks."""
        self.number = self._shared_text(self.number or uuid.uuid4().hex[:12])
        cold = cache.drop_caches(self.world, folder)
        with step(self.world, "read what was measured before"):
            engine = stage.open_engine(Config.from_environment(slab_count=1)).reason
            if self.world.rank == 0:
                self._environment = results.describe_environment(folder, engine, cold)
                if os.path.exists(self.path):
                    here = (self.suite.name, self.world.size, len(self.world.hosts))
                    self._before = Before.read(self.path, self.number, here, self._environment)
        self._environment = json.loads(self._shared_text(json.dumps(self._environment)))
        self._before = self._before.shared(self.world)

    def _shared_text(self, text: str) -> str:
        """Of rank 0."""
        data = text.encode() if self.world.rank == 0 else None
        return bytes(self.world.broadcast(data)).decode()

    def _room(self) -> tuple[int, int]:
        """Bytes of disk and of memory, in one direction, that a rank may take; agreed."""
        space = os.statvfs(self.directory)
        ranks_here = int(np.bincount(self.world.node_of_rank).max())
        known = [
            int(space.f_bavail * space.f_frsize * _DISK_SHARE) // self.world.size,
            int(stage.free_memory_bytes() * _MEMORY_SHARE) // ranks_here // 2,
        ]
        disk, memory = self.world.allreduce(np.array(known, np.int64), "min").tolist()
        arena = min(memory, ARENA_BYTES)
        self._memory_left = int(memory * 2 / _MEMORY_SHARE * _MEMORY_SHARE_OF_ALL) - 2 * arena
        return disk, arena

    def _has_memory(self, what: str, own_bytes: int, copies: int) -> bool:
        """Whether a state, what it is restored to, and copies of it fit into memory beside all that
        was granted before; if so, it is granted. Agreed.
        """
        most = int(self.world.allreduce(np.array([own_bytes], np.int64), "max")[0])
        needed = (2 + copies) * most
        if needed > self._memory_left:
            self.watcher.note(f"left out: {what}: no memory for {needed / 1e9:.1f} GB a rank")
            return False
        self._memory_left -= needed
        return True

    def _units(self, shelf: Shelf) -> list[list[Case]]:
        """Cases that belong together: a write, and the read of what it wrote."""
        disk_bytes, arena_bytes = self._room()
        self._require_room(disk_bytes)
        there = self._environment["stripe_bytes"], self._environment["direct"]
        ground = Ground(self.world.rank, self.world.size, *there, self.extra)
        if not ground.direct:
            self.watcher.note("left out: direct I/O: the file system refuses it")
        found = suites.specs(self.suite, ground, self.groups)
        extents = np.array([spec.extent_bytes for spec in found], np.int64)
        # of the largest rank: all leave out the same
        extents = self.world.allreduce(extents, "max") if len(found) else extents
        specs, left_out = suites.with_room(found, extents.tolist(), disk_bytes)
        for text in left_out:
            self.watcher.note(f"left out: {text}")
        memory = Memory.of(specs, self.world.rank, arena_bytes)
        units: list[list[Case]] = []
        for case in [PatternCase(self.world, shelf, memory, spec).case() for spec in specs]:
            if case.operation == results.READ and units and _same_files(units[-1][0], case):
                units[-1].append(case)
            else:
                units.append([case])
        if "inventory" in self.groups:
            first = suites.realistic(self.suite, ground)[0]
            units += self._inventory(shelf, ground, first, "")
        if "restore" in self.groups:
            units += self._restores(shelf, ground)
        if "inventory" in self.groups:
            for workload in self.extra:
                units += self._inventory(shelf, ground, workload, f"{workload.name}: ")
        return units

    def _require_room(self, disk_bytes: int) -> None:
        """What every suite needs at least."""
        wanted, ranks = self.suite.bytes_per_rank, self.world.size
        if disk_bytes < wanted:
            raise DiskFullError(
                "begin the suite",
                path=self.directory,
                expected=f"{wanted * ranks / _DISK_SHARE / 1e9:.1f} GB free",
                found=f"{disk_bytes * ranks / _DISK_SHARE / 1e9:.1f} GB",
                cause="a smaller --mebibytes-per-rank, or another --directory, would do",
            )

    def _inventory(
        self, shelf: Shelf, ground: Ground, workload: Workload, prefix: str
    ) -> list[list[Case]]:
        """Ours, peers and emulations on a workload."""
        copies = _KEPT_BY_PEERS if self.peers else 0
        if not self._has_memory(f"inventory: {workload.name}", workload.total_bytes, copies):
            return []
        ours = formats.our_saves(self.world, probe="off")
        if not self.suite.thorough:
            ours = [one for one in ours if one.what in _OURS_AT_LEAST]
        others = [
            *peers.peers(list(self.peers), self.world, self.no_group),
            *(emulations.emulations(self.world, self.no_group) if self.peers else ()),
        ]
        saved = state.workload_state(self.world.rank, workload.names, workload.tensor_bytes)
        target = saved.empty()
        return [
            FormatCase(
                *(self.world, shelf, "inventory", one, saved, target, workload.name),
                name=prefix + one.what,
                page_cache=one.page_cache or not ground.direct,
            ).cases()
            for one in (*ours, *others)
        ]

    def _restores(self, shelf: Shelf, ground: Ground) -> list[list[Case]]:
        """Our own, for its parts: into tensors that are there, and into new ones."""
        if not self._has_memory("restore: our own", self.suite.bytes_per_rank, 1):
            return []
        saved = state.large_state(self.world.rank, self.suite.bytes_per_rank / 1e9)
        target = saved.empty()
        ways = formats.our_loads(self.world, probe="off")[0], formats.our_new_loads(self.world)
        cases = [
            FormatCase(
                # a restore into new tensors puts them in the place of those that were there
                *(self.world, shelf, "restore", one, saved, state.State(dict(target.tensors))),
                workload="synthetic",
                name=one.what,
                page_cache=not ground.direct,
            ).cases()
            for one in ways
        ]
        return [[case for case in own if case.operation == results.READ] for own in cases]

    # ---------------------------------------------------------------------------------------------
    # the rounds

    def _rounds(self, units: list[list[Case]]) -> None:
        began = ended = time.monotonic()
        round_s = 0.0
        self.watcher.plan((self.trials + 1) * sum(map(len, units)))
        if self._before.done:
            self._warm_up(units)
        for trial in range(self.trials + 1):
            if trial > 1 and not self._time_left(time.monotonic() - began + round_s):
                count = f"{trial - 1} of {self.trials} trials"
                self.watcher.note(f"ended after {count}: no time left; --resume goes on")
                return
            for case in _shuffled(units, trial):
                if self._is_due(case, trial):
                    self._trial(case, trial)
            round_s, ended = time.monotonic() - ended, time.monotonic()

    def _is_due(self, case: Case, trial: int) -> bool:
        key = case.group, case.name
        return (*key, trial) not in self._before.done and key not in self._before.failed

    def _warm_up(self, units: list[list[Case]]) -> None:
        """Of a run that is resumed in another process: no records, the file has those."""
        for case in _shuffled(units, 0):
            if any(self._is_due(case, trial) for trial in range(1, self.trials + 1)):
                self.watcher.begin(f"{case.group}: {case.name}", 0)
                self._stop_if_full(case, case.timed(self.world, 0).reason)

    def _time_left(self, ends_s: float) -> bool:
        """Whether what ends after so long ends within the budget; agreed."""
        most = self.world.allreduce(np.array([int(ends_s * 1e6)], np.int64), "max")
        return not self.budget_s or int(most[0]) / 1e6 <= self.budget_s

    def _trial(self, case: Case, trial: int) -> None:
        self.watcher.begin(f"{case.group}: {case.name}", trial)
        began = results.now()
        row = case.timed(self.world, trial)
        record = self._record(case, trial, row, began)
        if record.error:
            self._before.failed.add((case.group, case.name))
        if row.different:
            self.different.append(f"{case.group}: {case.name}: {record.error}")
        # the results may lie on the same disk: without what was written there is room for a line
        self._stop_if_full(case, record.error, before=lambda: self._append(record))
        self._append(record)
        self.watcher.end(record)

    def _append(self, record: Record) -> None:
        with step(self.world, "append to the results"):
            if self.world.rank == 0:
                results.append_record(self.path, record)

    def _record(self, case: Case, trial: int, row: measure.Row, began: str) -> Record:
        phases = case.phases_s() if not row.reason else {}
        spent = np.array([round(phases.get(name, 0.0) * 1e6) for name in PHASES], np.int64)
        counts = np.array([case.operations.get(name, 0) for name in OPERATIONS], np.int64)
        spent = self.world.allreduce(spent, "max")
        counts = self.world.allreduce(counts, "sum")
        named = zip(PHASES, spent.tolist(), strict=True)
        counted = zip(OPERATIONS, counts.tolist(), strict=True)
        return Record(
            run=self.number,
            suite=self.suite.name,
            group=case.group,
            case=case.name,
            kind=case.kind,
            operation=case.operation,
            trial=trial,
            ranks=self.world.size,
            nodes=len(self.world.hosts),
            total_bytes=case.total_bytes,
            seconds=row.seconds,
            process_cpu_s=round(row.process_cpu_s, 6),
            machine_cpu_s=round(row.machine_cpu_s, 6),
            peak_bytes=row.peak_bytes,
            axes=dict(case.axes),
            phases_s={name: value / 1e6 for name, value in named if name in phases},
            operations={name: value for name, value in counted if value},
            error=row.reason,
            environment=self._environment,
            time=began,
        )

    def _stop_if_full(
        self, case: Case, error: str, before: Callable[[], None] = lambda: None
    ) -> None:
        """Raise `DiskFullError` if the disk was full, `before` that once there is room again."""
        full = np.array([int(_no_space(case.error))], np.int64)
        if not error or not self.world.allreduce(full, "max")[0]:
            return
        case.clear()
        before()
        raise DiskFullError(
            f"measure {case.group}: {case.name}",
            path=self.directory,
            expected=f"room for {case.total_bytes / 1e9:.1f} GB",
            found=error,
            cause=f"the results so far are in {self.path}; what was written is removed",
        )


def _same_files(write: Case, read: Case) -> bool:
    return write.group == read.group and write.axes == read.axes


def _shuffled(units: Sequence[Sequence[Case]], trial: int) -> Iterator[Case]:
    """All cases, in an order of each round's own, the same on all ranks."""
    order = list(units)
    random.Random(trial).shuffle(order)
    for unit in order:
        yield from unit


def _no_space(error: BaseException | None) -> bool:
    seen = 0
    while error is not None and seen < 8:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False
