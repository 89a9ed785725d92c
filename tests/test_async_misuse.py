"""Asynchronous saves beside other threads, forked children, other options: refused, or safe."""

import dataclasses
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

import megatron_uring
from megatron_uring import Config, UnsupportedError, _engine, fencing, pending, stage

MIB = 1 << 20
SMALL = Config(engine="posix", slab_bytes=MIB, slab_count=1, staging_bytes=MIB)


@pytest.fixture
def begin(world, tmp_path):
    def run(value, name="c", config=SMALL):
        state = {"w": torch.full((3 * MIB,), value, dtype=torch.uint8)}
        return megatron_uring.save_async(state, tmp_path / name, config=config, communicator=world)

    yield run
    for one in pending.in_flight():
        one.abort()


def value_in(directory):
    (value,) = megatron_uring.restore(directory)["w"].unique().tolist()
    return value


def test_a_child_cannot_finish_or_harm_its_parents_saves(tmp_path):
    """A handler of the parent's that calls `wait` also runs in its children."""
    program = tmp_path / "program.py"
    program.write_text(CHILD)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), str(tmp_path)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert value_in(tmp_path / "straight") == value_in(tmp_path / "tiered") == 2


CHILD = """
import os, signal, sys
import torch
from megatron_uring import Config, StorageError, _engine, save_async

root = sys.argv[1]
_engine.inject_fault("write", "delay", count=-1, path_contains="data-", delay_s=0.1)
saves = []
for name, staging in (("straight", ""), ("tiered", root + "/staging")):
    config = Config(engine="posix", slab_bytes=1 << 20, slab_count=2, staging_directory=staging)
    state = {"w": torch.full((3 << 20,), 2, dtype=torch.uint8)}
    saves.append(save_async(state, f"{root}/{name}", config=config))

def refused(*_):
    for save in saves:
        for call in (save.wait, save.poll):
            try:
                call()
            except StorageError as error:
                assert f"process {os.getppid()}" in str(error), error
            else:
                os._exit(1)
        save.abort()
    os._exit(0)

signal.signal(signal.SIGTERM, refused)
child = os.fork()
if not child:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(2)
assert os.waitpid(child, 0)[1] == 0
for save in saves:
    save.wait()
"""


def test_threads_of_one_process_save_each_its_own(begin, tmp_path):
    failed = []

    def run(number):
        try:
            for value in range(4):
                begin(10 * number + value, f"c{number}").wait()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert [value_in(tmp_path / f"c{number}") for number in range(4)] == [3, 13, 23, 33]


def test_pools_of_other_options_do_not_pile_up(begin, tmp_path):
    stage.close_engines()
    _engine.inject_fault("write", "delay", count=-1, path_contains="data-", delay_s=0.05)
    saves = []
    for value in range(7):
        config = Config(engine="posix", slab_bytes=MIB, slab_count=1, queue_depth=1 + value)
        saves.append(begin(value, f"c{value}", config))
        assert len(stage.running_engines()) <= 3
    for value, save in enumerate(saves):  # those whose pool has gone are whole all the same
        assert save.wait().staging.endswith(f"depth {1 + value}")
        assert value_in(tmp_path / f"c{value}") == value
    for value in range(7):
        config = Config(engine="posix", slab_bytes=MIB, slab_count=1, queue_depth=1 + value)
        megatron_uring.restore(tmp_path / "c0", config=config)
    assert len(stage.running_engines()) <= 6
    stage.close_engines()


def test_who_never_waits_is_told_once(begin, caplog, monkeypatch):
    monkeypatch.setattr(pending, "_told", [])
    saves = []
    for value in range(5):
        saves.append(begin(value, f"c{value}"))
        while not saves[-1].drained():
            time.sleep(0.01)
        lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert len(lines) == (value >= 2)
    assert saves[0].directory in lines[0] and "wait()" in lines[0]


@pytest.mark.parametrize("tiered", [False, True])
def test_who_waits_or_is_not_written_yet_is_not_told(
    begin, caplog, monkeypatch, tmp_path, staging, tiered
):
    monkeypatch.setattr(pending, "_told", [])
    monkeypatch.setattr(pending, "_FORGOTTEN", 1)
    config = dataclasses.replace(SMALL, staging_directory=str(staging) if tiered else "")
    begin(1, "a", config).wait()
    begin(2, "b", config).abort()
    slowed = {"count": -1, "path_contains": f"{tmp_path}/c/data-", "delay_s": 0.5}
    _engine.inject_fault("write", "delay", **slowed)
    slow = begin(3, "c", config)
    begin(4, "d", config)
    assert not slow.drained() and caplog.text == ""
    while not slow.drained():
        time.sleep(0.01)
    begin(5, "e", config).wait()
    assert f"{tmp_path}/c" in caplog.text


def test_a_save_that_is_over_keeps_no_file_open(begin, tmp_path):
    def open_files():
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        found = [os.readlink(link) for link in links if os.path.islink(link)]
        return [path for path in found if path.startswith(str(tmp_path))]

    first, second = begin(1, "a"), begin(2, "b")
    assert len(open_files()) == 2
    first.wait()
    second.abort()
    del first, second
    assert not open_files() and not fencing._state.staging


@pytest.mark.parametrize(
    "tensor",
    [
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.nn.LazyLinear(3).weight,
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_tensor_without_a_shape_is_refused_by_name(save, tmp_path, tensor):
    with pytest.raises(UnsupportedError, match="save tensor 'a/b'"):
        save({"a": {"b": tensor()}}, tmp_path / "c")
