"""A save between its call and its commit.

Guarantees
----------
- `poll` waits for no disk and for no rank that has come to the poll before, and gives all ranks
  the same answer at the same call: what one call begins to reduce, the next one reads.
- `wait` commits, or raises on all ranks; nothing of a save that failed is left that could be taken
  for a checkpoint. Called again, it gives the same answer.
- `abort` asks no other rank, and leaves the checkpoint that was there before.
- A `wait` inside of a `wait` of the same save, as a signal handler may call it, is refused. So are
  `poll` and `wait` in a forked child, and in a second thread of several ranks; the save goes on.
- Who never calls `wait` is told so, once: when another save begins while two are durable and not
  committed.
- Saves are finished in any order, the same on all ranks: where ranks poll or wait for different
  ones, all of them raise, and nothing is committed. One that is still pending when the process ends
  is aborted, and said so.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable

import numpy as np

from megatron_uring import _engine, timeline
from megatron_uring.columns import Int64Array
from megatron_uring.errors import CheckpointError, CommunicationError, StorageError
from megatron_uring.fencing import forget_staged
from megatron_uring.progress import together
from megatron_uring.report import Report
from megatron_uring.saving import Placed, Saving
from megatron_uring.tiered import TieredDrain

_log = logging.getLogger("megatron_uring")
_SLOW_POLL_S = 1e-3
_FORGOTTEN = 2  # so many that are written: one may be about to be waited for
_ID_DIGITS = 15  # of a save id, as many as a positive int64 holds
_last: dict[str, Report] = {}
_in_flight: list[PendingSave] = []
_told: list[bool] = []  # of saves that nobody waits for
os.register_at_fork(after_in_child=_in_flight.clear)  # the saves are the parent's


class PendingSave:
    """What `save_async` returns. Methods are called from the main thread.

    Attributes
    ----------
    directory, save_id
    """

    def __init__(
        self, saving: Saving, placed: Placed, common: bytes | None, called_at: float
    ) -> None:
        self.directory, self.save_id = saving.directory, saving.save_id
        self._saving, self._placed, self._common = saving, placed, common
        self._blocked_s = time.perf_counter() - called_at
        self._reduction: Callable[[], Int64Array] | None = None
        self._agreed = self._finishing = False
        self._process = os.getpid()
        self._outcome: Report | CheckpointError | None = None
        if saving.lazy:
            _engine.enter_step("drain")
            if saving.world.rank == 0:
                _warn_of_the_forgotten()
            _in_flight.append(self)

    def drained(self) -> bool:
        """Whether this rank's part is durable, or has failed; not collective, never waits."""
        assert self._saving.drain is not None
        return self._outcome is not None or self._saving.drain.advance()

    def acknowledged(self) -> bool:
        """Whether all of this rank's part is in ``staging_directory``, where the end of this
        process loses nothing of it, or durable, or has failed; not collective, never waits.

        The checkpoint exists no sooner than after `wait`: a save that was acknowledged and not
        committed is discarded by the next one.
        """
        assert self._saving.drain is not None
        return self._outcome is not None or self._saving.drain.acknowledged()

    def poll(self) -> bool:
        """Whether every rank's part is durable, or has failed, so that `wait` does not wait for a
        disk; collective, and the same on all ranks.

        Raises
        ------
        CommunicationError
            Ranks polled different saves, or one did not come within ``timeout_s``.
        """
        if self._outcome is not None or self._agreed:
            return True
        self._require_own_caller()
        drained, world = self.drained(), self._saving.world
        with together(world), self._saving.clock.span("poll", least_s=_SLOW_POLL_S):
            reduction, self._reduction = self._reduction, None
            if reduction is not None:
                least, first, last = reduction().tolist()
                if first != -last:
                    raise self._polled_another()
                self._agreed = bool(least)
            if not self._agreed:
                number = int(self.save_id[:_ID_DIGITS], 16)
                own = np.array([int(drained), number, -number], np.int64)
                self._reduction = world.start_allreduce(own, "min")
        return self._agreed

    def _polled_another(self) -> CommunicationError:
        return CommunicationError(
            "poll save",
            path=self.directory,
            expected=f"all ranks to poll save {self.save_id}",
            found="another save polled by some",
            cause="saves in flight are polled and waited for in the same order on all ranks",
        )

    def wait(self) -> Report:
        """Wait until every rank's part is durable, and commit; collective.

        Raises
        ------
        CheckpointError
            On every rank, whichever rank it happened on.
        """
        if isinstance(self._outcome, Report):
            return self._outcome
        if self._outcome is not None:
            raise self._outcome
        self._require_own_caller()
        if self._finishing:
            raise _given_up(self.directory, "it is being finished, further up the stack")
        self._finishing = True
        began = time.perf_counter()
        try:
            self._finish()
        except BaseException as error:
            if isinstance(error, CheckpointError):
                self._outcome = error
            else:
                self._outcome = _given_up(self.directory, repr(error))
            raise
        finally:
            self._forget()
            _engine.enter_step("nothing, the last save is over")
        self._blocked_s += time.perf_counter() - began
        self._outcome = _last["save"] = _report(self._saving, self._blocked_s)
        if self._saving.world.rank == 0:
            _log.info("%s", self._outcome.line())
        return self._outcome

    def _finish(self) -> None:
        saving = self._saving
        if saving.lazy:
            saving.clock.lap("drain", "")  # until now the caller was elsewhere
        with together(saving.world):
            try:
                if self._reduction is not None:
                    self._reduction()
                    self._reduction = None
                saving.finish_drain(self._placed)
                contents = saving.finish_subfile(self._placed)
            except BaseException:
                saving.discard()
                raise
            saving.commit(self._placed, contents, self._common)
            if saving.timeline:
                timeline.keep(
                    saving.world,
                    saving.directory,
                    saving.save_id,
                    saving.clock,
                    asynchronous=saving.lazy,
                    state_bytes=saving.totals.state_bytes,
                )

    def abort(self) -> None:
        """Give the save up, on this rank alone; what it had written is removed. Does nothing to one
        that is finished.
        """
        if self._outcome is None and os.getpid() == self._process:
            self._outcome = _given_up(self.directory, "aborted")
            self._saving.discard()
            self._forget()

    def _require_own_caller(self) -> None:
        if os.getpid() != self._process:
            raise _given_up(
                self.directory,
                f"it belongs to process {self._process}, and this is a child",
            )
        self._saving.world.require_own_thread("finish save")

    def _forget(self) -> None:
        self._saving.settle(committed=self._outcome is None)
        forget_staged()
        if self in _in_flight:
            _in_flight.remove(self)


