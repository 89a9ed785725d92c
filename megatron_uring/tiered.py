"""A drain in two tiers: to the staging directory of the node, and from there to the subfile.

Protocol
--------
A thread of its own takes these steps; it does I/O only, and no collective.

1. Space is reserved for a local copy, and the regions are written to it. When that is done, the
   drain is `staged` and acknowledged: tensors are read no more, and the end of this process loses
   nothing that is in the copy.
2. If 1 failed for want of space, or by an error of the local tier, the regions are written straight
   to the subfile, from the tensors; until they are copied the drain is not `staged`.
3. Else the copy is read back in chunks. Each block is compared with the checksum that it had in 1,
   and written to the subfile, whose checksum is compared again. Then the subfile is synced.
4. The copy is marked. It is kept only if the save is committed (`TieredDrain.settle`).

Guarantees
----------
- Seen from outside it is a `drain.Drain`: same fences, same errors, same bounds.
- The checksums that the index gets are those of step 1 (or 2): what the local tier did to the bytes
  afterwards fails the save.
- Memory beyond the engine's slabs is that of `forward`.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

from megatron_uring import _engine, fencing, tier
from megatron_uring.config import Config
from megatron_uring.drain import Compared, Drain, KeysAt, compared_later, patience_s
from megatron_uring.errors import (
    CheckpointError,
    StateMismatchError,
    StorageError,
    as_checkpoint_error,
)
from megatron_uring.forward import Region, Report, forward
from megatron_uring.progress import Clock, Patience
from megatron_uring.tables import Staged

_log = logging.getLogger("megatron_uring")
_POLL_S = 0.05
_GRACE_S = 15.0  # the thread ends jobs first, each with a grace of its own


def open_drain(
    engine: _engine.Engine,
    file: _engine.File,
    config: Config,
    place: tier.Place,
    length: int,
    clock: Clock,
) -> Drain | TieredDrain:
    """The drain of an asynchronous save of `length` bytes: by way of ``staging_directory``, if
    there is one.
    """
    if config.staging_directory and length:
        return TieredDrain(engine, file, config, place, clock)
    return Drain(engine, file, config, lazy=True, clock=clock)


class TieredDrain:
    """What one rank writes of one asynchronous save, in two tiers.

    Parameters
    ----------
    engine, file, config, clock
        As those of `drain.Drain`.
    place
        Whose regions they are.
    """

    def __init__(
        self,
        engine: _engine.Engine,
        file: _engine.File,
        config: Config,
        place: tier.Place,
        clock: Clock,
    ) -> None:
        self.engine, self.file, self.config = engine, file, config
        self.fence_s = self.acknowledged_s = self.staged_s = self.drained_s = 0.0
        self._place = place
        self._copy: tier.LocalCopy | None = None
        self._drain: Drain | None = None  # that copies from the tensors
        self._given: list[tuple[int, int, Staged, KeysAt | None, Compared]] = []
        self._error: CheckpointError | None = None
        self._moved = 0
        self._stop, self._staged = threading.Event(), threading.Event()
        self._acknowledged, self._over = threading.Event(), threading.Event()
        self._clock = clock
        self._thread = threading.Thread(target=self._run, name="megatron_uring-tier", daemon=True)

    # ---------------------------------------------------------------------------------------------
    # as a drain

    def add(self, start: int, length: int, staged: Staged, keys_at: KeysAt | None = None) -> None:
        """A region to be written, as of `drain.Drain.add`; it is not touched before `watch`."""
        if length:
            level = self.config.verify_staging if keys_at is not None else "off"
            compared = compared_later(level, start, length, staged)
            self._given.append((start, length, staged, keys_at, compared))

    def watch(self) -> None:
        """Begin; fences wait for what was added."""
        fencing.watch(self)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads: all ranks are told when it is finished
            self.give_up(as_checkpoint_error(error, "start a thread"))

    def staged(self) -> bool:
        """Whether no tensor is read any more."""
        return self._staged.is_set()

    def wait_staged(self, waited_since: float) -> None:
        """Return when it is `staged`; without progress for ``timeout_s`` the drain has failed."""
        self._wait_for(self._staged, "write to staging directory")
        self.fence_s += time.perf_counter() - waited_since

    def acknowledged(self) -> bool:
        """Whether nothing is left that only this process has; or the drain has failed."""
        return self._acknowledged.is_set() or self._over.is_set()

    def advance(self) -> bool:
        """Whether all is durable, or the drain has failed; never waits."""
        return self._over.is_set()

    def ended(self) -> bool:
        """As `advance`."""
        return self._over.is_set()

    def wait(self, report: Report) -> None:
        """Wait until all is durable; raises as `drain.Drain.wait`."""
        self._wait_for(self._over, "write subfile", report)
        if self._error is not None:
            raise self._error

    def give_up(self, error: CheckpointError) -> None:
        """Fail with `error`: what has not been started is not written any more."""
        self._error = self._error or error
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_GRACE_S)  # one that hangs keeps what it holds, and begins nothing
        self._end()

    def settle(self, committed: bool) -> None:
        """Keep the local copy of a checkpoint that was committed; remove any other."""
        if self._copy is None:
            return
        if committed and self.acknowledged_s:
            self._copy.keep()
        else:
            self._copy.discard()

    @property
    def regions(self) -> list[Region]:
        """Start, length and checksums of each region; of a drain that succeeded."""
        return [] if self._drain is None else self._drain.regions

    @property
    def copy_s(self) -> float:
        """Thread seconds spent copying from tensors."""
        return 0.0 if self._drain is None else self._drain.copy_s

    @property
    def checksum_s(self) -> float:
        """Thread seconds spent on checksums of what was copied."""
        return 0.0 if self._drain is None else self._drain.checksum_s

    def _wait_for(
        self, event: threading.Event, operation: str, report: Report | None = None
    ) -> None:
        # the thread has the same bound for each job, and is to find it out first
        patience = Patience(patience_s(self.config) + _GRACE_S)
        while not event.wait(_POLL_S):
            moved = self._moved
            if patience.is_over(moved):
                self.give_up(
                    StorageError(
                        operation,
                        path=self.file.path,
                        found=f"no progress for {self.config.timeout_s:g} s",
                        cause="the file system does not answer",
                    )
                )
            if report is not None:
                report(moved)

    # ---------------------------------------------------------------------------------------------
    # the thread

    def _run(self) -> None:
        try:
            copy = self._write_local()
            if copy is None:
                self._write(self.file, self.config)
            else:
                self._acknowledge()
                regions = self.regions
                began = time.perf_counter()
                forward(self.engine, copy.source, self.file, regions, self.config, self._move)
                total = sum(length for _, length, _ in regions)
                self._clock.add("forward", began, time.perf_counter(), total)
                self._mark(copy)
        except Exception as error:
            self._error = self._error or as_checkpoint_error(
                error, "drain staging directory", self.config.staging_directory
            )
        finally:
            self._end()
            if self._stop.is_set() and self._copy is not None:
                self._copy.discard()  # who gave up may have come before it was there

    def _write_local(self) -> tier.LocalCopy | None:
        """Step 1; None, and a warning, if the local tier refused or failed."""
        # limits are for the checkpoint directory; fences wait for this part
        config = replace(self.config, drain_bytes_per_s=0, drain_priority="normal")
        regions = [(start, length) for start, length, *_ in self._given]
        try:
            self._copy = copy = tier.reserve(self.engine, config, self._place, regions)
            self._write(copy.file, config, syncs=False, span="write to node")
        except StateMismatchError:
            raise  # a tensor changed: it would be no better written straight
        except CheckpointError as error:
            if self._stop.is_set():
                raise
            _log.warning("this save is written straight to %s: %s", self.file.path, error)
            return None
        return copy

    def _write(
        self, file: _engine.File, config: Config, *, syncs: bool = True, span: str = "write"
    ) -> None:
        """Write all regions from the tensors to `file`, the subfile or the local copy."""
        self._move(self._moved)
        self._drain = drain = Drain(
            self.engine, file, config, lazy=True, syncs=syncs, clock=self._clock, span=span
        )

        def report(moved: int) -> None:
            self._move(moved)
            if file is self.file and drain.staged() and not self._staged.is_set():
                self.staged_s = self._clock.seconds
                self._given.clear()
                self._staged.set()

        try:
            for region in self._given:
                drain.add(*region)
            drain.wait(report)
        except Exception as error:
            # it may have been ended from outside, or hold what was added before the error
            drain.give_up(as_checkpoint_error(error, "write subfile", file.path))
            raise

    def _acknowledge(self) -> None:
        self._given.clear()
        self.acknowledged_s = self.staged_s = self._clock.seconds
        self._acknowledged.set()
        self._staged.set()

    def _mark(self, copy: tier.LocalCopy) -> None:
        """Step 4; what cannot be marked is of no use later, and no reason to fail."""
        try:
            copy.mark([checksums for *_, checksums in self.regions])
        except OSError as error:
            _log.warning("no copy of this save stays in the staging directory: %s", error)

    def _move(self, moved: int) -> None:
        self._moved = moved
        if self._stop.is_set():
            raise self._error or StorageError("write subfile", path=self.file.path)

    def _end(self) -> None:
        self._given.clear()
        self.drained_s = self.drained_s or self._clock.seconds
        self._over.set()
        self._staged.set()
