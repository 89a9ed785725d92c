"""Commit: when a checkpoint begins to exist.

Protocol
--------
1. A save has an id, 16 random hexadecimal digits; every file that it makes carries the id in its
   name, so that nothing of an older checkpoint in the same directory is touched. What earlier
   saves left uncommitted is deleted.
2. Each subfile is written whole and ends with its own rows of the index; then every process that
   wrote syncs its own descriptor. A failed sync is never retried: the save fails and its subfiles
   are discarded.
3. All ranks have reported success before step 4, and rank 0 sees every subfile at full length.
4. Rank 0 writes the common state under the save id and syncs it, syncs the directory and its
   parent, writes the index under a temporary name and syncs it.
5. If another save has been committed here since 1, this one gives way. **rename to index.h5: the
   commit point.** The directory is synced.
6. `metadata.json` and `common.pt` are replaced, each written beside, synced, renamed. A Megatron
   that keeps no `common.pt` (0.19 and later) would take one for its own: there it is removed.
7. Files of our own with another save id are deleted.

Guarantees
----------
- A crash before 5 leaves the previous checkpoint of the directory, untouched; after 5 the new one
  is whole.
- Only names of `layout.save_id_of`, and a superseded `common.pt`, are ever deleted: the directory
  holds others' files too.
- If it cannot be known whether the rename happened, nothing is deleted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator
from typing import Any

from megatron_uring import _engine
from megatron_uring.errors import (
    CheckpointError,
    CorruptionError,
    StorageError,
    as_checkpoint_error,
)
from megatron_uring.layout import (
    COMMON_NAME,
    INDEX_NAME,
    METADATA_NAME,
    Trailer,
    common_name,
    save_id_of,
    subfile_name,
    temporary_name,
)
from megatron_uring.regular import open_regular, require_regular

_log = logging.getLogger(__name__)
_VISIBLE_WITHIN_S = 15.0


def new_save_id() -> str:
    """A save id: random, so that it neither repeats nor depends on a clock."""
    return secrets.token_hex(8)


def prepare_directory(directory: str) -> None:
    """Make the checkpoint directory if it is missing, and find out whether it can be written.

    Raises
    ------
    StorageError
        If it is no directory, read-only, or not ours to write to.
    """
    try:
        os.makedirs(directory, exist_ok=True)
        probe = os.path.join(directory, temporary_name("index", new_save_id()))
        _engine.File.create(probe, direct=False).close()
        _engine.remove(probe)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise StorageError("write to checkpoint directory", path=directory, cause=reason) from error


def write_common(directory: str, save_id: str, data: bytes) -> int:
    """Step 4: the common state under the save id, durable. Returns its CRC32C."""
    path = os.path.join(directory, common_name(save_id))
    with _translated("write common state", path):
        _engine.enter_step("commit 4: write common state")
        _engine.write_file(path, data)
    return _engine.crc32c(data)


def read_common(directory: str, save_id: str, length: int, crc32c: int) -> bytes:
    """The common state, checked against what the index says of it."""
    path = os.path.join(directory, common_name(save_id))
    try:
        with _translated("read common state", path):
            size = require_regular(path, "read common state").st_size
            # a size that is wrong is not read: it may be anything
            data = _engine.read_file(path) if size == length else b""
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise CorruptionError(
                "read common state", path=path, expected=f"{length} bytes", found="no such file"
            ) from error
        raise
    found = _engine.crc32c(data)
    if len(data) != length or found != crc32c:
        raise CorruptionError(
            "read common state",
            path=path,
            expected=f"{length} bytes with crc32c {crc32c:#010x}",
            found=f"{size} bytes" + (f" with {found:#010x}" if size == length else ""),
        )
    return data


def require_subfiles(directory: str, save_id: str, numbers: list[int], lengths: list[int]) -> None:
    """Refuse to commit subfiles that rank 0 does not see whole.

    A directory that is not shared between nodes would give an index of files that are elsewhere.
    Attributes may be cached by a network file system: they are asked for again for some seconds.

    Raises
    ------
    StorageError
    """
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    for number, length in zip(numbers, lengths, strict=True):
        path = os.path.join(directory, subfile_name(save_id, number))
        found = _size_of(path)
        while found != length and time.monotonic() < deadline:
            time.sleep(0.1)
            found = _size_of(path)
        if found != length:
            raise StorageError(
                "commit index",
                path=path,
                expected=f"{length} bytes, as its aggregator wrote them",
                found="no such file" if found is None else f"{found} bytes",
                cause="is the directory shared between all nodes?",
            )


def _size_of(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def publish(directory: str, save_id: str, sealed_index: bytes, *, replaces: str | None) -> None:
    """Steps 4 and 5: make the names durable, write the index beside, rename it.

    Parameters
    ----------
    replaces
        Save id that was committed here when this save began. If it is another one now, some other
        run has committed meanwhile, and this one gives way.

    Raises
    ------
    StorageError
        If a step failed. Files of this save are removed then, unless the rename may have happened.
    """
    temporary = os.path.join(directory, temporary_name("index", save_id))
    renaming = False
    try:
        with _translated("commit index", directory):
            _engine.enter_step("commit 4: sync directories")
            _engine.sync_directory(directory)
            _engine.sync_directory(os.path.dirname(os.path.realpath(directory)))
            _engine.enter_step("commit 4: write index")
            _engine.write_file(temporary, sealed_index)
            _engine.enter_step("commit 5: rename index")
            _require_unchanged(directory, replaces)
            renaming = True
            _engine.rename(temporary, os.path.join(directory, INDEX_NAME))
            _engine.enter_step("commit 5: sync directory")
            _engine.sync_directory(directory)
    except CheckpointError:
        if not renaming or _surely_not_renamed(directory, temporary):
            discard(directory, save_id)
        raise


def _require_unchanged(directory: str, replaces: str | None) -> None:
    found = committed_save_id(directory)
    if found != replaces:
        raise StorageError(
            "commit index",
            path=directory,
            expected=f"save {replaces or 'none'} committed, as when this save began",
            found=f"save {found or 'none'}",
            cause="another run saves into the same directory",
        )


def _surely_not_renamed(directory: str, temporary: str) -> bool:
    """Whether the temporary index is still there under its own name: then nothing was committed."""
    try:
        os.stat(temporary)
    except OSError:
        return False
    return True


def sweep_debris(directory: str) -> None:
    """Before a save: delete what failed saves left, whose space it may need.

    Nothing is deleted where the index is there but cannot be read.
    """
    committed = committed_save_id(directory)
    if committed is None:
        try:
            os.stat(os.path.join(directory, INDEX_NAME))
            return
        except FileNotFoundError:
            pass  # nothing is committed here: all is debris
        except OSError:
            return
    sweep(directory, committed or "")


def replace_file(directory: str, name: str, data: bytes, save_id: str) -> None:
    """Step 6: `name` holds either its old content or `data`, whatever happens."""
    kind = name.partition(".")[0]
    temporary = os.path.join(directory, temporary_name(kind, save_id))
    path = os.path.join(directory, name)
    with _translated("replace file", path):
        _engine.enter_step(f"commit 6: write {name} beside")
        _engine.remove(temporary)
        _engine.write_file(temporary, data)
        _engine.enter_step(f"commit 6: rename {name}")
        _engine.rename(temporary, path)
        _engine.sync_directory(directory)


def megatron_backend(directory: str) -> str | None:
    """The backend that Megatron's ``metadata.json`` names; None without one that can be read."""
    found = megatron_metadata(directory)
    return None if found is None else str(found["sharded_backend"])


