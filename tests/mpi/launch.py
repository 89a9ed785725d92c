"""Starts test programs under mpirun, torchrun or as bare processes, and kills all of them in time.

Guarantees
----------
- A launcher that is not installed fails the test; it never skips it.
- When the launcher is gone, or the time is up, every process that came of it is killed; after the
  latter the test fails with the output.
- The children's environment holds no launcher's variables but those that the test asked for.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().parent
_LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "TORCHELASTIC_", "MEGATRON_URING_")
_FAMILY = "TEST_PROGRAM"  # the variable that tells what came of one start
_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Finished:
    """What a program left behind: its exit status, and both streams in one text."""

    status: int
    output: str


def run_mpi(
    size: int,
    script: str | Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    ok: bool = True,
) -> Finished:
    """`script` under ``mpirun -n size``; with `ok` its exit status must be 0."""
    command = [
        _beside_python("mpirun"),
        *("--oversubscribe", "--bind-to", "none", "-n", str(size)),
        *(sys.executable, "-W", "error", str(script), *arguments),
    ]
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return _run(command, {**allowed, **free_rendezvous(), **(env or {})}, timeout_s, ok)


def run_torchrun(
    size: int,
    script: str | Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    ok: bool = True,
    python: str | Path = sys.executable,
) -> Finished:
    """`script` under ``torchrun --nproc-per-node size`` of that interpreter."""
    rendezvous = free_rendezvous()
    command = [
        *(str(python), "-m", "torch.distributed.run", "--nproc-per-node", str(size)),
        *("--master-addr", rendezvous["MASTER_ADDR"], "--master-port", rendezvous["MASTER_PORT"]),
        *(str(script), *arguments),
    ]
    return _run(command, {"OMP_NUM_THREADS": "1", **(env or {})}, timeout_s, ok)


def run_processes(
    size: int,
    script: str | Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    ok: bool = True,
) -> Finished:
    """`size` bare processes with the variables that torch's ``env://`` wants, and no launcher.

    The status is the first one that is not 0.
    """
    rendezvous = free_rendezvous()
    command = [sys.executable, __file__, str(size), sys.executable, "-W", "error"]
    command += [str(script), *arguments]
    return _run(command, {**rendezvous, **(env or {})}, timeout_s, ok)


def _run(command: Sequence[str], extra: Mapping[str, str], timeout_s: float, ok: bool) -> Finished:
    env = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS) and k not in _TORCH}
    path = os.pathsep.join([str(ROOT), str(PROGRAMS), env.get("PYTHONPATH", "")])
    family = f"{_FAMILY}={uuid.uuid4().hex}"
    env.update({"PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", **extra})
    env.update([family.split("=")])
    # a file, not a pipe: a helper process that Megatron started would hold a pipe open for ever
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        child = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            # SIGABRT first: faulthandler then shows where each rank stands.
            _kill_family(family, signal.SIGABRT)
            time.sleep(1.0)
            status = None
        finally:
            _kill_family(family)
            child.wait()
        output.seek(0)
        text = output.read()
    assert status is not None, f"{command} was not over after {timeout_s} s:\n{text}"
    if ok:
        assert status == 0, f"{command} ended with {status}:\n{text}"
    return Finished(status, text)


def _kill_family(family: str, how: signal.Signals = signal.SIGKILL) -> None:
    """Kill every process that has `family` in its environment: launchers give ranks groups and
    sessions of their own.
    """
    mark = family.encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), how)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue


def _beside_python(name: str) -> str:
    """The tool that was installed with this interpreter."""
    path = Path(sys.executable).parent / name
    assert path.exists(), f"{path} is missing: install the dev extra"
    return str(path)


def free_rendezvous() -> dict[str, str]:
    """Address and free port of a new torch.distributed world."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}


def _start_bare(size: int, command: Sequence[str]) -> int:
    """Run `command` `size` times, each with its RANK; the first status that is not 0."""
    children = [
        subprocess.Popen(command, env={**os.environ, "RANK": str(r), "WORLD_SIZE": str(size)})
        for r in range(size)
    ]
    return next((code for code in [child.wait() for child in children] if code != 0), 0)


if __name__ == "__main__":
    sys.exit(_start_bare(int(sys.argv[1]), sys.argv[2:]))
