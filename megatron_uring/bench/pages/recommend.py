"""A recommendation for the file system that was measured, in options of `megatron_uring.Config`.

Guarantees
----------
- Pure. The default stays unless another choice is clearly faster in one comparison at least (the
  factor that a probe asks for, ranges of the trials apart) and clearly slower in none. Of sizes,
  those up to the largest count: checkpoints are large.
- Each line names the comparisons that it rests on, or says that nothing was measured.
- Where several sizes are clearly faster, the smallest that comes near the fastest is taken: memory
  has a price.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_uring.bench.formats import RANK_IO_URING, RANK_POSIX, SHARED_IO_URING
from megatron_uring.bench.pages.answering import OPERATIONS, labelled_pairs
from megatron_uring.bench.pages.comparing import (
    AT,
    UNDECIDED,
    WITH,
    Comparison,
    against_default,
    neighbours,
    outcome,
    sweeps,
)
from megatron_uring.bench.pages.findings import ours_of
from megatron_uring.bench.pages.measured import Case, select
from megatron_uring.bench.pages.tradeoffs import ENGINES, POOL_AXES, by_size
from megatron_uring.bench.suite.results import OURS, READ, WRITE
from megatron_uring.bench.summary import size
from megatron_uring.config import MEBIBYTE, Config
from megatron_uring.probing import CLEARLY_FASTER
from megatron_uring.read import DIRECT_FROM_BYTES

_SHARED_BY_DEFAULT = ("lustre", "gpfs")  # of `aggregation="auto"`
_RULE = (
    f"at least {round(100 * (CLEARLY_FASTER - 1))} % faster, with the ranges of the trials apart"
)
_TOO_FEW = "There are too few trials to decide anything."
KEEP = "keep the default"


@dataclass(frozen=True)
class Recommendation:
    """What to do about one option.

    Attributes
    ----------
    setting
        `KEEP`, or the option and its value.
    default
        What the default does here.
    why
        In words, with figures.
    evidence
        The comparisons; the left one is what could be chosen instead of the default.
    """

    option: str
    setting: str
    default: str
    why: str
    evidence: tuple[Comparison, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether something is to be set."""
        return self.setting != KEEP

    @property
    def decided(self) -> bool:
        """Whether there is a comparison with trials enough."""
        return any(one.relation != UNDECIDED for one in self.evidence)

    @property
    def pairs(self) -> list[tuple[Comparison, str]]:
        """As those of an answer; nothing is claimed about them."""
        return [(one, "") for one in self.evidence]


def recommend(cases: Sequence[Case], environment: Mapping[str, Any]) -> list[Recommendation]:
    """One line for each option that the suite says something about."""
    return [
        _aggregation(cases, environment),
        *_apart(_direct(cases, environment, WRITE), _direct(cases, environment, READ)),
        _engine(cases, environment),
        *(_pool(cases, *axis) for axis in POOL_AXES),
    ]


def headline(found: Sequence[Recommendation]) -> str:
    """All of it in one sentence or two."""
    changes = [f"{one.option}: {one.setting}" for one in found if one.changed]
    if changes:
        return f"Set, on this file system: {'; '.join(changes)}. Keep the other defaults."
    if not any(one.decided for one in found):
        return "Too little was measured for a recommendation: keep the defaults."
    unknown = "; ".join(one.option for one in found if not one.decided)
    rest = f" Not measured, or not often enough: {unknown}." if unknown else ""
    return f"Keep the defaults: nothing that was measured beside them is {_RULE}.{rest}"


def holds(evidence: Sequence[Comparison]) -> bool:
    """Whether the left ones should take the place of the default."""
    return any(one.clearly_faster for one in evidence) and not any(
        one.clearly_slower for one in evidence
    )


def _choose(
    option: str, default: str, setting: str, evidence: Sequence[Comparison]
) -> Recommendation:
    """For an option with one alternative."""
    if not evidence:
        why = "No alternative was measured beside the default."
        return Recommendation(option, KEEP, default, why)
    if all(one.relation == UNDECIDED for one in evidence):
        return Recommendation(option, KEEP, default, _TOO_FEW, tuple(evidence))
    change = holds(evidence)
    mixed = any(one.clearly_faster for one in evidence)
    reason = (
        f"{setting} is {_RULE}, and nowhere clearly slower"
        if change
        else f"{setting} is clearly faster here and clearly slower there"
        if mixed
        else f"{setting} is nowhere {_RULE}"
    )
    why = f"{reason}. Against the default it is {outcome(evidence)}."
    return Recommendation(option, setting if change else KEEP, default, why, tuple(evidence))


# -------------------------------------------------------------------------------------------------
# the options


def _aggregation(cases: Sequence[Case], environment: Mapping[str, Any]) -> Recommendation:
    evidence = []
    for operation in OPERATIONS:
        own = {c.title: c for c in select(cases, "inventory", kind=OURS, operation=operation)}
        rank = own.get(RANK_IO_URING) or ours_of(cases, operation)
        if SHARED_IO_URING in own and rank is not None and rank.title != SHARED_IO_URING:
            label = f"inventory, {operation}"
            evidence.append(Comparison(label, own[SHARED_IO_URING], rank))
        rows = select(cases, "patterns", operation=operation)
        patterns = {str(case.axes.get("pattern")): case for case in rows}
        # the ranks of a node share a file: what `shared` does
        if {"file per group", "file per rank"} <= set(patterns):
            label = f"I/O alone, {operation}"
            pair = patterns["file per group"], patterns["file per rank"]
            evidence.append(Comparison(label, *pair))
    here = str(environment.get("file_system", ""))
    if here in _SHARED_BY_DEFAULT:
        turned = [one.swapped for one in evidence]
        default = f"auto: a file for each group of a node's ranks, on {here}"
        return _choose("aggregation", default, "aggregation=rank", turned)
    default = "auto: a file for each rank" + (f", on {here}" if here else "")
    return _choose("aggregation", default, "aggregation=shared", evidence)


