"""Panels of pictures: bars, lines, labels and legends, as all pictures have them.

Guarantees
----------
- Bars and points are medians of the trials; lines through them go from the slowest to the fastest.
- Each axis names its unit; colours can be told apart by people who see fewer of them. Legends lie
  outside the panels.
- No global state of matplotlib is touched, and no window is opened.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_uring.bench.pages.measured import Case
from megatron_uring.bench.summary import size
from megatron_uring.errors import UnsupportedError

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import FixedLocator, NullLocator
except ImportError as error:
    raise UnsupportedError(
        "draw the report",
        expected="matplotlib",
        found="not installed",
        cause="pip install 'megatron-uring[bench]'",
    ) from error

# of Okabe and Ito
BLUE, ORANGE, GREEN = "#0072B2", "#E69F00", "#009E73"
SKY, GREY, INK = "#56B4E9", "#8C8C8C", "#222222"
PAIR = (BLUE, ORANGE)
_WIDTH_INCHES, _LABEL_CHARACTERS = 7.5, 27
ROW_INCHES, FRAME_INCHES = 0.21, 1.35
GB_PER_S = "GB/s (median, slowest to fastest trial)"
TEXT_POINTS, _TITLE_POINTS = 8, 10.5


@dataclass(frozen=True)
class Bars:
    """A panel: `series` by name, each a case or None for each of `rows`."""

    title: str
    rows: Sequence[str]
    series: Mapping[str, Sequence[Case | None]]


def new_figure(title: str, height_inches: float, panels: int = 1) -> tuple[Figure, list[Any]]:
    """A figure as wide as a page, and its panels beside each other."""
    figure = Figure(figsize=(_WIDTH_INCHES, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        textwrap.fill(title, 88),
        x=0.01,
        ha="left",
        fontsize=_TITLE_POINTS,
        fontweight="bold",
        color=INK,
    )
    grid = figure.subplots(1, panels, squeeze=False, sharey=True)
    return figure, list(grid[0])


def tidy(axes: Any, x_label: str, title: str = "") -> None:
    """Label a panel, and take away what is no information."""
    axes.set_xlabel(x_label, fontsize=TEXT_POINTS, color=INK)
    axes.set_title(title, fontsize=TEXT_POINTS + 1, loc="left", color=INK)
    axes.tick_params(labelsize=TEXT_POINTS, length=2, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def put_legend(
    figure: Figure,
    panels: Sequence[Any] = (),
    styles: Mapping[str, Mapping[str, Any]] | None = None,
    columns: int = 5,
) -> None:
    """What the colours mean, below the panels: all that these show, or `styles` by name."""
    found = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in panels]
    named = {label: handle for own in found for handle, label in own}
    patches = [Patch(label=name, **style) for name, style in (styles or {}).items()]
    shown = patches or list(named.values())
    figure.legend(
        handles=shown,
        loc="outside lower center",
        ncols=min(len(shown), columns),
        fontsize=TEXT_POINTS,
        frameon=False,
    )


def bar_figure(title: str, panels: Sequence[Bars], colours: Sequence[str]) -> Figure | None:
    """Horizontal bars, a colour for each series; the panels share their rows."""
    panels = [one for one in panels if any(any(own) for own in one.series.values())]
    if not panels:
        return None
    rows = panels[0].rows
    count = len(panels[0].series)
    figure, grid = new_figure(
        title, FRAME_INCHES + len(rows) * (ROW_INCHES * count + 0.12), len(panels)
    )
    shown = [case for one in panels for own in one.series.values() for case in own if case]
    most = max(case.fastest_gb_per_s for case in shown)
    for axes, panel in zip(grid, panels, strict=True):
        draw_bars(axes, panel, colours)
        axes.set_xlim(0, most * 1.18)
        tidy(axes, GB_PER_S if len(panels) == 1 else "GB/s", panel.title)
    if count > 1:
        put_legend(figure, grid)
    return figure


def draw_bars(axes: Any, panel: Bars, colours: Sequence[str]) -> None:
    """The bars of one panel, with ranges and figures."""
    height = 0.8 / len(panel.series)
    for number, (name, own) in enumerate(panel.series.items()):
        shift = (number - (len(panel.series) - 1) / 2) * height
        found = [(row + shift, case) for row, case in enumerate(own) if case is not None]
        if not found:
            continue
        axes.barh(
            [at for at, _ in found],
            [case.gb_per_s for _, case in found],
            height * 0.92,
            color=colours[number],
            label=name,
        )
        for at, case in found:
            mark_range(axes, at, case)
    label_rows(axes, panel.rows)


def mark_range(axes: Any, at: float, case: Case) -> None:
    """The range of the trials, and the median in figures."""
    span = (case.slowest_gb_per_s, case.fastest_gb_per_s)
    mark_span(axes, at, span, f"{case.gb_per_s:.2f}")


def mark_span(axes: Any, at: float, span: tuple[float, float], text: str) -> None:
    """A line from the least to the most, and a text behind it."""
    axes.plot(span, [at, at], color=INK, linewidth=1.1, solid_capstyle="butt")
    axes.annotate(
        text,
        (span[1], at),
        xytext=(3, 0),
        textcoords="offset points",
        va="center",
        fontsize=TEXT_POINTS - 1,
        color=INK,
    )


def label_rows(axes: Any, rows: Sequence[str]) -> None:
    """Names of the rows, wrapped, the first on top."""
    axes.set_yticks(range(len(rows)), [textwrap.fill(row, _LABEL_CHARACTERS) for row in rows])
    axes.set_ylim(len(rows) - 0.45, -0.55)


def in_rows(cases: Sequence[Case], label: Callable[[Case], str], rows: Sequence[str]) -> list[Any]:
    """The case of each row, or None."""
    found = {label(case): case for case in cases}
    return [found.get(row) for row in rows]


def rows_of(cases: Sequence[Case], label: Callable[[Case], str]) -> list[str]:
    """Labels in order of appearance."""
    return list(dict.fromkeys(label(case) for case in cases))


def draw_line(axes: Any, own: Sequence[Case], axis: str, name: str, style: tuple[str, str]) -> None:
    """Medians over a numeric axis, with the range of the trials; `style` is colour and marker."""
    own = sorted(own, key=lambda case: case.axes[axis])
    if not own:
        return
    medians = [case.gb_per_s for case in own]
    below = [case.gb_per_s - case.slowest_gb_per_s for case in own]
    above = [case.fastest_gb_per_s - case.gb_per_s for case in own]
    axes.errorbar(
        [float(case.axes[axis]) for case in own],
        medians,
        yerr=[below, above],
        color=style[0],
        marker=style[1],
        markersize=4.5,
        linewidth=1.6,
        elinewidth=1,
        capsize=3,
        label=name,
    )


def scale_sizes(axes: Any, own: Sequence[Case], axis: str) -> None:
    """A logarithmic x axis with a tick at each value that was measured."""
    values = sorted({int(case.axes[axis]) for case in own})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_minor_locator(NullLocator())
    name: Callable[[float], str] = str if axis == "queue_depth" else size
    crowded = len(values) > 5 or (axis != "queue_depth" and len(values) > 3)
    axes.set_xticklabels(
        [name(value) for value in values],
        rotation=40 if crowded else 0,
        ha="right" if crowded else "center",
    )
    axes.set_ylim(0, None)
    axes.grid(axis="y", linewidth=0.4, color="#DDDDDD")
