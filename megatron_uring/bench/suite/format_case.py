"""Whole saves and restores as cases: ours, those of other libraries, and emulations.

Guarantees
----------
- A library that cannot be used on one rank is left out on all, with the reason.
- Files that are read are in no page cache, and were written in the same format.
- What comes back is compared in the warm-up, after the save and after the restore.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from megatron_uring import checkpoint
from megatron_uring.bench import cache, measure
from megatron_uring.bench.formats import Format
from megatron_uring.bench.state import State
from megatron_uring.bench.suite import counting
from megatron_uring.bench.suite.cases import PHASES, Case, Shelf, total_bytes
from megatron_uring.bench.suite.results import READ, WRITE
from megatron_uring.comm import Communicator
from megatron_uring.progress import step


@dataclass
class FormatCase:
    """A state in a format: ours, a peer's, or an emulation.

    Attributes
    ----------
    name
        Of its cases, which the operation is added to.
    page_cache
        Whether its bytes go through the page cache here.
    """

    world: Communicator
    shelf: Shelf
    group: str
    one: Format
    state: State
    target: State
    workload: str
    name: str
    page_cache: bool

    def cases(self) -> list[Case]:
        """Its save and its restore; collective."""
        self._failure = measure.attempt(self.world, self._build)
        return [self._case(WRITE), self._case(READ)]

    def _case(self, operation: str) -> Case:
        total = total_bytes(self.world, self.state.total_bytes)
        writes = operation == WRITE
        return Case(
            self.group,
            f"{self.name}, {operation}",
            self.one.kind,
            operation,
            {"workload": self.workload, "bytes_per_rank": total // self.world.size},
            total,
            self._prepare_save if writes else self._prepare_load,
            self._save if writes else self._load,
            self._check_save if writes else self._check_load,
            lambda: None,
            lambda: None,
            self.shelf.empty,
            lambda: self._phases_s(operation),
            count=self._count(),
        )

    def _count(self) -> Callable[[], AbstractContextManager[Counter[str]]]:
        if self.one.native:
            return counting.recorded
        return lambda: counting.traced(self.shelf.folder)

    def _build(self) -> None:
        """What a format builds once, outside of the clock."""
        self._saver = self.one.saver(self.state)
        self._loader = self.one.loader(self.target)

    @property
    def _key(self) -> object:
        return self.one.what, self.workload, self.state.total_bytes

    def _prepare_save(self) -> None:
        if self._failure:
            raise measure.UnavailableError(self._failure)
        self.shelf.empty()
        self._touch_cache()
        self.state.read()

    def _touch_cache(self) -> None:
        if self.page_cache:
            cache.touch(self.world, os.path.dirname(self.shelf.folder), self.state.total_bytes)

    def _save(self) -> None:
        self._saver(self.shelf.folder)
        self.shelf.holds = self._key

    def _prepare_load(self) -> None:
        if not self.shelf.has(self._key):
            self._prepare_save()
            with step(self.world, "write what is to be read"):
                self._save()
        self.target.wipe()
        cache.drop_caches(self.world, self.shelf.folder)
        self._touch_cache()

    def _load(self) -> None:
        self._loader(self.shelf.folder)

    def _check_save(self) -> None:
        self.target.wipe()
        self._load()
        self._check_load()

    def _check_load(self) -> None:
        self.state.check_equal(self.target)

    def _phases_s(self, operation: str) -> dict[str, float]:
        report = checkpoint.last_reports().get("save" if operation == WRITE else "restore")
        if self.one.kind != measure.OURS or report is None:
            return {}
        found = {name: value for name, value in report.phases_s.items() if name in PHASES}
        return {**found, "copy": report.copy_s, "checksum": report.checksum_s}
