"""The scripts: they parse, refuse what is not theirs, and leave no process behind."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "scripts" / "demo" / "quickstart.py"
SHELL_SCRIPTS = [
    path
    for path in sorted([*ROOT.glob("scripts/*"), *ROOT.glob("slurm/*"), ROOT / ".ci" / "run"])
    if path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env bash")
]


@pytest.fixture(scope="module")
def quickstart():
    spec = importlib.util.spec_from_file_location("quickstart", QUICKSTART)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*command, **options):
    return subprocess.run(
        [str(word) for word in command],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


def test_all_shell_scripts_are_looked_at():
    names = {path.name for path in SHELL_SCRIPTS}
    assert names >= {"setup", "quickstart", "test", "bench", "gpu_check", "run"}
    assert names >= {"train.sbatch", "bench.sbatch"}


@pytest.mark.parametrize("path", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_shell_script_parses(path):
    done = run("bash", "-n", path)
    assert done.returncode == 0 and done.stderr == ""


def test_usage_of_the_validator_names_the_directory_alone():
    done = run(sys.executable, ROOT / "scripts" / "validate_restore.py", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: validate_restore.py [OPTIONS] DIRECTORY\n")


@pytest.mark.parametrize(("words", "code"), [((), 2), (("unknown",), 2), (("--help",), 0)])
def test_bench_explains_itself_without_setting_anything_up(tmp_path, words, code):
    environment = {**os.environ, "VENV": str(tmp_path / "venv")}
    done = run(ROOT / "scripts" / "bench", *words, env=environment)
    assert done.returncode == code
    assert "usage: scripts/bench quick" in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


def test_quickstart_refuses_a_work_folder_that_is_not_its_own(quickstart, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    with pytest.raises(quickstart.FailedError, match="--work"):
        quickstart.prepare_work_folder(tmp_path)
    with pytest.raises(quickstart.FailedError, match="not a folder"):
        quickstart.prepare_work_folder(precious)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_quickstart_empties_a_work_folder_that_it_made(quickstart, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    work = tmp_path / "a" / "work"
    quickstart.prepare_work_folder(work)
    (work / "checkpoints").mkdir()
    (work / "checkpoints" / "file").touch()
    (work / "link").symlink_to(kept)
    quickstart.prepare_work_folder(work)
    assert [path.name for path in work.iterdir()] == [quickstart.MARKER]
    assert (kept / "file").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_quickstart_that_is_ended_leaves_no_process_behind(quickstart, tmp_path, number):
    launcher = tmp_path / "bin" / "mpirun"
    launcher.parent.mkdir()
    # as PRRTE does, the launcher gives its rank a process group of its own
    launcher.write_text(f"#!/bin/bash\nset -m\nsleep 600 &\necho $$ >{tmp_path}/pid\nwait\n")
    launcher.chmod(0o755)
    path = f"{launcher.parent}{os.pathsep}{os.environ['PATH']}"
    # who runs the tests in the background of a shell ignores SIGINT, and so would the script
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, str(QUICKSTART), "--work", str(tmp_path / "work")],
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    signal.signal(signal.SIGINT, before)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        session = int((tmp_path / "pid").read_text())
        assert len(quickstart.session_members(session)) == 2
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode == (128 + number if number == signal.SIGTERM else 1)
        assert quickstart.session_members(session) == []
    finally:
        process.kill()
        process.communicate()
