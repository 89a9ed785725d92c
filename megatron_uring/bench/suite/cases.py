"""Cases: what is timed, ready to be called again, and the one folder that all of them write to.

Guarantees
----------
- A write begins in an empty folder, with nothing left to write back.
- What a case does before, within and after the clock, it does on all ranks; what fails on one of
  them is a reason on all.
- The names of phases are those of `RESULTS.md`, the same on all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np

from megatron_uring.bench import measure
from megatron_uring.bench.sections import empty_folder
from megatron_uring.bench.suite import counting
from megatron_uring.bench.suite.results import Axis
from megatron_uring.comm import Communicator

PHASES = (
    *("open", "allocate", "transfer", "sync", "close", "copy", "checksum"),  # of a pattern
    *("begin", "collect", "engine", "plan", "write", "footer", "commit"),  # of our save
    *("index", "read", "finish"),  # of our restore
)


@dataclass
class Shelf:
    """The one folder that cases write to, and what is in it."""

    world: Communicator
    folder: str
    holds: object = None

    def empty(self) -> None:
        """Collective."""
        self.holds = None
        empty_folder(self.world, self.folder)

    def has(self, key: object) -> bool:
        """Whether that is what it holds, on all ranks: one of them may have failed to write it;
        collective.
        """
        own = np.array([int(self.holds == key)], np.int64)
        return bool(self.world.allreduce(own, "min")[0])


@dataclass
class Case:
    """Something to time, under one name; `prepare`, `run` and `check` are called on all ranks.

    Attributes
    ----------
    axes
        As records hold them.
    total_bytes
        Of all ranks.
    stop
        Ends what still runs after the call, such as an engine; before its calls are counted.
    finish
        Called after each trial, however it went.
    clear
        Removes what was written; collective.
    phases_s
        Of the last trial, on this rank.
    count
        What counts its calls to the file system, in the warm-up.
    error, operations
        Of the last trial, on this rank; operations of the warm-up alone.
    """

    group: str
    name: str
    kind: str
    operation: str
    axes: Mapping[str, Axis]
    total_bytes: int
    prepare: Callable[[], None]
    run: Callable[[], None]
    check: Callable[[], None]
    stop: Callable[[], None]
    finish: Callable[[], None]
    clear: Callable[[], None]
    phases_s: Callable[[], dict[str, float]]
    submit_calls: Callable[[], int] = lambda: 0
    count: Callable[[], AbstractContextManager[Counter[str]]] = counting.recorded
    error: BaseException | None = None
    operations: dict[str, int] = field(default_factory=dict)

    def timed(self, world: Communicator, trial: int) -> measure.Row:
        """One trial; collective."""
        self.error, self.operations = None, {}
        variant = measure.Variant(
            self.name,
            self.kind,
            lambda: self._run(counting=not trial),
            lambda: self._keep_error(self.prepare),
            lambda: self._keep_error(self.check),
        )
        try:
            return measure.timed(world, self.group, variant, trial, self.total_bytes / 1e9)
        finally:
            self.finish()

    def _run(self, *, counting: bool) -> None:
        if not counting:
            return self._keep_error(self.run)
        with self.count() as calls:
            self._keep_error(self.run)
            self.stop()
        self.operations = {**calls, "submit": self.submit_calls()}
        return None

    def _keep_error(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            self.error = error
            raise


def total_bytes(world: Communicator, own: int) -> int:
    """Of all ranks; collective."""
    return int(world.allreduce(np.array([own], np.int64), "sum")[0])
