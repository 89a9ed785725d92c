"""One trial of one variant, timed alike for all: seconds, CPU, memory; and trials in turn.

Guarantees
----------
- The clock runs from the call until it returns, of the slowest rank; a variant that brings its own
  clock (fio) says so by returning seconds. Preparing and checking lie outside.
- CPU seconds are those of the ranks' processes, their children that have ended and their kernel
  workers, and, apart, of the whole machine, which also counts the kernel's writeback.
- Peak memory is the highest resident set during the call less the one before it, of the worst rank;
  children are not in it. What a variant keeps between calls shows in its first, the warm-up.
- What fails becomes a row with the reason in words and is not tried again; it is never dropped, and
  ends no other trial.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_uring.comm import Communicator

LIMIT, OURS, PEER = "limit", "ours", "peer"
LIMITS_KEPT = 2
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_REASON_CHARACTERS = 200


class UnavailableError(Exception):
    """A variant that cannot run here; the message is all that there is to say."""


class DifferentError(Exception):
    """What came back is not what was saved."""


@dataclass(frozen=True)
class Row:
    """One trial, of all ranks.

    Attributes
    ----------
    section, what, kind
        Of what; `kind` is ``"limit"``, ``"ours"`` or ``"peer"``.
    trial
        From 1; 0 is the warm-up, whose time counts for nothing.
    gigabytes
        10^9 bytes of all ranks.
    seconds
        Of the slowest rank.
    process_cpu_s, machine_cpu_s
        Of all ranks together.
    peak_bytes
        Of the worst rank.
    reason
        Why there are no figures.
    different
        Whether the reason is that the bytes came back different.
    """

    section: str
    what: str
    kind: str
    trial: int
    gigabytes: float
    seconds: float
    process_cpu_s: float
    machine_cpu_s: float
    peak_bytes: int
    reason: str = ""
    different: bool = False


@dataclass(frozen=True)
class Variant:
    """Something to time; all functions are called on every rank.

    Attributes
    ----------
    what, kind
        As in `Row`.
    run
        What is timed; returns seconds if it has a better clock.
    prepare
        Before each trial.
    check
        After the warm-up, and after each trial if `check_always`; raises `DifferentError`.
    """

    what: str
    kind: str
    run: Callable[[], float | None]
    prepare: Callable[[], None]
    check: Callable[[], None] | None = None
    check_always: bool = False


def interleave(
    world: Communicator,
    section: str,
    variants: Sequence[Variant],
    *,
    trials: int,
    gigabytes: float,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Rows of all trials, the first of them a warm-up; collective.

    Each round begins with another variant, so that none always follows the same one. Of several
    limits the fastest of the warm-up stay. `tell` is told of each round that is over.
    """
    rows: list[Row] = []
    for trial in range(trials + 1):
        first = trial % max(len(variants), 1)
        done = [
            timed(world, section, variant, trial, gigabytes)
            for variant in [*variants[first:], *variants[:first]]
        ]
        rows += done
        alive = {row.what: row for row in done if not row.reason}
        if not trial:
            limits = [row for row in alive.values() if row.kind == LIMIT]
            for row in sorted(limits, key=lambda row: row.seconds)[LIMITS_KEPT:]:
                del alive[row.what]
        variants = [variant for variant in variants if variant.what in alive]
        tell(f"{section}: {f'trial {trial} of {trials}' if trial else 'warm-up'} done")
    return rows


def timed(world: Communicator, section: str, variant: Variant, trial: int, gigabytes: float) -> Row:
    """One trial; collective."""
    row = Row(section, variant.what, variant.kind, trial, gigabytes, 0.0, 0.0, 0.0, 0)
    reason = attempt(world, variant.prepare)
    if reason:
        return replace(row, reason=reason)
    world.barrier()
    resident = _reset_peak_memory()
    machine, cpu, began = _machine_cpu_s(), _process_cpu_s(), time.perf_counter()
    own_s: float | None = None

    def run() -> None:
        nonlocal own_s
        own_s = variant.run()

    error = _reason_of(run)
    elapsed_s = time.perf_counter() - began
    own = [elapsed_s if own_s is None else own_s, status_bytes("VmHWM") - resident]
    cpu_s = _process_cpu_s() - cpu
    seconds, peak_bytes = world.allreduce(
        np.array([own[0] * 1e6, max(own[1], 0)], np.int64), "max"
    ).tolist()
    all_cpu = world.allreduce(np.array([cpu_s * 1e6], np.int64), "sum")
    row = replace(
        row,
        seconds=max(seconds, 1) / 1e6,
        process_cpu_s=int(all_cpu[0]) / 1e6,
        machine_cpu_s=_machine_cpu_s() - machine,
        peak_bytes=peak_bytes,
        reason=_agree(world, error),
    )
    if row.reason or variant.check is None or (trial and not variant.check_always):
        return row
    reason = attempt(world, variant.check)
    return replace(row, reason=reason, different=bool(reason))


def attempt(world: Communicator, function: Callable[[], None]) -> str:
    """Call `function` on every rank; why it failed on the first that failed, or nothing."""
    return _agree(world, _reason_of(function))


def describe_error(error: BaseException) -> str:
    """The first line of what an error says, with its class unless it is one of ours."""
    text = next(iter(str(error).strip().splitlines()), "")
    if not isinstance(error, UnavailableError | DifferentError):
        text = f"{type(error).__name__}: {text}"
    return text[:_REASON_CHARACTERS]


def _reason_of(function: Callable[[], None]) -> str:
    try:
        function()
    except Exception as error:
        return describe_error(error) or type(error).__name__
    return ""


def _agree(world: Communicator, reason: str) -> str:
    found = world.gather(reason.encode())
    texts = [bytes(text).decode() for text in found or ()]
    first = next((text for text in texts if text), "")
    return world.broadcast(first.encode() if world.rank == 0 else None).decode()


def _process_cpu_s() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _machine_cpu_s() -> float:
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, irq, softirq, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + softirq) / _TICKS_PER_S


def _reset_peak_memory() -> int:
    """Let the peak begin at what is resident now, and return that; what the heap has kept of freed
    memory is part of it.
    """
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    return status_bytes("VmRSS")


def status_bytes(name: str) -> int:
    """A field of this process's status: ``VmRSS``, or ``VmHWM``, the peak since the last reset.

    Not ``ru_maxrss``, which a process inherits from its parent.
    """
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(name + ":"):
                return int(line.split()[1]) << 10
    raise UnavailableError(f"/proc/self/status has no {name}")
