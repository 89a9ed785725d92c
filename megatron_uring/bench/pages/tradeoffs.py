"""Answers about options, of which the paper's abstract states no result.

Guarantees
----------
- Pure. What was not measured is named.
- Sizes, depths and modes are those that were measured; nothing is read off between them.
- The share of allocation is taken trial by trial, never from a median over another median.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from megatron_uring.bench.formats import DEFAULT, NEW_TENSORS
from megatron_uring.bench.pages.answering import (
    MODES,
    NO_CLAIM,
    NOT_MEASURED,
    OPERATIONS,
    VARIED,
    Answer,
    Point,
    Support,
    labelled_pairs,
    without_claim,
)
from megatron_uring.bench.pages.comparing import (
    AT,
    WITH,
    Comparison,
    against_default,
    pairs,
    sweeps,
)
from megatron_uring.bench.pages.measured import Case, mode, select, trials
from megatron_uring.bench.suite.results import OURS, PATTERN, READ
from megatron_uring.bench.summary import size
from megatron_uring.config import Config

ENGINES = ("io_uring", "posix")
_BASE_ALIGNMENT = {True: "block", False: "packed"}
_WAYS = ("polled_submission", "registered_memory", "registered_files", "submission_batch")
_LIBURING = "Kernel-accelerated I/O libraries such as liburing may mitigate these issues versus "
_LIBURING += "POSIX, but their effectiveness for LLM checkpointing remains underexplored"


def buffered(cases: Sequence[Case]) -> Answer:
    """Buffered against direct I/O, by size."""
    points, missing = [], []
    for operation in OPERATIONS:
        found = by_size([c for c in select(cases, "size") if c.operation == operation])
        supports = [Support(one) for one in found]
        points.append(Point(f"Buffered {operation}s against direct ones", supports, AT))
        missing += [] if found else [f"{operation}, direct and buffered, by size"]
    question = "Where is buffered I/O better than direct I/O?"
    return without_claim("buffered", question, ("size",), points, missing, VARIED)


def by_size(rows: Sequence[Case]) -> list[Comparison]:
    """Buffered against direct I/O, by bytes of a rank."""
    found = pairs(rows, "direct", False, True)
    found.sort(key=lambda pair: pair[0].axes["bytes_per_rank"])
    return [Comparison(size(float(a.axes["bytes_per_rank"])), a, b) for a, b in found]


def alignment(cases: Sequence[Case]) -> Answer:
    """Each alignment against the least one that its mode allows."""
    rows = select(cases, "alignment")
    points = []
    for one in MODES:
        own = [case for case in rows if mode(case) == one]
        base = next(
            (c for c in own if c.axes["alignment"] == _BASE_ALIGNMENT["direct" in one]), None
        )
        found = [
            Comparison(str(c.axes["alignment"]), c, base) for c in own if base and c is not base
        ]
        against = _BASE_ALIGNMENT["direct" in one]
        subject = f"{one.capitalize()}s, against {against}"
        points.append(Point(subject, [Support(pair) for pair in found], WITH))
    missing = [one for one, point in zip(MODES, points, strict=True) if not point.supports]
    question = "What does the alignment of tensors in the file change?"
    return without_claim("alignment", question, ("alignment",), points, missing, VARIED)


def engine(cases: Sequence[Case]) -> Answer:
    """io_uring against POSIX."""
    found = labelled_pairs(select(cases, "engine"), "engine", *ENGINES)
    missing = [one for one in MODES if one not in {pair.label for pair in found}]
    points = [Point("io_uring against POSIX calls", [Support(one) for one in found])]
    question = "What does io_uring gain over POSIX calls?"
    return without_claim("engine", question, ("engine",), points, missing, _LIBURING)


def submission(cases: Sequence[Case]) -> Answer:
    """Each way to submit against the plain one."""
    points, missing = [], []
    for operation in OPERATIONS:
        rows = select(cases, "submission", operation=operation)
        plain = next((case for case in rows if not any(map(case.axes.get, _WAYS))), None)
        found = [Comparison(c.title, c, plain) for c in rows if plain and c is not plain]
        submissions = size(float(plain.axes["submission_bytes"])) if plain else ""
        subject = f"{operation.capitalize()}s in {submissions} submissions, against plain ones"
        points.append(Point(subject, [Support(one) for one in found], WITH))
        missing += [] if found else [operation]
    question = "What do SQPOLL, registered buffers and files, and batches change?"
    return without_claim("submission", question, ("submission",), points, missing)


def pool(cases: Sequence[Case]) -> Answer:
    """Queue depth and submission size, each against the default or what is nearest to it."""
    points, missing = [], []
    rows = select(cases, "pool")
    for axis, default, words in POOL_AXES:
        for sweep in sweeps(rows, axis):
            found = against_default(sweep, axis, default)
            if found:
                kind = f"{mode(sweep[0]).capitalize()}s by {words}"
                subject = f"{kind}, against {found[0].right.title}"
                points.append(Point(subject, [Support(one) for one in found], WITH))
        missing += [] if sweeps(rows, axis) else [words]
    question = "Which queue depth and which slab size?"
    return without_claim("pool", question, ("pool",), points, missing)


POOL_AXES = (
    ("queue_depth", Config.queue_depth, "queue depth"),
    ("submission_bytes", Config.slab_bytes, "submission size"),
)


def allocation(cases: Sequence[Case]) -> Answer:
    """The share of a restore that goes into memory which is new."""
    rows = select(cases, "restore", operation=READ)
    # torch allocates without touching: what new tensors cost is within the scatter of ours
    points = [_share(c) for c in rows if c.kind == PATTERN and c.phase_s("allocate") > 0]
    found = [
        Comparison(_STAGING[str(case.axes["staging"])], case, other)
        for case, other in pairs(rows, "memory", "new", "reused")
    ]
    ours = {case.title: case for case in rows if case.kind == OURS}
    if {NEW_TENSORS, DEFAULT} <= set(ours):
        found.append(Comparison("restores by megatron_uring", ours[NEW_TENSORS], ours[DEFAULT]))
    answer = without_claim(
        "allocation",
        "What share of a restore is allocation?",
        ("restore",),
        [Point("A restore into new memory against touched memory", [*map(Support, found)])],
        [] if points else ["a restore into new memory"],
    )
    verdict = NO_CLAIM if points or found else NOT_MEASURED
    return Answer(**{**vars(answer), "points": (*points, *answer.points), "verdict": verdict})


_STAGING = {"none": "plain reads", "slabs": "reads that are verified and scattered"}


def _share(case: Case) -> str:
    shares = [100 * one.phases_s.get("allocate", 0.0) / one.seconds for one in case.trials]
    spread = f"{min(shares):.0f} to {max(shares):.0f} %, {trials(len(shares))}"
    return (
        f"{case.title}: {statistics.median(shares):.0f} % ({spread}) of {case.seconds:.2f} s "
        "is allocation."
    )
