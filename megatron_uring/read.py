"""Reading: coalesced ranges through the engine, checked, to where they belong.

Guarantees
----------
- A subfile whose length differs from the index's is refused before anything is read from it.
- A block whose checksum differs is never scattered; the error names file, offset, expected and
  found checksum, and the tensors that lie in it.
- Reads only; no lock, no collective, no file is created beside the checkpoint's.
- What several ranks of a node need at the same time is read once where shared memory allows
  (`node_cache`); every rank checks what it gets.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from megatron_uring import _engine, comm
from megatron_uring.columns import Int32Array, Int64Array
from megatron_uring.config import Config
from megatron_uring.errors import CorruptionError, as_checkpoint_error
from megatron_uring.layout import BLOCK_BYTES, SUPERBLOCK_BYTES, Superblock, subfile_name
from megatron_uring.progress import run_job
from megatron_uring.regular import open_regular, require_regular
from megatron_uring.tables import Ranges, Staged

# Below this a read is buffered: the page cache may hold it, and read-ahead beats the set-up of
# direct I/O.
DIRECT_FROM_BYTES = 64 << 20
# Below this, a chunk handed from rank to rank saves less than attaching to shared memory costs.
_SHARED_FROM_BYTES = 64 << 20
_SHARED_MEMORY = "/dev/shm"
_SLOTS_MAXIMUM = 1024
_NAMES_LISTED = 4

_log = logging.getLogger(__name__)

NamesInRange = Callable[[int, int, int], Sequence[str]]


@contextlib.contextmanager
def open_subfiles(
    directory: str,
    save_id: str,
    numbers: Int32Array,
    lengths: Int64Array,
    *,
    direct: str,
    read_bytes: int,
    check_identity: bool = True,
) -> Iterator[list[_engine.File]]:
    """Open subfiles for reading, each checked against its length in the index.

    Parameters
    ----------
    numbers : int32 [F]
        Ascending.
    lengths : int64 [F]
    direct
        ``"on"``, ``"off"`` or ``"auto"``: from `DIRECT_FROM_BYTES` on.
    check_identity
        Whether the superblock, too, must be that of this save and number: a file of another save
        may have the same length, and even the same checksums.

    Raises
    ------
    CorruptionError
        If a file is missing, shorter or longer.
    """
    use_direct = direct == "on" or (direct == "auto" and read_bytes >= DIRECT_FROM_BYTES)
    files: list[_engine.File] = []
    try:
        for number, length in zip(numbers.tolist(), lengths.tolist(), strict=True):
            path = os.path.join(directory, subfile_name(save_id, number))
            files.append(_open_subfile(path, length, use_direct))
            if check_identity:
                check_superblock(path, save_id, number)
        yield files
    finally:
        for file in files:
            file.close()


def _open_subfile(path: str, length: int, direct: bool) -> _engine.File:
    try:
        require_regular(path, "open subfile")
        file = _engine.File.open(path, writable=False, direct=direct)
        found = file.size()
    except FileNotFoundError as error:
        raise CorruptionError(
            "open subfile",
            path=path,
            expected=f"{length} bytes",
            found="no such file",
            cause="it was deleted or not copied with the others",
        ) from error
    except OSError as error:
        raise as_checkpoint_error(error, "open subfile", path) from error
    if found != length:
        file.close()
        raise CorruptionError(
            "open subfile",
            path=path,
            offset=min(found, length),
            expected=f"{length} bytes",
            found=f"{found} bytes",
            cause="the file was cut or not copied whole",
        )
    return file


def check_superblock(path: str, save_id: str, number: int) -> None:
    """Raise `CorruptionError` unless the file begins as subfile `number` of the save `save_id`."""
    try:
        with open_regular(path, "read superblock") as file:
            head = Superblock.unpack(file.read(SUPERBLOCK_BYTES), path)
    except OSError as error:
        raise as_checkpoint_error(error, "read superblock", path) from error
    if (head.save_id, head.subfile) != (save_id, number):
        raise CorruptionError(
            "check superblock",
            path=path,
            offset=0,
            expected=f"save {save_id}, subfile {number}",
            found=f"save {head.save_id}, subfile {head.subfile}",
            cause="a file of another save under this name",
        )


@contextlib.contextmanager
def node_cache(config: Config, save_id: str, read_bytes: int) -> Iterator[_engine.NodeCache | None]:
    """Where the ranks of this node leave what they have read for each other; None without one.

    A rank that restores alone finds nothing there, and reads. It is twice as large as a rank's
    pool, which lets each byte be read once: measured with two ranks and the same 2 GB, 1.06 s;
    1.2 s with half of it, 1.8 s without.

    Raises
    ------
    StorageError
        If it is asked for (``node_sharing="on"``) and shared memory cannot be had.
    """
    wanted = config.node_sharing == "on" or (
        config.node_sharing == "auto"
        and read_bytes >= _SHARED_FROM_BYTES
        and comm.local_ranks() > 1
    )
    cache = None
    prefix = f"megatron_uring-{os.geteuid()}-"
    if config.node_sharing != "off":  # what killed restores left
        _engine.sweep_node_caches(_SHARED_MEMORY, prefix)
    if wanted:
        name = f"{prefix}{save_id}-{config.slab_bytes}-{config.slab_count}"
        slots = min(2 * config.slab_count, _SLOTS_MAXIMUM)
        try:
            cache = _engine.NodeCache(os.path.join(_SHARED_MEMORY, name), config.slab_bytes, slots)
        except OSError as error:
            if config.node_sharing == "on":
                raise as_checkpoint_error(error, "share reads", _SHARED_MEMORY) from error
            _log.debug("each rank reads for itself: %s", error)
    yield cache


def read_ranges(
    engine: _engine.Engine,
    files: list[_engine.File],
    ranges: Ranges,
    staged: Staged,
    *,
    timeout_s: float,
    shared: tuple[_engine.NodeCache, Sequence[int]] | None = None,
) -> tuple[Int64Array, _engine.Job]:
    """Read whole blocks, check them and scatter them to the pieces of `staged`.

    Parameters
    ----------
    shared
        The node's cache, and the number of each file there.

    Returns
    -------
    int64 [M, 4]
        For each bad block: range number, offset in the file, expected and found CRC32C. Empty if
        all is well.
    Job
        Done; what it did, in bytes and seconds.
    """
    cache, file_keys = shared or (None, ())
    path = os.path.dirname(files[0].path) if files else None
    job = run_job(
        lambda: engine.read(
            files,
            ranges.file_number,
            ranges.start,
            ranges.length,
            staged.pieces,
            ranges.crc32c,
            cache,
            file_keys,
        ),
        "read subfiles",
        path,
        timeout_s,
        alive=(staged, files),
    )
    return engine.bad_blocks(job), job


def raise_bad_block(
    files: list[_engine.File],
    file_number: Int32Array,
    subfile: Int32Array,
    bad: Int64Array,
    names: NamesInRange,
    *,
    half_written: bool,
) -> None:
    """Raise for the first bad block of `bad`, if there is one."""
    if len(bad):
        error = bad_block_error(files, file_number, subfile, bad[0], names)
        after = "destinations are half written; verify_first=True checks before it writes"
        raise error if not half_written else CorruptionError(f"{error}; {after}")


def bad_block_error(
    files: list[_engine.File],
    file_number: Int32Array,
    subfile: Int32Array,
    bad: Int64Array,
    names: NamesInRange,
) -> CorruptionError:
    """The error for one row of what `read_ranges` returned.

    `names` gives the tensors and objects that lie between two offsets of a subfile.
    """
    range_number, offset, expected, found = bad.tolist()
    number = int(file_number[range_number])
    inside = list(names(int(subfile[number]), offset, offset + BLOCK_BYTES))
    listed = ", ".join(repr(name) for name in inside[:_NAMES_LISTED])
    if len(inside) > _NAMES_LISTED:
        listed += f" and {len(inside) - _NAMES_LISTED} more"
    return CorruptionError(
        f"verify block of {listed or 'no tensor (superblock, padding or footer)'}",
        path=files[number].path,
        offset=offset,
        expected=f"crc32c {expected:#010x}",
        found=f"{found:#010x}",
        cause="the file changed after it was saved",
    )


def dense_file_numbers(subfile: Int32Array) -> tuple[Int32Array, Int32Array]:
    """The distinct subfile numbers, ascending, and the place of each entry among them."""
    numbers, place = np.unique(subfile, return_inverse=True)
    return numbers.astype(np.int32), place.astype(np.int32)