def _direct(
    cases: Sequence[Case], environment: Mapping[str, Any], operation: str
) -> Recommendation:
    option = "direct, for saves" if operation == WRITE else "direct, for restores"
    if environment.get("direct") is False:
        why = "The file system has no direct I/O; nothing else than buffered I/O is possible."
        return Recommendation(option, KEEP, "auto: buffered, as files cannot be direct", why)
    every = by_size([case for case in select(cases, "size") if case.operation == operation])
    default, evidence, small = "auto: direct", every, []
    if operation == READ:
        default = f"auto: direct from {size(DIRECT_FROM_BYTES)} on, buffered below"
        small = [one for one in every if _bytes(one) < DIRECT_FROM_BYTES]
        evidence = [one for one in every if one not in small]
    note = f" Below that, buffered against direct: {outcome(small, AT)}." if small else ""
    last = _largest_run(evidence)
    if last:
        setting, start = "direct=off", last[0].label
        listed = outcome(evidence, AT)
        more = f"from {start} a rank on" if len(last) < len(evidence) else "at all sizes"
        why = f"Buffered I/O is {_RULE}, {more}. Buffered against direct: {listed}.{note}"
        return Recommendation(option, setting, default, why, tuple(evidence))
    if any(one.relation != UNDECIDED for one in evidence):
        why = (
            f"At the largest size that was measured, buffered I/O is not {_RULE}. "
            f"Buffered against direct: {outcome(evidence, AT)}.{note}"
        )
        return Recommendation(option, KEEP, default, why, tuple(evidence))
    return _choose(option, default, "direct=off", evidence)


def _apart(saves: Recommendation, restores: Recommendation) -> list[Recommendation]:
    """The option is one for both: where they want it different, a probe sets each by itself."""
    if saves.changed == restores.changed:
        return [saves, restores]
    setting = "buffered: megatron-uring bench probe chooses it, the option itself is for both"
    return [replace(one, setting=setting) if one.changed else one for one in (saves, restores)]


def _bytes(comparison: Comparison) -> float:
    return float(comparison.left.axes["bytes_per_rank"])


def _largest_run(evidence: Sequence[Comparison]) -> list[Comparison]:
    """The largest sizes without a gap at which the left one is clearly faster."""
    found: list[Comparison] = []
    for one in reversed(evidence):
        if not one.clearly_faster:
            break
        found.insert(0, one)
    return found


def _engine(cases: Sequence[Case], environment: Mapping[str, Any]) -> Recommendation:
    auto = str(environment.get("engine", "")).partition(":")[0].strip() or ENGINES[0]
    other = next(one for one in ENGINES if one != auto)
    direct = environment.get("direct") is not False
    rows = select(cases, "engine", direct=direct)  # buffered engines matter where nothing else is
    evidence = labelled_pairs(rows, "engine", other, auto)
    for operation in OPERATIONS:
        own = {c.title: c for c in select(cases, "inventory", kind=OURS, operation=operation)}
        names = {"io_uring": RANK_IO_URING, "posix": RANK_POSIX}
        default = own.get(names[auto]) or ours_of(cases, operation)
        if names[other] in own and default is not None:
            evidence.append(Comparison(f"inventory, {operation}", own[names[other]], default))
    return _choose("engine", f"auto: {auto}", f"engine={other}", evidence)


def _pool(cases: Sequence[Case], axis: str, default: int, words: str) -> Recommendation:
    """Of the sweeps at the other option's default, or what is nearest to it."""
    option = "slab_bytes" if axis == "submission_bytes" else axis
    rows = [c for c in select(cases, "pool") if not c.axes["submission_bytes"] % MEBIBYTE]
    for other, other_default, _ in POOL_AXES:
        if other != axis:
            near = neighbours([int(case.axes[other]) for case in rows], other_default)
            rows = [case for case in rows if case.axes[other] in near]
    by_value: dict[int, list[Comparison]] = {}
    for sweep in sweeps(rows, axis):
        for one in against_default(sweep, axis, default):
            by_value.setdefault(int(one.left.axes[axis]), []).append(one)
    text = size(default) if option == "slab_bytes" else str(default)
    evidence = tuple(one for value in sorted(by_value) for one in by_value[value])
    if len({one.left.operation for one in evidence}) > 1:  # else it need not be said each time
        evidence = tuple(
            replace(one, label=f"{one.label}, {one.left.operation}") for one in evidence
        )
    if all(one.relation == UNDECIDED for one in evidence):
        return _choose(option, text, option, evidence)
    against = ", ".join(dict.fromkeys(one.right.title for one in evidence))
    listed = f"Against {against}: {outcome(evidence, WITH)}."
    better = {value: max(c.ratio for c in own) for value, own in by_value.items() if holds(own)}
    if not better:
        return Recommendation(
            option, KEEP, text, f"No other {words} is {_RULE}. {listed}", evidence
        )
    best = max(better.values())
    value = min(one for one, ratio in better.items() if ratio * CLEARLY_FASTER >= best)
    return Recommendation(option, _setting(option, value), text, listed, evidence)


def _setting(option: str, value: int) -> str:
    """With the slabs that it needs, and the memory of these."""
    if option == "slab_bytes":
        pool = value * Config.slab_count
        return f"slab_bytes={value} (a pool of {size(pool)} for each rank)"
    count = max(value, Config.slab_count)
    more = f", slab_count={count}" if count > Config.slab_count else ""
    return f"queue_depth={value}{more} (a pool of {size(count * Config.slab_bytes)} for each rank)"
