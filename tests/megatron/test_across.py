"""A checkpoint that one version of Megatron-Core has saved is loaded by another."""

import subprocess
import sys
from pathlib import Path

import programs
import pytest

launch = programs.launch
pytestmark = [pytest.mark.megatron, pytest.mark.mpi, pytest.mark.slow]


def other_python():
    """Interpreter with another version: of the environment around this one, or the newest in it."""
    here = Path(sys.prefix)
    if here.name.startswith("megatron-core-"):
        return here.parent / "bin" / "python"
    inner = sorted(here.glob("megatron-core-*/bin/python"))
    assert inner, "no environment with another version: scripts/test makes one"
    return inner[-1]


def version_of(python):
    text = "from importlib import metadata; print(metadata.version('megatron-core'))"
    command = [str(python), "-c", text]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("this_saves", [True, False], ids=["to another", "from another"])
def test_what_one_version_saved_another_loads(this_saves, tmp_path):
    pythons = [Path(sys.executable), other_python()]
    assert version_of(pythons[0]) != version_of(pythons[1])
    saver, loader = pythons if this_saves else reversed(pythons)
    for python, checks in ((saver, ["save"]), (loader, ["load", "load_training"])):
        done = launch.run_torchrun(
            2,
            programs.FOLDER / "across.py",
            *(str(tmp_path), *checks),
            timeout_s=170.0,
            ok=False,
            python=python,
        )
        for check in checks:
            programs.require(check, 2, done)
