"""What a save or restore reports of itself.

Guarantees
----------
- Frozen; plain numbers and text, so that it can be printed, compared and written as JSON.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Totals:
    """What a save wrote, of all ranks."""

    state_bytes: int = 0
    file_bytes: int = 0
    files: int = 0
    slowest_rank: int = 0
    slowest_s: float = 0.0


@dataclass(frozen=True)
class Report:
    """What one save or restore did, as this rank saw it.

    Attributes
    ----------
    directory, save_id
    state_bytes
        Tensors and objects of all ranks (save) or of this rank (restore).
    file_bytes, files
        On disk, index included (save), or read (restore).
    seconds
        From the call until the checkpoint is committed (save) or the data in place (restore).
    phases_s
        The same, by step. Of an asynchronous save ``"drain"`` is what lies between the return of
        the call and the commit.
    engine, communicator, aggregation, staging
        What ran, and why.
    direct
        Whether O_DIRECT was in force on this rank's subfile (save), or on all that were read
        (restore).
    shared_bytes
        What other ranks of the node had read already (restore), beyond `file_bytes`.
    local_bytes
        Of `file_bytes`, read from the node's ``staging_directory`` (restore).
    copy_s, checksum_s
        Seconds of the native threads, beside the writing or reading.
    blocked_s
        For how long the caller of a save waited: in the call, at fences, and for the commit.
    fence_s
        Of that, at fences.
    acknowledged_s
        After how many seconds everything was in the node's ``staging_directory``, on this rank; 0:
        it was not used.
    staged_s, drained_s
        How many seconds after the call everything was copied, and everything written, on this rank;
        of an asynchronous save, written and synced, which begins when somebody asks for it (a poll,
        a wait).
    asynchronous
        Whether the call returned before the data was written.
    lazy_bytes
        Of this rank's tensors: copied after the call had returned.
    slowest_rank, slowest_s
        Which rank took longest to write and sync its own part, and how long, from when all ranks
        had come to the save (phase ``"collect"``), waiting for others apart.
    """

    directory: str
    save_id: str
    state_bytes: int
    file_bytes: int
    files: int
    seconds: float
    phases_s: dict[str, float] = field(default_factory=dict)
    engine: str = ""
    communicator: str = ""
    aggregation: str = ""
    staging: str = ""
    direct: bool = False
    shared_bytes: int = 0
    local_bytes: int = 0
    copy_s: float = 0.0
    checksum_s: float = 0.0
    blocked_s: float = 0.0
    fence_s: float = 0.0
    acknowledged_s: float = 0.0
    staged_s: float = 0.0
    drained_s: float = 0.0
    asynchronous: bool = False
    lazy_bytes: int = 0
    slowest_rank: int = 0
    slowest_s: float = 0.0

    @property
    def durable_s(self) -> float:
        """Seconds after this rank called a save, when the data of all ranks was durable."""
        return self.slowest_s + self.phases_s["collect"] if self.asynchronous else self.seconds

    @property
    def blocked_ms(self) -> float:
        """For how long the caller of a save waited, in milliseconds."""
        return self.blocked_s * 1e3

    @property
    def gigabytes_per_s(self) -> float:
        """Of the state of all ranks of a save, until it was durable."""
        return self.state_bytes / self.durable_s / 1e9 if self.durable_s else 0.0

    def summary(self) -> dict[str, float]:
        """What its fields do not say by themselves of a save, in plain numbers."""
        names = ("durable_s", "blocked_ms", "gigabytes_per_s")
        return {name: getattr(self, name) for name in names}

    def line(self) -> str:
        """A save in one line, for a log."""
        on_node = f"on the node after {self.acknowledged_s:.2f} s, " if self.acknowledged_s else ""
        return (
            f"saved {self.directory}: {amount(self.state_bytes)} {on_node}durable after "
            f"{self.durable_s:.2f} s ({amount(self.gigabytes_per_s * 1e9)}/s), rank "
            f"{self.slowest_rank} slowest with {self.slowest_s:.2f} s; this rank was blocked for "
            f"{self.blocked_ms:.0f} ms, {self.fence_s * 1e3:.0f} ms of them at fences"
        )


def amount(count: float) -> str:
    """Bytes for people: what is no tenth of a gigabyte in MB, or kB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size / 10:
            return f"{count / size:.2f} {unit}"
    return f"{count / 1e3:.2f} kB"


def loaded_versions() -> dict[str, str]:
    """Of this package and of those of the others that this process has imported."""
    names = ("megatron_uring", "torch", "numpy", "h5py", "mpi4py", "megatron.core")
    return {
        name: str(getattr(sys.modules[name], "__version__", "unknown"))
        for name in names
        if name in sys.modules
    }
