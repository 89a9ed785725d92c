"""Who talks to whom: one interface over MPI, torch.distributed (gloo) and a single process.

Guarantees
----------
- `connect` and `current` give every rank of the job the same kind of communicator, or raise on
  every rank.
- Every wait is bounded: `timeout_s` without progress raises `CommunicationError`, which names the
  missing ranks where they can be known, and poisons the communicator: later calls raise at once
  and touch no network.
- `agree` raises on all ranks when one rank failed, so that no rank goes on alone.
- Messages are numpy columns and bytes in host memory, never pickles, in chunks below 2**31 bytes.
- Importing this module imports neither torch nor mpi4py.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_uring.comm.parts import (
    Bytes,
    Columns,
    Family,
    as_bytes,
    as_columns,
    checked_root_data,
    encode_arrival,
    judge,
    leak,
    raise_failures,
)
from megatron_uring.errors import (
    CheckpointError,
    CommunicationError,
    UnsupportedError,
    as_checkpoint_error,
)

__all__ = ["Communicator", "SingleCommunicator", "beside", "connect", "current"]

Operation = Literal["min", "max", "sum"]


def connect(timeout_s: float, kind: str = "auto") -> Communicator:
    """Make a new communicator over all ranks of the job; collective.

    MPI is taken only where it provably spans the same ranks as torch.distributed, gloo where
    torch.distributed is initialised, and a single process otherwise.

    Parameters
    ----------
    timeout_s
        Seconds without progress after which any wait gives up.
    kind
        ``"auto"``; or ``"mpi"`` or ``"gloo"``, which raise `UnsupportedError` with the reason if
        they cannot be had. The same on all ranks.
    """
    from megatron_uring.comm.choice import choose

    return choose(timeout_s, kind)


def current(timeout_s: float, kind: str = "auto") -> Communicator:
    """Return the communicator of this generation of the job; collective when it has to be built.

    It is kept until torch's default process group is replaced (an in-process restart). What is
    built then is gloo: ranks that died took their part of the MPI world with them.
    """
    from megatron_uring.comm.choice import choose_once

    return choose_once(timeout_s, kind)


def beside(timeout_s: float, group: Any = None) -> AbstractContextManager[Communicator]:
    """A gloo communicator over a process group, for this thread alone while the context lasts;
    collective over the group when it has to be built.

    It shares nothing with `current`, which the main thread may be using meanwhile, nor with the
    process group but its store, so that a thread of its own may make a save.

    Parameters
    ----------
    timeout_s
        As in `connect`; and how long another thread is waited for.
    group
        A ``torch.distributed.ProcessGroup``; default: the default one. Where there is none, a
        single process.
    """
    from megatron_uring.comm.choice import take_beside

    return take_beside(timeout_s, group)


class Communicator(ABC):
    """A group of ranks. Methods are collective unless they say otherwise; main thread only, but for
    those of `beside`.

    Attributes
    ----------
    kind
        ``"mpi"``, ``"gloo"`` or ``"single"``.
    rank, size
        This process and the number of processes: those of torch.distributed where it is there.
    node_of_rank
        int32 [size]: dense node numbers, in order of each node's first rank.
    hosts
        One host name per node.
    reason
        Why this kind was chosen.
    """

    kind: str

    def __init__(self, rank: int, size: int, family: Family, reason: str) -> None:
        self.rank = rank
        self.size = size
        self.reason = reason
        self.node_of_rank: NDArray[np.int32] = np.zeros(size, np.int32)
        self.hosts: list[str] = []
        self._family = family
        self._closed = False
        self._thread, self._process = threading.get_ident(), os.getpid()

    @property
    def timeout_s(self) -> float:
        """Seconds without progress after which a wait gives up; shared with every split."""
        return self._family.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._family.timeout_s = timeout_s

    @property
    def poisoned(self) -> str | None:
        """Why this communicator is broken, or None; shared with every split."""
        return self._family.poisoned

    def agree(self, step: str, error: BaseException | None = None) -> None:
        """Return on all ranks if no rank passed an error, else raise on all of them.

        A rank that passed an error raises that error, as a member of the `CheckpointError` family.
        The others raise one of the first failing rank's class, prefixed ``"rank R: "``.

        Parameters
        ----------
        step
            What the ranks agree on; all must name the same step.
        error
            What went wrong on this rank.
        """
        own = None if error is None else as_checkpoint_error(error, step)
        try:
            self._check(f"agree on {step!r}")
            verdict = self._exchange(step, encode_arrival(step, own))
        except CommunicationError as broken:
            if own is None:
                raise
            raise broken from own
        self._obey(verdict, step, own)

    @abstractmethod
    def report_progress(self, bytes_done: int) -> None:
        """Tell those who wait in the next `agree` that this rank is slow, not stuck.

        Not collective, and cheap enough to call every 50 ms. Only a `bytes_done` that differs from
        the last one counts: a disk that hangs makes no progress however often it is polled. It
        counts for this communicator, not for those split from it.
        """

    @abstractmethod
    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        """Return the bytes that `root` passed; what the others pass is ignored."""

    @abstractmethod
    def gather(self, data: NDArray[Any] | bytes, root: int = 0) -> list[Bytes] | None:
        """On `root` the bytes of every rank, which may differ in size; None on the others."""

    @abstractmethod
    def allgather(self, values: Columns) -> Columns:
        """int64 [size, k] from the int64 [k] of every rank; k must be the same on all."""

    @abstractmethod
    def allreduce(self, values: Columns, operation: Operation) -> Columns:
        """int64 [k], combined element by element over all ranks."""

    @abstractmethod
    def start_allreduce(self, values: Columns, operation: Operation) -> Callable[[], Columns]:
        """Begin an `allreduce`, and return what waits for it and gives its result.

        Between the two any collectives may be called, in the same order on all ranks, and this
        counts as one in both places.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has come here."""

    @abstractmethod
    def split(self, color: int) -> Communicator:
        """Return a communicator of those that passed this `color` (0 or more), in rank order."""

    @abstractmethod
    def close(self, abort: bool = False) -> None:
        """Give up the communicator; with `abort` nothing is sent and nobody is waited for."""

    def abandon(self, error: BaseException) -> None:
        """Break this family because `error` left a collective, or a step, on this rank alone.

        Not collective. The other ranks find this one missing; here nothing that they still send
        can be taken for the answer to a later call.
        """
        if self.size > 1 and self._family.poisoned is None:
            reason = f"interrupted by {type(error).__name__}"
            self._poison(CommunicationError(reason))

    @abstractmethod
    def _exchange(self, step: str, arrival: bytes) -> dict[str, Any]:
        """Bring `arrival` to rank 0 and return the verdict that it made of all arrivals."""

    def _check(self, operation: str) -> None:
        """Refuse to use a broken or closed communicator."""
        if self._family.poisoned is not None:
            raise CommunicationError(
                operation, cause=f"the communicator is broken: {self._family.poisoned}"
            )
        if self._closed:
            raise CommunicationError(operation, cause="the communicator is closed")

    def hand_over(self) -> None:
        """Let the calling thread be the one that may use it; for `beside`, which lends it to one at
        a time.
        """
        self._family.lent_to = threading.get_ident()

    def require_own_thread(self, operation: str) -> None:
        """Refuse other threads, whose messages ranks would take for each other's, and children; not
        collective, and breaks nothing.
        """
        own = self._family.lent_to or self._thread
        if threading.get_ident() != own or os.getpid() != self._process:
            raise CommunicationError(
                operation,
                cause=f"{self.kind} may be used only by the thread that built the communicator",
            )

    def _poison(self, error: CommunicationError, *buffers: object) -> CommunicationError:
        """Break this family for good; `buffers` stay, as the network may still write into them."""
        if self._family.poisoned is None:
            self._family.poisoned = str(error)
        leak(*buffers)
        return error

    def _timed_out(self, operation: str, missing: list[int] | None) -> CommunicationError:
        """Return the error of a collective that stands still; `missing` is None if unknown."""
        return CommunicationError(
            operation,
            expected=f"all {self.size} ranks",
            found="ranks missing that cannot be told" if not missing else self._name(missing),
            cause=f"no progress for {self.timeout_s:g} s",
        )

    def _obey(self, verdict: Mapping[str, Any], step: str, own: CheckpointError | None) -> None:
        """Raise what the verdict says, if anything."""
        if "missing" in verdict:
            error = CommunicationError(
                f"agree on {step!r}",
                expected=f"all {self.size} ranks",
                found=f"no sign of {self._name(verdict['missing'])}",
                cause=f"no progress for {verdict['waited_s']:g} s",
            )
            raise self._poison(error) from own
        if own is not None:
            raise own
        if "failures" in verdict:
            raise_failures(verdict["failures"], verdict["failed"])
        if "steps" in verdict:
            steps = [f"rank {rank} in {name!r}" for name, rank in verdict["steps"].items()]
            raise CommunicationError(
                f"agree on {step!r}", expected="all ranks in one step", found=", ".join(steps)
            )

    def _name(self, ranks: list[int]) -> str:
        """``"rank 2 (host-a), rank 5 (host-b)"``; at most 16 of them."""
        names = []
        for rank in ranks[:16]:
            host = self.hosts[self.node_of_rank[rank]] if self.hosts else "host not known"
            names.append(f"rank {rank} ({host})")
        more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
        return ", ".join(names) + more

    def _adopt(self, places: Mapping[str, Any]) -> None:
        """Take over what `topology` found; raises on all ranks alike."""
        if "refusal" in places:
            raise UnsupportedError("find out which ranks share a node", cause=places["refusal"])
        self.node_of_rank = np.array(places["node_of_rank"], np.int32)
        self.hosts = list(places["hosts"])

    def _adopt_part(self, parent: Communicator, members: list[int]) -> None:
        """Take over the topology of `parent` for its ranks `members`, renumbered."""
        number: dict[int, int] = {}
        nodes = [number.setdefault(int(parent.node_of_rank[rank]), len(number)) for rank in members]
        self.node_of_rank = np.array(nodes, np.int32)
        self.hosts = [parent.hosts[node] for node in number]


class SingleCommunicator(Communicator):
    """One process alone: every collective is its own answer."""

    kind = "single"

    def __init__(self, timeout_s: float, reason: str, host: str) -> None:
        super().__init__(0, 1, Family(timeout_s), reason)
        self.hosts = [host]

    def report_progress(self, bytes_done: int) -> None:
        """Nobody waits."""

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        """Return `data` itself."""
        self._check("broadcast")
        return checked_root_data(data)

    def gather(self, data: NDArray[Any] | bytes, root: int = 0) -> list[Bytes] | None:
        """Return a copy of `data`."""
        self._check("gather")
        return [as_bytes(data).copy()]

    def allgather(self, values: Columns) -> Columns:
        """One row."""
        self._check("allgather")
        return np.array([as_columns(values)])

    def allreduce(self, values: Columns, operation: Operation) -> Columns:
        """Return a copy of `values`."""
        self._check("allreduce")
        return np.array(as_columns(values))

    def start_allreduce(self, values: Columns, operation: Operation) -> Callable[[], Columns]:
        """The result is there at once."""
        result = self.allreduce(values, operation)
        return lambda: result

    def barrier(self) -> None:
        """Nobody to wait for."""
        self._check("barrier")

    def split(self, color: int) -> Communicator:
        """Another communicator of one."""
        self._check("split")
        return SingleCommunicator(self.timeout_s, self.reason, self.hosts[0])

    def require_own_thread(self, operation: str) -> None:
        """Nobody could take a message for another."""

    def close(self, abort: bool = False) -> None:
        """Nothing is held."""
        self._closed = True

    def _exchange(self, step: str, arrival: bytes) -> dict[str, Any]:
        return judge({0: arrival})
