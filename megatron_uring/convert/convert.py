"""convert(): a checkpoint in one format to a directory in another.

Guarantees
----------
- The target appears under its name only when it is whole, durable, and was read back and compared
  with what was read from the source; until then it is a hidden folder beside it. What is there
  already is never replaced: only a missing or an empty directory is taken.
- A rank holds three windows of tensors (`parts.WINDOW_BYTES`) and the engine's pool at most,
  however large the state or a tensor is; its share of the objects is in memory.
- Collective: ranks share the work, and an error on one is raised on all.
- Nothing of the source is run, and nothing of it is written.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_uring import _engine, comm, commit, roots
from megatron_uring.config import Config, config_or_default
from megatron_uring.convert import safetensors_layout, to_ours, to_safetensors, to_torch_dist
from megatron_uring.convert.from_ours import OurSource
from megatron_uring.convert.from_safetensors import SafetensorsSource
from megatron_uring.convert.from_torch_dist import DCP_METADATA_NAME, TorchDistSource
from megatron_uring.convert.job import Job
from megatron_uring.convert.parts import Catalog, Source
from megatron_uring.errors import (
    CheckpointError,
    MissingKeyError,
    NotACheckpointError,
    StorageError,
    UnsupportedError,
    as_checkpoint_error,
)
from megatron_uring.layout import INDEX_NAME
from megatron_uring.progress import step, together

FORMATS = ("ours", "torch_dist", "safetensors")
MAX_FILE_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Conversion:
    """What `convert` did; the same on all ranks.

    Attributes
    ----------
    source, destination
    source_format, destination_format
    tensors, objects
        How many were written.
    nbytes
        Of all tensors.
    files
        In the destination.
    seconds
        Reading back included.
    notes
        What was left out, and why.
    """

    source: str
    destination: str
    source_format: str
    destination_format: str
    tensors: int
    objects: int
    nbytes: int
    files: int
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def gigabytes_per_s(self) -> float:
        """Of tensors, by the clock."""
        return self.nbytes / 1e9 / max(self.seconds, 1e-9)


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    to: str,
    *,
    keys: Sequence[str] = (),
    max_file_bytes: int = MAX_FILE_BYTES,
    config: Config | None = None,
    communicator: comm.Communicator | None = None,
) -> Conversion:
    """Write what `source` holds to `destination` in another format; collective over all ranks.

    Parameters
    ----------
    source
        A checkpoint of ours (or a save root, of which the newest is taken), of Megatron's
        ``torch_dist`` or torch.distributed.checkpoint, or safetensors: a directory or one file.
    destination
        A directory that is missing or empty, in one that exists.
    to
        ``"ours"``, ``"torch_dist"`` or ``"safetensors"``.
    keys
        Shell patterns (`fnmatch`): only tensors and objects whose key matches one of them.
    max_file_bytes
        Most bytes of tensors in a safetensors file; a larger tensor has one of its own.
    config, communicator
        As in `checkpoint.save`.

    Raises
    ------
    CheckpointError
        On every rank, whichever rank it happened on; the destination is as it was then.
    """
    began = time.perf_counter()
    config = config_or_default(config)
    world = communicator or comm.current(config.timeout_s, config.communicator)
    target = os.path.realpath(os.fspath(destination))
    with together(world):
        with step(world, "open source"):
            kind, path = _choose(os.path.abspath(os.fspath(source)), to, max_file_bytes)
            opened = _open(kind, path, config)
            catalog = _wanted(opened, path, keys)
        with contextlib.closing(opened):
            directory = _make_beside(world, target)
            job = Job(world, opened, catalog, directory, config, max_file_bytes)
            try:
                _WRITERS[to](job)
                files = _read_back(job, to)
                with step(world, "publish destination"):
                    if world.rank == 0:
                        _publish(directory, target)
            except BaseException:
                if world.rank == 0:
                    shutil.rmtree(directory, ignore_errors=True)
                raise
    if to != "safetensors":
        job.note_common()
    return Conversion(
        path,
        target,
        kind,
        to,
        len(catalog.shards.keys),
        0 if to == "safetensors" else len(catalog.object_keys),
        int(catalog.shards.lengths().sum()),
        files,
        time.perf_counter() - began,
        tuple(job.notes),
    )


_WRITERS = {
    "ours": to_ours.write_checkpoint,
    "torch_dist": to_torch_dist.write,
    "safetensors": to_safetensors.write,
}


def detect(path: str) -> tuple[str, str]:
    """Format of the checkpoint at `path`, and where exactly it is.

    Raises
    ------
    NotACheckpointError
        If there is none.
    """
    if os.path.isfile(path) and path.endswith(safetensors_layout.SUFFIX):
        return "safetensors", path
    ours = os.path.exists(os.path.join(path, INDEX_NAME))
    theirs = os.path.exists(os.path.join(path, DCP_METADATA_NAME))
    if theirs and (not ours or commit.megatron_backend(path) == "torch_dist"):
        return "torch_dist", path
    if not ours and os.path.isdir(path):
        names = os.listdir(path)
        if any(name.endswith(safetensors_layout.SUFFIX) for name in names):
            return "safetensors", path
    try:
        return "ours", roots.resolve_latest(path)
    except NotACheckpointError as error:
        expected = f"{INDEX_NAME}, {DCP_METADATA_NAME} or *{safetensors_layout.SUFFIX}"
        raise NotACheckpointError(
            "open source", path=path, expected=expected, found=error.found
        ) from error


def _choose(source: str, to: str, max_file_bytes: int) -> tuple[str, str]:
    """Format and place of the source, if that can be converted as it is asked."""
    if to not in FORMATS:
        raise UnsupportedError("convert", expected=f"to {', '.join(FORMATS)}", found=to)
    kind, path = detect(source)
    if kind == to:
        raise UnsupportedError(
            "convert", path=path, expected=f"a source that is not {to}", found=kind
        )
    if max_file_bytes < 1:
        raise UnsupportedError("convert", expected="max_file_bytes of 1 or more")
    return kind, path


def _wanted(opened: Source, path: str, keys: Sequence[str]) -> Catalog:
    if isinstance(keys, str):
        raise UnsupportedError("convert", expected="a list of patterns", found=repr(keys))
    catalog = opened.catalog.filtered(keys)
    if keys and not catalog.shards.keys and not catalog.object_keys:
        raise MissingKeyError(
            "convert", path=path, expected="a key that matches", found=", ".join(keys)
        )
    return catalog


def _open(kind: str, path: str, config: Config) -> Source:
    if kind == "torch_dist":
        return TorchDistSource(path, config)
    return SafetensorsSource(path) if kind == "safetensors" else OurSource(path, config)


# -------------------------------------------------------------------------------------------------
# the destination


def _make_beside(world: comm.Communicator, target: str) -> str:
    """A new folder beside `target`, the same on all ranks."""
    name = f".{os.path.basename(target)}.converting-{secrets.token_hex(8)}"
    beside = os.path.join(os.path.dirname(target), name)
    with step(world, "make destination"):
        if world.rank == 0:
            _require_free(target)
            try:
                os.mkdir(beside)
            except OSError as error:
                raise as_checkpoint_error(error, "make destination", beside) from error
    return os.fsdecode(world.broadcast(os.fsencode(beside) if world.rank == 0 else None))


def _require_free(target: str) -> None:
    try:
        names = os.listdir(target)
    except FileNotFoundError:
        return
    except OSError as error:
        raise as_checkpoint_error(error, "make destination", target) from error
    if names:
        raise StorageError(
            "make destination",
            path=target,
            expected="no directory, or an empty one",
            found=f"{len(names)} entries",
            cause="nothing is overwritten",
        )


def _read_back(job: Job, to: str) -> int:
    """Compare all that was written with what is there now; how many files there are."""
    world = job.world
    with step(world, "read back"):
        _forget_cached(job)
        written = _open(to, job.directory, job.config)
        try:
            _require_same_catalog(job, written, to)
            job.ledger.compare(job, written, job.directory)
        finally:
            written.close()
        names = os.listdir(job.directory)
    return int(world.allreduce(np.array([len(names)], np.int64), "max")[0])


def _forget_cached(job: Job) -> None:
    """Let the next read come from the disk, for this rank's share of the files."""
    for name in sorted(os.listdir(job.directory))[job.world.rank :: job.world.size]:
        descriptor = os.open(job.path(name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _require_same_catalog(job: Job, written: Source, to: str) -> None:
    found, wanted = written.catalog, job.catalog
    objects = () if to == "safetensors" else wanted.object_keys
    common = to == "safetensors" or wanted.common in (None, found.common)
    if (
        set(found.shards.keys) != set(wanted.shards.keys)
        or set(found.object_keys) != set(objects)
        or not common
    ):
        raise CheckpointError(
            "read back",
            path=job.directory,
            expected=f"{len(wanted.shards.keys)} tensors, {len(objects)} objects",
            found=f"{len(found.shards.keys)} and {len(found.object_keys)}, or other ones",
        )


def _publish(directory: str, target: str) -> None:
    try:
        _engine.sync_directory(directory)
        _require_free(target)
        _engine.rename(directory, target)
        _engine.sync_directory(os.path.dirname(target))
    except OSError as error:
        raise as_checkpoint_error(error, "publish destination", target) from error
