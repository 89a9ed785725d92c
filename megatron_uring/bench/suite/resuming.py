"""Resuming: what a run has measured already, and whether this is the same run.

Guarantees
----------
- A run goes on only with the suite, the ranks, the machine and the file system that it began with,
  and with cases that are what they were; else `ResultsError` says what differs.
- A case that failed stays failed, unless it was for want of room.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_uring.bench.suite.cases import Case
from megatron_uring.bench.suite.results import Axis, Record, ResultsError, read_results
from megatron_uring.comm import Communicator

FULL = (errno.ENOSPC, errno.EDQUOT)
_PLACE = ("host", "kernel", "file_system", "mount_options", "file_system_bytes")


@dataclass(frozen=True)
class Before:
    """What is in the results file of this run.

    Attributes
    ----------
    done
        What each trial was measured of, by group, case and trial.
    failed
        Group and case.
    """

    done: dict[tuple[str, str, int], str] = field(default_factory=dict)
    failed: set[tuple[str, str]] = field(default_factory=set)

    @classmethod
    def read(
        cls, path: str, run: str, here: tuple[str, int, int], environment: Mapping[str, Any]
    ) -> Before:
        """What the file `path` has of `run`.

        Parameters
        ----------
        here
            Suite, ranks and nodes of this process's run.
        environment
            Of this process.

        Raises
        ------
        ResultsError
            If that run was another one in what matters, or the file cannot be read.
        """
        own = [one for one in read_results(path).records if one.run == run]
        for one in own:
            there = _identity((one.suite, one.ranks, one.nodes), one.environment)
            found = _identity(here, environment)
            if there != found:
                raise ResultsError(f"{path}: cannot resume: expected {there}, found {found}")
        return cls(
            {one.key: _what(one.axes, one.total_bytes) for one in own if not one.error},
            {(one.group, one.case) for one in own if one.error and not _wanted_room(one)},
        )

    def shared(self, world: Communicator) -> Before:
        """That of rank 0, on all ranks; collective."""
        own = json.dumps([[[*key, what] for key, what in self.done.items()], sorted(self.failed)])
        text = world.broadcast(own.encode() if world.rank == 0 else None)
        done, failed = json.loads(bytes(text))
        return Before(
            {(group, case, trial): what for group, case, trial, what in done},
            {(group, case) for group, case in failed},
        )

    def require_the_same(self, cases: Sequence[Case]) -> None:
        """Raise `ResultsError` if a case is not what it was when it was measured."""
        named = {(case.group, case.name): case for case in cases}
        for (group, name, _), what in self.done.items():
            case = named.get((group, name))
            found = what if case is None else _what(case.axes, case.total_bytes)
            if found != what:
                raise ResultsError(
                    f"cannot resume: {group}: {name}: expected {what}, found {found}"
                )


def _identity(here: tuple[str, int, int], environment: Mapping[str, Any]) -> dict[str, Any]:
    suite, ranks, nodes = here
    place = {name: environment.get(name) for name in _PLACE}
    return {"suite": suite, "ranks": ranks, "nodes": nodes, **place}


def _what(axes: Mapping[str, Axis], total_bytes: int) -> str:
    """Of a case, what must not change."""
    return json.dumps([dict(axes), total_bytes], sort_keys=True)


def _wanted_room(record: Record) -> bool:
    return any(os.strerror(code) in record.error for code in FULL)
