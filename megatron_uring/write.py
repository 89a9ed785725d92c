"""Writing: slabs to a subfile, through the engine.

Guarantees
----------
- A subfile is created under a name that no other save has; an existing file is never opened for
  writing.
- Direct and buffered I/O never mix on one subfile: the aggregator tries one direct page before the
  first region is written, and the mode that works is the mode of the whole group.
- What was written counts only after `sync` of the same descriptor; after a failed sync nothing is
  retried.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass

from megatron_uring import _engine
from megatron_uring.errors import StorageError, as_checkpoint_error
from megatron_uring.layout import BLOCK_BYTES, SUPERBLOCK_BYTES
from megatron_uring.progress import run_job
from megatron_uring.tables import Staged, no_pieces

_direct_devices: set[int] = set()


@dataclass(frozen=True)
class Storage:
    """What is known of the file system under a directory."""

    file_system: str
    mount_options: str
    stripe_bytes: int


def describe_storage(directory: str, stripe_bytes: int = 0) -> Storage:
    """File system type and options from the mount table, and the stripe: `stripe_bytes`, or what
    the system prefers.

    ``st_blksize`` is the block size on GPFS and the preferred I/O size on Lustre and BeeGFS; below
    1 MiB (4096 on local file systems) it says nothing about stripes.
    """
    file_system, options = _mount_of(os.path.realpath(directory))
    if not stripe_bytes:
        preferred = os.stat(directory).st_blksize
        stripe_bytes = preferred if preferred >= BLOCK_BYTES else BLOCK_BYTES
    return Storage(file_system, options, stripe_bytes)


def _mount_of(path: str) -> tuple[str, str]:
    best, found = "", ("unknown", "")
    with (
        contextlib.suppress(OSError),
        open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table,
    ):
        for line in table:
            left, _, right = line.partition(" - ")
            # the kernel writes space, tab, newline and backslash as octal
            point = re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), left.split()[4])
            inside = path == point or path.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, found = point, (right.split()[0], left.split()[5])
    return found


def create_subfile(
    engine: _engine.Engine,
    path: str,
    length: int,
    *,
    direct: str,
    timeout_s: float,
    proved: bool = False,
) -> _engine.File:
    """Create the subfile, decide how it is written, and reserve `length` bytes.

    With `proved` no page is tried on a device on which one of this process's has been written
    directly before: behind an earlier save that still writes, it would wait for the disk.

    Raises
    ------
    StorageError
        Whatever the file system refused; the file is removed then.
    """
    file = None
    try:
        file = _engine.File.create(path, direct=direct != "off")
        device = os.stat(path).st_dev
        if file.direct and not (proved and device in _direct_devices):
            if _direct_works(engine, file, timeout_s):
                _direct_devices.add(device)
            else:
                file.set_direct(False)
        if direct == "on" and not file.direct:
            raise StorageError(
                "open subfile",
                path=path,
                expected="O_DIRECT",
                found="refused by the file system",
                cause="MEGATRON_URING_DIRECT=auto falls back to buffered writes",
            )
        file.preallocate(length)
        return file
    except OSError as error:
        _discard(file, path)
        raise as_checkpoint_error(error, "create subfile", path) from error
    except BaseException:
        _discard(file, path)
        raise


def _direct_works(engine: _engine.Engine, file: _engine.File, timeout_s: float) -> bool:
    if max(file.offset_alignment, file.memory_alignment) > SUPERBLOCK_BYTES:
        return False
    try:
        run_job(
            lambda: engine.write(file, 0, SUPERBLOCK_BYTES, no_pieces()),
            "write first page",
            file.path,
            timeout_s,
            alive=file,
        )
    except StorageError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno == errno.EINVAL:
            return False
        raise
    return True


def open_subfile(path: str, *, direct: bool) -> _engine.File:
    """Open a subfile that the aggregator of this group created, in the mode that it found to
    work.
    """
    try:
        file = _engine.File.open(path, writable=True, direct=direct)
        if file.direct != direct:
            file.set_direct(direct)
        return file
    except OSError as error:
        raise as_checkpoint_error(error, "open subfile", path) from error


def write_region(
    engine: _engine.Engine,
    file: _engine.File,
    start: int,
    length: int,
    staged: Staged,
    *,
    timeout_s: float,
    report: Callable[[int], None],
    meanwhile: Callable[[], None] | None = None,
) -> _engine.Job:
    """Write the region [start, start+length): the staged pieces, and zeros between them; call
    `meanwhile` beside it.

    Returns
    -------
    Job
        Done; its checksums are those of each block of the region, as it went to disk.
    """
    return run_job(
        lambda: engine.write(file, start, length, staged.pieces),
        "write subfile",
        file.path,
        timeout_s,
        alive=(staged, file),
        report=report,
        meanwhile=meanwhile,
    )


def sync_subfile(engine: _engine.Engine, file: _engine.File, timeout_s: float) -> None:
    """Make what this descriptor wrote durable."""
    run_job(lambda: engine.sync(file), "sync subfile", file.path, timeout_s, alive=file)


def _discard(file: _engine.File | None, path: str) -> None:
    with contextlib.suppress(OSError):
        if file is not None:
            file.close()
            _engine.remove(path)
