"""Writes docs/compatibility.md from what the tests reported: feature by version of Megatron-Core.

Guarantees
----------
- A cell is what the tests of that row did with that version; without one that ran it is empty.
- A test that failed leaves the table as it was, and the exit status is 1.
- `--check` changes nothing: the exit status is 1 if a test did otherwise than the table says.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import click

TABLE = Path(__file__).resolve().parents[1] / "docs" / "compatibility.md"
WORKS, REFUSED, FAILED = "yes", "no", "FAILED"
HEAD = """# What works with which Megatron-Core

Written by `scripts/compatibility` from the reports of the tests of `tests/megatron`; not to be
edited. Each row is one test or more, named as the test is, and each cell what they did with that
version: **yes**, all passed; **no**, this Megatron itself refuses the same, without us, for the
reason below; empty, not run with it. What was loaded was compared with what Megatron's own
`torch_dist` loads, or with the tensors in memory, to the last bit. `.ci/run` runs all rows with
0.16.1 and most of them with 0.14.0 and 0.19.2, and fails where this table says otherwise. All on
the CPU, over gloo or MPI, torch {torch}.
"""


@dataclass(frozen=True)
class Result:
    """What one test did."""

    area: str
    feature: str
    version: str
    torch: str
    outcome: str
    reason: str


@click.command()
@click.option("--check", is_flag=True, help="compare with the table, and write nothing")
@click.argument("reports", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
def main(reports: tuple[str, ...], check: bool) -> None:
    """Write the table from REPORTS, the files of pytest --junitxml."""
    results = [result for report in reports for result in read(report)]
    cells = merge(results)
    failed = [" | ".join(key) for key, (outcome, _) in cells.items() if outcome == FAILED]
    if failed:
        sys.exit("compatibility: failed: " + "; ".join(failed))
    if check:
        sys.exit("\n".join(differences(cells, TABLE.read_text(encoding="utf-8"))) or 0)
    TABLE.write_text(render(cells, results), encoding="utf-8")
    click.echo(f"compatibility: {len(cells)} cells in {TABLE}")


def read(report: str) -> Iterator[Result]:
    """The results of the tests that say what they show."""
    for case in ElementTree.parse(report).iter("testcase"):
        told = {one.get("name", ""): one.get("value", "") for one in case.iter("property")}
        if "megatron-core" not in told:
            continue
        outcome, reason = WORKS, ""
        skipped = case.find("skipped")
        if skipped is not None:
            outcome, reason = REFUSED, skipped.get("message", "")
            if not reason.startswith("megatron-core"):
                continue  # for a reason of this machine's
            reason = reason.partition(": ")[2] or reason
        elif told.get("outcome", "").startswith("not in Megatron: "):
            outcome, reason = REFUSED, told["outcome"].partition(": ")[2]
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = FAILED
        place = (told["area"], told["feature"], told["megatron-core"], told["torch"])
        yield Result(*place, outcome, reason)


Cells = dict[tuple[str, str, str], tuple[str, str]]


def merge(results: Iterable[Result]) -> Cells:
    """Outcome and reason by area, feature and version; the worst of several tests counts."""
    order = (WORKS, REFUSED, FAILED)
    cells: Cells = {}
    for one in results:
        key = (one.area, one.feature, one.version)
        known = cells.get(key, (WORKS, ""))
        cells[key] = max(known, (one.outcome, one.reason), key=lambda cell: order.index(cell[0]))
    return cells


def render(cells: Cells, results: Iterable[Result]) -> str:
    """The whole page."""
    versions = sorted({version for _, _, version in cells}, key=_numbers)
    rows: dict[str, list[str]] = defaultdict(list)
    for area, feature, _ in cells:
        if feature not in rows[area]:
            rows[area].append(feature)
    torch = ", ".join(sorted({one.torch for one in results}))
    lines = [HEAD.format(torch=torch)]
    for area, features in rows.items():
        lines += [
            f"## {area}\n",
            "| | " + " | ".join(versions) + " |",
            "|---" * (len(versions) + 1) + "|",
        ]
        notes: list[str] = []
        for feature in features:
            row = [_cell(cells.get((area, feature, version)), notes) for version in versions]
            lines.append(f"| {feature} | " + " | ".join(row) + " |")
        lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1)), ""]
    return "\n".join(lines).replace("\n\n\n", "\n\n").rstrip() + "\n"


def _cell(cell: tuple[str, str] | None, notes: list[str]) -> str:
    if cell is None:
        return ""
    outcome, reason = cell
    if outcome != REFUSED:
        return outcome
    if reason not in notes:
        notes.append(reason)
    return f"{REFUSED} ({notes.index(reason) + 1})"


def differences(cells: Cells, page: str) -> Iterator[str]:
    """What of `cells` the page does not say."""
    said = parse(page)
    for key, (outcome, _) in cells.items():
        if said.get(key) != outcome:
            found = said.get(key) or "nothing"
            yield f"compatibility: {' | '.join(key)}: the test says {outcome}, the table {found}"


def parse(page: str) -> dict[tuple[str, str, str], str]:
    """Outcomes of a page that `render` wrote, by area, feature and version."""
    area, versions = "", []
    said = {}
    for line in page.splitlines():
        if line.startswith("## "):
            area = line.removeprefix("## ")
        elif line.startswith("| | "):
            versions = [part.strip() for part in line.strip("|").split("|")][1:]
        elif line.startswith("| "):
            feature, *row = (
                part.strip() for part in line.removeprefix("|").removesuffix("|").split("|")
            )
            for version, cell in zip(versions, row, strict=True):
                if cell:
                    said[area, feature, version] = cell.partition(" ")[0]
    return said


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdecimal()]


if __name__ == "__main__":
    main()
