"""Results of the microbenchmarks: an append-only JSON Lines file, one record for each trial.

`RESULTS.md` beside this file is the schema in words.

Guarantees
----------
- A record is appended with one write and synced: a run that is killed leaves every trial that was
  over. A line that is torn by that is counted by `read_results`, never guessed at, and the next
  record begins on a line of its own.
- A record stands alone: it says on which machine, file system and versions it was measured.
- What has another schema, or a field of another type, is refused, naming file and line.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_uring import _engine
from megatron_uring.bench import measure, report
from megatron_uring.write import describe_storage

SCHEMA = 1
WRITE, READ = "write", "read"
PATTERN, OURS, PEER, EMULATION = "pattern", measure.OURS, measure.PEER, "emulation"
_FIELD_TYPES: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "float": (int, float),
}

Axis = str | int | float | bool


@dataclass(frozen=True)
class Record:
    """One trial of one case; fields as in `RESULTS.md`.

    Attributes
    ----------
    run
        Of one start of the suite; a resumed run keeps it.
    suite, group, case
        What was measured; a case has one name within its group.
    kind
        ``"pattern"``, ``"ours"``, ``"peer"`` or ``"emulation"``.
    operation
        ``"write"`` or ``"read"``.
    trial
        From 1; 0 is the warm-up, whose time counts for nothing.
    total_bytes
        Of all ranks.
    seconds
        Of the slowest rank, opening, allocation and sync inside.
    process_cpu_s, machine_cpu_s
        Of all ranks together, and of the whole machine of rank 0.
    peak_bytes
        Resident memory added, of the worst rank.
    axes
        What distinguishes the case; see `RESULTS.md`.
    phases_s
        Parts of the time, each of its slowest rank.
    operations
        Calls to the file system, of all ranks, counted in the warm-up; empty elsewhere.
    error
        Why there are no figures; empty if there are.
    environment
        Of `describe_environment`.
    time
        When the trial began, ISO 8601, UTC.
    """

    run: str
    suite: str
    group: str
    case: str
    kind: str
    operation: str
    trial: int
    ranks: int
    nodes: int
    total_bytes: int
    seconds: float
    process_cpu_s: float
    machine_cpu_s: float
    peak_bytes: int
    axes: Mapping[str, Axis]
    phases_s: Mapping[str, float] = field(default_factory=dict)
    operations: Mapping[str, int] = field(default_factory=dict)
    error: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    time: str = ""
    schema: int = SCHEMA

    @property
    def key(self) -> tuple[str, str, int]:
        """What a resumed run need not measure again."""
        return self.group, self.case, self.trial


class ResultsError(ValueError):
    """A results file that cannot be read."""


@dataclass(frozen=True)
class Results:
    """What a results file holds.

    Attributes
    ----------
    torn_lines
        Lines that a killed run left unfinished.
    """

    records: tuple[Record, ...]
    torn_lines: int = 0


def append_record(path: str, record: Record) -> None:
    """Append one line; durable when it returns."""
    line = json.dumps(dataclasses.asdict(record), sort_keys=True, allow_nan=False)
    with open(path, "ab+") as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_results(path: str) -> Results:
    """All records of a file.

    Raises
    ------
    ResultsError
        If a line is whole but no record of this schema.
    OSError
        If the file cannot be read.
    """
    records, torn = [], 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except ValueError:
                torn += 1
                continue
            records.append(_record(fields, f"{path}, line {number}"))
    return Results(tuple(records), torn)


def _record(fields: Any, where: str) -> Record:
    if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
        found = fields.get("schema") if isinstance(fields, dict) else type(fields).__name__
        raise ResultsError(f"{where}: expected a record of schema {SCHEMA}, found {found!r}")
    known = {one.name: str(one.type) for one in dataclasses.fields(Record)}
    missing, unknown = sorted(set(known) - set(fields)), sorted(set(fields) - set(known))
    if missing or unknown:
        raise ResultsError(f"{where}: missing fields {missing}, unknown fields {unknown}")
    for name, kind in known.items():
        wanted = _FIELD_TYPES.get(kind, dict)
        value = fields[name]
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise ResultsError(f"{where}: {name}: expected {kind}, found {value!r}")
    return Record(**fields)


def describe_environment(directory: str, engine: str, cold: str) -> dict[str, Any]:
    """Machine, kernel, file system, alignment, engine and versions, as plain JSON.

    Parameters
    ----------
    directory
        On the file system that is measured; a file is made there for a moment.
    engine
        What an engine of kind ``"auto"`` says of itself.
    cold
        How files are taken out of the page cache before they are read.
    """
    storage = describe_storage(directory)
    space = os.statvfs(directory)
    found = report.machine(directory)
    del found["filesystem"]
    return {
        **found,
        "host": platform.node(),
        "file_system": storage.file_system,
        "mount_options": storage.mount_options,
        "stripe_bytes": storage.stripe_bytes,
        "file_system_bytes": space.f_blocks * space.f_frsize,
        **_direct_alignment(directory),
        "engine": engine,
        "cold": cold,
    }


def _direct_alignment(directory: str) -> dict[str, Any]:
    path = os.path.join(directory, f".alignment.{os.getpid()}")
    file = _engine.File.create(path, direct=True)
    try:
        return {
            "direct": file.direct,
            "offset_alignment_bytes": file.offset_alignment,
            "memory_alignment_bytes": file.memory_alignment,
        }
    finally:
        file.close()
        os.unlink(path)


def now() -> str:
    """The present, as records say it."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
