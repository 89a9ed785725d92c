"""Memory before a trial: the page cache without the files that are to be read, free pages that are
there, and nothing being taken away.

A hypervisor takes back what is free for some seconds (free page reporting), and gives it again page
by page at the next touch. Whoever writes through the page cache pays for pages that are not there:
3.8 s at 1.3 CPU seconds per GB instead of 2.4 s at 0.5 for the same 4 GB. Who does not pays while
pages are taken: copying goes at 0.3 to 2 CPU seconds per GB instead of 0.15, in fits of a second.
Both depend on what ran before, so each variant gets what it needs.

Guarantees
----------
- Everything is written back before anything is dropped.
- It says which way was taken: all caches of the machine, or, without the right to that, those of
  the files.
- What `touch` writes is removed.
"""

from __future__ import annotations

import math
import os
import time

import numpy as np

from megatron_uring.comm import Communicator
from megatron_uring.progress import step

_DROP_CACHES = "/proc/sys/vm/drop_caches"
_CHUNK_BYTES = 16 << 20
_SETTLE_S = 10.0
_SETTLE_FROM_BYTES = 256 << 20
_QUIET_S = 2.5
_QUIET_RATIO = 1.5
_PAUSE_S = 0.05


def drop_caches(world: Communicator, folder: str) -> str:
    """Drop what is cached of the files in `folder`, on every node; collective. Returns how."""
    world.barrier()
    how = ""
    with step(world, "drop caches"):
        if _first_of_its_node(world):
            how = _drop(folder)
    return world.broadcast(how.encode() if world.rank == 0 else None).decode()


def write_back(world: Communicator) -> None:
    """Leave nothing to write back on any node; collective."""
    if _first_of_its_node(world):
        os.sync()
    world.barrier()


def _first_of_its_node(world: Communicator) -> bool:
    """Whether this rank speaks for the caches of its node."""
    node = world.node_of_rank[world.rank]
    return int(np.flatnonzero(world.node_of_rank == node)[0]) == world.rank


def _drop(folder: str) -> str:
    os.sync()
    try:
        with open(_DROP_CACHES, "w", encoding="ascii") as file:
            file.write("3")
    except OSError:
        for path, _, names in os.walk(folder):
            for name in names:
                _drop_file(os.path.join(path, name))
        return "posix_fadvise(DONTNEED) on every file"
    return "sync; echo 3 > /proc/sys/vm/drop_caches"


def _drop_file(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def touch(world: Communicator, folder: str, bytes_per_rank: int) -> None:
    """Write as much through the page cache as a trial may need of it, and forget it; collective.

    Anonymous memory, touched and freed, does not help: the page cache takes other pages.
    """
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    path = os.path.join(folder, f"touch.{world.rank}")
    with step(world, "touch the page cache"):
        try:
            with open(path, "wb", buffering=0) as file:
                for start in range(0, bytes_per_rank, _CHUNK_BYTES):
                    file.write(chunk[: bytes_per_rank - start])
        finally:
            if os.path.exists(path):
                os.unlink(path)


def settle(world: Communicator, bytes_per_rank: int, limit_s: float = _SETTLE_S) -> bool:
    """Wait until copying has kept its best speed for a while on every rank, or for `limit_s`;
    collective. Returns whether it came to rest on this rank. Where a trial moves, and frees, little
    memory, there is nothing to wait for.
    """
    if bytes_per_rank < _SETTLE_FROM_BYTES:
        return True
    source = np.ones(_CHUNK_BYTES, np.uint8)
    target = np.empty_like(source)
    target[:] = source
    began = quiet_since = time.monotonic()
    best = math.inf
    quiet = False
    while not quiet and time.monotonic() - began < limit_s:
        start = time.thread_time()
        target[:] = source
        spent = time.thread_time() - start
        best = min(best, spent)
        now = time.monotonic()
        if spent > _QUIET_RATIO * best:
            quiet_since = now
        quiet = now - quiet_since > _QUIET_S
        time.sleep(_PAUSE_S)
    world.barrier()
    return quiet
