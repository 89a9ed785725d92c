"""What can be proved of a checkpoint: that every byte is the one that was written, and that nothing
is missing.

Guarantees
----------
- `verify` reads every block of every region and compares its checksum; ranks share the work, and
  all get the same findings. It never stops at the first finding.
- It proves from the index that every global tensor is covered exactly once, from the files that
  lengths, superblocks and footers are those of this save, and from the common state's checksum that
  it is the one that was committed.
- It only reads.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

from megatron_uring import _engine, commit, ownership, read, roots, stage
from megatron_uring import index as index_module
from megatron_uring.columns import Int64Array, Uint32Array
from megatron_uring.comm import Communicator
from megatron_uring.config import Config, config_or_default
from megatron_uring.errors import CheckpointError, CorruptionError
from megatron_uring.index_rules import Index
from megatron_uring.layout import BACKEND, BLOCK_BYTES, METADATA_NAME, subfile_name
from megatron_uring.regular import open_regular
from megatron_uring.tables import Ranges

_WORK_BYTES = 64 * BLOCK_BYTES


@dataclass(frozen=True)
class Findings:
    """Outcome of `verify`, the same on all ranks.

    Attributes
    ----------
    directory, save_id
    problems
        One message for each thing that is wrong; empty for a good checkpoint.
    notes
        What is not wrong, but worth knowing.
    tensors, shards, objects, subfiles, blocks
        How much was proved.
    bytes_read
    seconds
    """

    directory: str
    save_id: str
    problems: tuple[str, ...]
    tensors: int
    shards: int
    objects: int
    subfiles: int
    blocks: int
    bytes_read: int
    seconds: float
    notes: tuple[str, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether all that was to be proved was proved."""
        return not self.problems


def verify(directory: str, world: Communicator, config: Config | None = None) -> Findings:
    """Prove that a checkpoint can be restored; collective.

    Parameters
    ----------
    directory
        A checkpoint, or a save root, of which the newest committed checkpoint is taken.
    world
        Ranks that share the reading.

    Raises
    ------
    NotACheckpointError, CorruptionError
        If there is no index, or none that can be read: nothing else can be proved then.
    """
    began = time.perf_counter()
    config = config_or_default(config)
    error: CheckpointError | None = None
    root = os.fspath(directory)
    try:
        directory = roots.resolve_latest(root)
        index = index_module.read_index(directory)
        engine = stage.open_engine(config)
    except CheckpointError as caught:
        error = caught
    world.agree("open checkpoint", error)
    problems: list[str] = []
    if world.rank == 0:
        tracker = roots.tracker_problem(root, directory)
        problems += [] if tracker is None else [tracker]
        problems += _check_coverage(index) + _check_common(directory, index)
    own = index.subfile_number[world.rank :: world.size].tolist()
    for number in own:
        problems += _check_subfile(directory, index, number)
    starts, lengths, subfiles, checksums = _share(index, world)
    found, bytes_read = _read_share(
        directory, index, engine, config, starts, lengths, subfiles, checksums
    )
    problems += found
    everything, total = _collect(world, problems, bytes_read)
    return Findings(
        directory,
        index.save_id,
        tuple(everything),
        len(index.shards.keys),
        len(index.shards),
        len(index.object_keys),
        len(index.subfile_number),
        len(index.regions.crc32c),
        total,
        time.perf_counter() - began,
        _notes(directory, index),
        index.facts,
    )


def _check_coverage(index: Index) -> list[str]:
    rows = len(index.shards)
    try:
        ownership.check_ownership(
            index.shards, np.zeros(rows, np.int32), np.ones(rows, bool), operation="check coverage"
        )
    except CheckpointError as error:
        return [str(error)]
    return []


def _check_common(directory: str, index: Index) -> list[str]:
    if index.common_length < 0:
        return []
    try:
        commit.read_common(directory, index.save_id, index.common_length, index.common_crc32c)
    except CheckpointError as error:
        return [str(error)]
    return []


def _notes(directory: str, index: Index) -> tuple[str, ...]:
    """What is not wrong with the checkpoint, but will be in somebody's way."""
    if index.common_length < 0 or commit.megatron_backend(directory) == BACKEND:
        return ()
    path = os.path.join(directory, METADATA_NAME)
    return (f"{path} does not name {BACKEND}: Megatron will not load this checkpoint",)


def _check_subfile(directory: str, index: Index, number: int) -> list[str]:
    """Length, superblock and footer of one subfile."""
    path = os.path.join(directory, subfile_name(index.save_id, number))
    problems = []
    try:
        length = int(index.subfile_length[np.searchsorted(index.subfile_number, number)])
        with open_regular(path, "check subfile") as file:
            read.check_superblock(path, index.save_id, number)
            problems += _check_gaps(file, path, index, number)
            footer = index_module.read_footer(file, path, length)
            if footer.save_id != index.save_id:
                raise CorruptionError(
                    "check footer", path=path, expected=index.save_id, found=footer.save_id
                )
    except CheckpointError as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"open subfile: {path}: {error.strerror}")
    return problems


