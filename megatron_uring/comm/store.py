"""Small messages over torch.distributed's store: star-shaped exchanges with a verdict by rank 0.

Guarantees
----------
- No blocking store call: keys are polled with a back-off, never waited for, as a wait would hold
  the lock of the client that the training job uses too.
- Bounded even if the store's server stops: calls run in a daemon thread that is given up on.
- One verdict for all ranks of an exchange, also when rank 0 was given up on and comes back.
- Keys are deleted once every rank has the verdict, so the store does not grow.
"""

from __future__ import annotations

import importlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, cast

from megatron_uring.comm.parts import (
    Family,
    ProgressMeter,
    Waiter,
    decode,
    encode,
    leak,
    verdict_on_missing,
)
from megatron_uring.errors import CommunicationError

Combine = Callable[[Mapping[int, bytes]], Mapping[str, Any]]

_Job = tuple[Callable[[], Any], "Future[Any]"]


def torch_distributed() -> Any:
    """torch.distributed, imported on first use; untyped, as its stubs lack much of what it has."""
    return importlib.import_module("torch.distributed")


class StoreCaller:
    """Runs the calls of one store client in one daemon thread, so that each can be given up."""

    def __init__(self, store: Any, family: Family) -> None:
        self.store = store
        self._family = family
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # The thread ends with the last user of the caller, so it must not refer to it.
        weakref.finalize(self, self._jobs.put, None)
        threading.Thread(
            target=_serve, args=(self._jobs,), name="megatron_uring store", daemon=True
        ).start()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(*arguments)`; `CommunicationError` if the store fails or does not answer."""
        if self._family.poisoned is not None:
            raise CommunicationError(
                "call the store", cause=f"the communicator is broken: {self._family.poisoned}"
            )
        future: Future[Any] = Future()
        self._jobs.put((lambda: function(*arguments), future))
        limit_s = self._family.timeout_s + self._family.grace_s
        try:
            return future.result(limit_s)
        except FutureTimeoutError:
            cause = f"torch.distributed's store did not answer for {limit_s:g} s"
        except RuntimeError as error:  # torch's DistError and its children
            cause = f"torch.distributed's store: {error}"
        failure = CommunicationError("call the store", cause=cause)
        self._family.poisoned = str(failure)
        leak(self.store)
        raise failure


def _serve(jobs: queue.SimpleQueue[_Job | None]) -> None:
    """Run jobs one by one until there is a None."""
    while (job := jobs.get()) is not None:
        function, future = job
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
        del job, function, future


class StoreChannel:
    """Exchanges among the ranks 0 to size - 1 that use the same `prefix`."""

    def __init__(
        self, caller: StoreCaller, prefix: str, rank: int, size: int, family: Family
    ) -> None:
        self.caller = caller
        self.prefix = prefix
        self.store = torch_distributed().PrefixStore(prefix, caller.store)
        self.rank = rank
        self.size = size
        self._family = family
        self._sequence = 0
        self._meter = ProgressMeter()
        # The more ranks poll one server, the less often each may.
        self._longest_pause_s = min(0.25, 5e-3 + 20e-6 * size)

    def report_progress(self, bytes_done: int) -> None:
        """Count one more sign of life; those who wait in `exchange` look at the counter."""
        if self._meter.worth_sending(bytes_done, self._family.report_interval_s):
            self.caller.call(self.store.add, "progress", 1)

    def exchange(self, arrival: bytes, combine: Combine) -> dict[str, Any]:
        """Return what `combine` makes on rank 0 of the arrivals of all ranks, on all ranks."""
        call, store, place = self.caller.call, self.store, str(self._sequence)
        self._sequence += 1
        call(store.set, f"{place}/{self.rank}", arrival)
        call(store.add, f"{place}/arrived", 1)
        verdict = self._lead(place, combine) if self.rank == 0 else self._follow(place)
        if "missing" not in verdict:
            call(store.delete_key, f"{place}/{self.rank}")
            if call(store.add, f"{place}/left", 1) == self.size:
                for key in ("arrived", "verdict", "left"):
                    call(store.delete_key, f"{place}/{key}")
        return verdict

    def _lead(self, place: str, combine: Combine) -> dict[str, Any]:
        """Rank 0's part: wait for all, judge, publish the verdict."""
        waiter = Waiter(self._family.timeout_s, self._longest_pause_s)
        seen = (-1, -1)
        while True:
            news = self._news(place)
            if news != seen:
                waiter.progressed()
                seen = news
            if news[0] == self.size:
                verdict = dict(combine(self._arrivals(place)))
                break
            if waiter.expired():
                verdict = verdict_on_missing(self._missing(place), waiter.limit_s)
                break
            waiter.pause()
        return self._publish(place, verdict)

    def _follow(self, place: str) -> dict[str, Any]:
        """Make the others' part: wait for the verdict; without one, find out who is missing."""
        call, store, key = self.caller.call, self.store, f"{place}/verdict"
        waiter = Waiter(self._family.timeout_s + self._family.grace_s, self._longest_pause_s)
        seen, looked_at = (-1, -1), time.monotonic()
        while not call(store.check, [key]):
            if time.monotonic() - looked_at > self._family.report_interval_s / 2:
                news, looked_at = self._news(place), time.monotonic()
                if news != seen:
                    waiter.progressed()
                    seen = news
            if waiter.expired():
                verdict = verdict_on_missing(self._missing(place) or [0], waiter.limit_s)
                return self._publish(place, verdict)
            waiter.pause()
        return decode(cast(bytes, call(store.get, key)))

    def _publish(self, place: str, verdict: dict[str, Any]) -> dict[str, Any]:
        """Make `verdict` that of all ranks, unless there is one; return the one that stands.

        Rank 0 may come back when another has given up on it: the first to speak decides for all.
        """
        key = f"{place}/verdict"
        return decode(self.caller.call(self.store.compare_set, key, "", encode(verdict).decode()))

    def _news(self, place: str) -> tuple[int, int]:
        """How many arrived, and how often progress was reported."""
        call, store = self.caller.call, self.store
        return call(store.add, f"{place}/arrived", 0), call(store.add, "progress", 0)

    def _arrivals(self, place: str) -> dict[int, bytes]:
        """Return what all ranks brought; every key is there."""
        keys = [f"{place}/{rank}" for rank in range(self.size)]
        if self.caller.call(self.store.has_extended_api):
            values = self.caller.call(self.store.multi_get, keys)
        else:
            values = [self.caller.call(self.store.get, key) for key in keys]
        return dict(enumerate(values))

    def _missing(self, place: str) -> list[int]:
        """Return the ranks that did not arrive."""
        call, store = self.caller.call, self.store
        return [r for r in range(self.size) if not call(store.check, [f"{place}/{r}"])]
