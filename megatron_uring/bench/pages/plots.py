"""Pictures of the cases, one function for each.

Guarantees
----------
- Bars and points are medians of the trials; lines through them go from the slowest to the fastest.
- Each axis names its unit; colours can be told apart by people who see fewer of them, and what is
  no measurement of the system itself (an emulation) is hatched.
- A picture without cases is None, never empty axes.
- No global state of matplotlib is touched, and no window is opened.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_uring.bench.pages.answering import MODES, OPERATIONS
from megatron_uring.bench.pages.comparing import sweeps
from megatron_uring.bench.pages.drawing import (
    BLUE,
    FRAME_INCHES,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PAIR,
    SKY,
    TEXT_POINTS,
    Bars,
    bar_figure,
    draw_line,
    in_rows,
    label_rows,
    mark_range,
    mark_span,
    new_figure,
    put_legend,
    rows_of,
    scale_sizes,
    tidy,
)
from megatron_uring.bench.pages.findings import AGGREGATED, SCATTERED
from megatron_uring.bench.pages.measured import Case, mode, select
from megatron_uring.bench.pages.tradeoffs import ENGINES, POOL_AXES
from megatron_uring.bench.suite.patterns import ALIGNMENTS
from megatron_uring.bench.suite.results import EMULATION, OURS, PEER, READ
from megatron_uring.bench.summary import GIGABYTE, size

if TYPE_CHECKING:  # `drawing` says what to do where it is missing
    from matplotlib.figure import Figure

_KINDS = {OURS: ("megatron_uring", BLUE), PEER: ("other library", ORANGE)}
_KINDS |= {EMULATION: ("emulation of another library's pattern", "#DDDDDD")}
# Parts of a restore, from left to right.
_PARTS = {
    "allocate": ORANGE,
    "read: waiting for the file system": BLUE,
    "read: verify": GREEN,
    "read: scatter": SKY,
    "other": GREY,
}
_REASON_CHARACTERS = 44


def figures(cases: Sequence[Case]) -> dict[str, Figure]:
    """All pictures that there are cases for, by the key of the answer that they belong to."""
    drawn = {key: draw(cases) for key, draw in _FIGURES.items()}
    return {key: figure for key, figure in drawn.items() if figure is not None}


# -------------------------------------------------------------------------------------------------
# the pictures


def draw_patterns(cases: Sequence[Case]) -> Figure | None:
    """Throughput by pattern."""
    rows = (*SCATTERED, *AGGREGATED)
    series = {
        operation: in_rows(
            select(cases, "patterns", operation=operation),
            lambda case: str(case.axes.get("pattern")),
            rows,
        )
        for operation in OPERATIONS
    }
    title = "Throughput by pattern: the same bytes in many files or few"
    return bar_figure(title, [Bars("", rows, series)], PAIR)


def draw_coalescing(cases: Sequence[Case]) -> Figure | None:
    """Throughput by size of a submission."""
    found = select(cases, "coalescing")
    found.sort(key=lambda case: str(case.axes["workload"]) != "synthetic")
    rows = rows_of(found, _submission_label)
    return _modes(
        "Throughput by size of a submission: small buffers or coalesced ones", found, rows
    )


def _submission_label(case: Case) -> str:
    bytes_, workload = int(case.axes["submission_bytes"]), str(case.axes["workload"])
    if case.axes.get("staging") == "slabs":
        way = "packed into slabs"
    elif case.axes.get("pattern") == SCATTERED[0]:
        way = "a file for each tensor"
    else:
        way = f"{size(bytes_)} submissions" if bytes_ else "a submission for each tensor"
    return way if workload == "synthetic" else f"{workload}: {way}"


def _modes(
    title: str,
    found: Sequence[Case],
    rows: Sequence[str],
    label: Callable[[Case], str] = _submission_label,
) -> Figure | None:
    """A panel for each operation, direct and buffered in each."""
    panels = [
        Bars(
            operation,
            rows,
            {
                kind: in_rows([c for c in found if mode(c) == f"{kind} {operation}"], label, rows)
                for kind in ("direct", "buffered")
            },
        )
        for operation in OPERATIONS
    ]
    return bar_figure(title, panels, PAIR)


def draw_alignment(cases: Sequence[Case]) -> Figure | None:
    """Throughput by alignment of the tensors."""
    found = select(cases, "alignment")

    def label(case: Case) -> str:
        return str(case.axes["alignment"])

    title = "Throughput by alignment of each tensor in its file"
    known = [one for one in ALIGNMENTS if any(label(case) == one for case in found)]
    return _modes(title, found, known, label)


def draw_engine(cases: Sequence[Case]) -> Figure | None:
    """io_uring and POSIX."""
    found = select(cases, "engine")
    series = {
        name: in_rows([case for case in found if case.axes["engine"] == name], mode, MODES)
        for name in ENGINES
    }
    return bar_figure("Throughput of io_uring and of POSIX calls", [Bars("", MODES, series)], PAIR)


def draw_submission(cases: Sequence[Case]) -> Figure | None:
    """Ways to submit."""
    found = select(cases, "submission")
    rows = rows_of(found, lambda case: case.title)
    series = {
        operation: in_rows([c for c in found if c.operation == operation], lambda c: c.title, rows)
        for operation in OPERATIONS
    }
    series = {operation: own for operation, own in series.items() if any(own)}
    title = "Throughput by way of submitting: polled, registered, in batches"
    return bar_figure(title, [Bars("", rows, series)], PAIR)


def draw_metadata(cases: Sequence[Case]) -> Figure | None:
    """Metadata operations by pattern."""
    rows = [*SCATTERED, *AGGREGATED]
    found = [case for case in select(cases, "patterns") if case.metadata_operations]
    if not found:
        return None
    figure, (axes,) = new_figure(
        "Metadata operations for each GiB, by pattern: calls that neither move nor submit data",
        FRAME_INCHES + len(rows) * 0.54,
    )
    for number, operation in enumerate(OPERATIONS):
        own = {rows.index(str(c.axes["pattern"])): c for c in found if c.operation == operation}
        if not own:
            continue
        bars = axes.barh(
            [row + (number - 0.5) * 0.4 for row in own],
            [case.metadata_per_gib for case in own.values()],
            0.37,
            color=PAIR[number],
            label=operation,
        )
        labels = [f"{case.metadata_per_gib:.4g}" for case in own.values()]
        axes.bar_label(bars, labels, padding=3, fontsize=TEXT_POINTS - 1, color=INK)
    axes.set_xscale("log")
    values = [case.metadata_per_gib for case in found]
    axes.set_xlim(min(1.0, *values) * 0.8, max(values) * 3)
    label_rows(axes, rows)
    tidy(axes, "calls for each GiB, of all ranks (logarithmic)")
    put_legend(figure, [axes])
    return figure


def draw_size(cases: Sequence[Case]) -> Figure | None:
    """Throughput by bytes of a rank, direct and buffered."""
    found = select(cases, "size")
    panels = [one for one in OPERATIONS if any(case.operation == one for case in found)]
    if not panels:
        return None
    title = "Throughput by size of a rank's state: direct and buffered"
    figure, grid = new_figure(title, 3.5, len(panels))
    for axes, operation in zip(grid, panels, strict=True):
        for name, colour, marker in (("direct", BLUE, "o"), ("buffered", ORANGE, "s")):
            own = [case for case in found if mode(case) == f"{name} {operation}"]
            draw_line(axes, own, "bytes_per_rank", name, (colour, marker))
        own = [case for case in found if case.operation == operation]
        scale_sizes(axes, own, "bytes_per_rank")
        tidy(axes, "state of a rank (logarithmic)", operation)
    put_legend(figure, grid)
    grid[0].set_ylabel("GB/s (median, slowest to fastest)", fontsize=TEXT_POINTS, color=INK)
    return figure


def draw_pool(cases: Sequence[Case]) -> Figure | None:
    """Queue depth and submission size."""
    found = select(cases, "pool")
    panels = [(axis, words, sweeps(found, axis)) for axis, _, words in POOL_AXES]
    panels = [one for one in panels if one[2]]
    if not panels:
        return None
    figure, grid = new_figure("Throughput by queue depth and by submission size", 3.5, len(panels))
    for axes, (axis, words, lines) in zip(grid, panels, strict=True):
        for own in lines:
            write = own[0].operation != READ
            name, style = ("write", (BLUE, "o")) if write else ("read", (ORANGE, "s"))
            draw_line(axes, own, axis, name, style)
        scale_sizes(axes, [case for own in lines for case in own], axis)
        (fixed,) = [other for other, _, _ in POOL_AXES if other != axis]
        kept = sorted({int(own[0].axes[fixed]) for own in lines})
        with_ = size(kept[0]) if fixed == "submission_bytes" else f"depth {kept[0]}"
        tidy(axes, f"{words} (logarithmic)", f"{words}, at {with_}" if len(kept) == 1 else words)
    put_legend(figure, grid)
    grid[0].set_ylabel("GB/s (median, slowest to fastest)", fontsize=TEXT_POINTS, color=INK)
    return figure


def draw_restore(cases: Sequence[Case]) -> Figure | None:
    """Where the time of a restore goes."""
    found = [case for case in select(cases, "restore", operation=READ) if _parts(case)]
    if not found:
        return None
    title = "Where the time of a restore goes"
    figure, (axes,) = new_figure(title, FRAME_INCHES + 0.3 + len(found) * 0.42)
    left = [0.0] * len(found)
    for name, colour in _PARTS.items():
        widths = [_parts(case)[name] for case in found]
        axes.barh(range(len(found)), widths, 0.62, left=left, color=colour, label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, case in enumerate(found):
        span = (1 / case.fastest_gb_per_s, 1 / case.slowest_gb_per_s)
        mark_span(axes, row, span, f"{1 / case.gb_per_s:.2f}")
    axes.set_xlim(0, 1.12 * max(*left, *(1 / case.slowest_gb_per_s for case in found)))
    label_rows(axes, [case.title for case in found])
    note = "verify and scatter are within the read"
    tidy(axes, f"seconds for each GB (medians; the line is the range of the trials); {note}")
    put_legend(figure, [axes], columns=3)
    return figure


def _parts(case: Case) -> dict[str, float]:
    """Seconds of each part for each GB; they make up the median time of the case."""
    read = case.phase_s("read") or case.phase_s("transfer")
    if not read:
        return {}
    # each is that of its slowest rank, so that together they can be longer than the whole
    allocate = min(case.phase_s("allocate"), case.seconds)
    read = min(read, case.seconds - allocate)
    rest = case.seconds - read - allocate
    verify, scatter = case.phase_s("checksum"), case.phase_s("copy")
    # thread seconds: several threads can have more of them than the read is long
    fit = min(1.0, read / (verify + scatter)) if verify + scatter else 1.0
    waiting = read - fit * (verify + scatter)
    parts = (allocate, waiting, fit * verify, fit * scatter, rest)
    gigabytes = case.total_bytes / GIGABYTE
    return {name: part / gigabytes for name, part in zip(_PARTS, parts, strict=True)}


def draw_inventory(cases: Sequence[Case]) -> Figure | None:
    """Ours beside other libraries and emulations; what failed with its reason."""
    order = list(_KINDS)
    found = [case for case in cases if case.group == "inventory" and case.kind in order]
    found.sort(key=lambda case: order.index(case.kind))
    panels = [one for one in OPERATIONS if any(c.operation == one and not c.error for c in found)]
    if not panels:
        return None
    most = max(case.fastest_gb_per_s for case in found if not case.error)
    rows = rows_of(found, lambda case: case.title)
    title = "Throughput on a realistic inventory: megatron_uring, other libraries, emulations"
    figure, grid = new_figure(title, FRAME_INCHES + len(rows) * 0.36, len(panels))
    for axes, operation in zip(grid, panels, strict=True):
        own = [case for case in found if case.operation == operation]
        for case in own:
            row = rows.index(case.title)
            if case.error:
                reason = textwrap.shorten(case.error, _REASON_CHARACTERS, placeholder=" ...")
                style = {"va": "center", "fontsize": TEXT_POINTS - 1, "color": INK}
                text = textwrap.fill(f"failed: {reason}", 32)
                axes.annotate(text, (0, row), (4, 0), textcoords="offset points", **style)
                continue
            axes.barh(row, case.gb_per_s, 0.66, **_style(case.kind))
            mark_range(axes, row, case)
        axes.set_xlim(0, most * 1.2)
        label_rows(axes, rows)
        tidy(axes, "GB/s (median, slowest to fastest)", operation)
    kinds = [kind for kind in order if any(case.kind == kind for case in found)]
    put_legend(figure, styles={_KINDS[kind][0]: _style(kind) for kind in kinds})
    return figure


def _style(kind: str) -> dict[str, Any]:
    colour = _KINDS[kind][1]
    if kind == EMULATION:
        return {"facecolor": colour, "edgecolor": GREY, "hatch": "////"}
    return {"facecolor": colour}


_FIGURES: dict[str, Callable[[Sequence[Case]], Figure | None]] = {
    "coalescing": draw_coalescing,
    "aggregation": draw_patterns,
    "metadata": draw_metadata,
    "buffered": draw_size,
    "alignment": draw_alignment,
    "engine": draw_engine,
    "submission": draw_submission,
    "pool": draw_pool,
    "allocation": draw_restore,
    "inventory": draw_inventory,
}
