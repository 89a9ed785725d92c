"""Comparisons: two cases beside each other, and which cases belong beside each other; pure.

Guarantees
----------
- Two cases differ only where the ranges of their trials do not overlap and each has at least
  `LEAST_TRIALS`; all else is within the noise, whatever the medians say.
- *Clearly* faster is what is also faster by the factor that a probe asks for before it leaves a
  default.
- A pair is equal in operation and in all axes but those that it is about.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from megatron_uring.bench.pages.measured import Case, trials
from megatron_uring.bench.suite.results import Axis
from megatron_uring.bench.summary import size
from megatron_uring.probing import CLEARLY_FASTER

LEAST_TRIALS = 2
FOR, WITH, AT, THAN = "for", "with", "at", "than"
FASTER, SLOWER, NOISE, UNDECIDED = "faster", "slower", "within the noise", "too few trials"


@dataclass(frozen=True)
class Comparison:
    """One case against another, by bandwidth.

    Attributes
    ----------
    label
        What the two share, and what it is about.
    """

    label: str
    left: Case
    right: Case

    @property
    def ratio(self) -> float:
        """Bandwidth of `left` over that of `right`, of medians; above 1 is faster."""
        return self.left.gb_per_s / self.right.gb_per_s

    @property
    def lowest_ratio(self) -> float:
        """The slowest trial of `left` over the fastest of `right`."""
        return self.left.slowest_gb_per_s / self.right.fastest_gb_per_s

    @property
    def relation(self) -> str:
        """`FASTER`, `SLOWER`, `NOISE` or `UNDECIDED`."""
        if min(len(self.left.trials), len(self.right.trials)) < LEAST_TRIALS:
            return UNDECIDED
        if self.left.slowest_gb_per_s > self.right.fastest_gb_per_s:
            return FASTER
        return SLOWER if self.left.fastest_gb_per_s < self.right.slowest_gb_per_s else NOISE

    @property
    def clearly_faster(self) -> bool:
        """Whether `left` is faster by so much that a default should give way."""
        return self.relation == FASTER and self.ratio >= CLEARLY_FASTER

    @property
    def clearly_slower(self) -> bool:
        """Whether `right` is faster by so much."""
        return self.relation == SLOWER and 1 / self.ratio >= CLEARLY_FASTER

    @property
    def swapped(self) -> Comparison:
        """The right one against the left one."""
        return Comparison(self.label, self.right, self.left)


def factor(ratio: float) -> str:
    """``"1.94 times"``."""
    return f"{ratio:.3g} times" if ratio >= 10 else f"{ratio:.2f} times"


def percent(ratios: Iterable[float]) -> str:
    """``"44 to 47 %"``."""
    known = sorted(ratios)
    low, high = f"{100 * known[0]:.0f}", f"{100 * known[-1]:.0f}"
    return f"{high} %" if low == high else f"{low} to {high} %"


def outcome(comparisons: Iterable[Comparison], link: str = FOR) -> str:
    """What is faster, slower and neither, by label, in one line; `link` stands before the labels:
    `THAN` where they name what the left one is compared with.
    """
    found: dict[str, list[str]] = {FASTER: [], SLOWER: [], NOISE: [], UNDECIDED: []}
    for one in comparisons:
        found[one.relation].append(f"{one.label} ({factor(one.ratio)})")
    links = {NOISE: "of", UNDECIDED: "beside"} if link == THAN else {}
    return "; ".join(
        f"{relation} {links.get(relation, link)} {', '.join(own)}"
        for relation, own in found.items()
        if own
    )


def chance(trials: int) -> float:
    """How often two equal cases with so many trials each have ranges apart by chance."""
    return 2 / math.comb(2 * trials, trials)


def noise(cases: Sequence[Case]) -> str:
    """How it is decided what is faster, and how often that errs with so many trials."""
    counts = [len(case.trials) for case in cases if not case.error]
    least, most = min(counts), max(counts)
    count = trials(least) if least == most else f"{least} to {trials(most)}"
    text = (
        "A case is faster or slower than another if the ranges of their trials do not overlap; "
        f"everything else is within the noise. Fewer than {LEAST_TRIALS} trials decide nothing. "
        f"Clearly faster is what is faster by {round(100 * (CLEARLY_FASTER - 1))} % too. "
        f"The cases here have {count} each."
    )
    if least < LEAST_TRIALS:
        return text
    return (
        f"{text} With {least} trials each, two equal cases have ranges apart by chance once in "
        f"{1 / chance(least):.0f} comparisons."
    )


# -------------------------------------------------------------------------------------------------
# pairs


def differing(left: Case, right: Case, without: Collection[str] = ()) -> set[str]:
    """Axes in which two cases differ."""
    names = (set(left.axes) | set(right.axes)) - set(without)
    return {name for name in names if left.axes.get(name) != right.axes.get(name)}


def pairs(
    cases: Sequence[Case], axis: str, value: Axis, against: Axis, ignore: Collection[str] = ()
) -> list[tuple[Case, Case]]:
    """Cases with `value` on `axis`, each beside the case of its group with `against` that is equal
    in operation and all other axes.

    Parameters
    ----------
    ignore
        Axes that may differ; the partner that differs in fewest of them is taken.
    """
    found = []
    for left in cases:
        if left.axes.get(axis) != value:
            continue
        candidates = [
            right
            for right in cases
            if right.axes.get(axis) == against
            and (right.group, right.operation) == (left.group, left.operation)
            and not differing(left, right, {axis, *ignore})
        ]
        if candidates:
            found.append((left, min(candidates, key=lambda one: len(differing(left, one)))))
    return found


def neighbours(values: Iterable[int], default: int) -> list[int]:
    """`default` if it was measured, else the nearest values below and above it."""
    known = sorted(set(values))
    if default in known:
        return [default]
    return [*[v for v in known if v < default][-1:], *[v for v in known if v > default][:1]]


def sweeps(cases: Sequence[Case], axis: str) -> list[list[Case]]:
    """Cases that differ in one numeric axis alone, by its value; at least two each."""
    found: list[list[Case]] = []
    for case in cases:
        for own in found:
            if own[0].operation == case.operation and not differing(own[0], case, {axis}):
                own.append(case)
                break
        else:
            found.append([case])
    return [sorted(own, key=lambda one: one.axes[axis]) for own in found if len(own) > 1]


def value_label(axis: str, case: Case) -> str:
    """``"depth 16"``, or a size."""
    value = int(case.axes[axis])
    return size(value) if axis.endswith("_bytes") else f"depth {value}"


def against_default(sweep: Sequence[Case], axis: str, default: int) -> list[Comparison]:
    """Each case of a sweep against the one with the default. If that was not measured, against the
    faster of its neighbours, and only those beyond them.
    """
    known = neighbours([int(case.axes[axis]) for case in sweep], default)
    near = [case for case in sweep if case.axes[axis] in known]
    best = max(near, key=lambda case: case.gb_per_s)
    return [Comparison(value_label(axis, case), case, best) for case in sweep if case not in near]
