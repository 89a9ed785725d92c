"""A drain: the regions of one rank on their way to its subfile, each synced behind its last byte.

Guarantees
----------
- Memory is read until the drain is `staged`, and not after; what is written is kept alive until no
  native thread can touch it, whatever happens to the save.
- `advance` never waits. `wait` and `wait_staged` end when there is nothing to wait for, or when
  there was no progress for `timeout_s`; then the drain has failed.
- With ``verify_staging`` the checksums of blocks (of all, or of a sample) are taken when the drain
  begins and compared with those of what was copied: a tensor that changed between is named, and the
  drain has failed. What was not compared may be torn; nothing is claimed of it.
- Nothing is retried after a failed sync.
- Its spans end when native threads were through, not when somebody noticed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_uring import _engine, fencing
from megatron_uring.columns import Int64Array, Uint32Array
from megatron_uring.config import Config
from megatron_uring.errors import (
    CheckpointError,
    StateMismatchError,
    StorageError,
    as_checkpoint_error,
)
from megatron_uring.layout import BLOCK_BYTES
from megatron_uring.progress import Clock, Patience, end_job, hold, let_go
from megatron_uring.tables import Staged

_POLL_S = 0.05
_SAMPLED_BLOCKS = 16
# As ioprio_set(2) has it: class in the upper bits, level in the lower ones.
PRIORITIES = {"normal": 0, "low": 2 << 13 | 7, "idle": 3 << 13}

KeysAt = Callable[[int, int], list[str]]
"""Keys of the tensors that have bytes in [begin, end) of the subfile."""
Compared = tuple[Int64Array, Uint32Array]
"""Numbers of blocks, ascending, and the checksums that they had when the save was called."""


@dataclass(frozen=True)
class _Region:
    start: int
    length: int
    job: _engine.Job
    compared: Int64Array
    expected: Uint32Array
    keys_at: KeysAt | None
    began: float


class Drain:
    """What one rank writes of one save.

    Parameters
    ----------
    engine, file
        Through which, and to where.
    config
        ``timeout_s``; and, of a lazy drain, ``verify_staging``, ``drain_bytes_per_s`` and
        ``drain_priority``.
    lazy
        Whether the caller goes on while tensors are copied: fences then wait for this drain.
    syncs
        Whether to sync the file behind each region.
    clock, span
        Of the save: seconds count from its begin, and spans are kept there, that of the writes
        under the name `span`.
    """

    def __init__(
        self,
        engine: _engine.Engine,
        file: _engine.File,
        config: Config,
        *,
        lazy: bool = False,
        syncs: bool = True,
        clock: Clock | None = None,
        span: str = "write",
    ) -> None:
        self.engine, self.file, self.config, self.lazy = engine, file, config, lazy
        self.fence_s = self.staged_s = self.drained_s = 0.0
        self._syncs = syncs
        self._regions: list[_Region] = []
        self._error: CheckpointError | None = None
        self._over = False
        self._clock, self._span = clock or Clock(), span
        self._tickets: list[object] = []

    # ---------------------------------------------------------------------------------------------
    # begin

    def add(
        self,
        start: int,
        length: int,
        staged: Staged,
        keys_at: KeysAt | None = None,
        compared_with: Compared | None = None,
    ) -> None:
        """Begin to write the region [start, start + length): the pieces, and zeros between them.

        Copies are compared with `compared_with`; default: with what is there now.
        """
        if not length:
            return
        level = self.config.verify_staging if self.lazy and keys_at is not None else "off"
        compared, expected = compared_with or compared_later(level, start, length, staged)
        self._tickets.append(hold((staged, self.file)))
        began = time.perf_counter()
        job = self.engine.write(
            self.file,
            start,
            length,
            staged.pieces,
            checksum_copies=level == "full",
            bytes_per_s=self.config.drain_bytes_per_s if self.lazy else 0,
            io_priority=PRIORITIES[self.config.drain_priority] if self.lazy else 0,
            syncs=self._syncs,
        )
        self._regions.append(_Region(start, length, job, compared, expected, keys_at, began))

    def watch(self) -> None:
        """Let fences wait for what was added."""
        fencing.watch(self)

    # ---------------------------------------------------------------------------------------------
    # staging

    def staged(self) -> bool:
        """Whether every region is copied, or failed."""
        return all(region.job.staged() for region in self._regions)

    def wait_staged(self, waited_since: float) -> None:
        """Return when it is `staged`; without progress for ``timeout_s`` the drain has failed."""
        patience = Patience(patience_s(self.config))
        while not self.staged() and self._error is None:
            for region in self._regions:
                if not region.job.wait_staged(_POLL_S):
                    break
            moved = self._moved_bytes()
            if patience.is_over(moved):
                self.give_up(self._stuck("stage tensors", moved))
        now = time.perf_counter()
        self.fence_s += now - waited_since
        self._clock.add("fence wait", waited_since, now)

    # ---------------------------------------------------------------------------------------------
    # writing

    def advance(self) -> bool:
        """Go on as far as that needs no wait; whether all is durable, or the drain has failed."""
        if self._over:
            return True
        if not self.ended():
            return False
        if self._error is None:
            self._error = self._failure([region.job for region in self._regions]) or self._torn()
        self._end()
        return True

    def ended(self) -> bool:
        """Whether nothing is written any more; changes nothing, so that any thread may ask."""
        return all(region.job.done() for region in list(self._regions))

    def acknowledged(self) -> bool:
        """Whether nothing is left that only this process has; or the drain has failed."""
        return self.advance()

    def wait(self, report: Callable[[int], None]) -> None:
        """Wait until all is durable.

        Parameters
        ----------
        report
            Called with the bytes done so far, about twenty times a second.

        Raises
        ------
        StorageError
            What failed, or that there was no progress for ``timeout_s``.
        StateMismatchError
            A tensor changed before it was copied.
        """
        patience = Patience(patience_s(self.config))
        while not self.advance():
            self._pause()
            moved = self._moved_bytes()
            if patience.is_over(moved):
                self.give_up(self._stuck("write subfile", moved))
            report(moved)
        if self._error is not None:
            raise self._error

    def give_up(self, error: CheckpointError) -> None:
        """Fail with `error`: what has not been started is not written any more."""
        self._error = self._error or error
        for region in self._regions:
            end_job(region.job)
        self._end()

    def _pause(self) -> None:
        for region in self._regions:
            if not region.job.done():
                with contextlib.suppress(OSError):  # `advance` tells it
                    region.job.wait(_POLL_S)
                return

    def _moved_bytes(self) -> int:
        jobs = [region.job for region in self._regions]
        return sum(job.bytes_done + job.bytes_staged for job in jobs)

    def _end(self) -> None:
        self._over = True
        if all(region.job.done() for region in self._regions):  # else memory stays held for ever
            for ticket in self._tickets:
                let_go(ticket)
            self._tickets.clear()
            self._keep_spans()

    def _keep_spans(self) -> None:
        jobs = [region.job for region in self._regions]
        done_at = max((job.done_at_s for job in jobs), default=time.perf_counter())
        self.drained_s = done_at - self._clock.began
        if self._regions:
            began = min(region.began for region in self._regions)
            staged_at = max(job.staged_at_s for job in jobs)
            written_at = max(job.written_at_s for job in jobs)
            total = sum(region.length for region in self._regions)
            self.staged_s = staged_at - self._clock.began
            self._clock.add(self._span, began, written_at, total)
            self._clock.add("staging", began, staged_at, total)
            if self._syncs:
                self._clock.add("sync", written_at, max(done_at, written_at))

    # ---------------------------------------------------------------------------------------------
    # what came of it

    @property
    def regions(self) -> list[tuple[int, int, Uint32Array]]:
        """Start, length and checksums of each region; of a drain that succeeded."""
        return [(one.start, one.length, one.job.checksums()) for one in self._regions]

    @property
    def copy_s(self) -> float:
        """Thread seconds spent copying."""
        return sum(region.job.copy_s for region in self._regions)

    @property
    def checksum_s(self) -> float:
        """Thread seconds spent on checksums."""
        return sum(region.job.checksum_s for region in self._regions)

    def _failure(self, jobs: list[_engine.Job]) -> CheckpointError | None:
        for job in jobs:
            try:
                job.wait(0.0)
            except OSError as error:
                return as_checkpoint_error(error, "write subfile", self.file.path)
        return None

    def _torn(self) -> CheckpointError | None:
        for region in self._regions:
            found = region.job.checksums()[region.compared]
            different = np.flatnonzero(found != region.expected)
            if not len(different) or region.keys_at is None:
                continue
            begin = region.start + int(region.compared[different[0]]) * BLOCK_BYTES
            keys = region.keys_at(begin, min(begin + BLOCK_BYTES, region.start + region.length))
            return StateMismatchError(
                f"stage tensor {', '.join(map(repr, keys[:3]))}",
                path=self.file.path,
                offset=begin,
                expected="the bytes that it had when the save was called",
                found="other bytes",
                cause="it was changed before it was copied: call megatron_uring.fence() before "
                "anything but an optimizer of PyTorch changes it",
            )
        return None

    def _stuck(self, operation: str, moved: int) -> StorageError:
        total = sum(region.length for region in self._regions)
        return StorageError(
            operation,
            path=self.file.path,
            expected=f"{total} bytes",
            found=f"{moved} copied or written after {self.config.timeout_s:g} s without progress",
            cause="the file system does not answer",
        )


def patience_s(config: Config) -> float:
    """How long nothing may move: ``timeout_s``, and what a slab takes where the rate is limited."""
    limited_s = config.slab_bytes / config.drain_bytes_per_s if config.drain_bytes_per_s else 0.0
    return config.timeout_s + limited_s


def compared_later(level: str, start: int, length: int, staged: Staged) -> Compared:
    """What the copies of a region are compared with: checksums of some blocks as they are now."""
    compared = _compared_blocks(length, level)
    if not len(compared):
        return compared, np.zeros(0, np.uint32)
    return compared, _engine.block_checksums(staged.pieces, start, length, compared)


def _compared_blocks(length: int, level: str) -> Int64Array:
    """Numbers of the blocks of a region whose checksums are compared, ascending."""
    blocks = -(-length // BLOCK_BYTES)
    if level == "off":
        return np.zeros(0, np.int64)
    if level == "full" or blocks <= _SAMPLED_BLOCKS:
        return np.arange(blocks, dtype=np.int64)
    # another sample each time: what one save misses the next may find
    return np.sort(np.random.default_rng().choice(blocks, _SAMPLED_BLOCKS, replace=False))
