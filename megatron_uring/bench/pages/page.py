"""The report: a page, pictures and findings, from a results file.

Guarantees
----------
- `report.html` is one file: pictures are in it, nothing is fetched, no script is run. All text from
  the results is escaped.
- A file with errors, torn lines or missing groups gives a report that says so.
- The newest run is reported, and how many others the file has. `findings.md` names no host.
- Each file is replaced as a whole.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_uring.bench.pages import findings, measured, plots, recommend
from megatron_uring.bench.pages.answering import AGREES, DIFFERS, NO_CLAIM, PARTLY, Answer
from megatron_uring.bench.pages.comparing import Comparison, factor, noise
from megatron_uring.bench.pages.measured import Case, Run
from megatron_uring.bench.suite.results import Results, ResultsError, read_results
from megatron_uring.bench.summary import GIGABYTE, size
from megatron_uring.errors import UnsupportedError

try:
    import jinja2
except ImportError as error:
    raise UnsupportedError(
        "write the report",
        expected="jinja2",
        found="not installed",
        cause="pip install 'megatron-uring[bench]'",
    ) from error

PAGE, FINDINGS = "report.html", "findings.md"
_TEMPLATES = Path(__file__).with_name("templates")
_DOTS_PER_INCH = 144
_TONES = {AGREES: "good", PARTLY: "part", DIFFERS: "bad"}
_RATES = ("GB/s", "slowest to fastest", "trials")
_COSTS = ("CPU s per GB, processes", "CPU s per GB, machine", "peak MB")
_COLUMNS = ("case", "operation", *_RATES, *_COSTS)


def write_report(results_path: str, directory: str) -> list[str]:
    """Write the page, its pictures and `findings.md`, of the newest run.

    Parameters
    ----------
    results_path
        A file of `results.append_record`.
    directory
        Made if need be.

    Returns
    -------
    list
        Paths of what was written.

    Raises
    ------
    ResultsError
        If the file is no results file, or no trial in it has figures.
    UnsupportedError
        On import, where matplotlib or jinja2 is missing.
    OSError
        If the file cannot be read, or the report not be written.
    """
    results = read_results(results_path)
    try:
        run = measured.newest_run(results.records)
    except ResultsError as error:
        raise ResultsError(f"{results_path}: {error}") from error
    cases = measured.summarize(run.records)
    pictures = {key: _png(figure) for key, figure in plots.figures(cases).items()}
    context = _context(results, run, cases)
    templates = _environment()
    os.makedirs(directory, exist_ok=True)
    written = []
    for name, template in ((PAGE, "report.html.j2"), (FINDINGS, "findings.md.j2")):
        text = templates.get_template(template).render(**context, pictures=_embedded(pictures))
        written.append(_replace(directory, name, text.encode()))
    for key, data in pictures.items():
        written.append(_replace(directory, f"{key}.png", data))
    return written


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return buffer.getvalue()


def _embedded(pictures: Mapping[str, bytes]) -> dict[str, str]:
    head = "data:image/png;base64,"
    return {key: head + base64.b64encode(data).decode() for key, data in pictures.items()}


def _replace(directory: str, name: str, data: bytes) -> str:
    path = os.path.join(directory, name)
    temporary = f"{path}.part"
    with open(temporary, "wb") as file:
        file.write(data)
    os.replace(temporary, path)
    return path


def _environment() -> jinja2.Environment:
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=lambda name: bool(name) and ".html" in str(name),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["markdown"] = _markdown
    return templates


def _markdown(value: object) -> str:
    """Text that is neither markup nor a border of a table."""
    text = " ".join(str(value).split())
    for sign, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|")):
        text = text.replace(sign, escaped)
    return text.replace("`", "\\`").replace("[", "\\[")


# -------------------------------------------------------------------------------------------------
# what the templates show


def _context(results: Results, run: Run, cases: Sequence[Case]) -> dict[str, Any]:
    environment = run.environment
    first = next(one for one in run.records if not one.error)
    ranks = "1 rank" if first.ranks == 1 else f"{first.ranks} ranks"
    answers = findings.answers(cases)
    recommendations = recommend.recommend(cases, environment)
    return {
        "title": f"Checkpoint I/O on {environment.get('file_system', 'an unknown file system')}",
        "run": run,
        "began": min(one.time for one in run.records),
        "machine": _machine(environment),
        "host": environment.get("host", "unknown"),
        "sizes": f"Suite {first.suite}, {ranks}",
        "scope": findings.scope(environment, first.ranks, first.nodes),
        "headline": recommend.headline(recommendations),
        "recommendations": recommendations,
        "questions": _questions(answers, cases),
        "columns": _COLUMNS,
        "compared": _compared,
        "failed": [case for case in cases if case.error],
        "missing": _missing(answers, cases),
        "torn_lines": results.torn_lines,
        "noise": noise(cases),
        "command": _command(first.suite, first.ranks),
    }


def _machine(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of the table, without the host."""
    known = dict(environment)
    offset, memory = known.get("offset_alignment_bytes"), known.get("memory_alignment_bytes")
    direct = f"yes; offsets of {offset}, memory of {memory} bytes"
    space = float(known.get("file_system_bytes", 0)) / GIGABYTE
    rows = [
        ("processor", f"{known.get('cpu', 'unknown')}, {known.get('cores', '?')} cores"),
        ("memory", f"{float(known.get('memory_gb', 0)):.1f} GB"),
        ("kernel", str(known.get("kernel", "unknown"))),
        ("file system", f"{known.get('file_system', 'unknown')}, {space:.0f} GB"),
        ("mount options", str(known.get("mount_options", "unknown"))),
        ("stripe", size(float(known.get("stripe_bytes", 0)))),
        ("direct I/O", direct if known.get("direct") else "no"),
        ("engine", str(known.get("engine", "unknown"))),
        ("Python", str(known.get("python", "unknown"))),
    ]
    versions = known.get("versions")
    if isinstance(versions, Mapping):
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
        rows.append(("versions", listed))
    return rows


