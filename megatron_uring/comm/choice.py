"""The choice between MPI, gloo and a single process, which all ranks make alike.

Guarantees
----------
- MPI is taken only if COMM_WORLD has as many ranks as torch.distributed, on the same places, and
  both carry the same secret; ranks are numbered as torch numbers them.
- One rank that cannot use MPI makes all ranks use gloo, and the reason says which and why.
- Never N communicators of one where N ranks were launched together.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import socket
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_uring.comm import launch as comm_launch
from megatron_uring.comm.communicator import Communicator, SingleCommunicator
from megatron_uring.comm.mpi import MpiCommunicator
from megatron_uring.comm.parts import Family, decode, encode, leak, own_place
from megatron_uring.comm.store import StoreCaller, StoreChannel, torch_distributed
from megatron_uring.errors import CheckpointError, CommunicationError, UnsupportedError

if TYPE_CHECKING:
    from mpi4py import MPI

_logger = logging.getLogger("megatron_uring")


@dataclass(frozen=True)
class _TorchWorld:
    rank: int
    size: int
    store: Any


@dataclass
class _Cache:
    """What `choose_once` made last, torch's default group then, and whether one ever was."""

    communicator: Communicator | None = None
    group: weakref.ref[Any] | None = None
    had_group: bool = False


_cache = _Cache()


def choose_once(timeout_s: float, kind: str) -> Communicator:
    """See `comm.current`."""
    group = _default_group()
    if (kept := _cache.communicator) is not None:
        same = group is (None if _cache.group is None else _cache.group())
        # An MPI communicator outlives a default group that was merely taken down.
        if same or (group is None and kept.kind == "mpi" and kept.poisoned is None):
            kept.timeout_s = timeout_s
            return kept
        # Not close(abort=True): nothing says that MPI is broken, and it would not be finalized.
        leak(kept)
        _cache.communicator = None
    restarted = "torch.distributed was started anew" if _cache.had_group else None
    communicator = choose(timeout_s, kind, restarted)
    _cache.had_group = _cache.had_group or group is not None
    _cache.communicator = communicator
    _cache.group = None if group is None else weakref.ref(group)
    return communicator


def choose(timeout_s: float, kind: str, refusal: str | None = None) -> Communicator:
    """See `comm.connect`; a `refusal` is a reason known beforehand not to use MPI."""
    if kind not in ("auto", "mpi", "gloo"):
        raise UnsupportedError(
            "choose a communicator", expected="auto, mpi or gloo", found=repr(kind)
        )
    if refusal is None:
        refusal = "gloo was asked for" if kind == "gloo" else comm_launch.mpi_refusal()
    world = _torch_world()
    if world is None:
        return _without_torch(timeout_s, kind, refusal)
    if world.size == 1 and kind == "auto":
        return SingleCommunicator(timeout_s, "single: torch.distributed has one rank", _host())
    return _with_torch(world, timeout_s, kind, refusal)


def _without_torch(timeout_s: float, kind: str, refusal: str | None) -> Communicator:
    """MPI alone, or a single process."""
    if kind == "gloo":
        raise UnsupportedError("use gloo", cause="torch.distributed is not initialised")
    if refusal is None:
        try:
            world = comm_launch.initialise()
        except UnsupportedError as error:
            refusal = str(error)
        else:
            if world.Get_size() > 1 or comm_launch.launched_size() == 1:
                reason = "mpi: launched by MPI, torch.distributed is not initialised"
                return MpiCommunicator.over(world, world.Get_rank(), timeout_s, reason)
            refusal = f"MPI_Init made {comm_launch.WORLD_OF_ONE}"
    if kind == "mpi":
        raise UnsupportedError("use MPI", cause=refusal)
    if comm_launch.launched_size() > 1:
        raise UnsupportedError(
            "choose a communicator",
            found=f"{comm_launch.launched_size()} ranks that cannot find each other",
            cause=f"no MPI: {refusal}; call torch.distributed.init_process_group first",
        )
    return SingleCommunicator(
        timeout_s, f"single: torch.distributed is not initialised; no MPI: {refusal}", _host()
    )


