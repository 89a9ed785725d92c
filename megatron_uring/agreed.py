"""What was worked out for a state, kept between saves, where all ranks are known to keep it.

Guarantees
----------
- `AgreedCache.find` gives a value on all ranks or on none: one small reduction compares a number
  that stands for the value of each rank's own.
- Values of a bounded number of states are kept for each communicator, those used last; nothing is
  kept of a communicator that is gone.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Generic, TypeVar

import numpy as np

from megatron_uring.comm import Communicator

UNKNOWN, NOTHING = -1, 0
_STATES_KEPT = 4
Value = TypeVar("Value")


class AgreedCache(Generic[Value]):
    """By communicator, and by digest of this rank's part of a state."""

    def __init__(self) -> None:
        self._of_world: weakref.WeakKeyDictionary[Communicator, _Numbered[Value]] = (
            weakref.WeakKeyDictionary()
        )

    def find(
        self, world: Communicator, digest: bytes, *, nothing: bool = False
    ) -> tuple[int, Value | None]:
        """The value of this state; collective.

        Parameters
        ----------
        nothing
            This rank has no part in it.

        Returns
        -------
        int
            The value's number; `NOTHING` if no rank has a part, `UNKNOWN` if some rank lacks it.
        Value or None
            None for these two.
        """
        entries = self._of_world.setdefault(world, _Numbered()).entries
        number, value = entries.get(digest, (NOTHING if nothing else UNKNOWN, None))
        lowest, highest = world.allreduce(np.array([number, -number], np.int64), "min").tolist()
        if lowest != -highest or value is None:
            return (NOTHING if lowest == -highest == NOTHING else UNKNOWN), None
        entries.move_to_end(digest)
        return number, value

    def keep(self, world: Communicator, digest: bytes, value: Value) -> Value:
        """Keep what was worked out, on all ranks, because `find` gave them none."""
        known = self._of_world.setdefault(world, _Numbered())
        known.made += 1
        known.entries[digest] = known.made, value
        known.entries.move_to_end(digest)
        while len(known.entries) > _STATES_KEPT:
            known.entries.popitem(last=False)
        return value


class _Numbered(Generic[Value]):
    """Values with their numbers, which are the same on all ranks: they make values together."""

    def __init__(self) -> None:
        self.entries: OrderedDict[bytes, tuple[int, Value]] = OrderedDict()
        self.made = 0
