"""The watchdog: a process says what it is doing, wherever it stands, and takes nobody's signal."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import megatron_uring
from megatron_uring import _engine

ROOT = Path(__file__).parents[1]
STUCK = """
import os, signal, sys
import torch
import megatron_uring
from megatron_uring import Config, _engine
handled = []
if sys.argv[2] == "own":
    signal.signal(signal.SIGUSR2, lambda *_: handled.append(1))
_engine.inject_fault(sys.argv[3], "delay", delay_s=3.0, path_contains=sys.argv[4])
print("begun", flush=True)
megatron_uring.save({"a": torch.ones(5)}, sys.argv[1], config=Config(engine="posix"))
print("handled", len(handled), flush=True)
"""


@pytest.fixture
def stuck(tmp_path):
    """Runs a save that stands still for a while; gives what the process said when asked."""
    running = []

    def run(handler, operation, path):
        child = subprocess.Popen(
            [sys.executable, "-c", STUCK, str(tmp_path / "c"), handler, operation, path],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        running.append(child)
        assert child.stdout.readline() == "begun\n"
        deadline = time.monotonic() + 20
        while not list(tmp_path.glob("c/data-*")) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.5)
        child.send_signal(signal.SIGUSR2)
        output, errors = child.communicate(timeout=60)
        assert child.returncode == 0, errors
        return output, errors

    yield run
    for child in running:
        child.kill()
        child.communicate()


@pytest.mark.fault
@pytest.mark.parametrize(
    ("operation", "path", "step"),
    [("rename", "index.h5", "commit 5: rename index"), ("write", "data-", "finish subfile")],
)
def test_a_process_that_stands_still_says_where(stuck, tmp_path, operation, path, step):
    _, errors = stuck("none", operation, path)
    said = re.search(
        r"^megatron_uring: rank 0, process \d+: (.*) for \d+\.\d s, "
        r"save ([0-9a-f]{16}) to (.*), (\d) operations in the kernel$",
        errors,
        re.MULTILINE,
    )
    assert said, errors
    assert said[1] in (step, "write subfile of save " + said[2], "create subfile")
    assert said[3] == str(tmp_path / "c")
    assert int(said[4]) == (1 if operation == "write" else 0)


def test_a_signal_that_the_program_handles_is_left_alone(stuck):
    output, errors = stuck("own", "rename", "index.h5")
    assert "handled 1" in output and "megatron_uring: rank" not in errors


def test_each_step_can_be_failed_and_traced(save, tmp_path):
    _engine.trace_start()
    save({"a": 1}, tmp_path / "a")
    steps = [row[1] for row in _engine.trace_stop() if row[0] == "step"]
    assert steps[0] == "collect state" and "commit 5: rename index" in steps
    assert steps.index("commit 4: write index") < steps.index("commit 5: rename index")
    _engine.inject_fault("step", "eio", path_contains="create subfile")
    with pytest.raises(megatron_uring.StorageError, match="step: Input/output error"):
        save({"a": 1}, tmp_path / "b")
    assert os.listdir(tmp_path / "b") == []


def test_what_is_no_signal_is_refused():
    with pytest.raises(ValueError, match="no such signal"):
        _engine.answer_signal(12345)
    with pytest.raises(ValueError, match="cannot be handled"):
        _engine.answer_signal(signal.SIGKILL)
