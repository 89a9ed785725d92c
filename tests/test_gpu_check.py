"""``scripts/gpu_check``: it says so where there is no GPU, and its checks find what is wrong.

Only the checks that need nothing of CUDA run here, on tensors of the host.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_uring import lazy
from megatron_uring.bench.gpu import correctness, driver, setting, times

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def here(tmp_path):
    return setting.Setting(torch.device("cpu"), str(tmp_path), 8 << 20, 1, time.monotonic() + 1e6)


def outcomes(rows):
    return {row.what: row.outcome for row in rows}


def test_without_a_gpu_it_says_so_and_succeeds(tmp_path):
    found = tmp_path / "found.json"
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check", "--json", found],
        env={**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "not run: no GPU here"
    assert json.loads(found.read_text())["rows"] == []


def test_a_python_without_the_package_is_an_error(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ModuleNotFoundError: torch' >&2\nexit 1\n")
    python.chmod(0o755)
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check"],
        env={**os.environ, "PYTHON": str(python)},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "ModuleNotFoundError: torch" in done.stderr


def test_round_trips_of_every_kind_of_tensor(here):
    rows = setting.run("round trips", correctness.round_trips, here)
    found = outcomes(rows)
    assert found.pop("round trip, save") == found.pop("round trip, save_async") == "passed", rows
    assert set(found.values()) <= {"not run"}


def test_a_round_trip_that_changes_a_bit_fails(here, monkeypatch):
    original = correctness.checkpoint.restore

    def restore(path, *arguments, **keywords):
        found = original(path, *arguments, **keywords)
        found["large"][7] += 1
        return found

    monkeypatch.setattr(correctness.checkpoint, "restore", restore)
    rows = setting.run("round trips", correctness.round_trips, here)
    assert outcomes(rows)["round trip, save"] == "failed"
    assert any(row.found.split("; ")[1] == "different: large" for row in rows)


def test_saves_under_an_optimizer_are_compared_and_watched(here):
    rows = setting.run("saves", lambda one: correctness.mutated_saves(one, 3, 1 << 16), here)
    found = outcomes(rows)
    assert found["3 saves under a mutating optimizer"] == "passed", rows
    assert found["processes created by them"] == "passed", rows
    # others use shared memory of this machine too, perhaps just now
    assert "files in /dev/shm by them" in found


def test_a_save_without_a_fence_is_found(here, monkeypatch):
    monkeypatch.setattr(lazy, "fence", lambda: 0.0)
    original = correctness.save_async

    def late(state, directory, config):
        """What a copy that comes after the step would have saved."""
        pending = original(state, directory, config)
        pending.abort()
        with torch.no_grad():
            state["parameter0"].add_(1)
        return original(state, directory, config)

    monkeypatch.setattr(correctness, "save_async", late)
    rows = setting.run("saves", lambda one: correctness.mutated_saves(one, 1, 1 << 16), here)
    assert outcomes(rows)["1 saves under a mutating optimizer"] == "failed"


def test_processes_and_shared_files_are_noticed(tmp_path):
    watch = correctness._Watch()
    with watch:
        subprocess.run(["sleep", "0.2"], check=True)
    assert outcomes(watch.rows())["processes created by them"] == "failed"


def test_times_of_a_small_state(here):
    rows = setting.run("times", times.blocking_and_fence, here)
    assert set(outcomes(rows).values()) == {"measured", "passed"}, rows
    assert len(rows) == 6


def test_what_needs_a_gpu_is_not_run_and_says_so(here):
    for check in (driver.graphed_step, driver.capture_beside_copies, driver.refused_page_lock):
        (row,) = setting.run("it", check, here)
        assert (row.outcome, row.found) == ("not run", "no GPU here")
    here.deadline = time.monotonic()
    (row,) = setting.run("it", correctness.mutated_saves, here)
    assert row.outcome == "not run" and "60 needed" in row.found


def test_an_error_is_a_row_that_failed(here):
    (row,) = setting.run("it", lambda _: 1 // 0, here)
    assert row.outcome == "failed"
    assert row.found.startswith("ZeroDivisionError at test_gpu_check.py:")
