"""The communicator over MPI: one duplicate of COMM_WORLD, polled from the main thread.

Guarantees
----------
- No wait inside an MPI call that depends on other ranks: everything is non-blocking and polled,
  except `Split`, which is entered only after a bounded collective proved that all ranks come.
- After a timeout no MPI function is called any more, not even at exit.

How `agree` works
-----------------
Each rank sends "arrived" to rank 0 with the number of the exchange; ranks that still work send
"progress" instead. Rank 0 sends "ping" to those who arrived while anybody progresses, and the
verdict when all are there or when nobody progressed for `timeout_s`. If rank 0 itself stands still,
the others give up on it; should it come back and find them all arrived, it goes on to its next
collective, which then fails. (Over the store one verdict binds all; here there is no such place.)
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from megatron_uring.comm import launch as comm_launch
from megatron_uring.comm.communicator import Communicator, Operation
from megatron_uring.comm.parts import (
    Bytes,
    Columns,
    Family,
    ProgressMeter,
    Waiter,
    as_bytes,
    as_columns,
    checked_color,
    checked_root_data,
    chunks,
    decode,
    encode,
    judge,
    leak,
    own_place,
    topology,
    verdict_on_missing,
)
from megatron_uring.errors import CommunicationError

if TYPE_CHECKING:
    from mpi4py import MPI

_TAG_TO_ROOT, _TAG_FROM_ROOT, _TAG_GATHER = 11, 12, 13
_ARRIVED, _PROGRESS, _PING, _VERDICT = 1, 2, 3, 4
_HEADER = struct.Struct("<qq")
_OPERATIONS = {"min": "MIN", "max": "MAX", "sum": "SUM"}


class MpiCommunicator(Communicator):
    """Ranks of an MPI communicator that is ours alone."""

    kind = "mpi"

    def __init__(self, comm: MPI.Intracomm, family: Family, reason: str) -> None:
        from mpi4py import MPI

        super().__init__(comm.Get_rank(), comm.Get_size(), family, reason)
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._mpi = MPI
        self._comm = comm
        self._sequence = 0
        self._meter = ProgressMeter()
        self._sends: list[tuple[MPI.Request, Bytes]] = []
        self._started: dict[int, object] = {}
        self._arrivals: dict[int, bytes] = {}
        self._progressed = False
        self._pinged_at = 0.0

    @classmethod
    def over(cls, world: MPI.Intracomm, key: int, timeout_s: float, reason: str) -> MpiCommunicator:
        """Make a communicator of all ranks of `world` in order of `key`; collective."""
        whole = cls(world, Family(timeout_s), reason)
        whole.barrier()
        duplicate = cast("MPI.Intracomm", world.Split(0, key))
        made = cls(duplicate, whole._family, reason)
        places = made.gather(own_place())
        table = None
        if places is not None:
            table = encode(topology({r: each.tobytes() for r, each in enumerate(places)}))
        made._adopt(decode(made.broadcast(table)))
        nodes = len(made.hosts)
        made.reason = f"{reason}, {made.size} ranks on {nodes} node{'s' if nodes > 1 else ''}"
        return made

    def report_progress(self, bytes_done: int) -> None:
        """See `Communicator.report_progress`."""
        if self._family.poisoned is not None or self._closed:
            return
        self._check("report progress")
        interval_s = self._family.report_interval_s
        news = self._meter.worth_sending(bytes_done, interval_s)
        with suppress(CommunicationError):  # the next agree raises it
            if self.rank == 0:
                self._progressed = self._progressed or news
                if time.monotonic() - self._pinged_at >= interval_s:
                    self._calling("report progress", self._attend)
            elif news and not self._calling("report progress", self._unsent):
                # One message at a time: what rank 0 does not take is not worth a queue.
                self._calling("report progress", partial(self._send, _PROGRESS, b"", 0))

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        """See `Communicator.broadcast`."""
        self._check("broadcast")
        payload = as_bytes(checked_root_data(data) if self.rank == root else b"")
        length = np.array([payload.size], np.int64)
        self._collective("broadcast", self._comm.Ibcast, [length, self._mpi.INT64_T], root)
        buffer = payload.copy() if self.rank == root else np.empty(int(length[0]), np.uint8)
        for chunk in chunks(buffer):
            self._collective("broadcast", self._comm.Ibcast, [chunk, self._mpi.BYTE], root)
        return buffer.tobytes()

    def gather(self, data: NDArray[Any] | bytes, root: int = 0) -> list[Bytes] | None:
        """See `Communicator.gather`."""
        self._check("gather")
        # Point to point and not Gatherv: its displacements are ints too, so more than 2 GiB in all
        # would not fit, and the root knows here whose bytes do not come.
        if self.rank != root:
            payload = as_bytes(data)
            length = as_bytes(np.array([payload.size], np.int64))
            self._transfer("gather", self._comm.Isend, [(root, length), *_to(root, payload)])
            return None
        lengths = np.zeros((self.size, 1), np.int64)
        others = [rank for rank in range(self.size) if rank != root]
        receive = self._comm.Irecv
        self._transfer("gather", receive, [(r, lengths[r].view(np.uint8)) for r in others])
        parts = [np.empty(int(length[0]), np.uint8) for length in lengths]
        self._transfer("gather", receive, [pair for r in others for pair in _to(r, parts[r])])
        parts[root] = as_bytes(data).copy()
        return parts

    def allgather(self, values: Columns) -> Columns:
        """See `Communicator.allgather`."""
        columns = as_columns(values)
        table = np.empty((self.size, columns.size), np.int64)
        kind = self._mpi.INT64_T
        self._collective("allgather", self._comm.Iallgather, [columns, kind], [table, kind])
        return table

    def allreduce(self, values: Columns, operation: Operation) -> Columns:
        """See `Communicator.allreduce`."""
        return self.start_allreduce(values, operation)()

    def start_allreduce(self, values: Columns, operation: Operation) -> Callable[[], Columns]:
        """See `Communicator.start_allreduce`."""
        self._check("allreduce")
        columns = as_columns(values).copy()
        result = np.empty_like(columns)
        kind = self._mpi.INT64_T
        how = getattr(self._mpi, _OPERATIONS[operation])
        buffers = [columns, kind], [result, kind]
        request = self._calling("allreduce", lambda: self._comm.Iallreduce(*buffers, how))
        self._started[id(request)] = (request, buffers)  # MPI writes there, whoever forgets it

        def finish() -> Columns:
            self._check("allreduce")
            self._wait("allreduce", [request], [], *buffers)
            del self._started[id(request)]
            return cast(Columns, result)

        return finish

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        self._collective("barrier", self._comm.Ibarrier)

    def split(self, color: int) -> Communicator:
        """See `Communicator.split`."""
        colors = self.allgather(np.array([checked_color(color)], np.int64))[:, 0]
        members = [rank for rank in range(self.size) if colors[rank] == color]
        part = self._calling("split", lambda: self._comm.Split(color, self.rank))
        made = MpiCommunicator(part, self._family, self.reason)
        made._adopt_part(self, members)
        return made

    def close(self, abort: bool = False) -> None:
        """See `Communicator.close`."""
        if self._closed:
            return
        if not abort and self._family.poisoned is None:
            # Unlike a barrier this takes in all small messages, so that none outlives the
            # communicator and turns up in the next one that MPI gives the same number.
            self.agree("close the communicator")
            self._calling("close", self._comm.Free)
        elif abort:
            # MPI_Finalize is collective too, and would wait for ranks that may be dead.
            comm_launch.mark_broken("its communicator was aborted")
            leak(self._comm, self._sends, self._started)
        self._closed = True

    def _check(self, operation: str) -> None:
        super()._check(operation)
        if (reason := comm_launch.broken()) is not None:
            raise CommunicationError(operation, cause=f"MPI is out of use: {reason}")
        self.require_own_thread(operation)

    def _poison(self, error: CommunicationError, *buffers: object) -> CommunicationError:
        comm_launch.mark_broken(str(error))
        # Destructors of communicators and requests would call MPI.
        return super()._poison(error, self._comm, self._sends, self._started, *buffers)

    def _calling(self, operation: str, call: Callable[[], Any]) -> Any:
        """Call MPI; an MPI error breaks the communicator."""
        try:
            return call()
        except self._mpi.Exception as error:
            text = error.Get_error_string()
            raise self._poison(CommunicationError(operation, cause=f"MPI: {text}")) from error

    def _collective(self, operation: str, start: Callable[..., MPI.Request], *buffers: Any) -> None:
        """Start a non-blocking collective and wait for it."""
        self._check(operation)
        request = self._calling(operation, lambda: start(*buffers))
        self._wait(operation, [request], [], *buffers)

    def _transfer(
        self, operation: str, start: Callable[..., MPI.Request], pieces: list[tuple[int, Bytes]]
    ) -> None:
        """Send or receive `pieces`, each to or from its rank, and wait for all."""
        byte = self._mpi.BYTE
        requests = self._calling(
            operation, lambda: [start([piece, byte], peer, _TAG_GATHER) for peer, piece in pieces]
        )
        self._wait(operation, requests, [peer for peer, _ in pieces], pieces)

    def _wait(
        self, operation: str, requests: list[MPI.Request], peers: Sequence[int], *buffers: object
    ) -> None:
        """Poll until all `requests` are complete; `peers` are the ranks they wait for, if known."""
        waiter = Waiter(self.timeout_s)
        pending = list(range(len(requests)))
        while pending:
            left = [i for i in pending if not self._calling(operation, requests[i].Test)]
            if len(left) < len(pending):
                waiter.progressed()
            pending = left
            if pending and waiter.expired():
                missing = sorted({peers[i] for i in pending}) if peers else None
                error = self._timed_out(operation, missing)
                raise self._poison(error, requests, buffers)
            if pending:
                waiter.pause()

    def _send(self, what: int, payload: bytes, to: int) -> None:
        """Start to send one small message of the present exchange."""
        message = as_bytes(_HEADER.pack(self._sequence, what) + payload)
        tag = _TAG_FROM_ROOT if self.rank == 0 else _TAG_TO_ROOT
        request = self._comm.Isend([message, self._mpi.BYTE], to, tag)
        self._sends.append((request, message))

    def _unsent(self) -> bool:
        """Whether messages are still on their way."""
        self._sends = [(request, kept) for request, kept in self._sends if not request.Test()]
        return bool(self._sends)

    def _receive(self) -> tuple[int, int, int, bytes] | None:
        """Source, exchange, kind and payload of the next small message, if one is there."""
        mpi = self._mpi
        tag = _TAG_TO_ROOT if self.rank == 0 else _TAG_FROM_ROOT
        source = mpi.ANY_SOURCE if self.rank == 0 else 0
        status = mpi.Status()
        if not self._comm.Iprobe(source, tag, status):
            return None
        buffer = np.empty(status.Get_count(mpi.BYTE), np.uint8)
        request = self._comm.Irecv([buffer, mpi.BYTE], status.Get_source(), tag)
        self._wait("receive a message", [request], [status.Get_source()], buffer)
        sequence, what = _HEADER.unpack_from(buffer.data)
        return status.Get_source(), sequence, what, buffer[_HEADER.size :].tobytes()

    def _exchange(self, step: str, arrival: bytes) -> dict[str, Any]:
        operation = f"agree on {step!r}"
        self._calling(operation, self._unsent)
        if self.rank == 0:
            return self._lead(operation, arrival)
        self._calling(operation, partial(self._send, _ARRIVED, arrival, 0))
        waiter = Waiter(self.timeout_s + self._family.grace_s)
        while True:
            message = self._calling(operation, self._receive)
            if message is None:
                if waiter.expired():
                    return verdict_on_missing([0], waiter.limit_s)
                waiter.pause()
                continue
            waiter.progressed()
            _, sequence, what, payload = message
            if what == _VERDICT and sequence == self._sequence:
                self._sequence += 1
                return decode(payload)

    def _lead(self, operation: str, arrival: bytes) -> dict[str, Any]:
        """Rank 0's part of an exchange: wait for all, judge, tell all."""
        self._arrivals[0] = arrival
        self._progressed = True
        waiter = Waiter(self.timeout_s)
        while True:
            if self._calling(operation, self._attend):
                waiter.progressed()
            if len(self._arrivals) == self.size:
                verdict = judge(self._arrivals)
                break
            if waiter.expired():
                missing = [rank for rank in range(self.size) if rank not in self._arrivals]
                verdict = verdict_on_missing(missing, waiter.limit_s)
                break
            waiter.pause()
        self._announce(operation, verdict)
        self._arrivals = {}
        self._progressed = False
        self._sequence += 1
        return verdict

    def _announce(self, operation: str, verdict: dict[str, Any]) -> None:
        """Send the verdict to all, also to the missing: should they come back, they learn it."""
        for rank in range(1, self.size):
            self._calling(operation, partial(self._send, _VERDICT, encode(verdict), rank))
        waiter = Waiter(self._family.grace_s if "missing" in verdict else self.timeout_s)
        while self._calling(operation, self._unsent):
            if waiter.expired():
                if "missing" in verdict:
                    return
                raise self._poison(self._timed_out(operation, None))
            waiter.pause()

    def _attend(self) -> bool:
        """Rank 0 takes in what was sent to it and tells those who wait; whether there was news.

        Arrivals are progress too. What is remembered of it (`_progressed`) lasts until a ping told.
        """
        news = False
        while (message := self._receive()) is not None:
            source, _, what, payload = message
            if what == _ARRIVED:
                self._arrivals[source] = payload
            news = True
        self._progressed = self._progressed or news
        now = time.monotonic()
        if self._progressed and now - self._pinged_at >= self._family.report_interval_s:
            self._progressed, self._pinged_at = False, now
            self._unsent()
            for rank in self._arrivals:
                if rank != 0:
                    self._send(_PING, b"", rank)
        return news


def _to(rank: int, buffer: Bytes) -> list[tuple[int, Bytes]]:
    """Return the chunks of `buffer`, each with the `rank` at the other end."""
    return [(rank, chunk) for chunk in chunks(buffer)]
