"""Typed face of the native engine (`csrc/bindings.cpp`).

Guarantees
----------
- Every call that can block releases the GIL; a `Job` runs on native threads only.
- Memory is bounded by the `SlabPool`: when no slab is free, staging waits. `Engine.transfer`
  needs none.
- A failed operation raises `OSError` with errno, path in ``filename`` and, in ``strerror``,
  operation, offset and length. Nothing is retried after a failed sync. Wrong arguments raise
  `ValueError`.
- Addresses that are handed over must stay valid until the job is done or has failed (`Job.done()`
  is true): a failed or cancelled job is done only when none of its operations is in flight any
  more.
"""

from collections.abc import Sequence
from typing import final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

BLOCK_BYTES: int  # 1 MiB, the unit of checksums

def has_io_uring() -> bool:
    """Whether the module was built with liburing (says nothing about the running kernel)."""

def crc32c(data: Buffer, value: int = 0) -> int:
    """CRC32C (Castagnoli, RFC 3720 convention: initial and final inversion) of a contiguous
    buffer."""

def block_checksums(
    pieces: Pieces, start: int, length: int, block_number: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    """Checksums of these blocks of the region [start, start + length), as a write of `pieces` that
    begins and ends while nobody changes the memory gives them. Pieces on devices are copied here
    to be read."""

@final
class Cuda:
    """The CUDA runtime (`csrc/cuda.hpp`): the one that the process has loaded already, or, with a
    `path`, that one, a file or a name that the loader finds. OSError (EIO) where it cannot be had.

    Every call of CUDA that fails, here or in a job, is an OSError (EIO) with the call and CUDA's
    text in ``strerror``.
    """

    def __init__(self, path: str = "") -> None: ...
    @property
    def path(self) -> str:
        """Of the library."""

@final
class DeviceEvents:
    """What is queued now on these streams, one (device, handle) for each device: copies from the
    devices wait for it."""

    def __init__(self, cuda: Cuda, streams: Sequence[tuple[int, int]]) -> None: ...

@final
class Pieces:
    """N pieces of memory, each a box of a contiguous shard in a file (`csrc/copy.hpp`).

    A piece is ``product(counts)`` runs of ``run_bytes`` contiguous bytes. Run (i0, i1, ...) starts
    at file offset ``file_start + sum(i * file_stride)`` and at address ``address + sum(i *
    memory_stride)``. File strides are positive, descending and nested, so that runs come in
    ascending, disjoint file order. Memory strides are free (0 and negative too when reading
    memory). Pieces are sorted by (file_number, file_start).

    Parameters
    ----------
    file_number : int32 [N]       which of the files given to `Engine.read` (0 when writing)
    file_start : int64 [N]        bytes from the start of the file
    address : uint64 [N]
    run_bytes : int64 [N]
    counts, file_strides, memory_strides : int64 [N, D], 0 <= D <= 16; unused trailing dimensions
    have count 1
    device_number : int32 [N]     device on which the piece lies; -1, as all without it: host
    memory. Of a write only; such a piece is contiguous, and overlaps none
    device_events                 of every device that is named
    """

    def __init__(
        self,
        file_number: npt.NDArray[np.int32],
        file_start: npt.NDArray[np.int64],
        address: npt.NDArray[np.uint64],
        run_bytes: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        file_strides: npt.NDArray[np.int64],
        memory_strides: npt.NDArray[np.int64],
        *,
        device_number: npt.NDArray[np.int32] | None = None,
        device_events: DeviceEvents | None = None,
    ) -> None: ...
    def __len__(self) -> int: ...

@final
class SlabPool:
    """`slab_count` slabs of `slab_bytes` (a multiple of 1 MiB): private memory, MADV_HUGEPAGE,
    MADV_DONTFORK, touched once unless `touched` is false: then by whom uses a slab first."""

    def __init__(self, slab_bytes: int, slab_count: int, *, touched: bool = True) -> None: ...
    @property
    def slab_bytes(self) -> int: ...
    @property
    def slab_count(self) -> int: ...
    @property
    def free_count(self) -> int: ...
    @property
    def allocate_s(self) -> float:
        """Seconds that mapping and first touch took."""

    @property
    def address(self) -> int:
        """Of its first byte."""

    def page_lock(self, cuda: Cuda, device: int) -> str:
        """Register all of it with CUDA, through the context of `device`; empty, or why that was
        refused. It is tried once; asked again, it gives the same answer."""

@final
class NodeCache:
    """Chunks read by one process of the node, for the others (`csrc/node_cache.hpp`).

    Attaches to the cache at `path`, a file in shared memory, or makes it; lets go of it when it is
    collected, and removes it then if nobody else holds it. OSError where it cannot be had.
    `slot_bytes` is a multiple of 1 MiB, `slot_count` from 1 to 1024; both the same in every
    process.
    """

    def __init__(self, path: str, slot_bytes: int, slot_count: int) -> None: ...

def sweep_node_caches(directory: str, prefix: str) -> None:
    """Remove caches whose names begin with `prefix` and that no process holds."""

@final
class File:
    """Owner of one descriptor. `direct` says whether O_DIRECT is in force after all fallbacks."""

    @staticmethod
    def create(path: str, *, direct: bool) -> File:
        """Create exclusively, mode 0666 under the umask. EINVAL on O_DIRECT: opened without it."""

    @staticmethod
    def open(path: str, *, writable: bool, direct: bool) -> File: ...
    @property
    def path(self) -> str: ...
    @property
    def direct(self) -> bool: ...
    @property
    def offset_alignment(self) -> int:
        """Alignment in bytes that direct I/O asks of offsets and lengths (statx; 4096 where it does
        not tell)."""

    @property
    def memory_alignment(self) -> int: ...
    def set_direct(self, direct: bool) -> None:
        """Switch O_DIRECT for all later I/O (the group of a subfile agrees on one mode before its
        first byte)."""

    def size(self) -> int: ...
    def preallocate(self, length: int, start: int = 0) -> bool:
        """fallocate(2) of [start, start + length). False where the file system cannot (EOPNOTSUPP,
        ENOSYS, EINVAL)."""

    def truncate(self, length: int) -> None: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...

@final
class Job:
    """Work on native threads. Not bound to the GIL; `wait` raises what failed, once and every time
    it is asked."""

    def done(self) -> bool: ...
    def wait(self, timeout_s: float) -> bool:
        """True when done, False after `timeout_s`. Raises the OSError with which the job failed."""

    def cancel(self) -> None:
        """Start nothing more; the job is done when what is in flight has ended (it then fails with
        ECANCELED)."""

    @property
    def bytes_total(self) -> int: ...
    @property
    def bytes_done(self) -> int: ...
    @property
    def bytes_shared(self) -> int:
        """Of a read: bytes that came from another process of the node."""

    @property
    def copy_s(self) -> float:
        """Thread seconds spent copying between tensors and slabs."""

    @property
    def checksum_s(self) -> float: ...
    def staged(self) -> bool:
        """Of a write: whether all was copied, or the job is done; the memory may change then."""

    def wait_staged(self, timeout_s: float) -> bool:
        """Whether it is `staged`, after `timeout_s` at most. Raises nothing that failed the job."""

    @property
    def bytes_staged(self) -> int: ...
    @property
    def staged_at_s(self) -> float:
        """When it was `staged`, in seconds of CLOCK_MONOTONIC, which on Linux is
        `time.perf_counter`; 0 until then."""

    @property
    def written_at_s(self) -> float:
        """When the last byte was written, as `done_at_s`, which lies behind the sync."""

    @property
    def done_at_s(self) -> float:
        """When it was done; 0 until then."""

    def checksums(self) -> npt.NDArray[np.uint32]:
        """Of a finished write or read: CRC32C of each block of each range, in order."""

@final
class Engine:
    """Moves bytes between memory and files through slabs.

    Parameters
    ----------
    kind
        ``"io_uring"``, ``"posix"`` or ``"auto"`` (io_uring if a ring can be set up, else posix).
        ``"io_uring"`` raises OSError where no ring can be had.
    queue_depth
        Most operations in flight; also the number of threads of the POSIX engine is
        min(queue_depth, posix_threads).
    copy_threads
        Threads that fill slabs (write) or verify and scatter them (read).
    submission_batch
        Of io_uring, as are those below: most operations that one call submits; 0: all there are.
    polled_submission
        Whether a kernel thread takes submissions (SQPOLL).
    registered_files
        Whether files are registered with the ring. One of the last 64 that were used keeps its
        space until the engine is closed, also if it is removed.
    registered_memory
        (address, bytes) of what is registered with the ring, at most 1 GiB each; it has to stay
        there until the engine is closed.
    """

    def __init__(
        self,
        kind: str,
        pool: SlabPool,
        *,
        queue_depth: int,
        posix_threads: int = 4,
        copy_threads: int = 1,
        submission_batch: int = 0,
        polled_submission: bool = False,
        registered_files: bool = False,
        registered_memory: Sequence[tuple[int, int]] = (),
    ) -> None: ...
    @property
    def kind(self) -> str: ...
    @property
    def reason(self) -> str:
        """Why this kind runs: ``"io_uring: asked for"``, ``"posix: io_uring_queue_init: Operation
        not permitted"`` ..."""

    def write(
        self,
        file: File,
        start: int,
        length: int,
        pieces: Pieces,
        *,
        checksum_copies: bool = False,
        bytes_per_s: int = 0,
        io_priority: int = 0,
        syncs: bool = False,
    ) -> Job:
        """Write [start, start+length) of `file`: the pieces, and zeros wherever no piece lies.

        `start` is a multiple of BLOCK_BYTES, `length` of 4096. Checksums are those of the bytes
        handed to the kernel, padding included; block k is [start + k MiB, min(start + (k+1) MiB,
        start+length)).

        With `checksum_copies` they are those of the copies even where that takes longer, so that
        memory that changes meanwhile never makes a block that a restore refuses. `bytes_per_s`
        limits the rate (0: no limit), `io_priority` is that of ioprio_set(2) (0: none of its own).
        With `syncs` the file is synced behind the last byte, before the job is done.
        """

    def read(
        self,
        files: list[File],
        file_number: npt.NDArray[np.int32],
        start: npt.NDArray[np.int64],
        length: npt.NDArray[np.int64],
        pieces: Pieces,
        expected: npt.NDArray[np.uint32] | None,
        cache: NodeCache | None = None,
        file_keys: Sequence[int] = (),
    ) -> Job:
        """Read ranges and scatter them to the pieces that they hold; eight files at a time in
        turn, with a `cache` from where other processes are at (`csrc/schedule.hpp`).

        Each range starts at a multiple of BLOCK_BYTES; `expected` has one checksum for each block
        of each range, in order, or is None. A slab whose checksum differs is not scattered;
        `bad_blocks` of the job names the block and the job goes on. A file that ends early fails
        the job with ENODATA, naming path and offset.

        With a `cache`, chunks that other processes of the node read are taken from there and those
        read here are offered; `file_keys` has the number of each file there, the same in every
        process and of no other file. It needs `expected`.
        """

    @property
    def slab_count(self) -> int:
        """Of its pool."""

    def page_lock(self, cuda: Cuda, device: int) -> str:
        """Its pool's."""

    @property
    def submit_calls(self) -> int:
        """System calls so far that handed I/O to the kernel (SQPOLL: that may have)."""

    def transfer(
        self,
        operation: str,
        files: list[File],
        file_number: npt.NDArray[np.int32],
        start: npt.NDArray[np.int64],
        length: npt.NDArray[np.int64],
        address: npt.NDArray[np.uint64],
    ) -> Job:
        """I/O alone: ``"write"`` or ``"read"`` each range as one operation, straight between its
        file and its address, in this order; no slab, no copy, no checksum.

        What O_DIRECT asks of offset, length and address is the caller's affair: where it is not
        met, the job fails with EINVAL.
        """

    def sync(self, file: File) -> Job:
        """fdatasync as a job, so that a stuck disk can be waited for with a bound."""

    def bad_blocks(self, job: Job) -> npt.NDArray[np.int64]:
        """[M, 4] of a read job: range number, file offset of the block, expected and found
        CRC32C."""

    def close(self) -> None:
        """Stop the threads after the jobs in flight; idempotent."""

# Operations of the commit: through the same recorder as the engine's own.
def write_file(path: str, data: Buffer, *, sync: bool = True) -> None:
    """Create exclusively, write all, fsync unless not to `sync`, close. On failure the file is
    removed."""

def read_file(path: str) -> bytes: ...
def rename(source: str, destination: str) -> None: ...
def sync_directory(path: str) -> None:
    """fsync of a directory (EINVAL, ENOTSUP: the file system has no such thing; not an error)."""

def remove(path: str) -> None:
    """unlink; a missing file is not an error."""

# The watchdog: where this process stands (`csrc/watchdog.hpp`).
def enter_step(step: str) -> None:
    """This process begins with `step`. Passes the recorder; OSError if a fault says so."""

def describe_process(rank: int, subject: str) -> None:
    """What is printed beside the step: the rank (negative: as it was), and what it works on."""

def answer_signal(signal: int) -> bool:
    """Print on standard error what this process is doing whenever it gets `signal`, also where it
    is blocked in a system call or in MPI. Whether that is so: a signal that somebody else handles
    is left alone."""

# The recorder: faults in, trace out. For tests and power-loss replay.
def inject_fault(
    operation: str,
    fault: str,
    *,
    skip: int = 0,
    count: int = 1,
    path_contains: str = "",
    delay_s: float = 0.0,
) -> None:
    """Make an operation misbehave: after `skip` matching calls, `count` times (-1: for ever).

    Operations: open, preallocate, write, read, sync, truncate, close, rename, sync_directory,
    remove, and step, of `enter_step`, whose path is its name. Faults: short (half the bytes),
    eintr, eagain, eio, enospc, edquot, einval, efault, enomem, erofs, estale, emfile, delay, kill
    (SIGKILL to this process).
    """

def clear_faults() -> None: ...
def trace_start() -> None: ...
def trace_stop() -> list[tuple[str, str, int, int, int]]:
    """(operation, path, offset, length, result or -errno) in the order of completion."""
