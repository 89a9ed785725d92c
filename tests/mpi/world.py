"""What the test programs share: the start of torch.distributed, and checks that all ranks print."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from megatron_uring.errors import CheckpointError


def start_torch(reverse: bool = False) -> None:
    """torch.distributed on gloo; under mpirun with MPI's ranks, in reverse order if asked."""
    import torch.distributed

    mpi_rank = os.environ.get("OMPI_COMM_WORLD_RANK")
    if "RANK" not in os.environ and mpi_rank is not None:
        size = int(os.environ["OMPI_COMM_WORLD_SIZE"])
        rank = size - 1 - int(mpi_rank) if reverse else int(mpi_rank)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=40))


@contextmanager
def raises(kind: type[CheckpointError], *fragments: str) -> Iterator[None]:
    """The block raises exactly `kind`, with every fragment in the message."""
    try:
        yield
    except CheckpointError as error:
        assert type(error) is kind, f"{type(error).__name__}: {error}"
        for fragment in fragments:
            assert fragment in str(error), f"{fragment!r} is not in {error}"
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


@contextmanager
def within(limit_s: float, at_least_s: float = 0.0) -> Iterator[None]:
    """The block takes between `at_least_s` and `limit_s`."""
    start = time.monotonic()
    yield
    took_s = time.monotonic() - start
    assert at_least_s <= took_s <= limit_s, f"took {took_s:.1f} s"


def say(text: str) -> None:
    """One whole line, in one write, so that lines of several ranks do not mix."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(*programs: Callable[[], None]) -> None:
    """Run the program that the command line names, and say that it passed."""
    program = {each.__name__: each for each in programs}[sys.argv[1]]
    program()
    say(f"passed {program.__name__}")
