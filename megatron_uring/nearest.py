"""The nearest whole copy: what of a restore is read from the staging directory of the node.

Guarantees
----------
- A local copy is read only if its marker has the regions of the committed index, and the digest of
  their checksums; each block is checked on the way as it is in a subfile.
- One that is damaged, cut or gone costs a warning: the caller reads the checkpoint directory.
- Leftovers of saves that were never committed are removed from the staging directory; nothing else
  is written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from megatron_uring import _engine, read, tier
from megatron_uring.columns import BoolArray, Int32Array, Int64Array
from megatron_uring.config import Config
from megatron_uring.errors import CheckpointError, as_checkpoint_error
from megatron_uring.index_rules import Index
from megatron_uring.layout import BLOCK_BYTES
from megatron_uring.regular import require_regular
from megatron_uring.tables import Ranges, Regions, RestorePlan, Staged, on_axis

_log = logging.getLogger("megatron_uring")


@dataclass(frozen=True)
class Near:
    """The part of a restore that local copies have, and the rest.

    Attributes
    ----------
    plan, rest
        Together the whole plan.
    paths, subfile
        Of each region that is read: its local copy, and its subfile, int32.
    range_file, piece_file
        Region of each range and piece of `plan`, int32, ascending.
    """

    index: Index
    plan: RestorePlan
    rest: RestorePlan
    paths: tuple[str, ...]
    subfile: Int32Array
    range_file: Int32Array
    piece_file: Int32Array

    def read(self, engine: _engine.Engine, staged: Staged, config: Config) -> _engine.Job | None:
        """Read, verify and scatter; None, and a warning, if a copy is not what it should be.

        Destinations may be half written then.
        """
        plan = self.plan
        ranges = Ranges(self.range_file, plan.range_start, plan.range_length, plan.crc32c)
        try:
            with self._opened(config) as files:
                bad, job = read.read_ranges(
                    engine, files, ranges, staged, timeout_s=config.timeout_s
                )
                if len(bad):
                    names = self.index.names_in
                    raise read.bad_block_error(files, self.range_file, self.subfile, bad[0], names)
        except CheckpointError as error:
            _log.warning("local copies are left out, the checkpoint directory is read: %s", error)
            return None
        return job

    @contextmanager
    def _opened(self, config: Config) -> Iterator[list[_engine.File]]:
        total = int(self.plan.range_length.sum())
        direct = config.direct != "off" and total >= read.DIRECT_FROM_BYTES
        files: list[_engine.File] = []
        try:
            for path in self.paths:
                try:
                    require_regular(path, "open local copy")
                    files.append(_engine.File.open(path, writable=False, direct=direct))
                except OSError as error:
                    raise as_checkpoint_error(error, "open local copy", path) from error
            yield files
        finally:
            for file in files:
                file.close()


def find(config: Config, directory: str, index: Index, restoring: RestorePlan) -> Near | None:
    """What local copies have of `restoring`; None if that is nothing."""
    if not config.staging_directory or not len(restoring.range_start):
        return None
    tier.sweep(config.staging_directory, directory)
    path_of_region = _usable(config.staging_directory, directory, index)
    if not path_of_region:
        return None
    order = np.lexsort((index.regions.start, index.regions.subfile))
    region = _Finder(index.regions, order)
    near_range = region.place(restoring.range_subfile, restoring.range_start)
    near_piece = region.place(restoring.piece_subfile, restoring.piece_start)
    usable = np.isin(order, list(path_of_region))
    ranges, pieces = usable[near_range], usable[near_piece]
    if not ranges.any():
        return None
    places, range_file = np.unique(near_range[ranges], return_inverse=True)
    rows = order[places].tolist()
    return Near(
        index,
        select(restoring, ranges, pieces),
        select(restoring, ~ranges, ~pieces),
        tuple(path_of_region[row] for row in rows),
        index.regions.subfile[rows],
        range_file.astype(np.int32),
        np.searchsorted(places, near_piece[pieces]).astype(np.int32),
    )


def _usable(staging_directory: str, directory: str, index: Index) -> dict[int, str]:
    """Rows of the index's regions that a local copy has, and its path."""
    regions, first_block = index.regions, index.regions.first_block()
    rows = {
        key: row
        for row, key in enumerate(
            zip(
                regions.subfile.tolist(),
                regions.rank.tolist(),
                regions.start.tolist(),
                regions.length.tolist(),
                strict=True,
            )
        )
    }
    found: dict[int, str] = {}
    for marker, path in tier.copies(staging_directory, directory, index.save_id):
        own = [rows.get((marker.subfile, marker.rank, *region)) for region in marker.regions]
        known = [row for row in own if row is not None]
        checksums = [regions.crc32c[first_block[row] : first_block[row + 1]] for row in known]
        if len(known) == len(own) and tier.digest(checksums) == marker.crc32c:
            found.update(dict.fromkeys(known, path))
    return found


class _Finder:
    """Finds the region that holds an offset of a subfile, by its place in `order`."""

    def __init__(self, regions: Regions, order: Int64Array) -> None:
        self._axis = on_axis(regions.subfile[order], regions.start[order])

    def place(self, subfile: Int32Array, start: Int64Array) -> Int64Array:
        """Of each (subfile, start)."""
        found = np.searchsorted(self._axis, on_axis(subfile, start), "right") - 1
        return found.astype(np.int64)


def select(restoring: RestorePlan, ranges: BoolArray, pieces: BoolArray) -> RestorePlan:
    """Some ranges of a plan, and the pieces that lie in them."""
    blocks = -(-restoring.range_length // BLOCK_BYTES)
    return RestorePlan(
        restoring.range_subfile[ranges],
        restoring.range_start[ranges],
        restoring.range_length[ranges],
        restoring.crc32c[np.repeat(ranges, blocks)],
        restoring.piece_subfile[pieces],
        restoring.piece_start[pieces],
        restoring.request[pieces],
        restoring.memory_offset[pieces],
        restoring.boxes.take(np.flatnonzero(pieces)),
    )
