"""Claims: of several ranks that hold the same piece, and cannot know of each other, one writes it.

A DTensor on a part of the ranks (FSDP beside tensor parallelism, pipeline stages) says nothing of
the ranks outside of its mesh: they may hold the same piece on a mesh of their own, or not know the
key at all.

Guarantees
----------
- Exactly one of the ranks that claim a piece owns it, another one from piece to piece.
- Where no rank claims anything, and where ranks claim what they did before, it costs one small
  reduction. What was decided is kept for a bounded number of states.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_uring.agreed import NOTHING, AgreedCache
from megatron_uring.columns import BoolArray, Int64Array
from megatron_uring.comm import Communicator
from megatron_uring.tables import Provided


def claim(key: str, offset: Sequence[int], shape: Sequence[int]) -> int:
    """A number that stands for a piece of a tensor on all ranks; never 0."""
    text = f"{key}\0{tuple(offset)}\0{tuple(shape)}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1 | 1


def settle(world: Communicator, provided: Provided) -> tuple[Provided, bool]:
    """Decide who owns what is claimed; collective.

    Returns
    -------
    Provided
        With `owner` as decided, and no claims.
    bool
        Whether any rank claimed anything; the same on all ranks.
    """
    rows = np.flatnonzero(provided.claims)
    own = provided.claims[rows]
    digest = hashlib.blake2b(own.tobytes(), digest_size=16).digest()
    number, mine = _decisions.find(world, digest, nothing=not len(own))
    if number == NOTHING:
        return provided, False
    if mine is None:
        mine = _decisions.keep(world, digest, _decide(world, own))
    owner = provided.owner.copy()
    owner[rows] = mine
    return replace(provided, owner=owner, claims=np.zeros(0, np.int64)), True


def _decide(world: Communicator, own: Int64Array) -> BoolArray:
    """Which of this rank's claims it is given, bool [len(own)]."""
    parts = world.gather(own)
    table = b""
    if parts is not None:
        claims = [part.view(np.int64) for part in parts]
        everything = np.concatenate(claims)
        rank = np.repeat(np.arange(world.size, dtype=np.int32), [len(part) for part in claims])
        order = np.lexsort((rank, everything))
        piece, first, count = np.unique(everything[order], return_index=True, return_counts=True)
        chosen = rank[order][first + piece % count]
        table = piece.tobytes() + chosen.tobytes()
    table = world.broadcast(table if world.rank == 0 else None)
    pieces = len(table) // 12
    known = np.frombuffer(table, np.int64, pieces)
    owner = np.frombuffer(table, np.int32, pieces, offset=8 * pieces)
    # a rank that names a piece twice keeps both: the proof of ownership refuses that by name
    decided: BoolArray = owner[np.searchsorted(known, own)] == world.rank
    return decided


_decisions: AgreedCache[BoolArray] = AgreedCache()
