"""Calls to the file system, counted: by the engine's recorder, or by strace for code that is not
ours.

Guarantees
----------
- Only calls that concern files below one folder are counted, under the names of `RESULTS.md`.
- Where strace is not installed, or may not attach, there are no counts; nothing else changes.
- strace slows what it watches: what is counted is not timed at the same time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from megatron_uring import _engine

_ATTACH_S = 5.0
_PR_SET_PTRACER = 0x59616D61
_NAMES = {
    **dict.fromkeys(("open", "openat", "openat2", "creat"), "open"),
    "fallocate": "preallocate",
    **dict.fromkeys(("write", "pwrite64", "writev", "pwritev", "pwritev2", "sendfile"), "write"),
    **dict.fromkeys(("read", "pread64", "readv", "preadv", "preadv2"), "read"),
    **dict.fromkeys(("fsync", "fdatasync", "sync_file_range", "syncfs"), "sync"),
    **dict.fromkeys(("truncate", "ftruncate"), "truncate"),
    "close": "close",
    **dict.fromkeys(("rename", "renameat", "renameat2"), "rename"),
    **dict.fromkeys(("unlink", "unlinkat", "rmdir"), "remove"),
    **dict.fromkeys(("mkdir", "mkdirat"), "mkdir"),
    **dict.fromkeys(("stat", "lstat", "statx", "newfstatat", "fstat", "access"), "stat"),
}
# As strace writes a call: an optional thread number, its name, its arguments.
_CALL = re.compile(r"^(?:\[pid\s+)?(?:\d+\]?\s+)?([a-z0-9_]+)\((.*)$")
OPERATIONS = (*dict.fromkeys([*_NAMES.values(), "sync_directory"]), "submit")


@contextlib.contextmanager
def recorded() -> Iterator[Counter[str]]:
    """What passes the engine's recorder within; filled in at the end."""
    counted: Counter[str] = Counter()
    _engine.trace_start()
    try:
        yield counted
    finally:
        counted.update(entry[0] for entry in _engine.trace_stop())


@contextlib.contextmanager
def traced(folder: str) -> Iterator[Counter[str]]:
    """What strace sees of this process and its children within; filled in at the end."""
    counted: Counter[str] = Counter()
    with tempfile.NamedTemporaryFile("r", prefix="megatron_uring.", suffix=".strace") as file:
        tracer = _attach(file.name)
        try:
            yield counted
        finally:
            if tracer is not None:
                tracer.send_signal(signal.SIGINT)  # it lets go of us
                tracer.wait()
                counted.update(count_lines(file, folder))


def count_lines(lines: Iterable[str], folder: str) -> Counter[str]:
    """Calls in strace's output that concern `folder`, by name.

    A call that another thread interrupted has two lines; the first, with the arguments, counts. A
    sync of a folder is a `sync_directory`.
    """
    counted: Counter[str] = Counter()
    for line in lines:
        call = _CALL.match(line)
        name = _NAMES.get(call[1]) if call else None
        if call is None or name is None or folder not in call[2]:
            continue
        syncs_folder = name == "sync" and re.search(r"<(.*?)>", call[2])
        if syncs_folder and os.path.isdir(syncs_folder[1]):
            name = "sync_directory"
        counted[name] += 1
    return counted


def _attach(path: str) -> subprocess.Popen[bytes] | None:
    """A strace on this process, once it has attached; None where it cannot."""
    strace = shutil.which("strace")
    if strace is None:
        return None
    with contextlib.suppress(OSError, AttributeError):  # Yama: let a child trace its parent
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)
    names = ",".join(f"?{name}" for name in _NAMES)
    tracer = subprocess.Popen(
        [strace, "-fyqq", "-s0", f"--trace={names}", f"--output={path}", f"-p{os.getpid()}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + _ATTACH_S
    while time.monotonic() < until and tracer.poll() is None:
        if _tracer_of_this_process():
            return tracer
        time.sleep(0.01)
    tracer.kill()
    tracer.wait()
    return None


def _tracer_of_this_process() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("TracerPid")), 0)