def in_flight() -> list[PendingSave]:
    """Asynchronous saves of this process that are not finished, in the order of their calls."""
    return list(_in_flight)


def _warn_of_the_forgotten() -> None:
    drains = [(one, one._saving.drain) for one in in_flight()]
    forgotten = [one for one, drain in drains if drain is not None and drain.ended()]
    if len(forgotten) >= _FORGOTTEN and not _told:
        _told.append(True)
        _log.warning(
            "%d asynchronous saves are written and not committed, the oldest to %s: there is no "
            "checkpoint before wait() has returned on all ranks, or, with Megatron's queue, "
            "maybe_finalize_async_calls()",
            len(forgotten),
            forgotten[0].directory,
        )


def finish_in(directory: str) -> None:
    """Finish those of this directory; collective. Their errors are theirs: `wait` gives them.

    Raises
    ------
    CommunicationError
        Ranks do not finish the same saves: they would not go on together either.
    """
    for one in in_flight():
        if os.path.realpath(one.directory) == os.path.realpath(directory):
            try:
                one.wait()
            except CommunicationError:
                raise
            except CheckpointError as error:
                _log.warning("an asynchronous save failed: %s", error)


def last_save() -> Report | None:
    """Report of this process's last save."""
    return _last.get("save")


def _given_up(directory: str, why: str) -> CheckpointError:
    return StorageError("finish save", path=directory, cause=why)


@atexit.register
def _abort_all() -> None:
    # Ranks that are gone would be waited for: what is not finished now never is.
    for one in in_flight():
        _log.warning(
            "the save to %s is given up: the process ends, and nobody called wait()", one.directory
        )
        one.abort()


def _report(saving: Saving, blocked_s: float) -> Report:
    """What this save did; its caller waited for so long."""
    totals, drain, pool = saving.totals, saving.drain, saving.config
    assert drain is not None
    return Report(
        directory=saving.directory,
        save_id=saving.save_id,
        state_bytes=totals.state_bytes,
        file_bytes=totals.file_bytes,
        files=totals.files,
        seconds=saving.clock.lapped_s,
        phases_s=dict(saving.clock.phases_s),
        engine=f"{saving.engine.kind}: a probe found it faster here"
        if saving.probed_engine
        else saving.engine.reason,
        communicator=saving.world.reason,
        aggregation=f"{saving.groups.mode}: {saving.groups.reason}",
        staging=f"{saving.engine.slab_count} slabs of {pool.slab_bytes >> 20} MiB, "
        f"depth {pool.queue_depth}" + (f", {saving.page_locking}" if saving.page_locking else ""),
        direct=saving.direct,
        copy_s=drain.copy_s,
        checksum_s=drain.checksum_s,
        blocked_s=blocked_s + drain.fence_s,
        fence_s=drain.fence_s,
        acknowledged_s=drain.acknowledged_s if isinstance(drain, TieredDrain) else 0.0,
        staged_s=drain.staged_s,
        drained_s=drain.drained_s,
        asynchronous=saving.lazy,
        lazy_bytes=saving.lazy_bytes,
        slowest_rank=totals.slowest_rank,
        slowest_s=totals.slowest_s,
    )
