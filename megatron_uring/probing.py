"""Probing: which slab size, depth and engine write fastest to a file system, and whether large
reads are faster direct or buffered; asked once, then remembered.

Guarantees
----------
- Short: a gigabyte is written and half of that read, and no candidate is begun after the budget of
  its `Effort`; an answer without all candidates is not kept for other processes. A thorough one, on
  request, takes up to half a minute. What the probe writes is removed; should it be killed, the
  next save sweeps it.
- The pool's size does not change: fewer larger slabs or more smaller ones.
- The default stays unless another choice is clearly faster: a noisy disk must not decide.
- Where the user set one of `slab_bytes`, `slab_count` and `queue_depth` to something else than the
  default, nothing is changed; an engine, mode or aggregation that the user named stays. A probe
  that fails changes nothing.
- A restore never probes: it may be anywhere, alone, and without the right to write. It asks what is
  remembered.
- The answer is kept as a profile (`profiles`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from megatron_uring import _engine, stage, write
from megatron_uring.config import MEBIBYTE, Config
from megatron_uring.errors import CheckpointError
from megatron_uring.layout import temporary_name
from megatron_uring.profiles import Tuning, recall, remember
from megatron_uring.progress import run_job
from megatron_uring.read import DIRECT_FROM_BYTES
from megatron_uring.tables import Staged

# Saves from which on half a second of probing is lost in the noise, on one rank.
FROM_BYTES = 4 << 30
_DEPTH_MAXIMUM = 32
CLEARLY_FASTER = 1.15
_SIZES = ("slab_bytes", "slab_count", "queue_depth")
_OPEN_CHOICES = ("engine", "direct", "aggregation")  # where they are "auto"
_READS = {"direct": True, "buffered": False}
_Name = TypeVar("_Name")
_Candidate = TypeVar("_Candidate")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Effort:
    """How much a probe tries.

    Attributes
    ----------
    budget_s
        No write is begun after so long, and no read after as long again; an answer without all
        candidates is not kept for others.
    rounds
        Of each candidate, in turns.
    file_bytes
        Of what is written.
    slab_mebibytes
        The default first.
    buffered
        Whether writes through the page cache are a candidate.
    read_bytes
        Sizes at which direct and buffered reads are compared, the last one that of the file.
    """

    budget_s: float
    rounds: int
    file_bytes: int
    slab_mebibytes: tuple[int, ...]
    buffered: bool
    read_bytes: tuple[int, ...]


SHORT = Effort(2.0, 2, 128 * MEBIBYTE, (16, 4, 32), False, (128 * MEBIBYTE,))
THOROUGH = Effort(
    12.0,
    5,
    256 * MEBIBYTE,
    (16, 1, 4, 32, 64),
    True,
    tuple(size * MEBIBYTE for size in (1, 4, 16, 64, 256)),
)


def tune(directory: str, config: Config, state_bytes: int) -> Config:
    """`config` for writing `state_bytes` to `directory`: as it is, or as a probe found to be
    faster.

    Called on one rank, which tells the others. The probe runs at most once for each file system;
    with ``probe="auto"`` only if the state is large.
    """
    if config.probe == "off" or _user_chose(config):
        return config
    found = recall(directory, config)
    if found is None and (config.probe == "on" or state_bytes >= FROM_BYTES):
        try:
            found = probe(directory, config)
        except (CheckpointError, OSError) as error:
            _log.warning("probe of %s failed, the defaults stay: %s", directory, error)
    return config if found is None else found.apply(config)


def direct_reads(directory: str, config: Config, read_bytes: int) -> str:
    """`config.direct`; where that is ``"auto"``, what a probe of the file system found to be faster
    for so many bytes, if there was one.
    """
    if config.direct != "auto" or config.probe == "off":
        return config.direct
    found = recall(directory, config)
    if found is None:
        return "auto"
    return "off" if found.buffered_reads or read_bytes < found.direct_from_bytes else "on"


def difference(config: Config, tuned: Config) -> dict[str, Any]:
    """What a probe changed in `config`, by name, to send."""
    changed = {name: getattr(tuned, name) for name in (*_OPEN_CHOICES, *_SIZES)}
    return {name: value for name, value in changed.items() if value != getattr(config, name)}


def adopt(config: Config, changed: dict[str, Any]) -> Config:
    """`config` with what another rank `changed`, unless the user chose this rank's own."""
    if _user_chose(config):
        return config
    kept = [name for name in _OPEN_CHOICES if getattr(config, name) != "auto"]
    return replace(config, **{name: changed[name] for name in changed if name not in kept})


def _user_chose(config: Config) -> bool:
    return any(getattr(config, name) != getattr(Config, name) for name in _SIZES)


