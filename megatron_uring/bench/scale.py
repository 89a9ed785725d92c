"""What planning and the index cost, from a thousand shards to a million; no rank, no data.

Guarantees
----------
- Each size runs in a process of its own, so that its peak memory is its own; there are no tensors.
- Saving is all that a save does to its structure: every rank's plan and columns, gathering them on
  rank 0, the proof of ownership, the index, and writing it durably. The plans of all ranks run one
  after the other here, which one machine of a job never does.
- Loading is reading and checking the index, and planning a restore of every shard.
- A process may use most of the machine's memory and no more: a size that needs more is a point with
  that reason.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from megatron_uring import _engine, index, ownership, plan
from megatron_uring.bench.measure import status_bytes
from megatron_uring.config import Config
from megatron_uring.index_rules import assemble_index, owned_rows
from megatron_uring.layout import BLOCK_BYTES, DTYPE_BYTES, DTYPE_NAMES, INDEX_NAME
from megatron_uring.progress import Clock
from megatron_uring.shards import ShardTable
from megatron_uring.tables import Contents, Extents, Regions, Structure

SIZES = (1_000, 10_000, 100_000, 1_000_000)
SHAPES = {"keys of 100 shards": 100, "keys of 1 shard": 1}
RANKS = 100
_ROWS, _COLUMNS = 128, 1024  # of a bfloat16 shard: 256 KiB
_MEMORY_PART = 0.8
_TIMEOUT_S = 500.0
_INPUTS = "inputs"  # what the subject does not do


@dataclass(frozen=True)
class Point:
    """One size of one shape.

    Attributes
    ----------
    import_bytes, inputs_bytes
        Resident after importing, and after the shards were described.
    peak_bytes
        Most that was ever resident.
    phases_s
        Both sides, step by step.
    reason
        Why there are no figures.
    """

    shape: str
    shards: int
    save_s: float = 0.0
    load_s: float = 0.0
    import_bytes: int = 0
    inputs_bytes: int = 0
    peak_bytes: int = 0
    index_bytes: int = 0
    phases_s: dict[str, float] | None = None
    reason: str = ""


def measure(directory: str, sizes: Sequence[int] = SIZES) -> list[dict[str, Any]]:
    """All sizes of both shapes, each in its own process; not collective."""
    return [measure_apart(shape, size, directory) for shape in SHAPES for size in sizes]


def measure_apart(shape: str, size: int, directory: str) -> dict[str, Any]:
    """One size, in a process of its own, as a `Point`'s fields."""
    with tempfile.TemporaryDirectory(dir=directory, prefix="scale-") as folder:
        return _measure_apart(shape, size, folder)


def _measure_apart(shape: str, size: int, folder: str) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "megatron_uring.bench.scale",
        "--one",
        shape,
        str(size),
        folder,
    ]
    # a launcher's variables would make the process think that it is a rank
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMPI_", "PMIX_", "PRTE_", "PMI_"))
    }
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            env=environment,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return asdict(Point(shape, size, reason=f"not done after {_TIMEOUT_S:.0f} s"))
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"ended with {done.returncode}"
        return asdict(Point(shape, size, reason=reason[:200]))
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure_here(shape: str, count: int, folder: str) -> Point:
    """One size, in this process."""
    imported = status_bytes("VmRSS")
    parts = describe_ranks(count, SHAPES[shape])
    inputs = status_bytes("VmRSS")
    path = os.path.join(folder, INDEX_NAME)
    clock = Clock()
    _save_side(parts, path, clock)
    parts.clear()  # who loads has not what was saved
    _load_side(folder, clock)
    phases = {name: seconds for name, seconds in clock.phases_s.items() if name != _INPUTS}
    save_s = sum(seconds for name, seconds in phases.items() if name.startswith("save"))
    return Point(
        shape,
        count,
        save_s,
        sum(phases.values()) - save_s,
        imported,
        inputs,
        status_bytes("VmHWM"),
        os.path.getsize(path),
        phases,
    )


def describe_ranks(count: int, shards_per_key: int) -> list[ShardTable]:
    """`count` bfloat16 shards over `RANKS` ranks.

    With many shards for a key each key is cut over all ranks, as tensor and data parallelism do;
    with one, each rank has its own keys.
    """
    key_count, per_rank = count // shards_per_key, count // RANKS
    tables = []
    for rank in range(RANKS):
        first = 0 if shards_per_key > 1 else rank * per_rank
        keys = tuple(
            f"model.decoder.layers.{number}.mlp.experts.linear_fc1.weight"
            for number in range(first, first + (key_count if shards_per_key > 1 else per_rank))
        )
        shape = np.tile(np.array([_ROWS, _COLUMNS], np.int64), (len(keys), 1))
        offset = np.zeros_like(shape)
        offset[:, 0] = rank * _ROWS if shards_per_key > 1 else 0
        tables.append(
            ShardTable(
                keys,
                np.arange(len(keys), dtype=np.int32),
                np.full(len(keys), DTYPE_NAMES.index("bfloat16"), np.uint8),
                np.full(len(keys), 2, np.uint8),
                shape * np.array([shards_per_key, 1]),
                offset,
                shape,
            )
        )
    return tables


