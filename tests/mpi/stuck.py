"""Programs: ranks that stop, stand still or die; the others must raise in time and name them."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import numpy as np
from world import main, raises, say, start_torch, within

from megatron_uring.comm import Communicator, connect
from megatron_uring.errors import CommunicationError, StorageError

TIMEOUT_S = 1.5
STOPPED_S = 5.5
VICTIM = int(os.environ.get("VICTIM", "1"))


def stop_myself() -> None:
    """Stand still, as a process in a debugger or on a frozen machine does."""
    me = os.getpid()
    with subprocess.Popen(["sh", "-c", f"sleep {STOPPED_S}; kill -CONT {me}"]):
        os.kill(me, signal.SIGSTOP)


def open_communicator() -> Communicator:
    """The communicator, over torch.distributed as well if the test asks for gloo."""
    if os.environ["EXPECTED_KIND"] == "gloo":
        start_torch()
    comm = connect(timeout_s=30.0)
    assert comm.kind == os.environ["EXPECTED_KIND"], comm.reason
    comm.barrier()
    comm.timeout_s = TIMEOUT_S
    return comm


def expect_poisoned(comm: Communicator, others: list[Communicator]) -> None:
    """Every later call raises at once, on the communicator and on all that share its fate."""
    assert comm.poisoned is not None
    for each in [comm, *others]:
        with within(0.5):
            with raises(CommunicationError, "broken"):
                each.barrier()
            with raises(CommunicationError, "broken"):
                each.gather(b"x")
            with raises(CommunicationError, "broken"):
                each.split(0)
            with raises(CommunicationError, "broken"):
                each.agree("anything")
            each.report_progress(1)
            each.close()


def stopped_before_agree() -> None:
    """A stopped rank is named by all others within the deadline; it learns it when it is back."""
    comm = open_communicator()
    part = comm.split(0)
    comm.agree("begin")
    if comm.rank == VICTIM:
        time.sleep(0.5)  # until the others have the verdict on "begin"
        stop_myself()
        if comm.rank == 0:
            # All had arrived before they gave up, and there was no store to say so: rank 0 learns
            # of it one step later.
            comm.agree("write")
            with raises(CommunicationError, "agree on 'next'", "rank 1 ("):
                comm.agree("next")
        else:
            with raises(CommunicationError, "agree on 'write'"):
                comm.agree("write")
    else:
        own = StorageError("write", cause="disk full") if comm.rank == 2 else None
        with within(STOPPED_S - 0.5, TIMEOUT_S):
            with raises(CommunicationError, "agree on 'write'", f"rank {VICTIM} ("):
                comm.agree("write", own)
    expect_poisoned(comm, [part])
    leave("stopped_before_agree", at_once=comm.rank == VICTIM)


def leave(program: str, at_once: bool) -> None:
    """Say that all went well and end; the others stay until the victim is through.

    mpirun ends the job as soon as one rank leaves without MPI_Finalize: let all speak first.
    """
    say(f"passed {program}")
    time.sleep(0.0 if at_once else STOPPED_S)
    os._exit(0)


def without_progress() -> None:
    """A rank that polls a dead disk, always with the same number of bytes, makes no progress."""
    comm = open_communicator()
    if comm.rank == VICTIM:
        start = time.monotonic()
        while time.monotonic() - start < STOPPED_S:
            comm.report_progress(7)
            time.sleep(0.05)
    else:
        with within(STOPPED_S - 0.5, TIMEOUT_S):
            with raises(CommunicationError, f"rank {VICTIM} ("):
                comm.agree("write")
    leave("without_progress", at_once=comm.rank == VICTIM)


def missing_in_collectives() -> None:
    """A rank that does not come to a gather; then the others find the communicator broken."""
    comm = open_communicator()
    if comm.rank == VICTIM:
        time.sleep(STOPPED_S)
    elif comm.kind == "mpi":
        # Small messages leave at once, so over MPI only the root waits, and knows for whom.
        if comm.rank == 0:
            with within(STOPPED_S - 0.5, TIMEOUT_S):
                with raises(CommunicationError, "gather", f"rank {VICTIM} (", "no progress"):
                    comm.gather(b"some")
            expect_poisoned(comm, [])
    else:
        with within(STOPPED_S - 0.5, TIMEOUT_S):
            with raises(CommunicationError, "allreduce"):
                comm.allreduce(np.zeros(3, np.int64), "sum")
        expect_poisoned(comm, [])
    leave("missing_in_collectives", at_once=comm.rank == VICTIM)


def dead_rank() -> None:
    """A rank that is gone: gloo sees the broken connection, the store the missing arrival."""
    comm = open_communicator()
    part = comm.split(0)
    if comm.rank == VICTIM:
        say("passed dead_rank")
        os._exit(0)
    time.sleep(0.5)
    with within(STOPPED_S - 0.5):
        with raises(CommunicationError):
            part.gather(np.zeros(100, np.int64))
    expect_poisoned(comm, [part])
    # and leave in the ordinary way: no destructor may hang


if __name__ == "__main__":
    main(stopped_before_agree, without_progress, missing_in_collectives, dead_rank)
