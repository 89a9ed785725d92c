"""What an answer is: sentences, the comparisons they rest on, and a verdict on the paper's claim.

Guarantees
----------
- Pure. Every answer names the comparisons that it rests on; what was not measured is named, never
  guessed.
- A verdict follows from the verdicts of comparisons alone: all of them agree, some do, or none.
- Without a claim there is no verdict.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from megatron_uring.bench.pages.comparing import (
    FASTER,
    FOR,
    NOISE,
    SLOWER,
    UNDECIDED,
    Comparison,
    outcome,
    pairs,
)
from megatron_uring.bench.pages.measured import Case, mode
from megatron_uring.bench.suite.results import READ, WRITE, Axis

AGREES, PARTLY, DIFFERS = "agrees", "partly agrees", "differs"
NO_CLAIM, NOT_MEASURED = "no claim", "not measured"
OPERATIONS = (WRITE, READ)
MODES = [f"{kind} {operation}" for operation in OPERATIONS for kind in ("direct", "buffered")]
# What the abstract says of what was varied; it says nothing of the outcome.
VARIED = "evaluating how aggregation, alignment, and I/O coalescing interact under buffered and "
VARIED += "direct I/O"


@dataclass(frozen=True)
class Support:
    """A comparison, and what it says of the paper's claim; empty where the claim is not about
    it.
    """

    comparison: Comparison
    verdict: str = ""


@dataclass(frozen=True)
class Answer:
    """The answer to one question.

    Attributes
    ----------
    groups
        Of cases that it is about.
    points
        The answer, in sentences.
    quote
        Of the paper's abstract; empty where that does not speak of it.
    verdict, tally, rule
        Whether the figures agree with it, how often, and how that was decided.
    counts
        Headings and rows of a table of counts, where the answer rests on counts.
    lead
        The answer in one sentence, where that can be said.
    """

    key: str
    question: str
    groups: tuple[str, ...]
    points: tuple[str, ...]
    supports: tuple[Support, ...] = ()
    quote: str = ""
    verdict: str = NO_CLAIM
    tally: str = ""
    rule: str = ""
    missing: tuple[str, ...] = ()
    counts: tuple[tuple[str, ...], ...] = ()
    lead: str = ""

    @property
    def pairs(self) -> list[tuple[Comparison, str]]:
        """Comparisons with their verdicts."""
        return [(one.comparison, one.verdict) for one in self.supports]


def decide(verdicts: Collection[str]) -> tuple[str, str]:
    """One verdict from those of the comparisons, and how often each came out."""
    counted = [verdict for verdict in verdicts if verdict]
    kinds = (AGREES, PARTLY, DIFFERS, NOISE, UNDECIDED)
    numbers = {kind: counted.count(kind) for kind in kinds}
    tally = ", ".join(f"{kind}: {number}" for kind, number in numbers.items() if number)
    if not counted:
        return NOT_MEASURED, ""
    if numbers[AGREES] == len(counted):
        return AGREES, tally
    if numbers[AGREES] or numbers[PARTLY]:
        return PARTLY, tally
    return next(kind for kind in (DIFFERS, NOISE, UNDECIDED) if numbers[kind]), tally


def judge_faster(comparison: Comparison) -> str:
    """Of a claim that the left one is faster."""
    verdicts = {FASTER: AGREES, SLOWER: DIFFERS}
    return verdicts.get(comparison.relation, comparison.relation)


@dataclass(frozen=True)
class Point:
    """Comparisons that make one sentence.

    Attributes
    ----------
    subject
        What is said to be faster or slower, and than what.
    link
        Between that and the labels; see `outcome`.
    """

    subject: str
    supports: Sequence[Support]
    link: str = FOR

    @property
    def sentence(self) -> str:
        """The outcome in words."""
        compared = (one.comparison for one in self.supports)
        return f"{self.subject}: {outcome(compared, self.link)}."


def sentences(points: Iterable[Point]) -> tuple[str, ...]:
    """Of those points that have something to say."""
    return tuple(point.sentence for point in points if point.supports)


def supports_of(points: Iterable[Point]) -> tuple[Support, ...]:
    """Of all points."""
    return tuple(one for point in points for one in point.supports)


def labelled_pairs(
    rows: Sequence[Case],
    axis: str,
    value: Axis,
    against: Axis,
    ignore: Collection[str] = (),
) -> list[Comparison]:
    """`pairs`, labelled by mode."""
    found = pairs(rows, axis, value, against, ignore)
    return [Comparison(mode(one), one, other) for one, other in found]


def without_claim(
    key: str,
    question: str,
    groups: tuple[str, ...],
    points: Sequence[Point],
    missing: Iterable[str],
    quote: str = "",
) -> Answer:
    """An answer from comparisons by what they are about, where the paper states no result."""
    supports = supports_of(points)
    rule = "The abstract states no result that these figures could bear out or contradict."
    return Answer(
        key,
        question,
        groups,
        sentences(points),
        supports,
        quote,
        NO_CLAIM if supports else NOT_MEASURED,
        "",
        rule,
        tuple(missing),
    )
