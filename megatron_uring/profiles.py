"""Profiles: what a probe found out about a file system, and where it is remembered.

Guarantees
----------
- A profile is kept per user, machine, kernel and file system in a small JSON file, which is
  replaced as a whole; one that cannot be read is as good as none.
- A profile changes nothing that the user chose.
"""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_uring import write
from megatron_uring.config import MEBIBYTE, Config
from megatron_uring.errors import CheckpointError
from megatron_uring.read import DIRECT_FROM_BYTES

_log = logging.getLogger(__name__)
_remembered: dict[str, Tuning] = {}


@dataclass(frozen=True)
class Tuning:
    """How to stage on a file system, and how fast each candidate was.

    Attributes
    ----------
    slab_bytes, slab_count, queue_depth
        As in `Config`.
    gb_per_s
        Of each candidate, by name.
    chosen
        The name of the one that these sizes are of.
    engine
        ``"posix"`` where its threads wrote faster than a ring: io_uring serialises the writes of
        one file on file systems that do not let direct ones run in parallel.
    buffered_reads
        Whether large cold reads are faster through the page cache.
    read_gb_per_s
        ``"direct"`` and ``"buffered"``; empty where files are not direct.
    buffered_writes
        Whether large writes are faster through the page cache.
    direct_from_bytes
        Reads of so many bytes and more are direct, unless `buffered_reads`.
    aggregation
        ``"rank"`` or ``"shared"`` where that was clearly faster, measured with several ranks.
    complete
        Whether there was time for all candidates; else it is not kept.
    """

    slab_bytes: int
    slab_count: int
    queue_depth: int
    gb_per_s: dict[str, float]
    chosen: str = ""
    engine: str = "auto"
    buffered_reads: bool = False
    read_gb_per_s: dict[str, float] = field(default_factory=dict)
    buffered_writes: bool = False
    direct_from_bytes: int = DIRECT_FROM_BYTES
    aggregation: str = "auto"
    complete: bool = True

    def apply(self, config: Config) -> Config:
        """`config` with these sizes, and with this engine, mode and aggregation where it leaves
        them open.
        """
        direct = "off" if self.buffered_writes else "auto"
        return replace(
            config,
            engine=self.engine if config.engine == "auto" else config.engine,
            direct=direct if config.direct == "auto" else config.direct,
            aggregation=(self.aggregation if config.aggregation == "auto" else config.aggregation),
            slab_bytes=self.slab_bytes,
            slab_count=self.slab_count,
            queue_depth=self.queue_depth,
        )

    def reads_as(self, name: str) -> bool:
        """Whether reads go the way of a name in `read_gb_per_s`: ``"direct, 64 MiB"``."""
        mode, _, size = name.partition(", ")
        length = int(size.split()[0]) * MEBIBYTE if size else self.direct_from_bytes
        direct = not self.buffered_reads and length >= self.direct_from_bytes
        return (mode == "direct") == direct


def describe(profile: Mapping[str, Any]) -> str:
    """Fields of a profile in a line."""
    mode = "buffered" if profile["buffered_writes"] else "direct where it can be"
    reads = (
        "buffered reads"
        if profile["buffered_reads"]
        else f"direct reads from {profile['direct_from_bytes'] // MEBIBYTE} MiB on"
    )
    return (
        f"engine {profile['engine']}, writes {mode}, {profile['slab_count']} slabs of "
        f"{profile['slab_bytes'] // MEBIBYTE} MiB, depth {profile['queue_depth']}, {reads}, "
        f"aggregation {profile['aggregation']}"
    )


# -------------------------------------------------------------------------------------------------
# what is remembered


def _key(directory: str, config: Config) -> str:
    """One for each machine, kernel, file system, and what the user asked for."""
    kind = write.describe_storage(directory).file_system
    identity = os.statvfs(directory).f_fsid
    return (
        f"{platform.node()} {platform.release()} {kind} {identity:x} "
        f"engine={config.engine} direct={config.direct}"
    )


def recall(directory: str, config: Config) -> Tuning | None:
    """What is known of the file system under `directory`."""
    key = _key(directory, config)
    return _remembered.get(key) or _read_store().get(key)


def store_path() -> Path:
    """Of the file that profiles are kept in."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "megatron_uring" / "probe.json"


def remember(directory: str, config: Config, found: Tuning) -> None:
    """For this process, and for others if it is complete."""
    key = _key(directory, config)
    _remembered[key] = found
    if found.complete:
        _store(key, found)
    _log.info("probe of %s: %s", directory, found)


def known() -> dict[str, dict[str, Any]]:
    """Fields of all profiles that are remembered, by machine and file system."""
    found = {**_read_store(), **_remembered}
    return {key: asdict(tuning) for key, tuning in found.items()}


def _read_store() -> dict[str, Tuning]:
    try:
        entries = json.loads(store_path().read_text(encoding="utf-8"))
        found = {key: Tuning(**entry) for key, entry in entries.items()}
        for tuning in found.values():
            tuning.apply(Config())  # refuses sizes that cannot be
        return found
    except (OSError, ValueError, TypeError, AttributeError, CheckpointError):
        return {}


def _store(key: str, found: Tuning) -> None:
    """For later processes, where the user's cache can be written."""
    path = store_path()
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = {name: asdict(tuning) for name, tuning in _read_store().items()}
        temporary.write_text(json.dumps({**entries, key: asdict(found)}, indent=1), "utf-8")
        os.replace(temporary, path)
    except OSError as error:
        _log.warning("the probe's answer is kept for this process only: %s", error)
