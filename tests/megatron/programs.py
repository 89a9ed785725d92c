"""Runs the programs of this folder once for each way to start them, and reports check by check.

Guarantees
----------
- A program's checks are its functions ``check_*``; every one of them becomes a test.
- A check has passed when every rank said so; one that a program did not reach has failed. One is
  skipped only where every rank has seen Megatron itself refuse the same.
- A program runs when its first check is asked for, and never twice with the same launcher and size.
"""

from __future__ import annotations

import functools
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "mpi"))

import launch  # noqa: E402 - found through the line above

VERSION = metadata.version("megatron-core")
LAUNCHERS = {
    "mpirun": launch.run_mpi,
    "torchrun": launch.run_torchrun,
    "alone": launch.run_processes,
}


def checks_of(program: str) -> list[str]:
    """Names of the checks of ``program.py``, in the order in which they run."""
    text = (FOLDER / f"{program}.py").read_text(encoding="utf-8")
    return re.findall(r"^def check_(\w+)\(", text, re.MULTILINE)


@functools.cache
def run(
    program: str,
    launcher: str,
    size: int,
    folder: Path,
    *checks: str,
    small_file_system: str | None = None,
    timeout_s: float = 170.0,
) -> launch.Finished:
    """Run the checks (default: all of them) with `folder` for their files."""
    env = {"OMP_NUM_THREADS": "1", "MEGATRON_URING_TIMEOUT_S": "40"}
    if small_file_system is not None:
        env["SMALL_FILE_SYSTEM"] = small_file_system
    return LAUNCHERS[launcher](
        size,
        FOLDER / f"{program}.py",
        str(folder),
        *(checks or checks_of(program)),
        env=env,
        timeout_s=timeout_s,
        ok=False,
    )


def require(check: str, size: int, done: launch.Finished) -> None:
    """Fail unless all ranks passed `check`; skip if all saw Megatron itself refuse it."""
    refusals = re.findall(rf"^cannot {check}: (.*)$", done.output, re.MULTILINE)
    if len(refusals) == size:
        pytest.skip(f"megatron-core {VERSION} itself refuses it: {refusals[0]}")
    passed = len(re.findall(rf"^passed {check}$", done.output, re.MULTILINE))
    assert passed == size, f"{passed} of {size} ranks passed {check}:\n{done.output[-8000:]}"
