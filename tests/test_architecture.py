"""The rules that the folder keeps: imports go down, files state guarantees, sizes stay small."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_uring

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_uring"
FILES = sorted(PACKAGE.rglob("*.py"))
NATIVE = sorted(p for p in (ROOT / "csrc").iterdir() if p.suffix in (".cpp", ".hpp"))
FILE_LINES = 400
FUNCTION_LINES = 70

STEPS = {"providers", "plan", "stage", "aggregate", "write", "read", "index", "commit"}
# From the top: a module imports from lower layers, and inside a layer only what is said below.
LAYERS = [
    {"cli", "__main__", "__init__", "megatron", "dcp", "bench", "launching", "convert", "view"},
    {"mapping"},
    {"checkpoint", "verify"},
    {"pending"},
    {"saving", "restoring"},
    {"structures", "probing", "timeline", "tiered", "nearest"},
    {"profiles", "tier", "forward"},
    STEPS,
    {"lazy", "drain", "devices"},
    {"ownership", "index_rules", "tensors", "dtensors", "claims", "overlap"},
    {"tables", "progress", "nesting", "objects", "selection", "agreed", "flattened", "roots"},
    {"shards"},
    {"columns", "comm", "layout", "fencing", "report"},
    {"regular"},
    {"config"},
    {"errors", "_engine"},
]
INSIDE_A_LAYER = {
    ("__init__", "megatron"),  # the package offers the adapter's switch
    ("__init__", "dcp"),  # and storage for torch.distributed.checkpoint
    ("__main__", "cli"),
    ("cli", "__init__"),  # status() of the package
    ("cli", "bench"),  # a command of its own
    ("cli", "launching"),  # run
    ("launching", "__init__"),  # enable() of the package
    ("launching", "megatron"),  # which waits for an import
    ("cli", "convert"),
    ("cli", "view"),
    ("convert", "dcp"),  # which says where its planner's data is kept
    ("bench", "megatron"),  # a row of its own: saves through Megatron
    ("index", "index_rules"),
}


def name_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def level(module):
    (found,) = [number for number, layer in enumerate(LAYERS) if module in layer]
    return found


def imports(path):
    """(top module, our module or None) of every import statement of a file, late ones too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield split(alias.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "megatron_uring":
                for alias in node.names:
                    known = alias.name in set().union(*LAYERS)
                    yield "megatron_uring", alias.name if known else "__init__"
            else:
                yield split(node.module)


def split(name):
    top, _, rest = name.partition(".")
    return top, (rest.partition(".")[0] or "__init__") if top == "megatron_uring" else None


def importers(*tops):
    return {name_of(path) for path in FILES if any(top in tops for top, _ in imports(path))}


def test_every_module_has_a_layer():
    for path in FILES:
        level(name_of(path))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    module = name_of(path)
    for top, ours in imports(path):
        if top != "megatron_uring" or ours == module:
            continue
        allowed = level(ours) > level(module) or (module, ours) in INSIDE_A_LAYER
        assert allowed, f"{module} imports {ours}"


def test_step_modules_do_not_import_each_other():
    for path in FILES:
        if name_of(path) in STEPS:
            assert not {ours for _, ours in imports(path)} & STEPS, path


def test_only_the_index_and_the_view_import_h5py():
    # the view is an HDF5 file for others' tools, and nothing of a checkpoint depends on it
    assert importers("h5py") == {"index", "view"}


def test_only_communicators_import_mpi4py():
    assert importers("mpi4py") == {"comm"}


def test_torch_stays_where_tensors_are():
    allowed = {"tensors", "providers", "objects", "lazy", "devices", "stage", "read"}
    allowed |= {"megatron", "dcp", "dtensors", "bench", "comm", "convert"}
    assert importers("torch") <= allowed


def test_communicators_import_torch_and_mpi_late_only():
    for path in sorted((PACKAGE / "comm").glob("*.py")):
        top_level = ast.parse(path.read_text()).body
        for node in top_level:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [n for n in names if n.split(".")[0] in ("torch", "mpi4py")], path


def test_only_the_adapter_imports_megatron():
    assert importers("megatron") <= {"megatron", "bench"}


def test_importing_the_package_imports_neither_mpi_megatron_nor_torch_and_starts_nothing():
    program = (
        "import sys, threading, megatron_uring;"
        "tops = ('megatron', 'torch');"
        "bad = [m for m in sys.modules if m == 'mpi4py.MPI' or m.split('.')[0] in tops];"
        "assert not bad, bad; assert threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=120)


def test_every_public_name_is_found_and_listed():
    assert sorted(megatron_uring._HOMES) == megatron_uring.__all__
    assert set(megatron_uring.__all__) <= set(dir(megatron_uring))
    for name in megatron_uring.__all__:
        assert getattr(megatron_uring, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = megatron_uring.nothing


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_file_says_what_it_guarantees(path):
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring
    if len(path.read_text().splitlines()) > 10:
        assert "Guarantees" in docstring


@pytest.mark.parametrize("path", NATIVE, ids=lambda path: path.name)
def test_every_native_header_says_what_it_guarantees(path):
    if path.suffix == ".hpp":
        assert path.read_text().lstrip().startswith("//")


@pytest.mark.parametrize("path", FILES + NATIVE, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_short(path):
    name = str(path.relative_to(ROOT))
    lines = len(path.read_text().splitlines())
    assert lines <= FILE_LINES, f"{name}: {lines} lines"


def test_functions_stay_short():
    long = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > FUNCTION_LINES:
                    long.add(f"{path.relative_to(ROOT)}:{node.name}")
    assert not long


def native_functions(path):
    """(name, lines) of what opens with a brace at the end of an unindented line."""
    start, head = None, ""
    for number, line in enumerate(path.read_text().splitlines()):
        if start is None and re.match(r"^[A-Za-z].*\{$", line) and "namespace" not in line:
            start, head = number, line
        elif start is not None and line.startswith("}"):
            if "(" in head:
                yield head, number - start + 1
            start = None


@pytest.mark.parametrize("path", NATIVE, ids=lambda path: path.name)
def test_native_functions_stay_short(path):
    long = {head for head, lines in native_functions(path) if lines > FUNCTION_LINES}
    assert path.name == "bindings.cpp" or not long


def test_only_the_ring_includes_liburing_and_only_the_bindings_python():
    for path in NATIVE:
        text = path.read_text()
        assert ("liburing.h" not in text) or path.stem == "ring", path
        assert not re.search(r"#include <(Python\.h|pybind11)", text) or path.stem == "bindings"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_printed_but_by_the_command_line(path):
    if name_of(path) in ("cli", "bench"):
        return
    calls = [n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    assert "print" not in [call.id for call in calls if isinstance(call, ast.Name)]