def _save_side(parts: list[ShardTable], path: str, clock: Clock) -> None:
    packed, regions = [], []
    for rank, shards in enumerate(parts):
        lengths = shards.lengths()
        region = plan.plan_region(lengths, np.zeros(0, np.int64), head=True)
        group = plan.plan_group(
            np.array([region.tensor_bytes]), np.zeros(1, np.int64), stripe_bytes=0
        )
        start = region.shard_start + group.tensor_start[0]
        rows = len(shards)
        where = Extents(np.full(rows, rank, np.int32), start, lengths)
        owned = np.ones(rows, bool)
        structure = Structure(shards, np.full(rows, rank, np.int32), owned, where)
        packed.append(structure.pack())
        regions.append((rank, group.tensor_start[0], region.tensor_bytes))
    clock.lap("save: plan, all ranks")
    world = Structure.concatenate([Structure.unpack(part) for part in packed])
    packed.clear()
    clock.lap("save: gather")
    ownership.check_ownership(world.shards, world.rank, world.owner)
    clock.lap("save: ownership")
    contents = _contents(regions)
    clock.lap(_INPUTS)
    assembled = assemble_index("0" * 16, owned_rows(world), contents, {}, None)
    clock.lap("save: assemble")
    sealed = index.sealed(assembled)
    clock.lap("save: encode")
    _engine.write_file(path, sealed)
    clock.lap("save: write")


def _contents(regions: list[tuple[int, int, int]]) -> Contents:
    """What the ranks wrote: no objects, a region each, checksums that do not compress."""
    columns = np.array(regions, np.int64)
    blocks = int((-(-columns[:, 2] // BLOCK_BYTES)).sum())
    checksums = np.random.default_rng(0).integers(0, 1 << 32, blocks, dtype=np.uint32)
    rank = columns[:, 0].astype(np.int32)
    nothing = Extents(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64))
    return Contents((), nothing, Regions(rank, rank, columns[:, 1], columns[:, 2], checksums))


def _load_side(folder: str, clock: Clock) -> None:
    found = index.read_index(folder)
    clock.lap("load: read and check index")
    shards = found.shards
    # requests come with keys of their own, as a program's state does
    wanted = replace(shards, keys=tuple(key.encode().decode() for key in shards.keys))
    strides = plan.contiguous_strides(wanted.shape, DTYPE_BYTES[wanted.dtype])
    clock.lap(_INPUTS)
    restoring = plan.plan_restore(
        shards,
        found.shard_extents,
        found.regions,
        wanted,
        strides,
        gap_bytes=Config().gap_bytes,
    )
    clock.lap("load: plan restore")
    assert len(restoring.request) == len(shards)


def _limit_memory() -> None:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    bound = int(pages * _MEMORY_PART)
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))


def parse_sizes(text: str, option: str) -> list[int]:
    """Numbers of shards, with commas between them; raises click's `BadParameter`."""
    import click

    sizes = [int(size) if size.strip().isdecimal() else 0 for size in text.split(",")]
    if min(sizes) < RANKS:
        raise click.BadParameter(f"{option}: {text!r} is no list of numbers from {RANKS} on")
    return sizes


def main(arguments: list[str] | None = None) -> None:
    """Command line: ``scripts/bench scale``."""
    import click

    from megatron_uring.bench.report import print_scale, write_json

    @click.command(context_settings={"help_option_names": ["-h", "--help"]})
    @click.option("--directory", default=".", show_default=True, help="where the index is written")
    @click.option(
        "--shards",
        default=",".join(map(str, SIZES)),
        show_default=True,
        help="how many, with commas",
    )
    @click.option("--json", "json_path", default=None, help="write all points to this file")
    @click.option("--one", nargs=3, default=None, hidden=True)
    def command(
        directory: str, shards: str, json_path: str | None, one: tuple[str, str, str] | None
    ) -> None:
        """Plan, check, index and write (save), and read and plan back (load), so many shards."""
        if one is not None:
            _limit_memory()
            print(json.dumps(asdict(measure_here(one[0], int(one[1]), one[2]))))
            return
        points = measure(directory, parse_sizes(shards, "--shards"))
        print_scale(points)
        if json_path:
            write_json(json_path, {"points": points})

    command(arguments)


if __name__ == "__main__":
    main()