def _questions(answers: Sequence[Answer], cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Each answer, and the cases of its groups where these are shown for the first time."""
    found, shown = [], set()
    for answer in answers:
        groups = [group for group in answer.groups if group not in shown]
        shown |= set(answer.groups)
        rows = [_row(case) for case in cases if case.group in groups]
        tone = _TONES.get(answer.verdict, "none")
        judged = answer.verdict != NO_CLAIM
        found.append({"answer": answer, "rows": rows, "tone": tone, "judged": judged})
    return found


def _row(case: Case) -> dict[str, Any]:
    if case.error:
        return {"title": case.title, "operation": case.operation, "error": case.error, "cells": ()}
    cells = (
        f"{case.gb_per_s:.2f}",
        f"{case.slowest_gb_per_s:.2f} to {case.fastest_gb_per_s:.2f}",
        str(len(case.trials)),
        f"{case.process_cpu_s_per_gb:.3f}",
        f"{case.machine_cpu_s_per_gb:.3f}",
        f"{case.peak_mb:.0f}",
    )
    return {"title": case.title, "operation": case.operation, "error": "", "cells": cells}


def _compared(comparison: Comparison) -> dict[str, str]:
    left, right = comparison.left, comparison.right
    return {
        "label": comparison.label,
        "left": f"{left.title}, {left.operation}: {left.figures}",
        "right": f"{right.title}, {right.operation}: {right.figures}",
        "ratio": factor(comparison.ratio),
        "relation": comparison.relation,
    }


def _missing(answers: Sequence[Answer], cases: Sequence[Case]) -> list[str]:
    """What the suite could have measured, by question; a whole group in one line."""
    groups = {case.group for case in cases}
    found = []
    for answer in answers:
        absent = [group for group in answer.groups if group not in groups]
        if absent:
            found.append(f"{answer.question} The group {', '.join(absent)} was not measured.")
        elif answer.missing:
            found.append(f"{answer.question} Without figures: {'; '.join(answer.missing)}.")
    return found


def _command(suite: str, ranks: int) -> str:
    if suite == "quick":
        return f"scripts/bench quick --ranks {ranks}"
    return f"mpirun -n {ranks} --bind-to none megatron-uring bench run"
