"""What a run tells while it goes: a bar with the time that is left, or lines.

Guarantees
----------
- All of it goes to standard error, and comes from rank 0.
- The time left follows from the trials that were measured, those that failed taken off.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from megatron_uring.bench.suite.results import Record
from megatron_uring.bench.suite.run import Watcher

_LINE_EVERY_S = 10.0
_CASE_CHARACTERS = 38


@contextlib.contextmanager
def watching(how: str, rank: int) -> Iterator[Watcher]:
    """A watcher for ``"auto"``, ``"bar"``, ``"lines"`` or ``"off"``; silent elsewhere than on rank
    0.
    """
    if rank or how == "off":
        yield Watcher()
    elif how == "bar" or (how == "auto" and sys.stderr.isatty()):
        with BarWatcher() as bar:
            yield bar
    else:
        yield LineWatcher()


class LineWatcher(Watcher):
    """A line every ten seconds or so."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._told = self._began
        self._trials = self._over = 0

    def plan(self, trials: int) -> None:
        """As in `Watcher`."""
        self._trials = trials
        self._tell(f"{trials} trials")

    def end(self, record: Record) -> None:
        """As in `Watcher`."""
        self._over += 1
        now = time.monotonic()
        if record.error:
            self._tell(f"{record.group}: {record.case}: {record.error}")
        elif now - self._told >= _LINE_EVERY_S:
            left_s = (now - self._began) / self._over * max(self._trials - self._over, 0)
            self._tell(f"{self._over} of {self._trials} trials, about {left_s:.0f} s left")

    def note(self, text: str) -> None:
        """As in `Watcher`."""
        self._tell(text)

    def _tell(self, text: str) -> None:
        self._told = time.monotonic()
        print(f"[{self._told - self._began:5.0f} s] {text}", file=sys.stderr, flush=True)


class BarWatcher(Watcher):
    """What is running, a bar, and the time that is left."""

    def __init__(self) -> None:
        # a launcher gives its ranks no terminal; who asked for a bar has one behind it
        console = Console(stderr=True, force_terminal=True, highlight=False, emoji=False)
        self._progress = Progress(
            TextColumn(f"{{task.description:<{_CASE_CHARACTERS}}}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> BarWatcher:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def plan(self, trials: int) -> None:
        """As in `Watcher`."""
        self._task = self._progress.add_task("", total=trials)

    def begin(self, case: str, trial: int) -> None:
        """As in `Watcher`."""
        what = f"trial {trial}" if trial else "warm-up"
        if self._task is not None:
            text = f"{what}, {case}"
            if len(text) > _CASE_CHARACTERS:
                text = text[: _CASE_CHARACTERS - 1] + "…"
            self._progress.update(self._task, description=text.replace("[", "\\["))

    def end(self, record: Record) -> None:
        """As in `Watcher`."""
        if self._task is not None:
            self._progress.advance(self._task)
        if record.error:
            self.note(f"{record.group}: {record.case}: {record.error}")

    def note(self, text: str) -> None:
        """As in `Watcher`."""
        self._progress.console.print(text, markup=False)
