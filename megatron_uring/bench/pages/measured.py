"""From records to cases: the trials of each, their median and spread; pure.

Guarantees
----------
- A case's figure is the median of its trials, its spread their slowest and fastest. A case with an
  error has no figures.
- The newest run is reported, never a mixture of runs; of a trial that was repeated the last one.
- Cases are found by their axes; their names are only shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_uring.bench.suite.results import Axis, Record, ResultsError
from megatron_uring.bench.summary import GIGABYTE, MEGABYTE
from megatron_uring.config import GIBIBYTE

# Calls that move or submit data, by the engine's names and by the system's; all others concern
# metadata.
_TRANSFERS = {"write", "read", "pwrite64", "pread64", "writev", "readv", "sendfile"}
_TRANSFERS |= {"pwritev", "preadv", "pwritev2", "preadv2", "copy_file_range"}
_SUBMISSIONS = {"submit", "io_uring_enter", "io_submit"}


@dataclass(frozen=True)
class Run:
    """The records of one start of a suite.

    Attributes
    ----------
    others
        Runs of the same file that are not in `records`.
    other_machines
        Host and file system of those, where they are not this run's.
    """

    name: str
    records: tuple[Record, ...]
    others: int = 0
    other_machines: tuple[str, ...] = ()

    @property
    def environment(self) -> Mapping[str, Any]:
        """Of the first trial that has figures."""
        return next(one.environment for one in self.records if not one.error)


@dataclass(frozen=True)
class Case:
    """All trials of one case.

    Attributes
    ----------
    trials
        Those whose time counts.
    operations
        Calls to the file system as counted in the warm-up; empty if they were not.
    error
        Why there are no figures; empty if there are.
    peak_mb
        Resident memory added, of the worst trial, the warm-up included.
    """

    group: str
    name: str
    kind: str
    operation: str
    axes: Mapping[str, Axis]
    trials: tuple[Record, ...]
    operations: Mapping[str, int]
    error: str
    peak_mb: float

    @property
    def title(self) -> str:
        """The name without the operation, which stands beside it everywhere."""
        return self.name.removesuffix(f", {self.operation}")

    @property
    def rates(self) -> list[float]:
        """GB/s of each trial."""
        return [one.total_bytes / one.seconds / GIGABYTE for one in self.trials]

    @property
    def gb_per_s(self) -> float:
        """Median of the trials."""
        return statistics.median(self.rates)

    @property
    def slowest_gb_per_s(self) -> float:
        """Of the slowest trial."""
        return min(self.rates)

    @property
    def fastest_gb_per_s(self) -> float:
        """Of the fastest trial."""
        return max(self.rates)

    @property
    def seconds(self) -> float:
        """Median of the trials."""
        return self.median(lambda one: one.seconds)

    @property
    def process_cpu_s_per_gb(self) -> float:
        """Of all ranks, kernel workers included."""
        return self.median(lambda one: one.process_cpu_s / one.total_bytes * GIGABYTE)

    @property
    def machine_cpu_s_per_gb(self) -> float:
        """Of the whole machine of rank 0, writeback included."""
        return self.median(lambda one: one.machine_cpu_s / one.total_bytes * GIGABYTE)

    @property
    def total_bytes(self) -> int:
        """Of all ranks."""
        return self.trials[0].total_bytes

    def median(self, value: Callable[[Record], float]) -> float:
        """Median of `value` over the trials."""
        return statistics.median(value(one) for one in self.trials)

    def phase_s(self, name: str) -> float:
        """Median seconds of a phase; 0 where it did not occur."""
        return self.median(lambda one: one.phases_s.get(name, 0.0))

    @property
    def metadata_counts(self) -> dict[str, int]:
        """Counted calls that neither move nor submit data, by name."""
        skipped = _TRANSFERS | _SUBMISSIONS
        return {name: count for name, count in self.operations.items() if name not in skipped}

    @property
    def metadata_operations(self) -> int:
        """All of `metadata_counts`."""
        return sum(self.metadata_counts.values())

    @property
    def metadata_per_gib(self) -> float:
        """`metadata_operations` for each GiB of state."""
        return self.metadata_operations / (self.total_bytes / GIBIBYTE)

    @property
    def transfers(self) -> int:
        """Counted reads and writes."""
        return sum(count for name, count in self.operations.items() if name in _TRANSFERS)

    @property
    def submit_calls(self) -> int:
        """Counted calls that handed submissions to the kernel."""
        return sum(count for name, count in self.operations.items() if name in _SUBMISSIONS)

    @property
    def figures(self) -> str:
        """Median, range and number of trials, in words."""
        low, high = self.slowest_gb_per_s, self.fastest_gb_per_s
        return f"{self.gb_per_s:.2f} GB/s ({low:.2f} to {high:.2f}, {trials(len(self.trials))})"

    @property
    def bytes_per_transfer(self) -> float:
        """Mean of the counted reads and writes; 0 where they were not counted."""
        return self.total_bytes / self.transfers if self.transfers else 0.0


# -------------------------------------------------------------------------------------------------
# from records


def newest_run(records: Iterable[Record]) -> Run:
    """The run that was measured last, among those that have figures.

    Raises
    ------
    ResultsError
        If no run has any.
    """
    runs: dict[str, list[Record]] = {}
    for one in records:
        runs.setdefault(one.run, []).append(one)
    useful = {name: own for name, own in runs.items() if any(_counts(one) for one in own)}
    if not useful:
        errors = sum(bool(one.error) for own in runs.values() for one in own)
        raise ResultsError(
            f"no trial with figures: {len(runs)} runs, {errors} records of failed trials"
        )
    name = max(useful, key=lambda run: max(one.time for one in useful[run]))
    machines = {run: _machine(own[0]) for run, own in runs.items()}
    others = sorted(set(machines.values()) - {machines[name]})
    return Run(name, tuple(useful[name]), len(runs) - 1, tuple(others))


def _machine(record: Record) -> str:
    environment = record.environment
    return f"{environment.get('host', 'unknown')}, {environment.get('file_system', 'unknown')}"


def _counts(record: Record) -> bool:
    return bool(record.trial and not record.error and record.seconds > 0 and record.total_bytes)


def summarize(records: Iterable[Record]) -> list[Case]:
    """The cases in order of appearance. Of a trial that was repeated, the last one counts."""
    latest: dict[tuple[str, str, str], dict[int, Record]] = {}
    for one in records:
        latest.setdefault((one.group, one.case, one.operation), {})[one.trial] = one
    return [_case(list(own.values())) for own in latest.values()]


def _case(records: list[Record]) -> Case:
    trials = tuple(one for one in records if _counts(one))
    error = next((one.error for one in records if one.error), "")
    first = (trials or records)[0]
    return Case(
        first.group,
        first.case,
        first.kind,
        first.operation,
        first.axes,
        trials,
        next((one.operations for one in records if one.operations), {}),
        error or ("" if trials else "no trial was over"),
        max(one.peak_bytes for one in records) / MEGABYTE,
    )


def select(cases: Iterable[Case], group: str, **wanted: object) -> list[Case]:
    """Cases of a group that have figures; `wanted` are axes, ``kind`` or ``operation``."""
    return [
        case
        for case in cases
        if case.group == group
        and not case.error
        and all(_property(case, name) == value for name, value in wanted.items())
    ]


def _property(case: Case, name: str) -> object:
    return getattr(case, name) if name in ("kind", "operation") else case.axes.get(name)


# -------------------------------------------------------------------------------------------------
# words


def trials(count: int) -> str:
    """``"3 trials"``."""
    return f"{count} trial" if count == 1 else f"{count} trials"


def mode(case: Case) -> str:
    """``"direct write"``."""
    return f"{'direct' if case.axes.get('direct') else 'buffered'} {case.operation}"
