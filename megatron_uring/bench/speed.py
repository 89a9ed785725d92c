"""``scripts/bench speed``: ours, the limit and every peer, in turns, on the same bytes.

Guarantees
----------
- One run gives everything: saves of large and of small tensors, cold restores, tiny tensors against
  large ones, and the cost of planning and index up to a million shards.
- A peer that cannot run is a row with its reason. The command fails only if bytes came back
  different, or if the default configuration of ours failed.
- What it writes lies in one folder, which is removed in the end, however the run ends.
- The JSON file is written again after each section: a run that is ended early leaves what it has.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click

from megatron_uring.bench.peers import NAMES

DEFAULT_SECTIONS = ("large", "small", "restore", "sharing", "tiny", "scale")
SECTIONS = (*DEFAULT_SECTIONS, "options")
_GROUP_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Options:
    """What the command line says; see ``--help``."""

    directory: str
    gigabytes_per_rank: float
    tensors_per_rank: int
    tiny_tensors_per_rank: int
    trials: int
    peers: Sequence[str]
    sections: Sequence[str]
    scale_shards: Sequence[int]


def run(options: Options, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any] | None:
    """Measure; collective. Returns machine, rows, table and figures on rank 0, None elsewhere;
    there, `keep` is given after each section what there is by then.
    """
    from megatron_uring import comm
    from megatron_uring.bench import measure, peers
    from megatron_uring.bench.sections import FOLDER, Bench, removed_in_the_end
    from megatron_uring.config import Config

    config = Config.from_environment()
    world = comm.connect(config.timeout_s, config.communicator)
    no_group = measure.attempt(world, lambda: join_torch(world))
    folder = os.path.join(os.path.abspath(options.directory), FOLDER)
    formats = peers.peers(list(options.peers), world, no_group)
    bench = Bench(world, folder, options.trials, formats, _progress(world.rank))
    rows: list[measure.Row] = []
    points: list[dict[str, Any]] = []
    with removed_in_the_end(world, folder):
        for section in options.sections:
            measured = _measure_section(bench, section, options)
            release_memory()
            _show(world.rank, measured, options.trials)
            rows += measured
            if section == "scale":
                points = _measure_scale(bench, options)
            if world.rank == 0:
                keep(_result(options, bench, rows, points))
    return _result(options, bench, rows, points) if world.rank == 0 else None


def release_memory() -> None:
    """Two sections' tensors would not fit into memory side by side, and glibc keeps what thousands
    of small ones had (measured: all 0.67 GB of 5,000) until it is told to let go.
    """
    gc.collect()
    with contextlib.suppress(AttributeError):  # another libc
        ctypes.CDLL(None).malloc_trim(0)


def _progress(rank: int) -> Callable[[str], None]:
    began = time.monotonic()

    def tell(what: str) -> None:
        if rank == 0:
            print(f"[{time.monotonic() - began:5.0f} s] {what}", file=sys.stderr, flush=True)

    return tell


def _measure_section(bench: Any, section: str, options: Options) -> list[Any]:
    from megatron_uring.bench import state

    rank, size = bench.world.rank, bench.world.size
    if section == "small":
        return list(bench.save_section("small", state.small_state(rank, options.tensors_per_rank)))
    if section == "tiny":
        large_count = max(state.TINY_LARGE_TENSORS // size, 1)
        return list(bench.tiny_section(options.tiny_tensors_per_rank, large_count))
    if section == "sharing":  # the same tensors on every rank
        return list(bench.sharing_section(state.large_state(0, options.gigabytes_per_rank)))
    large_sections = {
        "large": lambda large: bench.save_section("large", large),
        "restore": bench.restore_section,
        "options": bench.options_section,
    }
    if section not in large_sections:
        return []
    return list(large_sections[section](state.large_state(rank, options.gigabytes_per_rank)))


def _measure_scale(bench: Any, options: Options) -> list[dict[str, Any]]:
    """On rank 0; the others sleep meanwhile."""
    from megatron_uring.bench import report, scale

    points: list[dict[str, Any]] = []
    if bench.world.rank == 0:
        os.makedirs(bench.folder, exist_ok=True)
    for shape in scale.SHAPES:
        for size in options.scale_shards:
            if bench.world.rank == 0:
                points.append(scale.measure_apart(shape, size, bench.folder))
            bench.world.barrier()
        bench.tell(f"scale: {shape} done")
    if bench.world.rank == 0:
        report.print_scale(points)
    return points


def _show(rank: int, rows: list[Any], trials: int) -> None:
    from megatron_uring.bench import report, summary

    for section, own in _by_section(rows).items():
        if rank == 0:
            report.print_section(section, summary.summarize(own), own[0].gigabytes, trials)


def _by_section(rows: list[Any]) -> dict[str, list[Any]]:
    names = dict.fromkeys(row.section for row in rows)
    return {name: [row for row in rows if row.section == name] for name in names}


def _result(
    options: Options, bench: Any, rows: list[Any], points: list[dict[str, Any]]
) -> dict[str, Any]:
    from megatron_uring.bench import report, summary

    tables = {section: summary.summarize(own) for section, own in _by_section(rows).items()}
    machine = report.machine(options.directory)
    machine.update(ranks=bench.world.size, communicator=bench.world.reason, cold=bench.cold)
    return {
        "machine": machine,
        "options": asdict(options),
        "rows": [asdict(row) for row in rows],
        "table": {
            section: {what: asdict(row) for what, row in table.items()}
            for section, table in tables.items()
        },
        "scale": points,
        "figures": summary.figures(tables, points),
    }


def failures(found: dict[str, Any]) -> list[str]:
    """What makes the command fail: other bytes than were saved, or no figures for our default."""
    from megatron_uring.bench.formats import DEFAULT

    return [
        f"{row['section']}: {row['what']}: {row['reason']}"
        for row in found["rows"]
        if row["reason"] and (row["different"] or row["what"] == DEFAULT)
    ]


def join_torch(world: Any) -> None:
    """torch.distributed over gloo, for the peers: the same ranks as `world`; collective."""
    import datetime

    import torch.distributed

    address = "127.0.0.1" if len(world.hosts) == 1 else world.hosts[0]
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    port = int(bytes(world.broadcast(str(port).encode() if world.rank == 0 else None)))
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:{port}",
        rank=world.rank,
        world_size=world.size,
        timeout=datetime.timedelta(seconds=_GROUP_TIMEOUT_S),
    )


_AT_LEAST_ONE = click.IntRange(min=1)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--directory", default=".", show_default=True, help="file system to measure")
@click.option(
    "--gigabytes-per-rank",
    default=2.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="of 64 MiB tensors, in the sections large, restore and sharing",
)
@click.option(
    "--tensors-per-rank",
    default=20_000,
    show_default=True,
    type=_AT_LEAST_ONE,
    help="of 4 to 256 KiB, in the section small",
)
@click.option(
    "--tiny-tensors-per-rank",
    default=100_000,
    show_default=True,
    type=_AT_LEAST_ONE,
    help="of 1 to 64 KiB, in the section tiny",
)
@click.option(
    "--trials",
    default=5,
    show_default=True,
    type=_AT_LEAST_ONE,
    help="timed, of each variant, after a warm-up",
)
@click.option(
    "--peers", default="all", show_default=True, help=f"all, none, or some of {','.join(NAMES)}"
)
@click.option(
    "--sections",
    default=",".join(DEFAULT_SECTIONS),
    show_default=True,
    help="what to measure: large and small saves; cold restores; sharing, where all ranks of "
    "a node restore the same; tiny tensors beside large ones; scale, planning and index; "
    "options, other sizes of pool, queue and threads than the default ones",
)
@click.option(
    "--scale-shards",
    default="1000,10000,100000,1000000",
    show_default=True,
    help="numbers of shards, in the section scale",
)
@click.option(
    "--json",
    "json_path",
    default=None,
    type=click.Path(dir_okay=False, writable=True),
    help="write rows, tables and figures to this file, anew after each section",
)
def main(peers: str, sections: str, scale_shards: str, json_path: str | None, **rest: Any) -> None:
    """Saves and cold restores beside fio's limit and other libraries, interleaved."""
    from megatron_uring.bench import report, scale

    warnings.simplefilter("ignore")  # what peers warn of is not about this measurement
    options = Options(
        peers=choose(peers, list(NAMES), "--peers"),
        sections=choose(sections, list(SECTIONS), "--sections"),
        scale_shards=scale.parse_sizes(scale_shards, "--scale-shards"),
        **rest,
    )
    began = time.monotonic()

    def keep(found: dict[str, Any]) -> None:
        if json_path:
            report.write_json(json_path, found)

    found = run(options, keep)
    if found is None:
        return
    report.print_figures(found["figures"])
    print(f"{report.LEGEND}\n{time.monotonic() - began:.0f} s in all", flush=True)
    for failure in failures(found):
        print(f"bench: failed: {failure}", file=sys.stderr)
    if failures(found):
        sys.exit(1)


def choose(text: str, known: list[str], option: str) -> list[str]:
    """Names with commas between them, ``"all"``, or ``"none"`` where that is no name; each has to
    be known.
    """
    if text == "all":
        return known
    if text == "none" and "none" not in known:
        return []
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.BadParameter(f"{option}: {unknown[0]!r} is none of {', '.join(known)}")
    return names


if __name__ == "__main__":
    main()
