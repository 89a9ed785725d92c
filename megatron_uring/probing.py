"""Probing: which slab size, depth and engine write fastest to a file system, and whether large
reads are faster direct or buffered; asked once, then remembered.

Guarantees
----------
- Short: a gigabyte is written and half of that read, and no candidate is begun after `BUDGET_S`;
  an answer without all candidates is not kept for other processes. What the probe writes is
  removed; should it be killed, the next save sweeps it.
- The pool's size does not change: fewer larger slabs or more smaller ones.
- The default stays unless another choice is clearly faster: a noisy disk must not decide.
- Where the user set one of `slab_bytes`, `slab_count` and `queue_depth` to something else than the
  default, nothing is changed; an engine that the user named stays. A probe that fails changes
  nothing.
- A restore never probes: it may be anywhere, alone, and without the right to write. It asks what is
  remembered.
- The answer is kept per user, machine and file system in a small JSON file, which is replaced as a
  whole; one that cannot be read is as good as none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from megatron_uring import _engine, stage, write
from megatron_uring.config import MEBIBYTE, Config
from megatron_uring.errors import CheckpointError
from megatron_uring.layout import temporary_name
from megatron_uring.progress import run_job
from megatron_uring.tables import Staged

BUDGET_S = 2.0
# Saves from which on half a second of probing is lost in the noise, on one rank.
FROM_BYTES = 4 << 30
_SLAB_MEBIBYTES = (16, 4, 32)
_DEPTH_MAXIMUM = 32
_ROUNDS = 2
_FILE_BYTES = 128 * MEBIBYTE
CLEARLY_FASTER = 1.15
_SIZES = ("slab_bytes", "slab_count", "queue_depth")
_READS = {"direct": True, "buffered": False}
_Name = TypeVar("_Name")
_Candidate = TypeVar("_Candidate")

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
    """

    slab_bytes: int
    slab_count: int
    queue_depth: int
    gb_per_s: dict[str, float]
    chosen: str = ""
    engine: str = "auto"
    buffered_reads: bool = False
    read_gb_per_s: dict[str, float] = field(default_factory=dict)

    def apply(self, config: Config) -> Config:
        """`config` with these sizes, and this engine unless it names one."""
        return replace(
            config,
            engine=self.engine if config.engine == "auto" else config.engine,
            slab_bytes=self.slab_bytes,
            slab_count=self.slab_count,
            queue_depth=self.queue_depth,
        )


def tune(directory: str, config: Config, state_bytes: int) -> Config:
    """`config` for writing `state_bytes` to `directory`: as it is, or as a probe found to be
    faster.

    Called on one rank, which tells the others. The probe runs at most once for each file system;
    with ``probe="auto"`` only if the state is large.
    """
    if config.probe == "off" or _user_chose(config):
        return config
    found = _recall(directory, config)
    if found is None and (config.probe == "on" or state_bytes >= FROM_BYTES):
        try:
            found = probe(directory, config)
        except (CheckpointError, OSError) as error:
            _log.warning("probe of %s failed, the defaults stay: %s", directory, error)
    return config if found is None else found.apply(config)


def direct_reads(directory: str, config: Config) -> str:
    """`config.direct`; ``"off"`` where that is ``"auto"`` and a probe of the file system found
    large reads to be faster buffered.
    """
    if config.direct != "auto" or config.probe == "off":
        return config.direct
    found = _recall(directory, config)
    return "off" if found is not None and found.buffered_reads else "auto"


def difference(config: Config, tuned: Config) -> dict[str, Any]:
    """What a probe changed in `config`, by name, to send."""
    changed = {name: getattr(tuned, name) for name in ("engine", *_SIZES)}
    return {name: value for name, value in changed.items() if value != getattr(config, name)}


def adopt(config: Config, changed: dict[str, Any]) -> Config:
    """`config` with what another rank `changed`, unless the user chose this rank's own."""
    if _user_chose(config):
        return config
    kept = ("engine",) if config.engine != "auto" else ()
    return replace(config, **{name: changed[name] for name in changed if name not in kept})


def _user_chose(config: Config) -> bool:
    return any(getattr(config, name) != getattr(Config, name) for name in _SIZES)


def probe(directory: str, config: Config) -> Tuning:
    """Measure the candidates in `directory`, keep the answer, and return it.

    Raises
    ------
    StorageError
        If the directory cannot be written to.
    """
    # the answer is for those who set no size
    config = replace(config, **{name: getattr(Config, name) for name in _SIZES})
    candidates = _candidates(config)
    source = np.random.default_rng(0).integers(0, 256, 16 * MEBIBYTE, dtype=np.uint8)
    speed = _rates(candidates, lambda candidate: _time_write(directory, candidate, source))
    default = best = next(iter(candidates))
    complete = len(speed) == len(candidates)
    if complete and max(speed.values()) >= CLEARLY_FASTER * speed[default]:
        best = max(speed, key=lambda name: speed[name])
    chosen = candidates[best]
    reads = _read_rates(directory, chosen, source)
    found = Tuning(
        chosen.slab_bytes,
        chosen.slab_count,
        chosen.queue_depth,
        {name: round(rate, 3) for name, rate in speed.items()},
        best,
        chosen.engine,
        len(reads) == len(_READS) and reads["buffered"] >= CLEARLY_FASTER * reads["direct"],
        {name: round(rate, 3) for name, rate in reads.items()},
    )
    for candidate in candidates.values():
        if candidate not in (chosen, config):  # the caller's own may be at work
            stage.close_engine(candidate)
    _remember(directory, config, found, keep=complete)
    return found


