"""Structures: what is saved, gathered once and kept between saves of the same state.

Guarantees
----------
- Rows of shards cross the network once for each structure: later saves of the same one compare a
  number in a single collective. Addresses are never kept, only keys, shapes and offsets.
- Several structures are kept, since several models may save in turn; their number is bounded.
- The ownership of every element is proved, on rank 0, whenever a structure is new.
- What the index has of a structure is encoded once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from megatron_uring import aggregate, index, ownership
from megatron_uring.agreed import AgreedCache
from megatron_uring.comm import Communicator
from megatron_uring.index_rules import owned_rows
from megatron_uring.progress import step
from megatron_uring.shards import ShardTable
from megatron_uring.tables import Extents, Groups, Structure


class IndexRows:
    """What the index has of a structure."""

    def __init__(self, structure: Structure) -> None:
        self.rows: tuple[ShardTable, Extents] = owned_rows(structure)
        self._encoded: index.EncodedShards | None = None

    def encoded(self) -> index.EncodedShards:
        """Encoded at the first call."""
        if self._encoded is None:
            self._encoded = index.EncodedShards(*self.rows)
        return self._encoded


@dataclass
class KnownStructure:
    """What the index will have of the group (on its aggregator), and of all ranks (on rank 0)."""

    group: IndexRows | None
    world: IndexRows | None

    def encode(self) -> None:
        """Do now what the end of the save would otherwise wait for."""
        for rows in (self.group, self.world):
            if rows is not None:
                rows.encoded()


def share_structure(
    world: Communicator, group: Communicator, structure: Structure, grouping: bytes
) -> KnownStructure:
    """The structure of the group and of all ranks.

    It comes from the cache if that holds this structure on every rank; else it is gathered.
    """
    packed = structure.pack()
    digest = hashlib.blake2b(packed + grouping, digest_size=16).digest()
    _, found = _structures.find(world, digest)
    if found is not None:
        return found
    grouped = _gather_structures(group, structure, packed)
    if group is world:
        everything = grouped
    else:
        rows = b"" if grouped is None else packed if group.size == 1 else grouped.pack()
        everything = _gather_structures(world, grouped, rows)
    with step(world, "plan save"):
        if everything is not None:
            ownership.check_ownership(everything.shards, everything.rank, everything.owner)
    group_rows = world_rows = None if grouped is None else IndexRows(grouped)
    if everything is not grouped:
        world_rows = None if everything is None else IndexRows(everything)
    return _structures.keep(world, digest, KnownStructure(group_rows, world_rows))


def _gather_structures(
    communicator: Communicator, own: Structure | None, packed: bytes
) -> Structure | None:
    """Structures of all ranks of `communicator` that have one, as one, on its rank 0; else None."""
    if communicator.size == 1:
        return own
    # rank 0 keeps its own part as it is: what would it learn from unpacking it?
    sends = communicator.rank != 0
    parts = [
        Structure.unpack(part) for part in aggregate.gather(communicator, packed if sends else b"")
    ]
    if sends:
        return None
    return Structure.concatenate([*([own] if own is not None else []), *parts])


_structures: AgreedCache[KnownStructure] = AgreedCache()
_groups: dict[tuple[int, bytes], tuple[Communicator, Communicator]] = {}


def group_communicator(world: Communicator, groups: Groups) -> Communicator:
    """The communicator of this rank's group; made once for each election."""
    if len(groups.aggregator) == 1:
        return world
    key = (id(world), groups.group_of_rank.tobytes())
    kept = _groups.get(key)
    if kept is None:
        # the world is kept beside its part, so that its id is not given to another
        kept = _groups[key] = (world, world.split(int(groups.group_of_rank[world.rank])))
    return kept[1]
