"""Answers to the questions of the suite, those first about which the paper states a result.

The paper is arXiv 2512.24511, *Understanding LLM Checkpoint/Restore I/O Strategies and Patterns*;
its abstract is quoted where it speaks of a question.

Guarantees
----------
- Pure. All questions are answered in the same order, also where nothing was measured.
- A verdict follows from figures by the rule that stands beside it.
- Emulations of a system are never called by that system's name alone, and stand apart from peers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_uring.bench.formats import DEFAULT
from megatron_uring.bench.pages import tradeoffs
from megatron_uring.bench.pages.answering import (
    AGREES,
    DIFFERS,
    MODES,
    OPERATIONS,
    PARTLY,
    Answer,
    Point,
    Support,
    decide,
    judge_faster,
    labelled_pairs,
    sentences,
    supports_of,
)
from megatron_uring.bench.pages.comparing import (
    FASTER,
    NOISE,
    SLOWER,
    THAN,
    UNDECIDED,
    WITH,
    Comparison,
    factor,
    percent,
)
from megatron_uring.bench.pages.measured import Case, select
from megatron_uring.bench.suite.results import EMULATION, OURS, PEER, WRITE
from megatron_uring.bench.summary import size
from megatron_uring.config import MEBIBYTE

AGGREGATED = ("file per rank", "file per group", "one shared file")
SCATTERED = ("file per tensor", "chunk per file")
LARGE_BYTES = 16 * MEBIBYTE
OF_A_HALF = 2 / 3  # "halve": up to here the loss is nearer to a half than to nothing
OF_A_FACTOR = 1 / 2  # "up to": from this part of the paper's factor on
PAPER_FACTORS = {"DataStates": 3.9, "TorchSnapshot": 7.6}
_BELOW_BYTES = MEBIBYTE  # small submissions
# What may differ where submissions do: how many are in flight, and where tensors begin.
_BESIDE = ("alignment", "queue_depth", "submission_batch")
_AGGREGATION = "file system-aware aggregation restores bandwidth and reduces metadata overhead"


def answers(cases: Sequence[Case]) -> list[Answer]:
    """All questions in order, those without an answer too."""
    return [
        _coalescing(cases),
        _aggregation(cases),
        _metadata(cases),
        tradeoffs.buffered(cases),
        tradeoffs.alignment(cases),
        tradeoffs.engine(cases),
        tradeoffs.submission(cases),
        tradeoffs.pool(cases),
        tradeoffs.allocation(cases),
        _inventory(cases),
    ]


def scope(environment: Mapping[str, Any], ranks: int, nodes: int) -> str:
    """What the figures are about, and what nothing is claimed for."""
    here = str(environment.get("file_system", "an unknown file system"))
    elsewhere = "another file system" if here == "lustre" else "Lustre or another file system"
    many = "more than one node" if nodes == 1 else f"more than {nodes} nodes"
    count = "one node" if nodes == 1 else f"{nodes} nodes"
    return (
        f"Measured on {here} with {ranks} {'rank' if ranks == 1 else 'ranks'} on {count}. "
        f"Nothing is claimed for {elsewhere}, for {many}, or for checkpoints from GPUs. "
        "The paper is about parallel file systems and many processes: where the figures here "
        "differ from its abstract, that says nothing against what was found there."
    )


def judge_halved(comparison: Comparison) -> str:
    """Of the claim that throughput halves."""
    if comparison.relation == UNDECIDED:
        return UNDECIDED
    if comparison.relation == FASTER or comparison.lowest_ratio > OF_A_HALF:
        return DIFFERS
    if comparison.relation == NOISE:
        return NOISE
    return AGREES if comparison.ratio <= OF_A_HALF else DIFFERS


def judge_factor(comparison: Comparison, paper: float) -> str:
    """Of the claim that the left one is up to `paper` times as fast."""
    if comparison.relation != FASTER:
        return judge_faster(comparison)
    return AGREES if comparison.ratio >= OF_A_FACTOR * paper else PARTLY


def _coalescing(cases: Sequence[Case]) -> Answer:
    rows = select(cases, "coalescing", pattern=AGGREGATED[0])
    plain = [case for case in rows if case.axes.get("staging") == "none"]
    alone = [case for case in plain if case.axes["submission_bytes"] == 0]
    staged = [case for case in rows if case.axes.get("staging") == "slabs"]
    sizes = sorted({int(case.axes["submission_bytes"]) for case in plain} - {0, LARGE_BYTES})
    points, small = [], set()
    for submission_bytes in sizes:
        found = labelled_pairs(plain, "submission_bytes", submission_bytes, LARGE_BYTES, _BESIDE)
        counts = submission_bytes < _BELOW_BYTES
        small |= {one.label for one in found if counts}
        supports = [Support(one, judge_halved(one) if counts else "") for one in found]
        subject = f"{size(submission_bytes)} submissions against those of 16 MiB"
        points.append(Point(subject, supports))
    for workload in dict.fromkeys(str(case.axes["workload"]) for case in alone):
        own = [case for case in (*plain, *staged) if case.axes["workload"] == workload]
        found = labelled_pairs(own, "submission_bytes", 0, LARGE_BYTES, _BESIDE)
        mean = max((one.left.bytes_per_transfer for one in found), default=0.0)
        average = f" ({size(mean)} on average)" if mean else ""
        subject = f"{workload}, a submission for each tensor{average} against those of 16 MiB"
        counts = 0 < mean < _BELOW_BYTES
        supports = [Support(one, judge_halved(one) if counts else "") for one in found]
        points.append(Point(subject, supports))
        own = [case for case in own if case in alone or case in staged]
        ignored = (*_BESIDE, "submission_bytes")
        found = labelled_pairs(own, "staging", "slabs", "none", ignored)
        subject = f"{workload}, packed into slabs with copy and checksum against a submission "
        points.append(Point(subject + "for each tensor", [*map(Support, found)]))
    verdict, tally = decide([one.verdict for one in supports_of(points)])
    missing = [f"small submissions, {one}" for one in MODES if one not in small]
    missing += [] if alone else ["realistic tensors, a submission for each"]
    return Answer(
        "coalescing",
        "How much do small buffers cost that are not coalesced?",
        ("coalescing",),
        sentences(points),
        supports_of(points),
        "uncoalesced small-buffer operations halve throughput relative to synthetic workloads",
        verdict,
        tally,
        "A comparison of submissions below 1 MiB (of one for each tensor, where these are below 1 "
        "MiB on average) with those of 16 MiB, of which fewer are in flight, "
        "agrees if at most 2/3 of the throughput is left and the ranges of the trials are apart. "
        "It differs if more is left, or if even the slowest trial has more than 2/3 of the "
        "throughput of the fastest with 16 MiB. Else it is within the noise.",
        tuple(missing),
        lead=_coalescing_lead(supports_of(points)),
    )


def _coalescing_lead(supports: Sequence[Support]) -> str:
    compared = [
        one.comparison
        for one in supports
        if one.comparison.right.axes["submission_bytes"] == LARGE_BYTES
        and int(one.comparison.left.axes["submission_bytes"]) < _BELOW_BYTES
        and one.comparison.relation != UNDECIDED
    ]
    sizes = {int(one.left.axes["submission_bytes"]) for one in compared}
    parts = []
    for submission_bytes in sorted(sizes - {0}) + sorted(sizes & {0}):
        own = [one for one in compared if one.left.axes["submission_bytes"] == submission_bytes]
        what = f"those of {size(submission_bytes)}" if submission_bytes else "one for each tensor"
        parts.append(f"{what} reach {percent(one.ratio for one in own)}")
    listed = "; ".join(parts)
    return f"Of the throughput of 16 MiB submissions, {listed}." if parts else ""


def _aggregation(cases: Sequence[Case]) -> Answer:
    points, missing = [], []
    first, *shared = AGGREGATED
    for operation in OPERATIONS:
        found = select(cases, "patterns", operation=operation)
        rows = {str(case.axes.get("pattern")): case for case in found}
        missing += [f"{p}, {operation}" for p in (*AGGREGATED, *SCATTERED) if p not in rows]
        for pattern in [one for one in AGGREGATED if one in rows]:
            own = [Comparison(p, rows[pattern], rows[p]) for p in SCATTERED if p in rows]
            supports = [Support(one, judge_faster(one)) for one in own]
            points.append(Point(f"{operation.capitalize()}s, {pattern}", supports, THAN))
        kinds = [Comparison(p, rows[p], rows[first]) for p in shared if {p, first} <= set(rows)]
        subject = f"{operation.capitalize()}s, against {first}"
        points.append(Point(subject, [*map(Support, kinds)], WITH))
    real = select(cases, "coalescing", submission_bytes=LARGE_BYTES, staging="none")
    for workload in dict.fromkeys(str(case.axes["workload"]) for case in real):
        own_rows = [case for case in real if case.axes["workload"] == workload]
        pairs = labelled_pairs(own_rows, "pattern", first, SCATTERED[0], _BESIDE)
        supports = [Support(one, judge_faster(one)) for one in pairs]
        points.append(Point(f"{workload}, {first} against {SCATTERED[0]}", supports))
    verdict, tally = decide([one.verdict for one in supports_of(points)])
    return Answer(
        "aggregation",
        "Does aggregation restore the bandwidth, and which kind does?",
        ("patterns",),
        sentences(points),
        supports_of(points),
        _AGGREGATION,
        verdict,
        tally,
        "A comparison of an aggregated pattern (file per rank, file per group, one shared file) "
        "with a scattered one (file per tensor, chunk per file) agrees if the aggregated one is "
        "faster and the ranges of the trials are apart; it differs if it is slower and they are.",
        tuple(missing),
        lead=" ".join(_fastest_pattern(cases, operation) for operation in OPERATIONS).strip(),
    )


def _fastest_pattern(cases: Sequence[Case], operation: str) -> str:
    rows = sorted(select(cases, "patterns", operation=operation), key=lambda one: -one.gb_per_s)
    if len(rows) < 2 or Comparison("", *rows[:2]).relation == UNDECIDED:
        return ""
    close = [one for one in rows[1:] if Comparison("", rows[0], one).relation != FASTER]
    names = ", ".join(str(one.axes["pattern"]) for one in close)
    beside = f"; within the noise of it: {names}" if close else "; all others are slower"
    best = f"{rows[0].axes['pattern']} ({rows[0].gb_per_s:.2f} GB/s)"
    return f"{operation.capitalize()}s are fastest with {best}{beside}."


def _metadata(cases: Sequence[Case]) -> Answer:
    rows, verdicts, missing, points = [], [], [], []
    for operation in OPERATIONS:
        counted = {
            str(case.axes.get("pattern")): case
            for case in select(cases, "patterns", operation=operation)
            if case.operations
        }
        ordered = [one for one in (*SCATTERED, *AGGREGATED) if one in counted]
        missing += [f"{p}, {operation}" for p in (*SCATTERED, *AGGREGATED) if p not in counted]
        rows += [_count_row(pattern, counted[pattern]) for pattern in ordered]
        libraries = [case for case in select(cases, "inventory", operation=operation)]
        rows += [_count_row(case.title, case) for case in libraries if case.operations]
        per_gib = {pattern: counted[pattern].metadata_per_gib for pattern in ordered}
        if per_gib:
            listed = ", ".join(f"{name} {value:.4g}" for name, value in per_gib.items())
            points.append(f"{operation.capitalize()}, metadata operations for each GiB: {listed}.")
        verdicts += [
            AGREES if per_gib[few] < per_gib[many] else DIFFERS
            for few in AGGREGATED
            for many in SCATTERED
            if {few, many} <= set(per_gib)
        ]
    verdict, tally = decide(verdicts)
    headings = (
        "pattern or library",
        "operation",
        "metadata operations",
        "for each GiB",
        "of these",
    )
    return Answer(
        "metadata",
        "How many metadata operations and submissions does each pattern need?",
        ("patterns",),
        tuple(points),
        (),
        _AGGREGATION,
        verdict,
        tally,
        "An aggregated pattern beside a scattered one agrees if it needs fewer metadata operations "
        "for each GiB: all calls that neither move nor submit data. They were counted in the "
        "warm-up and have no noise. Libraries on the inventory are listed, and not compared.",
        tuple(missing),
        ((*headings, "reads and writes", "calls that submit"), *rows) if rows else (),
    )


def _count_row(pattern: str, case: Case) -> tuple[str, ...]:
    parts = ", ".join(f"{name} {count}" for name, count in case.metadata_counts.items())
    counts = (case.metadata_operations, case.transfers, case.submit_calls)
    total, transfers, calls = (f"{count:,}" for count in counts)
    return pattern, case.operation, total, f"{case.metadata_per_gib:.4g}", parts, transfers, calls


def ours_of(cases: Sequence[Case], operation: str) -> Case | None:
    """What stands for this package in the inventory: the default, else the fastest that there
    is.
    """
    own = select(cases, "inventory", kind=OURS, operation=operation)
    default = [case for case in own if case.title == DEFAULT]
    return max(default or own, key=lambda case: case.gb_per_s, default=None)


def _inventory(cases: Sequence[Case]) -> Answer:
    points, missing = [], []
    for operation in OPERATIONS:
        ours = ours_of(cases, operation)
        if ours is None:
            missing.append(f"ours, {operation}")
            continue
        subject = f"{operation.capitalize()}s, {ours.title}"
        for kind, words in ((PEER, "peers"), (EMULATION, "emulations"), (OURS, "other options")):
            rows = select(cases, "inventory", kind=kind, operation=operation)
            found = [Comparison(row.title, ours, row) for row in rows if row is not ours]
            supports = [Support(one, _judge_inventory(one)) for one in found]
            points.append(Point(f"{subject}, beside {words}", supports, THAN))
            missing += [] if rows or kind == OURS else [f"{words}, {operation}"]
    everything = supports_of(points)
    verdict, tally = decide([one.verdict for one in everything])
    about = [one.comparison.right.title for one in everything if one.verdict]
    missing += [
        f"writes against {name}, of which the abstract speaks"
        for name in PAPER_FACTORS
        if not any(one.startswith(name) for one in about)
    ]
    return Answer(
        "inventory",
        "How does megatron_uring compare with other libraries on a realistic inventory?",
        ("inventory",),
        sentences(points),
        everything,
        "up to 3.9x higher write throughput than DataStates-LLM and 7.6x higher than TorchSnapshot",
        verdict,
        tally,
        "A write comparison agrees from half of the paper's factor on, and partly agrees if "
        "megatron_uring is faster by less, both with the ranges of the trials apart. "
        "DataStates-LLM itself was not measured: an emulation of its I/O pattern stands for it. "
        "TorchSnapshot is the library in its best fair use; an emulation of its calls is not "
        "counted.",
        tuple(missing),
        lead=" ".join(_best_peer(everything, operation) for operation in OPERATIONS).strip(),
    )


def _best_peer(supports: Sequence[Support], operation: str) -> str:
    compared = [one.comparison for one in supports if one.comparison.right.kind == PEER]
    own = [one for one in compared if one.left.operation == operation]
    if not own:
        return ""
    best = min(own, key=lambda one: one.ratio)
    noise = "" if best.relation in (FASTER, SLOWER) else f", {best.relation}"
    return (
        f"{operation.capitalize()}s: {factor(best.ratio)} the throughput of the fastest other "
        f"library, {best.right.title}{noise}."
    )


def _judge_inventory(comparison: Comparison) -> str:
    right = comparison.right
    if right.operation != WRITE or right.kind == OURS:
        return ""
    if right.title.startswith("TorchSnapshot") and right.kind == PEER:
        return judge_factor(comparison, PAPER_FACTORS["TorchSnapshot"])
    if right.title.startswith("DataStates"):
        return judge_factor(comparison, PAPER_FACTORS["DataStates"])
    return ""
