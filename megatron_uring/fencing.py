"""The fence: the point before tensors change, at which nothing of them is still to be copied.

Guarantees
----------
- When `fence` returns, every save that copies tensors after its call had returned has copied all of
  them, or has failed. It waits for copies only; for the disk, where the pool of slabs is smaller
  than the state.
- It never raises and its wait is bounded: a save whose copies make no progress for its `timeout_s`
  fails instead, on all ranks, when it is finished.
- Where nothing is being copied it costs a look at an empty list.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Protocol


class Staging(Protocol):
    """Something that copies tensors while the caller goes on."""

    def staged(self) -> bool:
        """Whether all is copied, or nothing more will be."""
        ...

    def wait_staged(self, waited_since: float) -> None:
        """Return when it is; `waited_since` is `time.perf_counter` when the fence was reached."""
        ...


@dataclass(frozen=True)
class Fences:
    """What fences took in this process.

    Attributes
    ----------
    passed
        How often a fence was reached.
    waited
        How often there was something to wait for.
    seconds, last_s, longest_s
        Waited in all, at the last of these, at the longest.
    """

    passed: int = 0
    waited: int = 0
    seconds: float = 0.0
    last_s: float = 0.0
    longest_s: float = 0.0


@dataclass
class _State:
    fences: Fences
    staging: list[Staging]


_state = _State(Fences(), [])
# A forked child has no native threads; what its parent copies is the parent's.
os.register_at_fork(after_in_child=_state.staging.clear)


def fence() -> float:
    """Wait until no save copies from tensors any more; not collective.

    To be called before anything changes, moves or frees tensors that an asynchronous save was
    given. Steps of PyTorch optimizers and ``load_state_dict`` call it by themselves.

    Returns
    -------
    float
        Seconds waited.
    """
    began = time.perf_counter()
    old = _state.fences
    if not _state.staging:
        _state.fences = Fences(old.passed + 1, old.waited, old.seconds, old.last_s, old.longest_s)
        return 0.0
    for one in list(_state.staging):
        one.wait_staged(began)
    forget_staged()
    waited_s = time.perf_counter() - began
    _state.fences = Fences(
        old.passed + 1,
        old.waited + 1,
        old.seconds + waited_s,
        waited_s,
        max(old.longest_s, waited_s),
    )
    return waited_s


def watch(one: Staging) -> None:
    """From now on fences wait for `one`."""
    forget_staged()
    _state.staging.append(one)


def passed() -> Fences:
    """What fences took so far."""
    return _state.fences


def forget_staged() -> None:
    """Let go of those that no fence will wait for: they keep files open."""
    _state.staging[:] = [one for one in _state.staging if not one.staged()]
