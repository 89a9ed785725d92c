"""One write or read of a pattern: files opened, submissions transferred, synced, closed, in phases.

Guarantees
----------
- Opening, reserving, transfer and sync (write) lie inside the clock, and memory that is new (read).
  The engine, its slabs and what is registered with its ring are set up before it.
- At most `FILES_OPEN` files are open at a time, however many a pattern has.
- Memory is bounded by `Arena`: data longer than a lap of it lies there several times over, the
  same bytes at the same offsets in both directions.
- An error while files are created is raised on all ranks: none waits for a file that never comes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from megatron_uring import _engine
from megatron_uring.bench.measure import DifferentError, UnavailableError
from megatron_uring.bench.suite.patterns import PAGE_BYTES, Layout
from megatron_uring.columns import Int64Array, Uint8Array, Uint32Array, Uint64Array
from megatron_uring.comm import Communicator
from megatron_uring.config import MEBIBYTE, Config
from megatron_uring.layout import round_up
from megatron_uring.progress import Clock, run_job, step

FILES_OPEN = 256
ARENA_BYTES = 1 << 30
SLABS = "slabs"
NEW = "new"
_REGISTERED_BYTES = 1 << 30  # the most that the kernel takes as one buffer
_POOL_BYTES = 128 * MEBIBYTE
_THREADS_MAXIMUM = 256
_COMPARED_BYTES = 64 * MEBIBYTE


@dataclass(frozen=True)
class Options:
    """How submissions reach the file system; see `RESULTS.md`."""

    direct: bool = True
    engine: str = "io_uring"
    queue_depth: int = 8
    submission_batch: int = 0
    polled_submission: bool = False
    registered_memory: bool = False
    registered_files: bool = False
    staging: str = "none"
    memory: str = "reused"
    slab_bytes: int = Config.slab_bytes


@dataclass(frozen=True)
class Outcome:
    """What the last write or read took: its phases, and calls that handed I/O to the kernel."""

    phases_s: dict[str, float] = field(default_factory=dict)
    submit_calls: int = 0


class Arena:
    """Memory for a rank's data: page-aligned, in huge pages where there are some.

    Parameters
    ----------
    lap_bytes
        What lies beyond so many bytes of the data lies at the same addresses again.
    piece_bytes
        Room behind that, for the longest submission: none is cut in memory.
    seed
        Of the random bytes that it holds; None: zeros, touched.
    """

    def __init__(self, lap_bytes: int, piece_bytes: int, seed: int | None) -> None:
        self.lap_bytes = max(lap_bytes, 1)
        self.bytes = self.lap_bytes + piece_bytes
        self.memory = anonymous_memory(self.bytes, huge=True)
        if seed is None:
            self.memory[:] = 0
            return
        # a length that is no multiple of any submission's: what goes astray is found
        block = np.random.default_rng(seed).integers(0, 256, 16 * MEBIBYTE - 4099, np.uint8)
        for start in range(0, self.bytes, len(block)):
            part = self.memory[start : start + len(block)]
            part[:] = block[: len(part)]


def anonymous_memory(length: int, *, huge: bool) -> Uint8Array:
    """Memory that nobody has touched; unmapped with the last reference to it."""
    # shared memory, which is what mmap gives by default, has no huge pages on most machines
    mapped = mmap.mmap(-1, max(length, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        with contextlib.suppress(OSError, AttributeError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapped, np.uint8)


@dataclass
class Transfer:
    """One layout of one rank, written and read again and again.

    Attributes
    ----------
    folder
        Of the files; it exists.
    layout, options
        What goes where, and how.
    source, target
        What is written, and where it is read to.
    outcome
        Of the last call of `write` or `read`.
    """

    world: Communicator
    folder: str
    layout: Layout
    options: Options
    source: Arena
    target: Arena
    timeout_s: float = Config.timeout_s
    outcome: Outcome = field(default_factory=Outcome)
    _clock: Clock = field(default_factory=Clock)
    _threads_s: dict[str, float] = field(default_factory=dict)
    _running: _engine.Engine | None = None
    _checksums: Uint32Array | None = None

    def __post_init__(self) -> None:
        self._arrived = self.target.memory

    # ---------------------------------------------------------------------------------------------
    # what is timed

    def write(self) -> None:
        """Create the files, write them, and make them durable; collective."""
        engine = self._start()
        for first, last in _windows(len(self.layout.files)):
            files = self._create(first, last)
            self._clock.lap("open")
            with contextlib.ExitStack() as stack:
                for file in files:
                    stack.callback(file.close)
                self._move(engine, "write", files, first, self.source.memory)
                self._clock.lap("transfer")
                jobs = [engine.sync(file) for file in files]
                for job, file in zip(jobs, files, strict=True):
                    self._wait(lambda job=job: job, "sync", file.path, file)  # type: ignore[misc]
                self._clock.lap("sync")
            self._clock.lap("close")
        _engine.sync_directory(self.folder)
        self._clock.lap("sync")
        self._stop(engine)

    def read(self) -> None:
        """Open the files and read them; not collective."""
        engine = self._start()
        memory = self.target.memory
        if self.options.memory == NEW:
            memory = anonymous_memory(self._used_bytes, huge=False)
            memory[:: mmap.PAGESIZE] = 0
            self._clock.lap("allocate")
        for first, last in _windows(len(self.layout.files)):
            with contextlib.ExitStack() as stack:
                files = []
                for number in range(first, last):
                    path = self._path(number)
                    files.append(_open(path, writable=False, direct=self.options.direct))
                    stack.callback(files[-1].close)
                self._clock.lap("open")
                self._move(engine, "read", files, first, memory)
                self._clock.lap("transfer")
            self._clock.lap("close")
        self._stop(engine)
        self._arrived = memory

    # ---------------------------------------------------------------------------------------------
    # around it

    def prepare(self) -> None:
        """Set up a fresh engine, and wipe what is read into."""
        self.close()
        options = self.options
        slabs = options.slab_bytes, max(_POOL_BYTES // options.slab_bytes, 1)
        # what is never staged needs no slabs, but an engine wants a pool
        pool = _engine.SlabPool(*(slabs if options.staging == SLABS else (MEBIBYTE, 1)))
        self._running = _engine.Engine(
            options.engine,
            pool,
            queue_depth=options.queue_depth,
            posix_threads=min(options.queue_depth, _THREADS_MAXIMUM),
            submission_batch=options.submission_batch,
            polled_submission=options.polled_submission,
            registered_files=options.registered_files,
            registered_memory=self._registered() if options.registered_memory else (),
        )
        self.target.memory[: self._used_bytes] = 0

    def check(self) -> None:
        """Raise `DifferentError` unless what was read last is what was written."""
        begin = self.layout.memory % self.source.lap_bytes
        for start, length in _joined(begin, self.layout.length):
            for at in range(start, start + length, _COMPARED_BYTES):
                part = slice(at, min(at + _COMPARED_BYTES, start + length))
                if not np.array_equal(self.source.memory[part], self._arrived[part]):
                    raise DifferentError(f"bytes from {at} on came back different")

    def release(self) -> None:
        """Stop the engine, and give back what a read had allocated."""
        self._arrived = self.target.memory
        self.close()

    def close(self) -> None:
        """Stop the engine: what its threads held open is closed."""
        if self._running is not None:
            self._running.close()
            self._running = None

    @property
    def _used_bytes(self) -> int:
        """Of the arenas: up to the end of what lies highest there."""
        ends = self.layout.memory % self.source.lap_bytes + self.layout.length
        return int(ends.max(initial=1))

    def _registered(self) -> list[tuple[int, int]]:
        return [
            (arena.memory.ctypes.data + start, min(_REGISTERED_BYTES, arena.bytes - start))
            for arena in (self.source, self.target)
            for start in range(0, arena.bytes, _REGISTERED_BYTES)
        ]

    def _start(self) -> _engine.Engine:
        assert self._running is not None, "prepare comes first"
        self._clock, self._threads_s = Clock(), {}
        return self._running

    def _stop(self, engine: _engine.Engine) -> None:
        phases = {**self._clock.phases_s, **self._threads_s}
        self.outcome = Outcome(phases, engine.submit_calls)

    def _path(self, number: int) -> str:
        return os.path.join(self.folder, self.layout.files[number])

    def _create(self, first: int, last: int) -> list[_engine.File]:
        """Files of this rank, reserved, and those that another rank creates."""
        layout, files = self.layout, list[_engine.File]()
        own = [number for number in range(first, last) if layout.created[number]]
        with contextlib.ExitStack() as stack:
            with step(self.world, "create files") if layout.shared else contextlib.nullcontext():
                for number in own:
                    files.append(_create(self._path(number), direct=self.options.direct))
                    stack.callback(files[-1].close)
                    files[-1].preallocate(int(layout.file_bytes[number]))
            for number in range(first, last):
                if not layout.created[number]:
                    path = self._path(number)
                    files.append(_open(path, writable=True, direct=self.options.direct))
            stack.pop_all()
        return files

    def _move(
        self,
        engine: _engine.Engine,
        operation: str,
        files: list[_engine.File],
        first: int,
        memory: Uint8Array,
    ) -> None:
        """All submissions of the files from number `first` on."""
        if self.options.staging == SLABS:
            return self._move_through_slabs(engine, operation, files[0], memory)
        layout = self.layout
        low, high = np.searchsorted(layout.file_number, [first, first + len(files)])
        rows = slice(int(low), int(high))
        self._wait(
            lambda: engine.transfer(
                operation,
                files,
                layout.file_number[rows] - np.int32(first),
                layout.start[rows],
                layout.length[rows],
                self._addresses(rows, memory),
            ),
            operation,
            self.folder,
            (files, memory),
        )
        return None

    def _move_through_slabs(
        self, engine: _engine.Engine, operation: str, file: _engine.File, memory: Uint8Array
    ) -> None:
        layout = self.layout
        if not len(layout.start):  # a rank that owns nothing
            return
        numbers = np.zeros(len(layout.start), np.int32)
        none = np.zeros((len(layout.start), 0), np.int64)
        address = self._addresses(slice(None), memory)
        pieces = _engine.Pieces(numbers, layout.start, address, layout.length, none, none, none)
        begin = int(layout.start[0])
        end = int(layout.start[-1] + layout.length[-1])
        length = round_up(end - begin, PAGE_BYTES)

        def start() -> _engine.Job:
            if operation == "write":
                return engine.write(file, begin, length, pieces)
            return engine.read(
                [file],
                np.zeros(1, np.int32),
                np.array([begin], np.int64),
                np.array([length], np.int64),
                pieces,
                self._checksums,
            )

        job = self._wait(start, operation, file.path, (file, pieces, memory))
        self._threads_s = {"copy": job.copy_s, "checksum": job.checksum_s}
        if operation == "write":
            self._checksums = job.checksums()
        elif len(engine.bad_blocks(job)):
            raise DifferentError("a block has another checksum than it was written with")

    def _addresses(self, rows: slice, memory: Uint8Array) -> Uint64Array:
        offset = self.layout.memory[rows] % self.source.lap_bytes
        found: Uint64Array = offset.astype(np.uint64) + np.uint64(memory.ctypes.data)
        return found

    def _wait(
        self, start: Callable[[], _engine.Job], operation: str, path: str, alive: object
    ) -> _engine.Job:
        return run_job(start, operation, path, self.timeout_s, alive=(alive, self))


def _windows(count: int) -> Iterator[tuple[int, int]]:
    for first in range(0, count, FILES_OPEN):
        yield first, min(first + FILES_OPEN, count)


def _joined(begin: Int64Array, length: Int64Array) -> list[tuple[int, int]]:
    """(start, bytes) of what lies end to end, joined."""
    if not len(begin):
        return []
    apart = np.flatnonzero(begin[1:] != begin[:-1] + length[:-1]) + 1
    first = np.concatenate([np.zeros(1, np.intp), apart])
    last = np.append(apart, len(begin)) - 1
    spans = (begin + length)[last] - begin[first]
    return list(zip(begin[first].tolist(), spans.tolist(), strict=True))


def _create(path: str, *, direct: bool) -> _engine.File:
    return _refuse_buffered(_engine.File.create(path, direct=direct), direct)


def _open(path: str, *, writable: bool, direct: bool) -> _engine.File:
    return _refuse_buffered(_engine.File.open(path, writable=writable, direct=direct), direct)


def _refuse_buffered(file: _engine.File, direct: bool) -> _engine.File:
    if direct and not file.direct:
        file.close()
        raise UnavailableError("the file system refuses O_DIRECT")
    return file
