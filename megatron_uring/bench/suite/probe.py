"""``megatron-uring bench probe``: the thorough probe of a file system, and, with several ranks,
whether they had better share a file.

Guarantees
----------
- Half a minute: `probing.THOROUGH` bounds what rank 0 does alone, and no further round of the saves
  that are compared is begun after `_SAVES_S`.
- Collective. The answer is rank 0's, and is kept where its saves look for it.
- Aggregation stays open unless one way was clearly faster; one rank cannot tell.
- What it writes is removed.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from dataclasses import replace

import numpy as np

from megatron_uring import checkpoint, probing, profiles
from megatron_uring.bench.sections import FOLDER, removed_in_the_end
from megatron_uring.bench.state import large_state
from megatron_uring.comm import Communicator
from megatron_uring.config import Config
from megatron_uring.profiles import Tuning
from megatron_uring.progress import step

_SAVES_S = 6.0
_ROUNDS = 3
_GIGABYTES_PER_RANK = 0.27
_WAYS = ("rank", "shared")


def probe(directory: str, world: Communicator, config: Config) -> Tuning | None:
    """Measure, keep the answer, and return it on rank 0.

    Raises
    ------
    CheckpointError
        If the directory cannot be written to; on all ranks.
    """
    found: Tuning | None = None
    with step(world, "probe"):
        if world.rank == 0:
            found = probing.probe(directory, config, probing.THOROUGH)
    if world.size == 1 or config.aggregation != "auto":
        return found
    changed = {} if found is None else probing.difference(config, found.apply(config))
    message = json.dumps(changed).encode() if world.rank == 0 else None
    tuned = probing.adopt(config, json.loads(bytes(world.broadcast(message))))
    chosen = _faster_aggregation(directory, world, replace(tuned, probe="off"))
    if found is None:
        return None
    found = replace(found, aggregation=chosen)
    profiles.remember(directory, config, found)
    return found


def _faster_aggregation(directory: str, world: Communicator, config: Config) -> str:
    """``"rank"`` or ``"shared"`` where that is clearly faster; the same on all ranks."""
    shards = large_state(world.rank, _GIGABYTES_PER_RANK).shards()
    folder = os.path.join(os.path.abspath(directory), FOLDER)
    seconds: dict[str, list[int]] = {way: [] for way in _WAYS}
    with removed_in_the_end(world, folder):
        began = time.monotonic()
        for _ in range(_ROUNDS + 1):  # the first sets all up
            for way in _WAYS:
                start = time.perf_counter()
                own = replace(config, aggregation=way)
                checkpoint.save(shards, folder, config=own, communicator=world)
                spent = [time.perf_counter() - start, time.monotonic() - began]
                micros = np.array([int(one * 1e6) for one in spent], np.int64)
                slowest, since = world.allreduce(micros, "max").tolist()
                seconds[way].append(slowest)
            if since > _SAVES_S * 1e6:
                break
        world.barrier()
    if any(len(own) <= _ROUNDS for own in seconds.values()):
        return "auto"  # too slow to tell
    medians = {way: statistics.median(own[1:]) for way, own in seconds.items()}
    best, other = sorted(_WAYS, key=lambda way: medians[way])
    return best if medians[other] >= probing.CLEARLY_FASTER * medians[best] else "auto"
