"""The timeline of a save: what each rank did when; kept beside the checkpoint, shown as a trace.

A rank's spans are counted from the moment at which it left the save's first collective, which all
ranks leave together (`Clock.met_s`). Clocks of two hosts may differ: a trace puts that moment of
each host (of its earliest rank) at one place, and tells by how much it moved the host. Ranks of one
host share a clock and keep their distances.

Guarantees
----------
- A save never fails for its timeline: what goes wrong with it after the commit is logged.
- It costs one gather of about a kilobyte from each rank, which rank 0 writes as it comes, after the
  commit and without a wait for the disk.
- A checkpoint is whole without it; a new save takes the old one's away.
- What is read is bounded and checked: a file that is no whole timeline is refused by name.
- A trace is in Chrome's Trace Event Format; spans of one track lie within one another or apart.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from megatron_uring import _engine, commit, roots
from megatron_uring.comm import Communicator
from megatron_uring.errors import CorruptionError, StorageError, as_checkpoint_error
from megatron_uring.layout import INDEX_NAME, timeline_name
from megatron_uring.progress import Clock

_log = logging.getLogger("megatron_uring")
FORMAT, VERSION = "megatron_uring timeline", 1
_LARGEST_BYTES = 1 << 29
_LARGEST_NUMBER = 1 << 53  # what JSON numbers hold exactly
_LONGEST_NAME = 100
# What native threads do while the caller goes on has a track of its own.
_NATIVE = frozenset(("write", "write to node", "staging", "sync", "forward"))
_TRACKS_FROM = 1000


# -------------------------------------------------------------------------------------------------
# writing


def keep(
    world: Communicator,
    directory: str,
    save_id: str,
    clock: Clock,
    *,
    asynchronous: bool,
    state_bytes: int,
) -> None:
    """Write the timeline of a save that has just been committed; collective, raises nothing."""
    try:
        lines = world.gather(_line(world, clock))
        if lines is None:
            return
        head = {
            "format": FORMAT,
            "version": VERSION,
            "save_id": save_id,
            "world_size": world.size,
            "hosts": world.hosts,
            "asynchronous": asynchronous,
            "state_bytes": state_bytes,
        }
        data = b"\n".join([json.dumps(head).encode(), *(line.tobytes() for line in lines), b""])
        _engine.write_file(os.path.join(directory, timeline_name(save_id)), data, sync=False)
    except Exception as error:
        _log.warning("the save to %s is whole, but has no timeline: %s", directory, error)


def _line(world: Communicator, clock: Clock) -> bytes:
    """What this rank has to tell."""
    met = clock.began + clock.met_s
    # the outer one first of two that begin together
    spans = sorted(clock.spans, key=lambda span: (span.begin, -span.end))
    line = {
        "rank": world.rank,
        "node": int(world.node_of_rank[world.rank]),
        "met_us": round((clock.began_at_s + clock.met_s) * 1e6),
        "name": [span.name for span in spans],
        "begin_us": [round((span.begin - met) * 1e6) for span in spans],
        "end_us": [round((span.end - met) * 1e6) for span in spans],
        "bytes": [span.moved_bytes for span in spans],
    }
    return json.dumps(line, separators=(",", ":")).encode()


# -------------------------------------------------------------------------------------------------
# reading


@dataclass(frozen=True)
class RankSpans:
    """Spans of one rank.

    Attributes
    ----------
    rank, node
    met_us
        When it left the first collective: microseconds since 1970 by its host's clock.
    name, begin_us, end_us, moved_bytes
        Of each span, in order of their begin; microseconds since that moment.
    """

    rank: int
    node: int
    met_us: int
    name: tuple[str, ...]
    begin_us: tuple[int, ...]
    end_us: tuple[int, ...]
    moved_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Timeline:
    """What all ranks did in one save.

    Attributes
    ----------
    save_id, asynchronous, state_bytes
    hosts
        Of each node.
    ranks
        In order of rank.
    """

    save_id: str
    asynchronous: bool
    state_bytes: int
    hosts: tuple[str, ...]
    ranks: tuple[RankSpans, ...]


def read(directory: str) -> Timeline:
    """Timeline of the checkpoint in `directory`, or of the newest one under it.

    Raises
    ------
    StorageError
        If it has none, or it cannot be read.
    CorruptionError
        If the file is no whole timeline of this checkpoint.
    NotACheckpointError
        If there is no checkpoint.
    """
    directory = roots.resolve_latest(directory)
    save_id = commit.committed_save_id(directory)
    if save_id is None:
        path = os.path.join(directory, INDEX_NAME)
        raise CorruptionError("read timeline", path=path, found="an index without a save id")
    path = os.path.join(directory, timeline_name(save_id))
    lines = _read_bounded(path).split(b"\n")
    try:
        return _parse([json.loads(line) for line in lines if line], save_id)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptionError(
            "read timeline",
            path=path,
            expected=f"{FORMAT}, version {VERSION}, of save {save_id}",
            found=f"something else: {type(error).__name__}: {error}",
        ) from error


def _read_bounded(path: str) -> bytes:
    try:
        facts = os.stat(path)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > _LARGEST_BYTES:
            raise CorruptionError(
                "read timeline",
                path=path,
                expected=f"a file of at most {_LARGEST_BYTES} bytes",
                found=f"{facts.st_size} bytes"
                if stat.S_ISREG(facts.st_mode)
                else "something that is no file",
            )
        return _engine.read_file(path)
    except FileNotFoundError as error:
        raise StorageError(
            "read timeline",
            path=path,
            found="no such file",
            cause="saved with MEGATRON_URING_TIMELINE=off, or it could not be written; the "
            "checkpoint is whole without it",
        ) from error
    except OSError as error:
        raise as_checkpoint_error(error, "read timeline", path) from error


def _parse(lines: list[Any], save_id: str) -> Timeline:
    """Raises ValueError, KeyError or TypeError for what is no timeline."""
    if not lines:
        raise ValueError("the file is empty")
    head = lines[0]
    for name, value in (("format", FORMAT), ("version", VERSION), ("save_id", save_id)):
        if head[name] != value:
            raise ValueError(f"{name} is {str(head[name])[:_LONGEST_NAME]!r}")
    hosts = tuple(map(_text, head["hosts"]))
    if len(lines) - 1 != _number(head["world_size"]):
        raise ValueError(f"{len(lines) - 1} of {head['world_size']} ranks")
    ranks = [_parse_rank(line, len(hosts)) for line in lines[1:]]
    if [one.rank for one in ranks] != list(range(len(ranks))):
        raise ValueError("ranks that are not in order")
    return Timeline(
        save_id, head["asynchronous"] is True, _number(head["state_bytes"]), hosts, tuple(ranks)
    )


def _parse_rank(line: Mapping[str, Any], nodes: int) -> RankSpans:
    one = RankSpans(
        _number(line["rank"]),
        _number(line["node"]),
        _number(line["met_us"]),
        tuple(map(_text, line["name"])),
        tuple(map(_number, line["begin_us"])),
        tuple(map(_number, line["end_us"])),
        tuple(map(_number, line["bytes"])),
    )
    columns = (one.begin_us, one.end_us, one.moved_bytes)
    if any(len(column) != len(one.name) for column in columns) or not 0 <= one.node < nodes:
        raise ValueError(f"rank {one.rank}: columns that differ in length, or an unknown node")
    if any(begin > end for begin, end in zip(one.begin_us, one.end_us, strict=True)):
        raise ValueError(f"rank {one.rank}: a span that ends before it begins")
    return one


def _number(value: object) -> int:
    if type(value) is not int or abs(value) > _LARGEST_NUMBER:
        raise ValueError(f"expected a whole number, found {str(value)[:_LONGEST_NAME]!r}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, found {str(value)[:_LONGEST_NAME]!r}")
    return value[:_LONGEST_NAME]


# -------------------------------------------------------------------------------------------------
# the trace


def trace(timeline: Timeline) -> dict[str, Any]:
    """A timeline in the Trace Event Format, for Perfetto and ``chrome://tracing``.

    A process stands for each node, counted from 1, and two threads for each rank: the caller and
    the native threads. Perfetto sorts by their numbers, whatever sort index they have, and calls a
    thread with the number of a process its main thread: so both of a rank follow each other, in
    order of rank, behind the numbers of all nodes.
    """
    shifts = _clock_shifts(timeline)
    zeros = [one.met_us - shifts[one.node] for one in timeline.ranks]
    begins = [
        zero + one.begin_us[0]
        for zero, one in zip(zeros, timeline.ranks, strict=True)
        if one.begin_us
    ]
    origin = min(begins, default=0)
    events = list(_names(timeline))
    first = _first_track(timeline)
    for zero, one in zip(zeros, timeline.ranks, strict=True):
        events += _spans(one, zero - origin, first + 2 * one.rank)
    began = datetime.fromtimestamp(origin / 1e6, timezone.utc)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "save_id": timeline.save_id,
            "asynchronous": timeline.asynchronous,
            "state_bytes": timeline.state_bytes,
            "began": began.isoformat(),
            "clock_shift_us": {
                f"node {node} ({timeline.hosts[node]})": shift for node, shift in shifts.items()
            },
        },
    }


def _clock_shifts(timeline: Timeline) -> dict[int, int]:
    """How far the clock of each node is ahead of that of rank 0's, in microseconds, if the earliest
    rank of each left the first collective at the same time.
    """
    earliest: dict[int, int] = {}
    for one in timeline.ranks:
        earliest[one.node] = min(one.met_us, earliest.get(one.node, one.met_us))
    first = earliest[timeline.ranks[0].node] if timeline.ranks else 0
    return {node: met_us - first for node, met_us in sorted(earliest.items())}


def _first_track(timeline: Timeline) -> int:
    """Number of the first rank's caller, above those of all nodes: a thousand, up to 999 nodes."""
    return _TRACKS_FROM * (1 + len(timeline.hosts) // _TRACKS_FROM)


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """What the tracks are called, and how they are sorted."""

    def label(what: str, pid: int, tid: int, **arguments: object) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": arguments}

    first = _first_track(timeline)
    for node, host in enumerate(timeline.hosts):
        yield label("process_name", node + 1, 0, name=f"node {node} ({host})")
        yield label("process_sort_index", node + 1, 0, sort_index=node)
    for one in timeline.ranks:
        for tid in (first + 2 * one.rank, first + 2 * one.rank + 1):
            name = f"rank {one.rank}" + (" native threads" if tid % 2 else "")
            yield label("thread_name", one.node + 1, tid, name=name)
            yield label("thread_sort_index", one.node + 1, tid, sort_index=tid)


def _spans(one: RankSpans, zero_us: int, caller: int) -> Iterator[dict[str, Any]]:
    """Those of a rank whose caller has the track `caller`."""
    columns = (one.name, one.begin_us, one.end_us, one.moved_bytes)
    for name, begin_us, end_us, moved_bytes in zip(*columns, strict=True):
        native = name in _NATIVE
        event: dict[str, Any] = {
            "ph": "X",
            "name": name,
            "cat": "native" if native else "caller",
            "pid": one.node + 1,
            "tid": caller + native,
            "ts": zero_us + begin_us,
            "dur": end_us - begin_us,
        }
        if moved_bytes:
            event["args"] = {"bytes": moved_bytes}
            if end_us > begin_us:
                event["args"]["GB/s"] = round(moved_bytes / (end_us - begin_us) / 1e3, 3)
        yield event


def write_trace(directory: str, path: str) -> int:
    """Write the trace of a checkpoint to a file; returns how many events it has.

    Raises
    ------
    CheckpointError
        As `read`; or if the file cannot be written.
    """
    made = trace(read(directory))
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(made, file)
    except OSError as error:
        raise as_checkpoint_error(error, "write trace", path) from error
    return len(made["traceEvents"])
