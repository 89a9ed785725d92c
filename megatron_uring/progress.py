"""Steps that all ranks take together, and bounded waits on native jobs.

Guarantees
----------
- An error in a `step`, on whichever rank, is raised on all ranks: none goes on alone.
- A wait ends when the job is done, when it failed, or when it made no progress for `timeout_s`: a
  slow disk makes progress, a stuck one does not.
- While it waits it reports the bytes done, so that ranks that wait for this one wait on.
- Memory that a job may still touch is never given back: a wait that is left early cancels the job,
  and what is still in flight after a grace keeps its memory for ever.
- Whoever sends SIGUSR2 to a process is told its step, unless the program handles that signal.
- A `Clock` keeps few spans of each name, however often something happens.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_uring import _engine
from megatron_uring.comm import Communicator
from megatron_uring.errors import CheckpointError, StorageError, as_checkpoint_error

_POLL_S = 0.05
_GRACE_S = 5.0
_SPANS_OF_A_NAME = 16
# The phase of a save that ends with its first collective, which all ranks leave together.
MEETING = "collect"
_held: dict[object, object] = {}
# Its default action ends the process: who sends it asks for something.
_WATCHDOG_SIGNAL = signal.SIGUSR2


class Span(NamedTuple):
    """What lay between two moments of `time.perf_counter`, and how many bytes it moved."""

    name: str
    begin: float
    end: float
    moved_bytes: int = 0


@dataclass
class Clock:
    """Seconds since a save or restore began, and how they divide.

    Attributes
    ----------
    began, began_at_s
        When, by `time.perf_counter` and by `time.time`, which is asked only this once: it may be
        set back.
    phases_s
        How long each phase took; together `lapped_s`.
    spans
        Phases, and what happened within and beside them, for the timeline.
    """

    began: float = field(default_factory=time.perf_counter)
    began_at_s: float = field(default_factory=time.time)
    phases_s: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    def lap(self, phase: str, span: str | None = None) -> None:
        """End a phase; one that comes again goes on. Its span has its name, or that of `span`; or
        there is none, if that is empty.
        """
        lapped_s, now = self.lapped_s, time.perf_counter()
        spent_s = now - self.began - lapped_s
        self.phases_s[phase] = self.phases_s.get(phase, 0.0) + spent_s
        if span != "":
            self.add(span or phase, self.began + lapped_s, now)

    def add(self, name: str, begin: float, end: float, moved_bytes: int = 0) -> None:
        """Keep a span; of those that come often, the first ones."""
        if sum(span.name == name for span in self.spans) < _SPANS_OF_A_NAME:
            self.spans.append(Span(name, begin, end, moved_bytes))

    @contextlib.contextmanager
    def span(self, name: str, *, least_s: float = 0.0) -> Iterator[None]:
        """Keep what is done inside as a span, if it took `least_s`."""
        begin = time.perf_counter()
        yield
        end = time.perf_counter()
        if end - begin >= least_s:
            self.add(name, begin, end)

    @property
    def met_s(self) -> float:
        """Until all ranks had come to the save: what ranks tell each other counts from there."""
        return self.phases_s.get(MEETING, 0.0)

    @property
    def lapped_s(self) -> float:
        """Until the end of the last phase."""
        return sum(self.phases_s.values())

    @property
    def seconds(self) -> float:
        """All of it so far."""
        return time.perf_counter() - self.began


def announce(subject: str, rank: int = -1) -> None:
    """Say what this process works on from now on, to whoever asks by SIGUSR2 (see `_engine`).

    A negative rank leaves that as it was.
    """
    _engine.describe_process(rank, subject)
    _engine.answer_signal(_WATCHDOG_SIGNAL)


@contextlib.contextmanager
def together(world: Communicator) -> Iterator[None]:
    """Steps and collectives that all ranks go through to the end, or leave by a shared error.

    A rank that leaves in another way (an interrupt, an error between two steps) breaks the
    communicator: what the others still send must not be taken for the answer to a later call.
    """
    try:
        yield
    except CheckpointError:
        raise  # reduced by a step, so raised on all ranks, or the communicator's own
    except BaseException as error:
        world.abandon(error)
        raise


@contextlib.contextmanager
def step(world: Communicator, name: str) -> Iterator[None]:
    """Local work whose error, on whichever rank, is raised on all; no collective may be inside.

    The watchdog knows of it, and whether this rank is still at it or waits for the others.
    """
    error: Exception | None = None
    try:
        _engine.enter_step(name)
        yield
        _engine.enter_step(f"agree on {name!r}")
    except Exception as caught:
        error = as_checkpoint_error(caught, name)
        with contextlib.suppress(OSError):  # the first error is the one to tell
            _engine.enter_step(f"agree on {name!r}")
    world.agree(name, error)


class Patience:
    """The end of a wait for something that moves bytes: when it has moved none for `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._moved_bytes = -1
        self._deadline = time.monotonic() + limit_s

    def is_over(self, moved_bytes: int) -> bool:
        """Whether it has; `moved_bytes` is what was moved by now, and any change of it counts."""
        now = time.monotonic()
        if moved_bytes != self._moved_bytes:
            self._moved_bytes, self._deadline = moved_bytes, now + self._limit_s
        return now > self._deadline


def run_job(
    start: Callable[[], _engine.Job],
    operation: str,
    path: object,
    timeout_s: float,
    *,
    alive: object = None,
    report: Callable[[int], None] | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> _engine.Job:
    """Start a job and wait until it is done.

    Parameters
    ----------
    start
        Gives the job.
    operation, path
        What and where, for the message.
    timeout_s
        Longest time without progress, in seconds.
    alive
        Keeps the memory that the job works on.
    report
        Called with the bytes done so far, about twenty times a second.
    meanwhile
        Called once, as soon as the job is at work.

    Raises
    ------
    StorageError
        With errno's text if the job failed, or if it made no progress for `timeout_s`.
    """
    # Kept from before the start: an interrupt at any point finds the memory held.
    ticket = hold(alive)
    job = None
    try:
        job = start()
        if meanwhile is not None:
            meanwhile()
        _poll(job, operation, path, timeout_s, report)
    except OSError as error:
        if job is None:
            let_go(ticket)
        raise as_checkpoint_error(error, operation, path) from error
    finally:
        if job is not None:
            end_job(job)
            if job.done():
                let_go(ticket)
    return job


def hold(alive: object) -> object:
    """Keep `alive` until `let_go` of what this returns."""
    ticket = object()
    _held[ticket] = alive
    return ticket


def let_go(ticket: object) -> None:
    """Keep it no longer."""
    _held.pop(ticket, None)


def _poll(
    job: _engine.Job,
    operation: str,
    path: object,
    timeout_s: float,
    report: Callable[[int], None] | None,
) -> None:
    patience = Patience(timeout_s)
    while not job.wait(_POLL_S):
        done = job.bytes_done
        if patience.is_over(done):
            raise StorageError(
                operation,
                path=path,
                expected=f"{job.bytes_total} bytes",
                found=f"{done} after {timeout_s:g} s without progress",
                cause="the file system does not answer",
            )
        if report is not None:
            report(done)


def end_job(job: _engine.Job) -> None:
    """Cancel a job that is not done, and give it a grace."""
    if job.done():
        return
    job.cancel()
    deadline = time.monotonic() + _GRACE_S
    while not job.done() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
