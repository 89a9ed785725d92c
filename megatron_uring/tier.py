"""The local tier: what asynchronous saves leave in the staging directory of a node.

On disk, under ``Config.staging_directory``; a root is the directory that holds the checkpoint's::

    megatron_uring-<user>/<digest of the root>/lock
    megatron_uring-<user>/<digest of the root>/<save id>/<subfile>.<rank>        the local copy
    megatron_uring-<user>/<digest of the root>/<save id>/<subfile>.<rank>.json   its marker

Protocol
--------
1. A rank reserves the space of its regions in a new local copy and locks it (flock(2)): both, and
   all that removes, under the lock of the root. It holds the lock for as long as it needs the copy.
2. It writes its regions there, at the offsets that they have in the subfile; nothing is synced.
3. When all of it has been read back, verified and written to the subfile, the marker is written
   beside and renamed.
4. After the commit the lock is let go. Older copies of the root are removed, and with a save that
   failed its own.

Guarantees
----------
- A copy counts only if its marker names save, regions and the digest of their checksums as the
  committed index has them: what was never committed, or was replaced, is never read.
- A copy that no process holds and whose save is not the one committed in its directory is a
  leftover; only leftovers, and copies beyond ``staging_keep``, are removed. Whether a process lives
  is told by its lock: neither a number nor a clock is asked.
- Folders that belong to another user, or that others may write to, are not used.
- Everything here may be lost at any time without harm to a committed checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_uring import _engine, commit, write
from megatron_uring.columns import Uint32Array
from megatron_uring.config import Config
from megatron_uring.errors import StorageError, as_checkpoint_error
from megatron_uring.layout import subfile_name

_log = logging.getLogger("megatron_uring")
_inside: set[str] = set()  # staging directories inside of a checkpoint, of which that was said
_LOCK_NAME = "lock"
_MARKER_SUFFIX = ".json"
_SAVE_FOLDER = re.compile(r"^[0-9a-f]{16}$")
_LOCK_WITHIN_S = 5.0
_POLL_S = 0.02


@dataclass(frozen=True)
class Place:
    """Of a rank's regions: checkpoint directory, save id, number of the subfile, and the rank."""

    directory: str
    save_id: str
    subfile: int
    rank: int


@dataclass(frozen=True)
class Marker:
    """What a local copy holds: `regions` (start and length) of `rank` in a subfile of a save.

    `crc32c` is that of the checksums of their blocks, in order; `directory` is the checkpoint's.
    """

    save_id: str
    directory: str
    subfile: int
    rank: int
    regions: tuple[tuple[int, int], ...]
    crc32c: int


def digest(checksums: Sequence[Uint32Array]) -> int:
    """CRC32C of checksums, as a marker has it."""
    value = 0
    for column in checksums:
        value = _engine.crc32c(column.astype("<u4").tobytes(), value)
    return value


class LocalCopy:
    """The regions of one rank in the staging directory, while its save needs them.

    Attributes
    ----------
    path
    file, source
        The same file, to write to and to read from: both stay usable if somebody unlinks it.
    """

    def __init__(
        self,
        config: Config,
        path: str,
        marker: Marker,
        file: _engine.File,
        source: _engine.File,
        lock: int,
    ) -> None:
        self.path, self.file, self.source = path, file, source
        self._config, self._marker = config, marker
        self._lock: int | None = lock

    def mark(self, checksums: Sequence[Uint32Array]) -> None:
        """Step 3: say what the copy holds."""
        found = {**asdict(self._marker), "crc32c": digest(checksums)}
        temporary = f"{self.path}{_MARKER_SUFFIX}.tmp"
        _engine.write_file(temporary, json.dumps(found).encode())
        _engine.rename(temporary, self.path + _MARKER_SUFFIX)

    def keep(self) -> None:
        """Step 4: leave the copy of a committed checkpoint to restores; older ones are removed."""
        if self._lock is not None:
            self._let_go()
            config, marker = self._config, self._marker
            sweep(config.staging_directory, marker.directory, config.staging_keep, marker.save_id)

    def discard(self) -> None:
        """Remove the copy; what cannot be removed is left to the next sweep."""
        if self._lock is not None:
            _remove_copy(self.path)
            self._let_go()

    def _let_go(self) -> None:
        for file in (self.file, self.source):
            with contextlib.suppress(OSError):
                file.close()
        lock, self._lock = self._lock, None
        if lock is not None:
            _unlock(lock)


