"""The table of docs/compatibility.md: made of what tests reported, and of nothing else."""

import importlib.util
from pathlib import Path

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parents[1]
PASSED = ""
REFUSED = '<skipped message="megatron-core 0.14.0 itself refuses it: no grid"/>'
ELSEWHERE = '<skipped message="no right to mount"/>'
FAILED = '<failure message="wrong bits"/>'


@pytest.fixture
def table(tmp_path, monkeypatch):
    """The script, writing to a folder of the test's."""
    path = ROOT / "scripts" / "compatibility_table.py"
    spec = importlib.util.spec_from_file_location("compatibility_table", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "compatibility_table", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "TABLE", tmp_path / "table.md")
    return module


def case(feature, version, done, **told):
    told = {"area": "Loads.", "feature": feature, "megatron-core": version, "torch": "2", **told}
    lines = "".join(f'<property name="{name}" value="{value}"/>' for name, value in told.items())
    return f"<testcase><properties>{lines}</properties>{done}</testcase>"


@pytest.fixture
def run(table, tmp_path):
    def call(*cases, check=False):
        report = tmp_path / "report.xml"
        report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
        return CliRunner().invoke(table.main, [str(report), *(["--check"] if check else [])])

    return call


def test_each_cell_is_what_the_tests_of_its_row_did(run, table):
    done = run(
        case("one", "0.16.1", PASSED),
        case("one", "0.14.0", PASSED),
        case("one", "0.14.0", REFUSED),  # by another launcher
        case("two", "0.16.1", ELSEWHERE),
        case("three", "0.16.1", PASSED, outcome="not in Megatron: no such format"),
        "<testcase/>",  # a test that shows nothing of Megatron
    )
    assert done.exit_code == 0, done.output
    page = table.TABLE.read_text()
    assert "| | 0.14.0 | 0.16.1 |" in page and "\n1. no grid\n2. no such format\n" in page
    assert "| one | no (1) | yes |" in page and "| three |  | no (2) |" in page
    assert "two" not in page


def test_a_failed_test_leaves_the_table_as_it_was(run, table):
    table.TABLE.write_text("before")
    done = run(case("one", "0.16.1", PASSED), case("one", "0.16.1", FAILED))
    assert done.exit_code == 1 and "Loads. | one | 0.16.1" in done.output
    assert table.TABLE.read_text() == "before"


def test_a_table_that_says_otherwise_is_found_and_left_alone(run, table):
    run(case("one", "0.14.0", PASSED), case("two", "0.14.0", PASSED))
    page = table.TABLE.read_text()
    assert run(case("two", "0.14.0", PASSED), check=True).exit_code == 0
    for cases in (
        case("one", "0.14.0", REFUSED),
        case("three", "0.14.0", PASSED),
        case("one", "0.19.2", PASSED),
    ):
        done = run(cases, check=True)
        assert done.exit_code == 1 and "the test says" in done.output
    assert table.TABLE.read_text() == page


def test_the_table_that_is_kept_can_be_read(table):
    page = (ROOT / "docs" / "compatibility.md").read_text()
    said = table.parse(page)
    assert {version for _, _, version in said} >= {"0.14.0", "0.16.1", "0.19.2"}
    assert set(said.values()) == {"yes", "no"}
