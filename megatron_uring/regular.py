"""Regular files: what a checkpoint is made of, and all that is opened to read one.

Guarantees
----------
- Nothing waits on what is no file: a fifo, a device or a socket under the name of a file is refused
  as damage, before it is opened; so is a directory.
- What lies behind a symbolic link counts, as checkpoints may lie elsewhere; a loop is an error of
  the file system.
"""

from __future__ import annotations

import os
import stat
from typing import BinaryIO

from megatron_uring.errors import CorruptionError

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a fifo",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: str, operation: str) -> BinaryIO:
    """Open a file to read its bytes.

    Raises
    ------
    CorruptionError
        If something else than a file lies there.
    OSError
        As `open` does.
    """
    require_regular(path, operation)
    # O_NONBLOCK: what has taken the file's place meanwhile is not waited for either
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    return os.fdopen(descriptor, "rb")


def require_regular(path: str, operation: str) -> os.stat_result:
    """What the file system says of a file; raises as `open_regular` does, without opening."""
    found = os.stat(path)
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        raise CorruptionError(
            operation,
            path=path,
            expected="a regular file",
            found=_KINDS.get(kind, "something else"),
            cause="something has taken its place, or the copy that brought it here went wrong",
        )
    return found
