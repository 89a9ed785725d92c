"""What the communicators have in common: the deadline, the messages of `agree`, the topology.

Guarantees
----------
- Pure: no torch, no mpi4py, no communication.
- What goes over the wire is JSON or raw bytes, bounded in size, never a pickle.
"""

from __future__ import annotations

import ctypes
import json
import socket
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from megatron_uring.config import faked_topology
from megatron_uring.errors import CheckpointError

Bytes = NDArray[np.uint8]
Columns = NDArray[np.int64]

CHUNK_BYTES = 1 << 30
"""Largest single message; below 2**31 - 1, the largest count that MPI and gloo take."""

_LISTED_FAILURES = 3
_MESSAGE_CHARACTERS = 4000
_LEAKED: list[object] = []


class Family:
    """What a communicator shares with all that were split from it: the deadline and the poison."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.poisoned: str | None = None
        self.lent_to: int | None = None  # the thread that a communicator beside was handed to

    @property
    def report_interval_s(self) -> float:
        """Least time between two reports of progress; small against the deadline they move."""
        return min(1.0, self.timeout_s / 4)

    @property
    def grace_s(self) -> float:
        """How much longer than rank 0 the others wait, so that its verdict comes to them first."""
        return min(2.0, self.timeout_s)


class Waiter:
    """A deadline that progress moves, and the back-off between two polls.

    A process that was itself stopped (SIGSTOP, a debugger, a suspended machine) must not blame the
    others for the time it slept: a pause that took far too long moves the deadline, but by no more
    than about the limit in all.
    """

    def __init__(self, limit_s: float, longest_pause_s: float = 5e-3) -> None:
        self.limit_s = limit_s
        self._longest_pause_s = longest_pause_s
        self._pause_s = 0.0
        self._polls = 0
        self._forgiven_s = 0.0
        self._since = time.monotonic()

    def progressed(self) -> None:
        """Start to count anew."""
        self._since = time.monotonic()

    def expired(self) -> bool:
        """Whether nothing happened for `limit_s`."""
        return time.monotonic() - self._since > self.limit_s

    def pause(self) -> None:
        """Sleep: first not at all, then from 50 microseconds doubling up to the longest pause."""
        before = time.monotonic()
        time.sleep(self._pause_s)
        self._polls += 1
        if self._polls > 20:
            self._pause_s = min(max(50e-6, 2 * self._pause_s), self._longest_pause_s)
        slept_s = time.monotonic() - before
        if slept_s > 1.0 + self._longest_pause_s and self._forgiven_s < self.limit_s:
            self._forgiven_s += slept_s
            self._since += slept_s


class ProgressMeter:
    """Decides which reports of progress are worth a message: new bytes, and not too often."""

    def __init__(self) -> None:
        self._bytes_done: int | None = None
        self._sent_at = -1e9

    def worth_sending(self, bytes_done: int, interval_s: float) -> bool:
        """Whether `bytes_done` changed and the last message is old enough."""
        now = time.monotonic()
        if bytes_done == self._bytes_done or now - self._sent_at < interval_s:
            return False
        self._bytes_done, self._sent_at = bytes_done, now
        return True


def leak(*objects: object) -> None:
    """Keep `objects` alive for good, even past the interpreter's teardown.

    The network may still write into the buffers, and destructors may wait for dead peers.
    """
    for each in objects:
        _LEAKED.append(each)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def encode(message: Mapping[str, Any]) -> bytes:
    """`message` as JSON."""
    return json.dumps(message).encode()


def decode(message: bytes) -> dict[str, Any]:
    """Return what `encode` was given."""
    decoded: dict[str, Any] = json.loads(message)
    return decoded


def encode_arrival(step: str, error: CheckpointError | None) -> bytes:
    """One rank's message to rank 0: it is in `step`, well or with an `error`."""
    if error is None:
        return encode({"step": step})
    class_name, text = error.to_wire()
    return encode({"step": step, "class": class_name, "message": text[:_MESSAGE_CHARACTERS]})


