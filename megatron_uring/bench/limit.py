"""The limit: what fio gets out of the same directory with as many processes as there are ranks.

Guarantees
----------
- The time is that of the slowest fio job as fio reports it, its final fsync included; starting fio
  and laying out its files is not in it.
- io_uring is used, libaio where fio cannot have io_uring.
- fio moves whole requests: where that is not the size that was asked for, its time is scaled to it.
- Without fio there is one variant, which says so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_uring.bench.measure import LIMIT, UnavailableError, Variant
from megatron_uring.comm import Communicator
from megatron_uring.config import MEBIBYTE

_DEPTH = {4: 8, 16: 8, 64: 4}  # requests in flight, by their size in MiB
_ENGINES = ("io_uring", "libaio")


@dataclass
class Fio:
    """fio in one folder, started by rank 0 for all.

    Attributes
    ----------
    folder
        Of the files; made by the caller.
    bytes_per_rank
        What each process writes or reads.
    """

    world: Communicator
    folder: str
    bytes_per_rank: int
    _engines: list[str] = field(default_factory=lambda: list(_ENGINES))

    def variants(self, mode: str, prepare: Callable[[bool], None]) -> list[Variant]:
        """Direct and buffered with each request size; `mode` is ``"write"`` or ``"read"``, and
        `prepare` is told whether the page cache will be used.
        """
        if self.world.broadcast(b"1" if shutil.which("fio") else b"0") == b"0":
            return [Variant("fio", LIMIT, _not_installed, lambda: prepare(False))]
        return [
            Variant(
                f"fio {mebibytes} MiB {'direct' if direct else 'buffered'}",
                LIMIT,
                lambda mebibytes=mebibytes, direct=direct: self._run(  # type: ignore[misc]
                    mode, mebibytes, direct
                ),
                lambda direct=direct: prepare(not direct),  # type: ignore[misc]
            )
            for direct in (True, False)
            for mebibytes in _DEPTH
        ]

    def lay_out(self) -> None:
        """Write the files that are to be read; on rank 0, nothing elsewhere."""
        if self.world.rank == 0 and shutil.which("fio"):
            self._run("write", 64, True)

    def _run(self, mode: str, mebibytes: int, direct: bool) -> float:
        if self.world.rank != 0:
            return 0.0
        size = max(round(self.bytes_per_rank / (mebibytes * MEBIBYTE)), 1) * mebibytes
        if mode == "read":
            size = min(size, self._laid_out_mebibytes() // mebibytes * mebibytes)
        while True:
            done = subprocess.run(
                self._command(mode, mebibytes, size, direct),
                check=False,
                capture_output=True,
                text=True,
            )
            if done.returncode == 0:
                return slowest_job_s(json.loads(done.stdout), mode, self.bytes_per_rank)
            if len(self._engines) == 1:
                said = (done.stderr or done.stdout).strip().splitlines()
                raise UnavailableError(f"fio: {said[0] if said else done.returncode}")
            del self._engines[0]

    def _laid_out_mebibytes(self) -> int:
        path = os.path.join(self.folder, "limit.0.0")
        return os.path.getsize(path) // MEBIBYTE

    def _command(self, mode: str, mebibytes: int, size_mebibytes: int, direct: bool) -> list[str]:
        return [
            "fio",
            "--name=limit",
            f"--directory={self.folder}",
            f"--numjobs={self.world.size}",
            f"--size={size_mebibytes}M",
            f"--bs={mebibytes}M",
            f"--iodepth={_DEPTH[mebibytes]}",
            f"--direct={int(direct)}",
            f"--ioengine={self._engines[0]}",
            f"--rw={mode}",
            "--fallocate=native",
            f"--end_fsync={int(mode == 'write')}",
            "--output-format=json",
        ]


def slowest_job_s(report: dict[str, Any], mode: str, bytes_per_rank: int) -> float:
    """Seconds of the slowest job of fio's JSON report, scaled to `bytes_per_rank`."""
    jobs = [job[mode] for job in report["jobs"]]
    moved = min(job["io_bytes"] for job in jobs)
    if not jobs or not moved:
        raise UnavailableError("fio moved no bytes")
    slowest_ms = max(*(float(job["runtime"]) for job in jobs), 1.0)
    return slowest_ms / 1e3 * bytes_per_rank / float(moved)


def _not_installed() -> float:
    raise UnavailableError("fio not installed")