def reserve(
    engine: _engine.Engine, config: Config, place: Place, regions: Sequence[tuple[int, int]]
) -> LocalCopy:
    """A new local copy with space for `regions` (start and length in the subfile), locked;
    leftovers are removed first, and where space is short older copies, too.

    Raises
    ------
    StorageError
        If the staging directory cannot be used, or has too little space.
    """
    directory = os.path.realpath(place.directory)
    marker = Marker(place.save_id, directory, place.subfile, place.rank, tuple(regions), 0)
    try:
        root = _root_folder(config.staging_directory, directory)
        _make_staging_directory(config.staging_directory, directory)
        _make_private(os.path.dirname(root))
        _make_private(root)
        name = f"{subfile_name(place.save_id, place.subfile)}.{place.rank}"
        path = os.path.join(root, place.save_id, name)
        with _locked(root, _LOCK_WITHIN_S):
            _sweep(root, None, None)
            try:
                return _create(engine, config, path, marker)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
            _sweep(root, 0, None)
            return _create(engine, config, path, marker)
    except OSError as error:
        raise as_checkpoint_error(
            error, "reserve space in staging directory", config.staging_directory
        ) from error


def _create(engine: _engine.Engine, config: Config, path: str, marker: Marker) -> LocalCopy:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    lock = None
    try:
        direct = "off" if config.direct == "off" else "auto"
        with _as_os_error():
            file = write.create_subfile(
                engine, path, 0, direct=direct, timeout_s=config.timeout_s, proved=True
            )
        lock = os.open(path, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for start, length in marker.regions:
            file.preallocate(length, start)
        source = _engine.File.open(path, writable=False, direct=file.direct)
    except BaseException:
        _remove_copy(path)
        if lock is not None:
            file.close()
            _unlock(lock)
        raise
    return LocalCopy(config, path, marker, file, source, lock)


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from error
        raise


# -------------------------------------------------------------------------------------------------
# what is there


def copies(staging_directory: str, directory: str, save_id: str) -> list[tuple[Marker, str]]:
    """Marker and path of each local copy of a save; what cannot be read is left out."""
    folder = os.path.join(_root_folder(staging_directory, directory), save_id)
    try:
        for place in (os.path.dirname(os.path.dirname(folder)), os.path.dirname(folder)):
            _require_private(place)
        names = sorted(os.listdir(folder))
    except (OSError, StorageError):
        return []
    paths = [os.path.join(folder, name) for name in names if name.endswith(_MARKER_SUFFIX)]
    found = [(_read_marker(path), path.removesuffix(_MARKER_SUFFIX)) for path in paths]
    return [
        (marker, path) for marker, path in found if marker is not None and marker.save_id == save_id
    ]


def _read_marker(path: str) -> Marker | None:
    try:
        with open(path, encoding="utf-8") as file:
            found: dict[str, Any] = json.load(file)
        regions = tuple((int(start), int(length)) for start, length in found.pop("regions"))
        marker = Marker(regions=regions, **found)
        texts, numbers = (marker.save_id, marker.directory), (marker.subfile, marker.rank)
        text = all(isinstance(one, str) for one in texts)
        return marker if text and all(isinstance(one, int) for one in numbers) else None
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None


def sweep(
    staging_directory: str, directory: str, keep: int | None = None, newest: str | None = None
) -> None:
    """Remove leftovers in the root of `directory`, and copies beyond `keep` of committed
    checkpoints, of which `newest` is the last to go.

    Where somebody else is at it, or the folder is not ours, nothing is done. Nothing is raised.
    """
    root = _root_folder(staging_directory, directory)
    with contextlib.suppress(OSError, StorageError):
        _require_private(os.path.dirname(root))
        _require_private(root)
        with _locked(root, 0.0):
            _sweep(root, keep, newest)


def _sweep(root: str, keep: int | None, newest: str | None) -> None:
    kept, finishing = [], 0
    for name in filter(_SAVE_FOLDER.match, os.listdir(root)):
        folder = os.path.join(root, name)
        if _is_held(folder):
            finishing += name == newest  # other ranks let go of theirs in a moment
            continue
        if _is_committed(folder, name):
            # a clock that went backwards costs a copy, and never the newest one
            kept.append((name == newest, os.stat(folder).st_mtime_ns, folder))
        else:
            _remove_save(folder)
    if keep is not None:
        for *_, folder in sorted(kept, reverse=True)[max(keep - finishing, 0) :]:
            _remove_save(folder)


def _is_held(folder: str) -> bool:
    """Whether a living process holds a copy in it."""
    for path in _files(folder):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False


def _is_committed(folder: str, save_id: str) -> bool:
    """Whether the checkpoint that a marker in it names has been committed and is still there."""
    for path in _files(folder):
        marker = _read_marker(path) if path.endswith(_MARKER_SUFFIX) else None
        if marker is not None:
            return commit.committed_save_id(marker.directory) == save_id
    return False


def _remove_save(folder: str) -> None:
    with contextlib.suppress(OSError):
        # markers first: what is half removed is a leftover, and no copy
        for path in sorted(_files(folder), key=lambda path: not path.endswith(_MARKER_SUFFIX)):
            _engine.remove(path)
        os.rmdir(folder)


def _remove_copy(path: str) -> None:
    for name in (path + _MARKER_SUFFIX, f"{path}{_MARKER_SUFFIX}.tmp", path):
        with contextlib.suppress(OSError):
            _engine.remove(name)
    with contextlib.suppress(OSError):  # other ranks may have theirs there
        os.rmdir(os.path.dirname(path))


def _files(folder: str) -> list[str]:
    try:
        return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
    except OSError:
        return []


# -------------------------------------------------------------------------------------------------
# folders and the lock


def _root_folder(staging_directory: str, directory: str) -> str:
    root = os.path.dirname(os.path.realpath(directory))
    name = hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
    return os.path.join(staging_directory, f"megatron_uring-{os.geteuid()}", name)


def _make_staging_directory(staging: str, directory: str) -> None:
    """Make it, not its parents: those of a disk that is not mounted would fill another one."""
    if os.path.commonpath([directory, os.path.realpath(staging)]) == directory:
        if staging not in _inside:
            _inside.add(staging)
            why = "it is on the same disk, and is deleted with the checkpoint"
            _log.warning("staging directory %s lies inside %s: %s", staging, directory, why)
    try:
        os.mkdir(staging)
        _log.info("made staging directory %s", staging)
    except FileExistsError:
        pass
    except FileNotFoundError as error:
        found = f"no directory {os.path.dirname(os.path.normpath(staging))}"
        why = "only the last folder is made; is the disk mounted?"
        raise StorageError(
            "make staging directory", path=staging, found=found, cause=why
        ) from error


def _make_private(folder: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    _require_private(folder)


def _require_private(folder: str) -> None:
    found = os.lstat(folder)
    private = stat.S_ISDIR(found.st_mode) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not private or found.st_uid != os.geteuid():
        raise StorageError(
            "open staging directory",
            path=folder,
            expected=f"a folder of user {os.geteuid()} that nobody else can write to",
            found=f"mode {found.st_mode:o} of user {found.st_uid}",
        )


@contextlib.contextmanager
def _locked(root: str, within_s: float) -> Iterator[None]:
    """Hold the lock of a root; `BlockingIOError` if another process has it for longer."""
    descriptor = os.open(os.path.join(root, _LOCK_NAME), os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + within_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_POLL_S)
        yield
    finally:
        _unlock(descriptor)


def _unlock(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        # said outright: a child that was forked meanwhile has the same open file
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