@dataclass
class _Beside:
    """The communicator beside one process group, and who uses it."""

    group: weakref.ref[Any]
    in_use: threading.Lock = field(default_factory=threading.Lock)
    communicator: Communicator | None = None


_beside: dict[int, _Beside] = {}
_beside_lock = threading.Lock()


@contextlib.contextmanager
def take_beside(timeout_s: float, group: Any) -> Iterator[Communicator]:
    """See `comm.beside`."""
    group = _default_group() if group is None else group
    if group is None:
        yield SingleCommunicator(timeout_s, "single: no torch.distributed", _host())
        return
    with _beside_lock:
        kept = _beside.get(id(group))
        if kept is None or kept.group() is not group:
            if kept is not None:
                leak(kept)  # of a group that is gone, and with it perhaps its ranks
            kept = _beside[id(group)] = _Beside(weakref.ref(group))
    if not kept.in_use.acquire(timeout=timeout_s):
        cause = f"another thread has used it for {timeout_s:g} s"
        raise CommunicationError("take the communicator of a process group", cause=cause)
    try:
        if kept.communicator is None:
            kept.communicator = _make_beside(timeout_s, group)
        kept.communicator.timeout_s = timeout_s
        kept.communicator.hand_over()
        yield kept.communicator
    finally:
        kept.in_use.release()


def _make_beside(timeout_s: float, group: Any) -> Communicator:
    from megatron_uring.comm.gloo import GlooCommunicator

    distributed = torch_distributed()
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    if size == 1:
        return SingleCommunicator(timeout_s, "single: the process group has one rank", _host())
    family = Family(timeout_s)
    store = distributed.distributed_c10d._get_process_group_store(group)
    channel = _channel(_TorchWorld(rank, size, store), "megatron_uring beside", family)
    return GlooCommunicator.over(channel, family, "gloo: of its own, beside a process group")


def _channel(world: _TorchWorld, name: str, family: Family) -> StoreChannel:
    """Where the ranks of `world` meet that make a communicator under this name now."""
    caller = StoreCaller(_own_client(world.store), family)
    generation = (caller.call(caller.store.add, f"{name}/joined", 1) - 1) // world.size
    return StoreChannel(caller, f"{name}/{generation}", world.rank, world.size, family)


def _with_torch(
    world: _TorchWorld, timeout_s: float, kind: str, refusal: str | None
) -> Communicator:
    """MPI if it spans the ranks of torch.distributed, else gloo."""
    from megatron_uring.comm.gloo import GlooCommunicator

    family = Family(timeout_s)
    channel = _channel(world, "megatron_uring", family)
    ballot = _Ballot(channel, kind)
    communicator, refusal = _try_mpi(world, ballot, timeout_s, refusal)
    if communicator is not None:
        return communicator
    if kind == "mpi":
        raise UnsupportedError("use MPI", cause=refusal)
    if world.rank == 0 and (ballot.mpi_was_expected or comm_launch.WORLD_OF_ONE in refusal):
        _logger.warning("an MPI launcher started this job, but gloo is used: %s", refusal)
    reason = "gloo: asked for" if kind == "gloo" else f"gloo: no MPI: {refusal}"
    return GlooCommunicator.over(channel, family, reason)


def _try_mpi(
    world: _TorchWorld, ballot: _Ballot, timeout_s: float, refusal: str | None
) -> tuple[Communicator | None, str]:
    """Make an MPI communicator, or the reason why there is none; the same on all ranks."""
    refusal, secret = ballot.vote(refusal)
    if refusal is not None:
        return None, refusal
    try:
        comm_launch.load()
    except UnsupportedError as error:
        refusal = str(error)
    refusal, _ = ballot.vote(refusal)
    if refusal is not None:
        return None, refusal
    mpi: MPI.Intracomm | None = None
    try:
        mpi = comm_launch.initialise()
        refusal = _wrong_size(mpi.Get_size(), world)
    except UnsupportedError as error:
        refusal = str(error)
    refusal, _ = ballot.vote(refusal)
    if refusal is not None or mpi is None:
        return None, refusal or ""
    communicator = None
    try:
        _check_identity(mpi, world, secret, timeout_s)
        reason = "mpi: COMM_WORLD matches torch.distributed"
        communicator = MpiCommunicator.over(mpi, world.rank, timeout_s, reason)
    except CheckpointError as error:
        refusal = str(error)
    refusal, _ = ballot.vote(refusal)
    return (communicator, "") if refusal is None else (None, refusal)


