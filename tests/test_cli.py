"""The command line: exit codes, what is said, and where."""

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest
import torch
from click.testing import CliRunner

import megatron_uring
from megatron_uring import cli
from megatron_uring.cli import main


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setenv("MEGATRON_URING_SLAB_BYTES", str(1 << 20))
    monkeypatch.setenv("MEGATRON_URING_SLAB_COUNT", "2")
    monkeypatch.setenv("MEGATRON_URING_ENGINE", "posix")


@pytest.fixture
def checkpoint(save, tmp_path):
    save({"layer": {"weight": torch.arange(1000)}, "step": 3}, tmp_path / "c")
    return tmp_path / "c"


def damage(directory):
    (path,) = directory.glob("data-*.bin")
    with open(path, "r+b") as file:
        file.seek(5000)
        file.write(b"\xff\xff")
    return path


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_verify_of_a_good_checkpoint_exits_with_0_and_says_so(checkpoint):
    done = run("verify", checkpoint)
    assert done.exit_code == 0, done.output
    assert "good" in done.stdout and "1 tensors in 1 shards, 1 objects" in done.stdout
    assert " blocks in 1 subfile(s) " in done.stdout
    assert done.stderr == ""


def test_verify_of_a_damaged_one_exits_with_1_and_names_file_and_tensor(checkpoint):
    path = damage(checkpoint)
    done = run("verify", checkpoint)
    assert done.exit_code == 1
    assert path.name in done.stdout and "layer/weight" in done.stdout and "1 bad" in done.stdout


@pytest.mark.parametrize("good", [True, False])
def test_json_is_parsable_and_agrees_with_the_exit_code(checkpoint, good):
    if not good:
        damage(checkpoint)
    done = run("verify", "--json", checkpoint)
    found = json.loads(done.stdout)
    assert found["good"] is good and done.exit_code == (0 if good else 1)
    assert found["tensors"] == 1 and bool(found["problems"]) is not good


def test_what_is_no_checkpoint_exits_with_1_and_an_error_on_standard_error(tmp_path):
    done = run("verify", tmp_path)
    assert done.exit_code == 1
    assert done.stderr.startswith("megatron-uring: ") and str(tmp_path) in done.stderr
    assert "Traceback" not in done.output


def test_an_option_that_cannot_be_used_exits_with_1_naming_the_variable(checkpoint, monkeypatch):
    monkeypatch.setenv("MEGATRON_URING_ENGINE", "aio")
    done = run("verify", checkpoint)
    assert done.exit_code == 1 and "MEGATRON_URING_ENGINE" in done.stderr


def test_status_names_engine_and_versions():
    done = run("status", "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 0
    assert any(text.startswith("posix: ") for text in found["engines"])
    assert found["versions"]["megatron-uring"] == megatron_uring.__version__
    assert "posix: " in run("status").stdout


def test_status_names_the_versions_of_what_is_not_imported_or_not_installed(monkeypatch):
    def version(name):
        if name == "megatron-core":
            raise metadata.PackageNotFoundError(name)
        return f"{name} 1.2.3"

    monkeypatch.setattr(metadata, "version", version)
    found = json.loads(run("status", "--json").stdout)["versions"]
    assert found.pop("megatron-core") == "not installed"
    assert found == {
        name: f"{name} 1.2.3" for name in ("megatron-uring", "torch", "numpy", "h5py", "mpi4py")
    }


@pytest.mark.parametrize("name", [None, "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID"])
def test_a_rank_of_a_launcher_prints_no_colour_even_to_a_terminal(monkeypatch, name):
    for variable in cli._RANK_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    for variable in ("NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    if name is not None:
        monkeypatch.setenv(name, "0")
    console = cli.open_console()
    with console.capture() as capture:
        console.print("good", style="green")
    assert ("\x1b[" in capture.get()) is (name is None)


def test_help_lists_the_commands_and_a_missing_argument_is_a_usage_error():
    assert "verify" in run("--help").stdout and "status" in run("-h").stdout
    assert run("verify").exit_code == 2
    assert megatron_uring.__version__ in run("--version").stdout


def test_the_module_can_be_run_without_a_terminal(checkpoint):
    done = subprocess.run(
        [sys.executable, "-m", "megatron_uring", "verify", str(checkpoint)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert "good" in done.stdout and done.stderr == ""