def probe(directory: str, config: Config, effort: Effort = SHORT) -> Tuning:
    """Measure the candidates in `directory`, keep the answer, and return it.

    Raises
    ------
    StorageError
        If the directory cannot be written to.
    """
    # the answer is for those who set no size
    config = replace(config, **{name: getattr(Config, name) for name in _SIZES})
    candidates = _candidates(config, effort)
    source = np.random.default_rng(0).integers(0, 256, 16 * MEBIBYTE, dtype=np.uint8)
    speed = _rates(
        candidates, lambda one: _time_write(directory, one, source, effort.file_bytes), effort
    )
    rates = {name: effort.file_bytes / 1e9 / seconds for name, seconds in speed.items()}
    default = best = next(iter(candidates))
    complete = len(rates) == len(candidates)
    if complete and max(rates.values()) >= CLEARLY_FASTER * rates[default]:
        best = max(rates, key=lambda name: rates[name])
    chosen = candidates[best]
    reads = _read_rates(directory, chosen, source, effort)
    direct_from_bytes, buffered_reads = _direct_threshold(reads)
    found = Tuning(
        chosen.slab_bytes,
        chosen.slab_count,
        chosen.queue_depth,
        {name: round(rate, 3) for name, rate in rates.items()},
        best,
        chosen.engine,
        buffered_reads,
        {f"{mode}, {size // MEBIBYTE} MiB": round(rate, 3) for (mode, size), rate in reads.items()},
        chosen.direct == "off" and config.direct != "off",
        direct_from_bytes,
        complete=complete,
    )
    for candidate in candidates.values():
        # the caller's own may be at work; the mode of files is no matter of an engine's
        same = [replace(one, direct=candidate.direct) for one in (chosen, config)]
        if candidate not in same:
            stage.close_engine(candidate)
    if not complete:
        _log.warning(
            "probe of %s was not done after %g s: the defaults stay", directory, effort.budget_s
        )
    remember(directory, config, found)
    return found


def _rates(
    candidates: Mapping[_Name, _Candidate],
    time_one: Callable[[_Candidate], float],
    effort: Effort,
) -> dict[_Name, float]:
    """Median seconds of each candidate, in turns; without those for which there was no time."""
    seconds: dict[_Name, list[float]] = {name: [] for name in candidates}
    deadline = time.monotonic() + effort.budget_s
    for _ in range(effort.rounds):
        for name, candidate in candidates.items():
            if time.monotonic() < deadline:
                seconds[name].append(time_one(candidate))
    return {
        name: statistics.median(own) for name, own in seconds.items() if len(own) == effort.rounds
    }


def _direct_threshold(rates: Mapping[tuple[str, int], float]) -> tuple[int, bool]:
    """Bytes from which reads are direct, and whether none is to be; the default unless another is
    clearly faster.
    """
    sizes = sorted({size for _, size in rates}, reverse=True)
    threshold = DIRECT_FROM_BYTES
    for number, size in enumerate(sizes):
        direct, buffered = rates.get(("direct", size)), rates.get(("buffered", size))
        if direct is None or buffered is None:
            break
        if size >= DIRECT_FROM_BYTES and buffered >= CLEARLY_FASTER * direct:
            return (sizes[number - 1], False) if number else (DIRECT_FROM_BYTES, True)
        if size < DIRECT_FROM_BYTES:
            if direct < CLEARLY_FASTER * buffered:
                break
            threshold = size
    return threshold, False


def _candidates(config: Config, effort: Effort) -> dict[str, Config]:
    """By name, the default first."""
    kind = stage.open_engine(config).kind
    found = {label(kind, size): _candidate(config, size) for size in effort.slab_mebibytes}
    default = _candidate(config, effort.slab_mebibytes[0])
    if config.engine == "auto" and kind != "posix":
        found[label("posix", effort.slab_mebibytes[0])] = replace(default, engine="posix")
    if effort.buffered and config.direct == "auto":
        found["buffered"] = replace(default, direct="off")
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


def _time_write(directory: str, config: Config, source: np.ndarray, file_bytes: int) -> float:
    """Seconds from creating a file until it is durable; its engine is set up outside the clock."""
    engine = stage.open_engine(config)
    began = time.perf_counter()
    with _durable_file(directory, engine, config, source, file_bytes):
        return time.perf_counter() - began


def _read_rates(
    directory: str, config: Config, source: np.ndarray, effort: Effort
) -> dict[tuple[str, int], float]:
    """GB/s of cold reads by mode and bytes; nothing where the file system has no direct I/O, or the
    user does not want it.
    """
    engine = stage.open_engine(config)
    with _durable_file(directory, engine, config, source, effort.file_bytes) as file:
        if not file.direct:  # what was written through the page cache would still be there
            return {}
        ways = {
            (mode, size): (on, size) for size in effort.read_bytes for mode, on in _READS.items()
        }
        seconds = _rates(ways, lambda way: _time_read(engine, file.path, config, *way), effort)
        return {way: way[1] / 1e9 / spent for way, spent in seconds.items()}


def _time_read(
    engine: _engine.Engine, path: str, config: Config, direct: bool, length: int
) -> float:
    """Seconds of reading the first `length` bytes, cold."""
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
                np.full(1, length, np.int64),
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
    directory: str,
    engine: _engine.Engine,
    config: Config,
    source: np.ndarray,
    file_bytes: int,
) -> Iterator[_engine.File]:
    """A new file of `file_bytes`, written and synced; removed in the end."""
    path = os.path.join(directory, temporary_name("probe", os.urandom(8).hex()))
    staged = _repeated(source, file_bytes)
    file = write.create_subfile(
        engine, path, file_bytes, direct=config.direct, timeout_s=config.timeout_s
    )
    try:
        run_job(
            lambda: engine.write(file, 0, file_bytes, staged.pieces),
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


def _repeated(source: np.ndarray, length_bytes: int) -> Staged:
    """The same bytes again and again: not zeros, which some file systems do not store."""
    start = np.arange(0, length_bytes, source.nbytes, dtype=np.int64)
    none = np.zeros((len(start), 0), np.int64)
    address = np.full(len(start), source.ctypes.data, np.uint64)
    length = np.full(len(start), source.nbytes, np.int64)
    number = np.zeros(len(start), np.int32)
    return Staged(_engine.Pieces(number, start, address, length, none, none, none), (source,))
