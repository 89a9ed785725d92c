"""Functions that wait for an import."""

import importlib
import sys

import pytest

from megatron_uring.megatron import imports


@pytest.fixture
def package(tmp_path, monkeypatch):
    """`waited_for`, with a module `late` in it; not imported."""
    (tmp_path / "waited_for").mkdir()
    (tmp_path / "waited_for" / "__init__.py").write_text("ready = True\n", encoding="utf-8")
    (tmp_path / "waited_for" / "late.py").write_text("value = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield "waited_for"
    for name in [name for name in sys.modules if name.split(".")[0] == "waited_for"]:
        del sys.modules[name]
    assert imports._finder not in sys.meta_path


def test_it_is_called_once_when_the_module_is_ready_and_before_anybody_has_it(package):
    seen = []

    def change(module):
        seen.append(module.__name__)
        module.value = 2

    imports.after_import("waited_for.late", change)
    importlib.import_module(package)
    assert seen == []
    from waited_for.late import value

    assert value == 2 and seen == ["waited_for.late"]
    assert "exec_module" not in vars(sys.modules["waited_for.late"].__loader__)
    importlib.reload(sys.modules["waited_for.late"])
    assert seen == ["waited_for.late"]


def test_it_is_called_at_once_where_the_module_is_there(package):
    module, seen = importlib.import_module(package), []
    imports.after_import(package, seen.append)
    assert seen == [module]


def test_several_wait_in_order_and_one_that_is_taken_back_is_not_called(package):
    seen = []
    imports.after_import(package, lambda module: seen.append(1))
    imports.after_import(package, lambda module: seen.append(2))()
    imports.after_import(package, lambda module: seen.append(3))
    assert importlib.util.find_spec(package) is not None  # only looks
    importlib.import_module(package)
    assert seen == [1, 3]


def test_its_error_is_the_imports_and_a_module_that_is_not_there_stays_so(package):
    def fail(module):
        raise LookupError("no")

    undo = imports.after_import("waited_for.missing", fail)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("waited_for.missing")
    undo()
    imports.after_import("waited_for.late", fail)
    with pytest.raises(LookupError):
        importlib.import_module("waited_for.late")
    importlib.import_module("waited_for.late")
