"""Steps that all ranks take together, and bounded waits on native jobs.

Guarantees
----------
- An error in a `step`, on whichever rank, is raised on all ranks: none goes on alone.
- A wait ends when the job is done, when it failed, or when it made no progress for `timeout_s`: a
  slow disk makes progress, a stuck one does not.
- While it waits it reports the bytes done, so that ranks that wait for this one wait on.
- Memory that a job may still touch is never given back: a wait that is left early cancels the job,
  and what is still in flight after a grace keeps its memory for ever.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from megatron_uring import _engine
from megatron_uring.comm import Communicator
from megatron_uring.errors import CheckpointError, StorageError, as_checkpoint_error

_POLL_S = 0.05
_GRACE_S = 5.0
_held: dict[object, object] = {}


@dataclass
class Clock:
    """Seconds since a save or restore began, and how they divide."""

    began: float = field(default_factory=time.perf_counter)
    phases_s: dict[str, float] = field(default_factory=dict)

    def lap(self, phase: str) -> None:
        """End a phase; one that comes again goes on."""
        spent_s = time.perf_counter() - self.began - sum(self.phases_s.values())
        self.phases_s[phase] = self.phases_s.get(phase, 0.0) + spent_s

    @property
    def seconds(self) -> float:
        """All of it so far."""
        return time.perf_counter() - self.began


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
    """Local work whose error, on whichever rank, is raised on all; no collective may be inside."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = as_checkpoint_error(caught, name)
    world.agree(name, error)


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
    ticket = object()
    _held[ticket] = alive
    job = None
    try:
        job = start()
        if meanwhile is not None:
            meanwhile()
        _poll(job, operation, path, timeout_s, report)
    except OSError as error:
        if job is None:
            del _held[ticket]
        raise as_checkpoint_error(error, operation, path) from error
    finally:
        if job is not None:
            _end(job)
            if job.done():
                del _held[ticket]
    return job


def _poll(
    job: _engine.Job,
    operation: str,
    path: object,
    timeout_s: float,
    report: Callable[[int], None] | None,
) -> None:
    progress, deadline = -1, time.monotonic() + timeout_s
    while not job.wait(_POLL_S):
        done = job.bytes_done
        if done != progress:
            progress, deadline = done, time.monotonic() + timeout_s
        elif time.monotonic() > deadline:
            raise StorageError(
                operation,
                path=path,
                expected=f"{job.bytes_total} bytes",
                found=f"{done} after {timeout_s:g} s without progress",
                cause="the file system does not answer",
            )
        if report is not None:
            report(done)


def _end(job: _engine.Job) -> None:
    if job.done():
        return
    job.cancel()
    deadline = time.monotonic() + _GRACE_S
    while not job.done() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
