"""Cold reads: the page cache without the files that are to be read.

Guarantees
----------
- Everything is written back before anything is dropped.
- It says which way was taken: all caches of the machine, or, without the right to that, those of
  the files.
"""

from __future__ import annotations

import os

from megatron_uring.comm import Communicator

_DROP_CACHES = "/proc/sys/vm/drop_caches"


def drop_caches(world: Communicator, folder: str) -> str:
    """Drop what is cached of the files in `folder`; on rank 0, for all. Returns how."""
    world.barrier()
    how = _drop(folder) if world.rank == 0 else ""
    return world.broadcast(how.encode() if world.rank == 0 else None).decode()


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
