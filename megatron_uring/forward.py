"""Forwarding: regions of one file to the same places of another, verified on the way.

Guarantees
----------
- Every block is compared with its checksum twice: as it was read, and as it is written. What
  differs is an error, and the file is not synced.
- Memory beyond the engine's slabs is two chunks of four slabs each: one is written while the next
  one is read.
- A wait ends without progress for ``timeout_s``, and when `Report` raises. Nothing is retried after
  a failed sync.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from megatron_uring import _engine
from megatron_uring.columns import Uint8Array, Uint32Array
from megatron_uring.config import Config
from megatron_uring.drain import PRIORITIES, patience_s
from megatron_uring.errors import CorruptionError
from megatron_uring.layout import BLOCK_BYTES
from megatron_uring.progress import run_job

_POLL_S = 0.05
_CHUNK_SLABS = 4

Region = tuple[int, int, Uint32Array]
"""Start, length and the checksum of each block."""
Report = Callable[[int], None]
"""Called with the bytes moved so far, about twenty times a second; what it raises ends the wait."""


def forward(
    engine: _engine.Engine,
    source: _engine.File,
    file: _engine.File,
    regions: Sequence[Region],
    config: Config,
    report: Report,
) -> None:
    """Read regions of `source`, compare them with their checksums, write them to the same
    places of `file`, and sync it.

    Raises
    ------
    CorruptionError
        If what was read, or what is written, is not what was written to `source`.
    StorageError
        With errno's text, or if there was no progress for ``timeout_s``.
    """
    moving = _Moving(engine, source, file, config, report)
    chunks = list(_chunks(regions, _CHUNK_SLABS * config.slab_bytes))
    if chunks:
        moving.read(chunks[0], 0)
    for number, chunk in enumerate(chunks):
        following = chunks[number + 1] if number + 1 < len(chunks) else None
        moving.write(chunk, number, following)
    moving.run(lambda: engine.sync(file), "sync subfile", file)


def _chunks(regions: Sequence[Region], chunk_bytes: int) -> Iterator[Region]:
    for start, length, checksums in regions:
        for begin in range(0, length, chunk_bytes):
            end = min(begin + chunk_bytes, length)
            blocks = slice(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES))
            yield start + begin, end - begin, checksums[blocks]


class _Moving:
    """Two buffers between two files: one is written while the next chunk is read into the other."""

    def __init__(
        self,
        engine: _engine.Engine,
        source: _engine.File,
        file: _engine.File,
        config: Config,
        report: Report,
    ) -> None:
        self.engine, self.source, self.file, self.config = engine, source, file, config
        self._report, self._done, self._next_write = report, 0, 0.0
        self._buffers: list[Uint8Array] = [np.zeros(0, np.uint8), np.zeros(0, np.uint8)]

    def run(
        self,
        start: Callable[[], _engine.Job],
        operation: str,
        file: _engine.File,
        alive: object = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> _engine.Job:
        def report(done: int) -> None:
            self._report(self._done + done)

        job = run_job(
            start,
            operation,
            file.path,
            patience_s(self.config),
            alive=(file, alive),
            report=report,
            meanwhile=meanwhile,
        )
        self._done += job.bytes_done + 1  # a sync that ends is progress, too
        return job

    def read(self, chunk: Region, number: int) -> None:
        start, length, expected = chunk
        buffer = self._buffer(number, length)
        pieces = _pieces(buffer, start)
        job = self.run(
            lambda: self.engine.read(
                [self.source],
                np.zeros(1, np.int32),
                np.array([start], np.int64),
                np.array([length], np.int64),
                pieces,
                expected,
            ),
            "read staging directory",
            self.source,
            (pieces, buffer),
        )
        bad = self.engine.bad_blocks(job)
        if len(bad):
            _, offset, wanted, found = bad[0].tolist()
            raise _not_what_was_written(self.source.path, offset, wanted, found)

    def write(self, chunk: Region, number: int, following: Region | None) -> None:
        """Write a chunk that was read, and read the one that follows."""
        start, length, expected = chunk
        buffer = self._buffer(number, length)
        pieces = _pieces(buffer, start)
        self._pace(length)
        job = self.run(
            lambda: self.engine.write(
                self.file,
                start,
                length,
                pieces,
                bytes_per_s=self.config.drain_bytes_per_s,
                io_priority=PRIORITIES[self.config.drain_priority],
            ),
            "write subfile",
            self.file,
            (pieces, buffer),
            None if following is None else lambda: self.read(following, number + 1),
        )
        different = np.flatnonzero(job.checksums() != expected)
        for block in different[:1].tolist():
            offset = start + block * BLOCK_BYTES
            found = int(job.checksums()[block])
            raise _not_what_was_written(self.file.path, offset, int(expected[block]), found)

    def _pace(self, length: int) -> None:
        """Keep to ``drain_bytes_per_s`` between jobs, each of which keeps to it by itself."""
        if not self.config.drain_bytes_per_s:
            return
        while time.perf_counter() < self._next_write:
            time.sleep(min(_POLL_S, max(self._next_write - time.perf_counter(), 0.0)))
            self._done += 1  # a wait on purpose is progress
            self._report(self._done)
        self._next_write = time.perf_counter() + length / self.config.drain_bytes_per_s

    def _buffer(self, number: int, length: int) -> Uint8Array:
        if len(self._buffers[number % 2]) < length:
            self._buffers[number % 2] = np.empty(length, np.uint8)
        return self._buffers[number % 2][:length]


def _pieces(buffer: Uint8Array, start: int) -> _engine.Pieces:
    none = np.zeros((1, 0), np.int64)
    return _engine.Pieces(
        np.zeros(1, np.int32),
        np.array([start], np.int64),
        np.array([buffer.ctypes.data], np.uint64),
        np.array([len(buffer)], np.int64),
        none,
        none,
        none,
    )


def _not_what_was_written(path: str, offset: int, expected: int, found: int) -> CorruptionError:
    return CorruptionError(
        "drain staging directory",
        path=path,
        offset=offset,
        expected=f"crc32c {expected:#010x}, as it was written there",
        found=f"{found:#010x}",
        cause="the bytes changed on the node: its storage or memory is damaged",
    )
