"""Command line of the check on a GPU, started by ``scripts/gpu_check``.

Guarantees
----------
- Without a GPU, or with a PyTorch that has no CUDA, it says ``not run: no GPU here`` and succeeds.
- It uses no network, and begins nothing that it may not end within ``--limit-s``.
- It fails if a fact is wrong or a target missed; what was not run fails nothing, and has its row.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click
import torch

from megatron_uring import stage
from megatron_uring.bench.gpu import correctness, driver, times
from megatron_uring.bench.gpu.setting import (
    FAILED,
    MISSED,
    NotRunError,
    Row,
    Setting,
    library,
    run,
)

CHECKS: tuple[tuple[str, Callable[[Setting], list[Row]]], ...] = (
    ("round trips", correctness.round_trips),
    ("saves under a mutating optimizer", correctness.mutated_saves),
    ("CUDA graph of the optimizer", driver.graphed_step),
    ("CUDA graph captured while copies go on", driver.capture_beside_copies),
    ("refused page-lock", driver.refused_page_lock),
    ("device memory allocated for a save", driver.device_memory),
    ("blocking and fence", times.blocking_and_fence),
    ("RLIMIT_MEMLOCK of 64 KiB", driver.little_locked_memory),
    ("fence wait, copy threads", times.copy_threads),
)


def missing() -> str:
    """Why there is no GPU to check; empty if there is one."""
    if torch.version.cuda is None:
        return "this PyTorch was built without CUDA"
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device"
    return ""


def fitting_bytes(wanted: int, folder: str, device: torch.device) -> int:
    """As much of `wanted` as device, host and disk have room for."""
    free_device, _ = torch.cuda.mem_get_info(device)
    # beside the state: its pool, the page-locked buffer, and a restored copy
    free_host = stage.free_memory_bytes()
    free_disk = shutil.disk_usage(folder).free
    return min(wanted, free_device // 3, free_host // 5, free_disk // 3)


def facts(setting: Setting) -> dict[str, Any]:
    """On what it ran."""
    try:
        found = library(setting)
    except NotRunError as error:
        found = str(error)
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(setting.device),
        "library": found,
        "state_bytes": setting.state_bytes,
        "folder": setting.folder,
    }


def show(row: Row) -> None:
    """One row of the table."""
    target = f"   [{row.target}]" if row.target else ""
    print(f"{row.outcome:9} {row.what}: {row.found}{target}", flush=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--directory", default=None, help="where saves go; default: the temporary folder")
@click.option("--gigabytes", default=8.0, show_default=True, help="of the large state")
@click.option("--trials", default=5, show_default=True, type=click.IntRange(min=1), help="timed")
@click.option("--limit-s", default=420.0, show_default=True, help="nothing is begun after so long")
@click.option("--json", "json_path", default=None, help="write all rows to this file")
@click.option(driver.CHILD_OPTION, "child_folder", default=None, hidden=True)
def command(
    directory: str | None,
    gigabytes: float,
    trials: int,
    limit_s: float,
    json_path: str | None,
    child_folder: str | None,
) -> None:
    """Check staging from a GPU on this machine; without a GPU, say so."""
    if child_folder is not None:
        driver.child(child_folder)
        return
    reason = missing()
    if reason:
        print(f"not run: no GPU here\n{reason}")
        _write(json_path, {"not_run": f"no GPU here: {reason}", "rows": []})
        return
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="megatron_uring-gpu-", dir=directory) as folder:
        state_bytes = fitting_bytes(int(gigabytes * 1e9), folder, device)
        setting = Setting(device, folder, state_bytes, trials, time.monotonic() + limit_s)
        known = facts(setting)
        print(", ".join(f"{name} {value}" for name, value in known.items()), flush=True)
        rows: list[Row] = []
        for what, check in CHECKS:
            for row in run(what, check, setting):
                rows.append(row)
                show(row)
            torch.cuda.empty_cache()
    _write(json_path, {**known, "rows": [asdict(row) for row in rows]})
    bad = [row for row in rows if row.outcome in (FAILED, MISSED)]
    print(f"{len(rows)} rows, {len(bad)} failed or missed")
    sys.exit(1 if bad else 0)


def _write(path: str | None, found: dict[str, Any]) -> None:
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    command()
