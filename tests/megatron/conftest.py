"""What each test of this folder shows, for the table of docs/compatibility.md."""

import inspect

import programs
import pytest
import torch


@pytest.fixture(autouse=True)
def _told_what_it_shows(request, record_property):
    """The row is the check's or the test's name, below the first line of its module.

    A test that knows better says so itself, with the same properties.
    """
    document = inspect.getdoc(request.module) or request.module.__name__
    record_property("area", document.splitlines()[0])
    values = getattr(request.node, "callspec", None)
    name = values.params.get("check") if values is not None else None
    name = name or request.node.originalname.removeprefix("test_")
    record_property("feature", name.replace("_", " "))
    record_property("megatron-core", programs.VERSION)
    record_property("torch", torch.__version__)