def _check_gaps(file: BinaryIO, path: str, index: Index, number: int) -> list[str]:
    """Bytes between regions belong to nothing and must be zero, as `FORMAT.md` says."""
    regions = index.regions
    rows = np.flatnonzero(regions.subfile == number)
    rows = rows[np.argsort(regions.start[rows])]
    ends = regions.start[rows] + regions.length[rows]
    problems = []
    for begin, end in zip(ends[:-1].tolist(), regions.start[rows[1:]].tolist(), strict=True):
        for offset in range(begin, end, BLOCK_BYTES):
            file.seek(offset)
            data = np.frombuffer(file.read(min(BLOCK_BYTES, end - offset)), np.uint8)
            if data.any():
                at = offset + int(np.argmax(data != 0))
                error = CorruptionError(
                    "check gap between regions",
                    path=path,
                    offset=at,
                    expected="zero",
                    found=f"{data[at - offset]:#04x}",
                    cause="no tensor lies here, but the file changed after it was saved",
                )
                problems.append(str(error))
                break
    return problems


def _share(
    index: Index, world: Communicator
) -> tuple[Int64Array, Int64Array, Int64Array, Uint32Array]:
    """This rank's part of all regions, cut at 64 MiB: start, length, subfile of each range, and
    their checksums.
    """
    regions = index.regions
    counts = -(-regions.length // _WORK_BYTES)
    region = np.repeat(np.arange(len(regions)), counts)
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    start = regions.start[region] + within * _WORK_BYTES
    length = np.minimum(regions.length[region] - within * _WORK_BYTES, _WORK_BYTES)
    first = regions.first_block()[region] + within * (_WORK_BYTES // BLOCK_BYTES)
    order = np.lexsort((start, regions.subfile[region]))
    # neighbouring ranges go to one rank: fewer files open, longer runs on disk
    mine = np.array_split(order, world.size)[world.rank]
    blocks = -(-length[mine] // BLOCK_BYTES)
    rows = np.repeat(first[mine] - (np.cumsum(blocks) - blocks), blocks)
    rows += np.arange(int(blocks.sum()))
    subfile = regions.subfile[region].astype(np.int64)
    return start[mine], length[mine], subfile[mine], regions.crc32c[rows]


def _read_share(
    directory: str,
    index: Index,
    engine: _engine.Engine,
    config: Config,
    start: Int64Array,
    length: Int64Array,
    subfile: Int64Array,
    checksums: Uint32Array,
) -> tuple[list[str], int]:
    """Problems in this rank's share, file by file so that one bad file does not hide another."""
    problems: list[str] = []
    bytes_read = 0
    blocks = -(-length // BLOCK_BYTES)
    ends = np.cumsum(blocks)
    for number in np.unique(subfile).tolist():
        rows = np.flatnonzero(subfile == number)
        expected = np.concatenate([checksums[ends[r] - blocks[r] : ends[r]] for r in rows.tolist()])
        numbers = np.array([number], np.int32)
        lengths = index.subfile_length[np.searchsorted(index.subfile_number, numbers)]
        file_number = np.zeros(len(rows), np.int32)
        total = int(length[rows].sum())
        try:
            with read.open_subfiles(
                directory,
                index.save_id,
                numbers,
                lengths,
                direct=config.direct,
                read_bytes=total,
                check_identity=False,
            ) as files:
                bad, _ = read.read_ranges(
                    engine,
                    files,
                    Ranges(file_number, start[rows], length[rows], expected),
                    stage.stage_nothing(),
                    timeout_s=config.timeout_s,
                )
                bytes_read += total
                for row in range(len(bad)):
                    error = read.bad_block_error(
                        files, file_number, numbers, bad[row], index.names_in
                    )
                    problems.append(str(error))
        except CheckpointError as error:
            problems.append(str(error))
    return problems, bytes_read


def _collect(world: Communicator, problems: list[str], bytes_read: int) -> tuple[list[str], int]:
    """All ranks' problems, each once, and the sum of what was read."""
    parts = world.gather(json.dumps(problems).encode())
    message = None
    if parts is not None:
        merged = [text for part in parts for text in json.loads(part.tobytes())]
        message = json.dumps(list(dict.fromkeys(merged))).encode()
    everything: list[str] = json.loads(world.broadcast(message))
    total = world.allreduce(np.array([bytes_read], np.int64), "sum")
    return everything, int(total[0])