def megatron_metadata(directory: str) -> dict[str, Any] | None:
    """Megatron's ``metadata.json``; None without one that can be read and names a backend."""
    try:
        return read_metadata(directory, "read metadata")
    except CheckpointError:
        return None


def read_metadata(directory: str, operation: str) -> dict[str, Any] | None:
    """Megatron's ``metadata.json``; None without one that names a backend.

    Raises
    ------
    CheckpointError
        If there is one that cannot be read.
    """
    path = os.path.join(directory, METADATA_NAME)
    try:
        with open_regular(path, operation) as file:
            found = json.load(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise as_checkpoint_error(error, operation, path) from error
    except (ValueError, RecursionError) as error:
        raise CorruptionError(operation, path=path, cause=error) from error
    return found if isinstance(found, dict) and "sharded_backend" in found else None


def committed_save_id(directory: str) -> str | None:
    """Save id of the committed index, from its trailer alone; None if there is none or it cannot be
    read.
    """
    path = os.path.join(directory, INDEX_NAME)
    try:
        with open_regular(path, "read trailer") as file:
            file.seek(-Trailer.SIZE_BYTES, os.SEEK_END)
            position = file.tell()
            return Trailer.unpack(file.read(), path, position).save_id
    except (OSError, CheckpointError):
        return None


def sweep(directory: str, save_id: str) -> list[str]:
    """Step 7: delete what other saves left here. Returns the names; failures are left for the next
    save.
    """
    removed = []
    with contextlib.suppress(OSError):  # of a fault: what is left, the next save removes
        _engine.enter_step("commit 7: delete files of other saves")
    for name in _own_names(directory):
        if save_id_of(name) != save_id:
            with contextlib.suppress(OSError):
                _engine.remove(os.path.join(directory, name))
                removed.append(name)
    return removed


def retire(directory: str) -> None:
    """Remove our checkpoint from a directory in which another format has just been committed."""
    if os.path.exists(os.path.join(directory, INDEX_NAME)):
        with _translated("remove superseded index", directory):
            _engine.remove(os.path.join(directory, INDEX_NAME))
            _engine.sync_directory(directory)
    for name in _own_names(directory):
        with contextlib.suppress(OSError):
            _engine.remove(os.path.join(directory, name))


def discard(directory: str, save_id: str) -> None:
    """Delete every file of a save that was not committed."""
    for name in _own_names(directory):
        if save_id_of(name) == save_id:
            with contextlib.suppress(OSError):
                _engine.remove(os.path.join(directory, name))


def replace_common(directory: str, data: bytes, save_id: str) -> None:
    """Step 6: `common.pt`, for tools that read it without us. Our own loading never does."""
    replace_file(directory, COMMON_NAME, data, save_id)


def remove_common(directory: str) -> None:
    """Step 6, where Megatron keeps no `common.pt`: remove that of an earlier save."""
    path = os.path.join(directory, COMMON_NAME)
    if os.path.lexists(path):
        with _translated("remove superseded common state", path):
            _engine.remove(path)
            _engine.sync_directory(directory)


def _own_names(directory: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory) if save_id_of(name) is not None)
    except OSError:
        return []


@contextlib.contextmanager
def _translated(operation: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise as_checkpoint_error(error, operation, path) from error