def _rates(
    candidates: Mapping[_Name, _Candidate], time_one: Callable[[_Candidate], float]
) -> dict[_Name, float]:
    """GB/s of each candidate, in turns; without those for which there was no time."""
    seconds: dict[_Name, list[float]] = {name: [] for name in candidates}
    deadline = time.monotonic() + BUDGET_S
    for _ in range(_ROUNDS):
        for name, candidate in candidates.items():
            if time.monotonic() < deadline:
                seconds[name].append(time_one(candidate))
    return {
        name: _FILE_BYTES / 1e9 / statistics.median(own)
        for name, own in seconds.items()
        if len(own) == _ROUNDS
    }


def _candidates(config: Config) -> dict[str, Config]:
    """By name, the default first."""
    kind = stage.open_engine(config).kind
    found = {label(kind, size): _candidate(config, size) for size in _SLAB_MEBIBYTES}
    if config.engine == "auto" and kind != "posix":
        size = _SLAB_MEBIBYTES[0]
        found[label("posix", size)] = replace(_candidate(config, size), engine="posix")
    return found


def label(kind: str, mebibytes: int) -> str:
    """Name of a candidate."""
    return f"{kind}, slabs of {mebibytes} MiB"


def _candidate(config: Config, mebibytes: int) -> Config:
    count = max(1, config.slab_bytes * config.slab_count // (mebibytes * MEBIBYTE))
    return replace(
        config,
        slab_bytes=mebibytes * MEBIBYTE,
        slab_count=count,
        queue_depth=min(count, _DEPTH_MAXIMUM),
    )


def _time_write(directory: str, config: Config, source: np.ndarray) -> float:
    """Seconds from creating a file until it is durable; its engine is set up outside the clock."""
    engine = stage.open_engine(config)
    began = time.perf_counter()
    with _durable_file(directory, engine, config, source):
        return time.perf_counter() - began


def _read_rates(directory: str, config: Config, source: np.ndarray) -> dict[str, float]:
    """GB/s of cold reads, direct and buffered; nothing where the file system has no direct I/O,
    or the user does not want it.
    """
    engine = stage.open_engine(config)
    with _durable_file(directory, engine, config, source) as file:
        if not file.direct:  # what was written through the page cache would still be there
            return {}
        return _rates(_READS, lambda direct: _time_read(engine, file.path, config, direct=direct))


def _time_read(engine: _engine.Engine, path: str, config: Config, *, direct: bool) -> float:
    """Seconds of reading the whole file, cold."""
    file = _engine.File.open(path, writable=False, direct=direct)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        run_job(
            lambda: engine.read(
                [file],
                np.zeros(1, np.int32),
                np.zeros(1, np.int64),
                np.full(1, _FILE_BYTES, np.int64),
                stage.stage_nothing().pieces,
                None,
            ),
            "probe",
            path,
            config.timeout_s,
            alive=(file,),
        )
        return time.perf_counter() - began
    finally:
        os.close(descriptor)
        file.close()


@contextlib.contextmanager
def _durable_file(
    directory: str, engine: _engine.Engine, config: Config, source: np.ndarray
) -> Iterator[_engine.File]:
    """A new file of `_FILE_BYTES`, written and synced; removed in the end."""
    path = os.path.join(directory, temporary_name("probe", os.urandom(8).hex()))
    staged = _repeated(source)
    file = write.create_subfile(
        engine, path, _FILE_BYTES, direct=config.direct, timeout_s=config.timeout_s
    )
    try:
        run_job(
            lambda: engine.write(file, 0, _FILE_BYTES, staged.pieces),
            "probe",
            path,
            config.timeout_s,
            alive=(staged, file),
        )
        write.sync_subfile(engine, file, config.timeout_s)
        yield file
    finally:
        with contextlib.suppress(OSError):
            file.close()
        _engine.remove(path)


def _repeated(source: np.ndarray) -> Staged:
    """The same bytes again and again: not zeros, which some file systems do not store."""
    start = np.arange(0, _FILE_BYTES, source.nbytes, dtype=np.int64)
    none = np.zeros((len(start), 0), np.int64)
    address = np.full(len(start), source.ctypes.data, np.uint64)
    length = np.full(len(start), source.nbytes, np.int64)
    number = np.zeros(len(start), np.int32)
    return Staged(_engine.Pieces(number, start, address, length, none, none, none), (source,))


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


def _recall(directory: str, config: Config) -> Tuning | None:
    key = _key(directory, config)
    return _remembered.get(key) or _read_store().get(key)


def _store() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "megatron_uring" / "probe.json"


def _remember(directory: str, config: Config, found: Tuning, *, keep: bool) -> None:
    """For this process, and for others if `keep`."""
    key = _key(directory, config)
    _remembered[key] = found
    if keep:
        _store_answer(key, found)
    else:
        _log.warning("probe of %s was not done after %g s: the defaults stay", directory, BUDGET_S)
    _log.info("probe of %s: %s", directory, found)


def _read_store() -> dict[str, Tuning]:
    try:
        entries = json.loads(_store().read_text(encoding="utf-8"))
        found = {key: Tuning(**entry) for key, entry in entries.items()}
        for tuning in found.values():
            tuning.apply(Config())  # refuses sizes that cannot be
        return found
    except (OSError, ValueError, TypeError, AttributeError, CheckpointError):
        return {}


def _store_answer(key: str, found: Tuning) -> None:
    """For later processes, where the user's cache can be written."""
    path = _store()
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = {name: asdict(tuning) for name, tuning in _read_store().items()}
        temporary.write_text(json.dumps({**entries, key: asdict(found)}, indent=1), "utf-8")
        os.replace(temporary, path)
    except OSError as error:
        _log.warning("the probe's answer is kept for this process only: %s", error)
