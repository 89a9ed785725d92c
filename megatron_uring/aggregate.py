"""Aggregation: which ranks share a subfile, which of them owns it, and how their rows reach it and
rank 0.

Guarantees
----------
- The same on every rank, computed from the topology that all ranks agreed on (an allgather when the
  communicator was made); no rank is in two groups, no group spans two nodes, every group has its
  lowest rank as aggregator.
- Subfile numbers are the group numbers: dense, in the order of the aggregators' ranks.
- Rows travel member -> aggregator -> rank 0: no rank receives more messages than its group or the
  groups have.
- Right for every shape: unequal ranks per node, more aggregators than ranks, ranks placed
  round-robin.
"""

from __future__ import annotations

import numpy as np

from megatron_uring.columns import Int32Array
from megatron_uring.comm import Communicator
from megatron_uring.tables import Groups

# Where one file for a node's ranks is known to cost nothing. Elsewhere `auto` stays with a subfile
# for each rank, which no file system serialises.
_SHARED_WELL = {
    "lustre": "lustre stripes one file over many servers",
    "gpfs": "gpfs handles few large files better than many",
}


def elect(
    node_of_rank: Int32Array,
    *,
    aggregation: str,
    aggregators_per_node: int,
    file_system: str,
    probed: str = "auto",
) -> Groups:
    """Elect aggregators on every node.

    Parameters
    ----------
    node_of_rank : int32 [size]
        Node number of each rank.
    aggregation
        ``"rank"``, ``"shared"`` or ``"auto"``.
    aggregators_per_node
        Subfiles for each node in shared mode; a node with fewer ranks gets one for each of them.
    file_system
        Type name of the file system, for ``"auto"``.
    probed
        What a probe found to be clearly faster, for ``"auto"``; ``"auto"`` if it found nothing.
    """
    mode, reason = _choose(aggregation, file_system, probed)
    size = len(node_of_rank)
    if mode == "rank":
        every = np.arange(size, dtype=np.int32)
        return Groups(mode, reason, every, every)
    leader = np.empty(size, np.int64)
    for node in np.unique(node_of_rank):
        ranks = np.flatnonzero(node_of_rank == node)
        for part in np.array_split(ranks, min(aggregators_per_node, len(ranks))):
            leader[part] = part[0]
    aggregator, group_of_rank = np.unique(leader, return_inverse=True)
    return Groups(mode, reason, group_of_rank.astype(np.int32), aggregator.astype(np.int32))


def _choose(aggregation: str, file_system: str, probed: str) -> tuple[str, str]:
    if aggregation != "auto":
        return aggregation, "asked for"
    if probed != "auto":
        return probed, f"auto, a probe found it to be faster on {file_system}"
    if file_system in _SHARED_WELL:
        return "shared", _SHARED_WELL[file_system]
    return "rank", f"auto, a file for each rank on {file_system}"


def gather(communicator: Communicator, rows: bytes | None) -> list[bytes]:
    """Rows of every rank that has some, in order of rank, on rank 0 of `communicator`; an empty
    list elsewhere.

    Called once with the group (every member has rows) and once with all ranks (only aggregators
    have).
    """
    parts = communicator.gather(rows or b"")
    return [part.tobytes() for part in parts or [] if len(part)]