def judge(arrivals: Mapping[int, bytes]) -> dict[str, Any]:
    """Return the verdict on all arrivals: empty if all are well and in the same step."""
    decoded = {rank: decode(arrivals[rank]) for rank in sorted(arrivals)}
    failures = [(r, a["class"], a["message"]) for r, a in decoded.items() if "class" in a]
    if failures:
        return {"failures": failures[:_LISTED_FAILURES], "failed": len(failures)}
    first_of_step: dict[str, int] = {}
    for rank, arrival in decoded.items():
        first_of_step.setdefault(arrival["step"], rank)
    if len(first_of_step) > 1:
        return {"steps": dict(list(first_of_step.items())[:_LISTED_FAILURES])}
    return {}


def verdict_on_missing(missing: list[int], waited_s: float) -> dict[str, Any]:
    """Return the verdict when nobody progressed for `waited_s` and `missing` did not arrive."""
    return {"missing": missing, "waited_s": waited_s}


def raise_failures(failures: list[tuple[int, str, str]], failed: int) -> NoReturn:
    """Raise on this rank what went wrong on others: the first one's class, up to three messages."""
    texts = [f"rank {rank}: {message}" for rank, _, message in failures]
    if failed > len(failures):
        texts.append(f"and {failed - len(failures)} more")
    raise CheckpointError.from_wire(failures[0][1], "; ".join(texts))


def as_bytes(data: NDArray[Any] | bytes) -> Bytes:
    """Return the elements of `data` as one row of bytes, copied only if they are not contiguous."""
    if isinstance(data, bytes):
        return np.frombuffer(data, np.uint8)
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


def as_columns(values: Columns) -> Columns:
    """`values` as a contiguous one-dimensional int64 array; nothing else will do."""
    columns = np.ascontiguousarray(values)
    if columns.dtype != np.int64 or columns.ndim != 1:
        raise CheckpointError(
            "communicate", expected="int64 [k]", found=f"{columns.dtype} {list(columns.shape)}"
        )
    return columns


def checked_root_data(data: bytes | None) -> bytes:
    """Return `data` of the rank that broadcasts."""
    if data is None:
        raise CheckpointError("broadcast", expected="bytes on the root", found="None")
    return bytes(data)


def chunks(buffer: Bytes) -> list[Bytes]:
    """Return views of `buffer`, each no longer than a single message may be; none for no bytes."""
    return [buffer[start : start + CHUNK_BYTES] for start in range(0, buffer.size, CHUNK_BYTES)]


def own_place() -> bytes:
    """Where this process runs: host name, boot id (equal names may be different machines), fake."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
    except OSError:
        boot_id = ""
    place = {"host": socket.gethostname(), "boot_id": boot_id, "fake": faked_topology()}
    return encode(place)


def topology(places: Mapping[int, bytes]) -> dict[str, Any]:
    """Dense node numbers in order of first rank, and a host name per node; or why there are none.

    ``MEGATRON_URING_NODE_OF_RANK`` ("0,0,1,1"), set on rank 0, replaces what the places say.
    """
    decoded = [decode(places[rank]) for rank in range(len(places))]
    keys = [(place["host"], place["boot_id"]) for place in decoded]
    fake = decoded[0]["fake"]
    if fake:
        labels = [label.strip() for label in fake.split(",")]
        if len(labels) != len(keys):
            return {
                "refusal": f"MEGATRON_URING_NODE_OF_RANK names {len(labels)} ranks of {len(keys)}"
            }
        keys = [
            (f"{place['host']}-fake-{label}", label)
            for place, label in zip(decoded, labels, strict=True)
        ]
    number: dict[tuple[str, str], int] = {}
    nodes = [number.setdefault(key, len(number)) for key in keys]
    return {"node_of_rank": nodes, "hosts": [host for host, _ in number]}


def checked_color(color: int) -> int:
    """`color` of a split, which MPI wants to be at least 0."""
    if color < 0:
        raise CheckpointError("split", expected="a color of at least 0", found=color)
    return color