class _Ballot:
    """Votes of all ranks over the store: one refusal is enough."""

    def __init__(self, channel: StoreChannel, kind: str) -> None:
        self._channel = channel
        self._kind = kind
        self.mpi_was_expected = False

    def vote(self, refusal: str | None) -> tuple[str | None, int]:
        """Return the first refusal of any rank, or None, and a secret that all ranks share."""
        verdict = self._channel.exchange(
            encode({"refusal": refusal, "kind": self._kind}), self._count
        )
        if "missing" in verdict:
            ranks = ", ".join(f"rank {rank}" for rank in verdict["missing"][:16])
            raise CommunicationError(
                "choose a communicator",
                expected=f"all {self._channel.size} ranks",
                found=f"no sign of {ranks}",
                cause=f"no progress for {verdict['waited_s']:g} s",
            )
        if len(verdict["kinds"]) > 1:
            raise UnsupportedError(
                "choose a communicator", expected="one kind", found=", ".join(verdict["kinds"])
            )
        # Every refusal but that of the first vote comes after all ranks had evidence of MPI.
        self.mpi_was_expected = self.mpi_was_expected or verdict["refusal"] is None
        return verdict["refusal"], int(verdict["secret"])

    @staticmethod
    def _count(ballots: Mapping[int, bytes]) -> dict[str, Any]:
        decoded = {rank: decode(ballot) for rank, ballot in ballots.items()}
        refusals = {rank: each["refusal"] for rank, each in decoded.items() if each["refusal"]}
        first = min(refusals, default=None)
        text = None if first is None else refusals[first]
        if first is not None and len(refusals) < len(decoded):
            text = f"rank {first}: {text}"
        kinds = sorted({each["kind"] for each in decoded.values()})
        return {"refusal": text, "kinds": kinds, "secret": secrets.randbelow(1 << 62)}


def _wrong_size(mpi_size: int, world: _TorchWorld) -> str | None:
    """Why a COMM_WORLD of `mpi_size` cannot be this job, or None."""
    if mpi_size == world.size:
        return None
    if mpi_size > 1:
        return f"COMM_WORLD has {mpi_size} ranks, torch.distributed {world.size}"
    return f"MPI_Init made {comm_launch.WORLD_OF_ONE} in a job of {world.size}"


def _check_identity(mpi: MPI.Intracomm, world: _TorchWorld, secret: int, timeout_s: float) -> None:
    """Raise unless the ranks of `mpi` are, one to one, those of torch.distributed; collective."""
    place = decode(own_place())
    digests = [_digest(place["host"]), _digest(place["boot_id"])]
    whole = MpiCommunicator(mpi, Family(timeout_s), "")
    table = whole.allgather(np.array([world.rank, secret, *digests], np.int64))
    if sorted(table[:, 0].tolist()) != list(range(world.size)):
        found = str(table[:, 0].tolist()[:16])
        raise UnsupportedError("use MPI", expected="each torch rank once", found=found)
    if np.any(table[:, 1] != secret):
        raise UnsupportedError("use MPI", cause="COMM_WORLD spans ranks of different jobs")


def _digest(text: str) -> int:
    """Return a signed 64-bit digest of `text`, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def _own_client(store: Any) -> Any:
    """Return a connection of our own if torch can make one: theirs is locked in its waits."""
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        return store


def _default_group() -> Any:
    """Return torch's default process group, or None; does not import torch."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.group.WORLD


def _torch_world() -> _TorchWorld | None:
    """torch.distributed's world, if it is initialised."""
    if _default_group() is None:
        return None
    distributed = torch_distributed()
    store = distributed.distributed_c10d._get_default_store()
    return _TorchWorld(distributed.get_rank(), distributed.get_world_size(), store)


def _host() -> str:
    return socket.gethostname()
