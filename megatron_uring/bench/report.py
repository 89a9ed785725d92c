"""Tables to read and JSON to keep.

Guarantees
----------
- Tables fit 100 columns and have no colour: mpirun gives its ranks a terminal, whatever its output
  goes to.
- A variant without figures has a line with its reason.
- What is said of the machine names no host.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

from megatron_uring import write
from megatron_uring.bench.summary import GIGABYTE, MEGABYTE, Summary
from megatron_uring.probing import CLEARLY_FASTER
from megatron_uring.profiles import Tuning, describe

_WIDTH = 100
_COLUMNS = {
    "median_s": ("median s", "{:.3f}"),
    "fastest_s": ("min", "{:.2f}"),
    "slowest_s": ("max", "{:.2f}"),
    "gb_per_s": ("GB/s", "{:.2f}"),
    "to_limit": ("limit", "{:.2f}"),
    "drift_limit": ("~", "{:.2f}"),
    "to_best_peer": ("peer", "{:.2f}"),
    "drift_peer": ("~", "{:.2f}"),
    "process_cpu_s_per_gb": ("CPU", "{:.3f}"),
    "machine_cpu_s_per_gb": ("all", "{:.2f}"),
    "peak_mb": ("MB", "{:.0f}"),
}
_PACKAGES = (
    "megatron-uring",
    "torch",
    "numpy",
    "h5py",
    "mpi4py",
    "megatron-core",
    "torchsnapshot",
    "torch_checkpointing",
)
LEGEND = (
    "limit, peer: bandwidth over that of the limit and of the best peer, of medians; ~: median of\n"
    "the trials. CPU: seconds for each GB, of the processes; all: of the machine. MB: peak memory\n"
    "beyond what was there before the call, worst rank, warm-up included, without child processes."
)


def print_section(name: str, table: dict[str, Summary], gigabytes: float, trials: int) -> None:
    """The table of one section, and why some variants are not in it."""
    lines = [row.what for row in table.values()]
    rows = [
        [row.what, *("-" if row.reason else _cell(row, column) for column in _COLUMNS)]
        for row in table.values()
    ]
    title = f"{name}: {gigabytes:.2f} GB, {trials} trials"
    headings = [heading for heading, _ in _COLUMNS.values()]
    print_table(title, ["", *headings], rows, len(max(lines, key=len, default="")))
    for row in table.values():
        if row.reason:
            print(f"{row.what}: {row.reason}", flush=True)


def _cell(row: Summary, column: str) -> str:
    value = getattr(row, column)
    if value is None or (column == "peak_mb" and row.kind == "limit"):
        return ""
    return _COLUMNS[column][1].format(value)


def print_scale(points: Sequence[dict[str, Any]]) -> None:
    """Seconds and memory by number of shards."""
    headings = ["", "shards", "save s", "load s", "us/shard", "peak GB", "above import", "index MB"]
    rows = []
    for point in points:
        micro_s = 1e6 * (point["save_s"] + point["load_s"]) / point["shards"]
        above = point["peak_bytes"] - point["import_bytes"]
        cells = [
            f"{point['save_s']:.3f}",
            f"{point['load_s']:.3f}",
            f"{micro_s:.2f}",
            f"{point['peak_bytes'] / GIGABYTE:.2f}",
            f"{above / GIGABYTE:.2f}",
            f"{point['index_bytes'] / MEGABYTE:.2f}",
        ]
        if point["reason"]:
            cells = ["-"] * len(cells)
        rows.append([point["shape"], f"{point['shards']:,}", *cells])
    print_table("scale: planning and index", headings, rows, 18)
    for point in points:
        if point["reason"]:
            print(f"{point['shape']}, {point['shards']:,}: {point['reason']}", flush=True)


def print_figures(figures: dict[str, Any]) -> None:
    """Name and value."""
    rows = [
        [name, "not measured" if value is None else f"{value:.3f}"]
        for name, value in figures.items()
    ]
    print_table("figures", ["", "value"], rows, 32)


def print_profile(found: Tuning, *, as_json: bool) -> None:
    """What a probe measured and chose."""
    if as_json:
        print(json.dumps(asdict(found), indent=1))
        return
    rows = [
        [f"write, {name}", f"{rate:.2f}", "chosen" if name == found.chosen else ""]
        for name, rate in found.gb_per_s.items()
    ]
    rows += [
        [f"read, {name}", f"{rate:.2f}", "chosen" if found.reads_as(name) else ""]
        for name, rate in found.read_gb_per_s.items()
    ]
    print_table("", ["", "GB/s", ""], rows, 24)
    more = round(100 * (CLEARLY_FASTER - 1))
    print(f"something else than the default is chosen only if it is {more} % faster")
    print(f"from now on: {describe(asdict(found))}")


def print_table(title: str, headings: list[str], rows: list[list[str]], name_width: int) -> None:
    """A table whose first column is left-aligned."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for number, heading in enumerate(headings):
        width = name_width if not number else None
        table.add_column(
            heading, justify="right" if number else "left", no_wrap=True, min_width=width
        )
    for row in rows:
        table.add_row(*row)
    Console(no_color=True, force_terminal=False, width=_WIDTH).print(table)


def write_json(path: str, found: dict[str, Any]) -> None:
    """Replace the file by `found`, as a whole."""
    temporary = f"{path}.part"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(found, file, indent=1)
        file.write("\n")
    os.replace(temporary, path)


def machine(directory: str) -> dict[str, Any]:
    """Kernel, processor, memory, file system and versions."""
    storage = write.describe_storage(directory)
    return {
        "kernel": platform.release(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gb": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIGABYTE,
        "filesystem": f"{storage.file_system} ({storage.mount_options})",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def _cpu_model() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
