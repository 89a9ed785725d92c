"""The communicator over torch.distributed: its store for small messages, gloo of our own for data.

Guarantees
----------
- The default process group of the job (NCCL or gloo) is never used, only its store.
- No full mesh of the world: one gloo group per node and one of the node leaders (the first rank of
  each node); world collectives go node, leaders, node.
- Every wait is polled and bounded; after a timeout the groups are leaked, as their destructors
  would wait for the dead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_uring.comm.communicator import Communicator, Operation
from megatron_uring.comm.parts import (
    Bytes,
    Columns,
    Family,
    Waiter,
    as_bytes,
    as_columns,
    checked_color,
    checked_root_data,
    chunks,
    judge,
    leak,
    own_place,
    topology,
)
from megatron_uring.comm.store import StoreChannel, torch_distributed
from megatron_uring.errors import CommunicationError

_Group = Any
"""torch's ProcessGroupGloo, or None for a group of one."""
_Work = Any
_Hop = tuple[_Group, list[int], int, dict[int, list[int]]]


class GlooCommunicator(Communicator):
    """Ranks that share a store and a `StoreChannel` on it."""

    kind = "gloo"

    def __init__(self, channel: StoreChannel, family: Family, reason: str) -> None:
        super().__init__(channel.rank, channel.size, family, reason)
        self._channel = channel
        self._splits = 0
        self._node: _Group = None
        self._leaders: _Group = None

    @classmethod
    def over(cls, channel: StoreChannel, family: Family, reason: str) -> GlooCommunicator:
        """Make a communicator of all ranks of `channel`; collective."""
        made = cls(channel, family, reason)
        places = channel.exchange(own_place(), topology)
        made._obey(places, "find out which ranks share a node", None)
        made._adopt(places)
        nodes = len(made.hosts)
        made.reason = f"{reason}, {made.size} ranks on {nodes} node{'s' if nodes > 1 else ''}"
        made._build_groups()
        return made

    def report_progress(self, bytes_done: int) -> None:
        """See `Communicator.report_progress`."""
        if self._family.poisoned is None and not self._closed:
            with suppress(CommunicationError):  # the next agree raises it
                self._channel.report_progress(bytes_done)

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        """See `Communicator.broadcast`."""
        self._check("broadcast")
        payload = as_bytes(checked_root_data(data) if self.rank == root else b"")
        length = np.array([payload.size], np.int64)
        self._spread("broadcast", length, root)
        buffer = payload.copy() if self.rank == root else np.empty(int(length[0]), np.uint8)
        for chunk in chunks(buffer):
            self._spread("broadcast", chunk, root)
        return buffer.tobytes()

    def gather(self, data: NDArray[Any] | bytes, root: int = 0) -> list[Bytes] | None:
        """See `Communicator.gather`."""
        payload = as_bytes(data).copy()  # torch warns of read-only memory
        sizes = self.allgather(np.array([payload.size], np.int64))[:, 0]
        parts = {self.rank: payload}
        for group, members, receiver, deliveries in self._hops(root):
            self._hop(group, members, receiver, deliveries, parts, sizes)
        return [parts[rank] for rank in range(self.size)] if self.rank == root else None

    def allgather(self, values: Columns) -> Columns:
        """See `Communicator.allgather`."""
        self._check("allgather")
        columns = as_columns(values)
        width = columns.size
        mine = self._node_members
        table = np.zeros((self.size, width), np.int64)
        rows = self._allgather_in(self._node, columns, len(mine))
        if self.rank == mine[0]:
            # The leaders' messages must be equally long, so nodes with fewer ranks fill up.
            longest = max(len(members) for members in self._members_of_node)
            filled = np.zeros((longest, width), np.int64)
            filled[: len(mine)] = rows
            nodes = self._allgather_in(self._leaders, filled.reshape(-1), len(self.hosts))
            for node, members in enumerate(self._members_of_node):
                table[members] = nodes[node].reshape(longest, width)[: len(members)]
        self._broadcast_in("allgather", self._node, table.reshape(-1), 0)
        return table

    def allreduce(self, values: Columns, operation: Operation) -> Columns:
        """See `Communicator.allreduce`."""
        return self.start_allreduce(values, operation)()

    def start_allreduce(self, values: Columns, operation: Operation) -> Callable[[], Columns]:
        """See `Communicator.start_allreduce`; what lies between nodes is done at the end."""
        self._check("allreduce")
        result = np.array(as_columns(values))
        finish_node = self._start_reduce_in(self._node, result, operation)

        def finish() -> Columns:
            self._check("allreduce")
            finish_node()
            if self.rank == self._node_members[0]:
                self._start_reduce_in(self._leaders, result, operation)()
            self._broadcast_in("allreduce", self._node, result, 0)
            return np.array(result)

        return finish

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        self.allreduce(np.zeros(1, np.int64), "max")

    def split(self, color: int) -> Communicator:
        """See `Communicator.split`."""
        colors = self.allgather(np.array([checked_color(color)], np.int64))[:, 0]
        members = [rank for rank in range(self.size) if colors[rank] == color]
        self._splits += 1
        channel = StoreChannel(
            self._channel.caller,
            f"{self._channel.prefix}/split{self._splits}/{color}",
            members.index(self.rank),
            len(members),
            self._family,
        )
        made = GlooCommunicator(channel, self._family, self.reason)
        made._adopt_part(self, members)
        made._build_groups()
        return made

    def close(self, abort: bool = False) -> None:
        """See `Communicator.close`."""
        if self._closed:
            return
        self._closed = True
        if abort or self._family.poisoned is not None:
            leak(self._node, self._leaders)
        self._node = self._leaders = None

    def _check(self, operation: str) -> None:
        super()._check(operation)
        self.require_own_thread(operation)

    def _exchange(self, step: str, arrival: bytes) -> dict[str, Any]:
        try:
            return self._channel.exchange(arrival, judge)
        except CommunicationError as error:
            raise self._poison(
                CommunicationError(
                    f"agree on {step!r}",
                    found="no store of torch.distributed; its server is "
                    f"{self._name([0])} unless torchelastic runs it",
                    cause=error,
                )
            ) from error

    def _poison(self, error: CommunicationError, *buffers: object) -> CommunicationError:
        return super()._poison(error, self._node, self._leaders, self._channel.store, *buffers)

    @property
    def _members_of_node(self) -> list[list[int]]:
        return [
            np.flatnonzero(self.node_of_rank == node).tolist() for node in range(len(self.hosts))
        ]

    @property
    def _node_members(self) -> list[int]:
        return self._members_of_node[self.node_of_rank[self.rank]]

    def _build_groups(self) -> None:
        """Make the gloo groups of this rank; collective."""
        # All ranks are known to be here, so that gloo's own blocking connect does not wait long.
        node = int(self.node_of_rank[self.rank])
        leaders = [members[0] for members in self._members_of_node]
        self._node = self._group(f"node{node}", self._node_members)
        if self.rank in leaders:
            self._leaders = self._group("leaders", leaders)

    def _group(self, name: str, members: list[int]) -> _Group:
        """Make a gloo group of `members`, or None for one rank alone."""
        if len(members) == 1:
            return None
        distributed = torch_distributed()
        try:
            return distributed.ProcessGroupGloo(
                distributed.PrefixStore(name, self._channel.store),
                members.index(self.rank),
                len(members),
                timedelta(seconds=self.timeout_s + self._family.grace_s),
            )
        except RuntimeError as error:
            failure = CommunicationError(
                "connect by gloo", found=f"no connection among {self._name(members)}", cause=error
            )
            raise self._poison(failure) from error

    def _hops(self, root: int) -> Iterator[_Hop]:
        """Make the hops of a gather that this rank takes part in, in order."""
        nodes = self._members_of_node
        near = nodes[self.node_of_rank[root]]
        mine = self._node_members
        receiver = root if root in mine else mine[0]
        yield self._node, mine, receiver, {rank: [rank] for rank in mine if rank != receiver}
        leaders = [members[0] for members in nodes]
        if self.rank in leaders:
            far = {members[0]: members for members in nodes if members is not near}
            yield self._leaders, leaders, near[0], far
        if near[0] != root and self.rank in (near[0], root):
            others = [rank for rank in range(self.size) if rank not in near]
            yield self._node, mine, root, {near[0]: others}

    def _hop(
        self,
        group: _Group,
        members: list[int],
        receiver: int,
        deliveries: dict[int, list[int]],
        parts: dict[int, Bytes],
        sizes: Columns,
    ) -> None:
        """Move `parts` to `receiver`; `deliveries` are the ranks whose parts a sender brings."""
        if group is None:
            return
        self._check("gather")
        receives = self.rank == receiver
        works, peers = [], []
        for sender, ranks in deliveries.items():
            if not receives and sender != self.rank:
                continue
            if receives:
                parts.update({rank: np.empty(int(sizes[rank]), np.uint8) for rank in ranks})
            peer = sender if receives else receiver
            start = group.recv if receives else group.send
            pieces = [piece for rank in ranks for piece in chunks(parts[rank])]
            for tag, piece in enumerate(pieces):
                begin = partial(start, [tensor_of(piece)], members.index(peer), tag)
                works.append(self._start("gather", begin))
                peers.append(peer)
        self._finish_transfers(works, peers, list(parts.values()))

    def _finish_transfers(self, works: list[_Work], peers: list[int], buffers: list[Bytes]) -> None:
        """Wait for sends and receives, which gloo cannot poll: a thread waits, we watch it."""
        finished: list[int] = []
        failed: list[BaseException] = []

        def wait() -> None:
            try:
                for position, work in enumerate(works):
                    work.wait()
                    finished.append(position)
            except RuntimeError as error:
                failed.append(error)

        threading.Thread(target=wait, name="megatron_uring gather", daemon=True).start()
        waiter, seen = Waiter(self.timeout_s), 0
        while len(finished) < len(works):
            if len(finished) > seen:
                waiter.progressed()
                seen = len(finished)
            if failed or waiter.expired():
                error = self._timed_out("gather", [peers[len(finished)]])
                if failed:
                    error = CommunicationError(
                        "gather", found=self._name([peers[len(finished)]]), cause=failed[0]
                    )
                raise self._poison(error, works, buffers)
            waiter.pause()

    def _spread(self, operation: str, buffer: NDArray[Any], root: int) -> None:
        """Broadcast `buffer` in place: node of `root`, leaders, other nodes."""
        near = self._members_of_node[self.node_of_rank[root]]
        mine = self._node_members
        if root in mine:
            self._broadcast_in(operation, self._node, buffer, mine.index(root))
        if self.rank == mine[0]:
            self._broadcast_in(operation, self._leaders, buffer, int(self.node_of_rank[root]))
        if near != mine:
            self._broadcast_in(operation, self._node, buffer, 0)

    def _broadcast_in(self, operation: str, group: _Group, buffer: NDArray[Any], root: int) -> None:
        if group is None or buffer.size == 0:
            return
        options = torch_distributed().BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        tensors = [tensor_of(buffer)]
        self._run(operation, lambda: group.broadcast(tensors, options), tensors)

    def _start_reduce_in(
        self, group: _Group, buffer: Columns, operation: Operation
    ) -> Callable[[], None]:
        if group is None or buffer.size == 0:
            return lambda: None
        distributed = torch_distributed()
        options = distributed.AllreduceOptions()
        options.reduceOp = getattr(distributed.ReduceOp, operation.upper())
        tensors = [tensor_of(buffer)]
        work = self._start("allreduce", lambda: group.allreduce(tensors, options))
        return lambda: self._complete("allreduce", work, tensors)

    def _allgather_in(self, group: _Group, columns: Columns, size: int) -> Columns:
        if group is None or columns.size == 0:
            return np.repeat(columns[None, :], size, axis=0)
        own = tensor_of(columns.copy())
        rows = [tensor_of(np.empty_like(columns)) for _ in range(size)]
        self._run("allgather", lambda: group.allgather([rows], [own]), [own, rows])
        return np.stack([row.numpy() for row in rows])

    def _start(self, operation: str, start: Callable[[], _Work]) -> _Work:
        """Start a gloo operation; one that cannot even start breaks the communicator."""
        try:
            return start()
        except RuntimeError as error:
            raise self._poison(CommunicationError(operation, cause=error)) from error

    def _run(self, operation: str, start: Callable[[], _Work], buffers: Sequence[object]) -> None:
        """Start a gloo collective and poll until it is over."""
        self._check(operation)
        self._complete(operation, self._start(operation, start), buffers)

    def _complete(self, operation: str, work: _Work, buffers: Sequence[object]) -> None:
        """Poll until a gloo collective is over."""
        waiter = Waiter(self.timeout_s)
        while not work.is_completed():
            if waiter.expired():
                raise self._poison(self._timed_out(operation, None), work, buffers)
            waiter.pause()
        try:
            work.wait()
        except RuntimeError as error:
            failure = CommunicationError(operation, cause=f"gloo: {error}")
            raise self._poison(failure, work, buffers) from error


def tensor_of(array: NDArray[Any]) -> Any:
    """Return a tensor that shares the memory of `array`."""
    import torch

    return torch.from_numpy(array)
