"""Programs: which communicator is chosen, and what must not be imported on the way."""

from __future__ import annotations

import atexit
import io
import logging
import os
import sys

import numpy as np
from world import main, raises, say, start_torch

from megatron_uring import comm
from megatron_uring.errors import UnsupportedError


def mpi_is_imported() -> bool:
    """Whether the module that calls MPI_Init is there."""
    return "mpi4py.MPI" in sys.modules


def usable(communicator: comm.Communicator, kind: str, size: int) -> None:
    """It is of this kind, and carries numbers."""
    assert (communicator.kind, communicator.size) == (kind, size), communicator.reason
    ones = communicator.allreduce(np.ones(1, np.int64), "sum")
    assert ones.tolist() == [size]
    communicator.agree("used")


def log_of_choice() -> io.StringIO:
    """What the package logs from now on."""
    text = io.StringIO()
    logging.getLogger("megatron_uring").addHandler(logging.StreamHandler(text))
    return text


def under_mpirun() -> None:
    """All that keeps two ranks under mpirun from MPI, one after the other, and then MPI."""
    with raises(UnsupportedError, "torch.distributed is not initialised"):
        comm.connect(20.0, "gloo")
    with raises(UnsupportedError, "'nccl'"):
        comm.connect(20.0, "nccl")
    start_torch()
    log = log_of_choice()
    torchelastic()
    one_rank_without_evidence()
    asked_for = comm.connect(20.0, "gloo")
    usable(asked_for, "gloo", 2)
    assert "asked for" in asked_for.reason
    with raises(UnsupportedError, "one kind", "gloo, mpi"):
        comm.connect(20.0, "mpi" if os.environ["RANK"] == "0" else "gloo")
    assert not mpi_is_imported()
    assert not log.getvalue(), log.getvalue()
    one_rank_without_mpi4py()
    assert log.getvalue().count("gloo is used") == (1 if os.environ["RANK"] == "0" else 0)
    usable(comm.connect(20.0, "mpi"), "mpi", 2)
    generations("mpi")


def torchelastic() -> None:
    """Torchelastic started the ranks: MPI is not even imported."""
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    chosen = comm.connect(20.0)
    usable(chosen, "gloo", 2)
    assert "torchelastic" in chosen.reason
    with raises(UnsupportedError, "torchelastic"):
        comm.connect(20.0, "mpi")
    del os.environ["TORCHELASTIC_RUN_ID"]


def one_rank_without_evidence() -> None:
    """Rank 1 was not started by MPI as far as it can see: nobody uses MPI."""
    hidden = {}
    if os.environ["RANK"] == "1":
        hidden = {k: v for k, v in os.environ.items() if k.startswith(("OMPI_", "PMIX_"))}
    for name in hidden:
        del os.environ[name]
    chosen = comm.connect(20.0)
    usable(chosen, "gloo", 2)
    assert "rank 1: no PMIX_*" in chosen.reason, chosen.reason
    os.environ.update(hidden)


def one_rank_without_mpi4py() -> None:
    """mpi4py is missing on rank 1: all use gloo."""
    if os.environ["RANK"] == "1":
        sys.modules["mpi4py"] = None  # type: ignore[assignment]
    chosen = comm.connect(20.0)
    usable(chosen, "gloo", 2)
    assert "rank 1: use MPI" in chosen.reason, chosen.reason
    assert "mpi4py" in chosen.reason
    if os.environ["RANK"] == "1":
        del sys.modules["mpi4py"]
    else:
        from mpi4py import MPI

        assert not MPI.Is_initialized(), "MPI_Init would wait for rank 1 for ever"


def two_torch_worlds() -> None:
    """One mpirun of 4, two torch.distributed worlds of 2: MPI would mix them up."""
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    ports = os.environ["MASTER_PORT"], os.environ["SECOND_PORT"]
    os.environ.update(RANK=str(rank % 2), WORLD_SIZE="2", MASTER_PORT=ports[rank // 2])
    start_torch()
    chosen = comm.connect(20.0)
    usable(chosen, "gloo", 2)
    assert "COMM_WORLD has 4 ranks, torch.distributed 2" in chosen.reason, chosen.reason


def mpi_of_others() -> None:
    """MPI initialised by the program stays the program's: we do not finalize it."""
    if os.environ["WHOSE"] == "theirs":
        from mpi4py import MPI

        assert MPI.Is_initialized()
    atexit.register(say_whether_finalized)  # runs after whatever `connect` registers
    usable(comm.connect(20.0), "mpi", 2)


def say_whether_finalized() -> None:
    """Printed at exit, before mpi4py's own finalization."""
    from mpi4py import MPI

    say(f"finalized {MPI.Is_finalized()}")


def on_gloo() -> None:
    """Two bare processes: the store stays small, and the job is restarted."""
    start_torch()
    store_does_not_grow()
    generations("gloo")


def generations(kind: str) -> None:
    """`current` keeps what it has until torch.distributed is started anew; then it is gloo."""
    import torch.distributed

    first = comm.current(20.0)
    usable(first, kind, 2)
    assert comm.current(15.0) is first
    assert first.timeout_s == 15.0
    torch.distributed.destroy_process_group()
    os.environ["MASTER_PORT"] = os.environ["SECOND_PORT"]
    start_torch()
    second = comm.current(20.0)
    assert second is not first
    usable(second, "gloo", 2)
    assert comm.current(20.0) is second
    for turn in range(2):  # and another communicator on the same store
        usable(comm.connect(20.0, "gloo"), "gloo", 2)
        second.agree(f"turn {turn}")
    torch.distributed.destroy_process_group()


def store_does_not_grow() -> None:
    """A hundred rounds leave no keys behind."""
    import torch.distributed

    chosen = comm.connect(20.0, "gloo")
    store = torch.distributed.distributed_c10d._get_default_store()
    chosen.agree("settle")
    chosen.report_progress(-1)
    chosen.barrier()
    before = store.num_keys()
    for turn in range(100):
        chosen.agree(f"turn {turn}")
        chosen.report_progress(turn)
    chosen.barrier()  # over gloo, not the store; at most the last round is still there
    assert store.num_keys() <= before + 5, (before, store.num_keys())


def worlds_of_one() -> None:
    """Each process is told of MPI but MPI_Init finds no peers: gloo, said once, on rank 0."""
    start_torch()
    log = log_of_choice()
    chosen = comm.connect(20.0)
    usable(chosen, "gloo", 2)
    assert "a world of one" in chosen.reason, chosen.reason
    assert log.getvalue().count("srun --mpi=pmix") == (1 if chosen.rank == 0 else 0)
    if "PMI_RANK" in os.environ:
        from mpi4py import MPI

        assert not MPI.Is_initialized(), "MPI_Init belongs into the child"


def worlds_of_one_without_torch() -> None:
    """Two ranks that were launched together and cannot find each other must not go on alone."""
    with raises(UnsupportedError, "2 ranks that cannot find each other"):
        comm.connect(20.0)


def alone() -> None:
    """No launcher and no torch.distributed: one process, and neither torch nor MPI is imported."""
    chosen = comm.current(20.0)
    usable(chosen, "single", 1)
    assert not mpi_is_imported()
    with raises(UnsupportedError, "no PMIX_*"):
        comm.connect(20.0, "mpi")


if __name__ == "__main__":
    main(
        under_mpirun,
        two_torch_worlds,
        mpi_of_others,
        on_gloo,
        worlds_of_one,
        worlds_of_one_without_torch,
        alone,
    )
