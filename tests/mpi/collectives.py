"""Program: every collective, with odd sizes, on the communicator that `connect` chooses."""

from __future__ import annotations

import os
import time

import numpy as np
from world import main, raises, say, start_torch, within

from megatron_uring.comm import Communicator, connect
from megatron_uring.comm import parts as comm_parts
from megatron_uring.errors import (
    CommunicationError,
    CorruptionError,
    StateMismatchError,
    StorageError,
)


def all_collectives() -> None:
    """All of it, over MPI alone, over MPI with torch, or over gloo, as the environment says."""
    if os.environ.get("WITH_TORCH", "1") == "1":
        start_torch(reverse=os.environ.get("REVERSE") == "1")
    comm = connect(timeout_s=15.0)
    say(f"kind {comm.kind}: rank {comm.rank}: {comm.reason}")
    say(f"nodes {comm.node_of_rank.tolist()} {comm.hosts}")
    assert comm.kind == os.environ["EXPECTED_KIND"], comm.reason
    assert comm.size == int(os.environ["EXPECTED_SIZE"])
    assert comm.poisoned is None
    if "RANK" in os.environ:
        assert comm.rank == int(os.environ["RANK"])
    if comm.kind == "mpi" and os.environ.get("REVERSE") == "1":
        assert comm.rank == comm.size - 1 - int(os.environ["OMPI_COMM_WORLD_RANK"])
    check_messages(comm)
    comm_parts.CHUNK_BYTES = 1000
    check_messages(comm)
    check_numbers(comm)
    check_agree(comm)
    check_splits(comm)
    if os.environ.get("PROGRESS") == "1":
        check_progress(comm)
    comm.close()
    with raises(CommunicationError, "closed"):
        comm.barrier()


def check_messages(comm: Communicator) -> None:
    """Broadcast and gather, from and to every rank, of sizes around the chunk."""
    for root in sorted({0, comm.size - 1}):
        for length in (0, 1, 1000, 2503):
            expected = bytes((7 * i + root) % 256 for i in range(length))
            assert comm.broadcast(expected if comm.rank == root else None, root) == expected
        for base in (0, 1, 1250):
            # Rank 0 sends nothing when base is 0; all the others differ in size.
            lengths = [base * (rank + 1) + 3 * rank for rank in range(comm.size)]
            mine = np.arange(lengths[comm.rank], dtype=np.uint8) + np.uint8(comm.rank)
            parts = comm.gather(mine, root)
            assert (parts is not None) == (comm.rank == root)
            for rank, part in enumerate(parts or []):
                expected_part = np.arange(lengths[rank], dtype=np.uint8) + np.uint8(rank)
                assert part.dtype == np.uint8
                assert np.array_equal(part, expected_part), (root, base, rank)
    strided = np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2]
    for part in comm.gather(strided) or []:
        assert part.tobytes() == strided.tobytes()
    for rank, part in enumerate(comm.gather(b"x" * comm.rank) or []):
        assert part.tobytes() == b"x" * rank


def check_numbers(comm: Communicator) -> None:
    """Allgather, allreduce and barrier."""
    ranks = np.arange(comm.size, dtype=np.int64)
    for width in (0, 1, 3, 300):
        columns = np.arange(width, dtype=np.int64) * 1_000_000_007
        table = comm.allgather(columns - comm.rank)
        assert table.shape == (comm.size, width)
        assert table.dtype == np.int64
        assert np.array_equal(table, columns[None, :] - ranks[:, None])
        values = columns - comm.rank
        assert np.array_equal(comm.allreduce(values, "min"), columns - (comm.size - 1))
        assert np.array_equal(comm.allreduce(values, "max"), columns)
        assert np.array_equal(comm.allreduce(values, "sum"), columns * comm.size - ranks.sum())
        assert np.array_equal(values, columns - comm.rank), "the argument was changed"
    late = comm.size - 1
    with within(10.0, 0.3 if comm.rank != late else 0.0):
        if comm.rank == late:
            time.sleep(0.4)
        comm.barrier()


def check_agree(comm: Communicator) -> None:
    """Success, one failure, all failing, different steps; and success again after each."""
    last = comm.size - 1
    comm.agree("begin")
    cause = OSError(28, "No space left on device", "/data/x")
    try:
        comm.agree("write", cause if comm.rank == last else None)
    except StorageError as error:
        if comm.rank == last:
            assert error.__cause__ is cause
            assert not str(error).startswith("rank"), error
        else:
            assert str(error).startswith(f"rank {last}: write: /data/x"), error
            assert "No space left" in str(error)
    else:
        raise AssertionError("the error of one rank was lost")
    comm.agree("after one failure")
    own = CorruptionError(f"read {comm.rank}") if comm.rank > 0 else None
    if comm.size > 1:
        with raises(CorruptionError, f"read {comm.rank}" if own else "rank 1: read 1"):
            comm.agree("read", own)
    mismatch = StateMismatchError("é" * 6000)
    with raises(StateMismatchError, "éé"):
        comm.agree("everybody fails", mismatch)
    comm.agree("after all failed")
    if comm.size > 1:
        with raises(CommunicationError, "rank 0 in 'left'", "rank 1 in 'right'"):
            comm.agree("left" if comm.rank == 0 else "right")
    comm.agree("after different steps")
    for turn in range(50):
        comm.agree(f"turn {turn}")
    assert comm.poisoned is None


def check_splits(comm: Communicator) -> None:
    """Groups by parity and by node, and a split of a split."""
    part = comm.split(comm.rank % 2)
    members = list(range(comm.rank % 2, comm.size, 2))
    assert (part.rank, part.size) == (members.index(comm.rank), len(members))
    assert part.allgather(np.array([comm.rank], np.int64))[:, 0].tolist() == members
    nodes = comm.node_of_rank[members].tolist()
    seen = list(dict.fromkeys(nodes))
    assert part.node_of_rank.tolist() == [seen.index(node) for node in nodes]
    assert part.hosts == [comm.hosts[node] for node in seen]
    node = comm.split(int(comm.node_of_rank[comm.rank]))
    assert node.hosts == [comm.hosts[comm.node_of_rank[comm.rank]]]
    for each in (part, node, part.split(0)):
        check_messages(each)
        check_numbers(each)
        each.agree("in a split")
    part.close()
    comm.agree("after the splits")


def check_progress(comm: Communicator) -> None:
    """A slow rank, first the last and then rank 0, works far longer than the deadline.

    Longer, too, than the deadline and the grace together, so that it matters who tells whom.
    """
    comm.timeout_s = 1.2
    for slow in (comm.size - 1, 0):
        if comm.rank == slow:
            for done in range(64):
                comm.report_progress(done)
                time.sleep(0.05)
        with within(6.0):
            comm.agree(f"wait for slow rank {slow}")
    comm.timeout_s = 15.0


if __name__ == "__main__":
    main(all_collectives)
