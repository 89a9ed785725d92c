"""Program for several ranks: rank 0 raises in Megatron's validation, before our save begins.

Megatron validates on rank 0 alone. The other ranks are in our save by then, and must get out of
it. ``$SAVED_BEFORE``: whether there has been a save, so that the communicator is there.
"""

from __future__ import annotations

import os
import sys
import time
import traceback

import torch
from checking import FOLDER, folder, rank, size, start
from megatron.core import dist_checkpointing as dc
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException

import megatron_uring
from megatron_uring.errors import CommunicationError

TIMEOUT_S = float(os.environ["MEGATRON_URING_TIMEOUT_S"])
LATE_S = 6.0


def lose_rank_0() -> None:
    path = folder("lost")
    good = {"a": ShardedTensor.from_rank_offsets("a", torch.ones(3), (0, rank(), size()))}
    if os.environ["SAVED_BEFORE"] == "1":
        dc.save(good, str(path))
        found = megatron_uring.status()["last_save"]["communicator"]
        assert found.startswith(os.environ["EXPECTED_KIND"]), found
    bad = {"a": ShardedTensor.from_rank_offsets("a", torch.zeros(3))}  # all say: mine
    began = time.monotonic()
    try:
        dc.save(bad, str(path))
    except CommunicationError as error:
        took_s = time.monotonic() - began
        assert rank() != 0 and isinstance(error, CheckpointingException)
        assert "rank 0" in str(error), error
        assert took_s < TIMEOUT_S + LATE_S, f"took {took_s:.1f} s"
        _expect_broken(bad, path)
    except CheckpointingException as error:
        assert rank() == 0 and "a" in str(error), error
    else:
        raise AssertionError("nothing was raised")
    if os.environ["SAVED_BEFORE"] == "1":  # loading needs no other rank
        request = {"a": ShardedTensor.from_rank_offsets("a", torch.zeros(3), (0, rank(), size()))}
        request["a"].replica_id = rank()
        loaded = dc.load(request, str(path), validate_access_integrity=False)
        assert loaded["a"].eq(1).all()


def _expect_broken(state: dict, path: object) -> None:
    began = time.monotonic()
    try:
        dc.save(state, str(path), validate_access_integrity=False)
    except CommunicationError:
        if os.environ["SAVED_BEFORE"] == "1":
            assert time.monotonic() - began < 1.0
    else:
        raise AssertionError("a save without rank 0 went through")


def leave(status: int) -> None:
    """End once all have spoken: mpirun ends everything when the first is gone."""
    (FOLDER / f"over.{rank()}").touch()
    until = time.monotonic() + 3 * (TIMEOUT_S + LATE_S)
    while time.monotonic() < until and not status:
        if all((FOLDER / f"over.{each}").exists() for each in range(size())):
            break
        time.sleep(0.05)
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    start()
    megatron_uring.enable()
    try:
        lose_rank_0()
    except BaseException:
        traceback.print_exc()
        leave(1)
    sys.stdout.write("passed lost_rank\n")
    leave(0)
