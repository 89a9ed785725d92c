"""Whether MPI may be used in this process, and the life of MPI: from MPI_Init to MPI_Finalize.

Guarantees
----------
- mpi4py.MPI is imported only on evidence that an MPI launcher started this process, and never
  under torchelastic: elsewhere MPI_Init may abort or hang.
- An MPI that was initialised before us is never finalized by us; one that we initialised is, at
  exit, unless it broke or this is a forked child.
- What broke once is out of use in this process for good.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from megatron_uring.errors import UnsupportedError

if TYPE_CHECKING:
    from mpi4py import MPI

_TORCHELASTIC = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
# Not every OMPI_*, PMIX_* or PMI_*: OMPI_MCA_* and the like are settings that images bring along.
_LAUNCHED = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMIX_NAMESPACE")
_LAUNCHED_DOUBTFUL = ("PMI_RANK", "PMI_SIZE", "PMI_ID", "PMI_FD", "PMI_JOBID")
WORLD_OF_ONE = "a world of one (launched without PMIx: try srun --mpi=pmix, or mpirun)"
_PROBE_TIMEOUT_S = 30.0
_PROBE = """
import mpi4py
mpi4py.rc.thread_level, mpi4py.rc.recv_mprobe = "funneled", False
from mpi4py import MPI
print("size", MPI.COMM_WORLD.Get_size())
"""

_BROKEN: list[str] = []
"""Why MPI must not be called again in this process, whatever the generation; empty if it may."""


# What launchers say of the ranks on this node: torchrun, Open MPI, MPICH and its kin, Slurm.
_LOCAL_RANKS = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)


def local_ranks() -> int:
    """Ranks on this node as the launcher says, without asking any of them; 1 where it does not."""
    counts = [os.environ.get(name, "") for name in _LOCAL_RANKS]
    return max([1, *(int(count) for count in counts if count.isdecimal())])


def broken() -> str | None:
    """Why MPI is out of use in this process for good, or None."""
    return _BROKEN[0] if _BROKEN else None


def mark_broken(reason: str) -> None:
    """From now on no MPI in this process, not even at exit."""
    _BROKEN.append(reason)


def load() -> Any:
    """Import mpi4py.MPI without MPI_Init; raises `UnsupportedError` with the reason.

    MPI_Init waits for all ranks, so first all must know that all can call it.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        mpi4py.rc.thread_level = "funneled"
        mpi4py.rc.recv_mprobe = False
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        raise UnsupportedError("use MPI", cause=f"{type(error).__name__}: {error}") from error
    if MPI.Is_finalized():
        raise UnsupportedError("use MPI", cause="it is already finalized")
    return MPI


def initialise() -> MPI.Intracomm:
    """Return COMM_WORLD, initialised by us if nobody did; collective; `UnsupportedError` if not."""
    mpi = load()
    try:
        if not mpi.Is_initialized():
            mpi.Init_thread(mpi.THREAD_FUNNELED)
            atexit.register(_finalize, os.getpid())
    except mpi.Exception as error:
        raise UnsupportedError("use MPI", cause=f"MPI_Init: {error}") from error
    world: MPI.Intracomm = mpi.COMM_WORLD
    return world


def is_initialised() -> bool:
    """Whether somebody else imported and initialised MPI in this process; imports nothing."""
    module: Any = sys.modules.get("mpi4py.MPI")
    return module is not None and module.Is_initialized() and not module.Is_finalized()


def speaks_pmi() -> bool:
    """Whether the MPI library is one that PMI_* variables are meant for (MPICH's relatives)."""
    try:
        version = load().Get_library_version()
    except UnsupportedError:
        return False
    return any(name in version for name in ("MPICH", "Intel", "MVAPICH", "CRAY"))


def _finalize(process: int) -> None:
    """Finalize the MPI that we initialised, unless it is broken or this is a forked child."""
    from mpi4py import MPI

    if not _BROKEN and os.getpid() == process and not MPI.Is_finalized():
        MPI.Finalize()


def mpi_refusal() -> str | None:
    """Why this process must not even import mpi4py.MPI, or None; looks at this process alone."""
    if (reason := broken()) is not None:
        return f"MPI is broken: {reason}"
    for name in _TORCHELASTIC:
        if name in os.environ:
            return f"torchelastic started this process ({name})"
    if any(name in os.environ for name in _LAUNCHED) or is_initialised():
        return None
    doubtful = [name for name in _LAUNCHED_DOUBTFUL if name in os.environ]
    if not doubtful:
        return "no PMIX_*, PMI_* or OMPI_* variables of an MPI launcher"
    return None if speaks_pmi() else _probe(doubtful[0])


def _probe(evidence: str) -> str | None:
    """Why MPI_Init fails in a child, or makes a world of one; None if it works."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"only {evidence} speaks for MPI, and MPI_Init hangs in a child process"
    if child.returncode != 0 or "size" not in child.stdout:
        last = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        return f"only {evidence} speaks for MPI, and MPI_Init fails in a child process: {last}"
    if child.stdout.split()[-1] == "1" and os.environ.get("PMI_SIZE") != "1":
        return f"only {evidence} speaks for MPI, and MPI_Init makes {WORLD_OF_ONE}"
    return None


def launched_size() -> int:
    """How many ranks the launcher says it started; 1 if it says nothing."""
    names = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]
    if any(name in os.environ for name in _TORCHELASTIC):
        names = ["WORLD_SIZE"]
    sizes = [os.environ[name] for name in names if os.environ.get(name, "").isdigit()]
    return max([1, *map(int, sizes)])
