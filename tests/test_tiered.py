"""Saves by way of a staging directory: acknowledged early, committed only after the drain."""

import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import megatron_uring
from megatron_uring import (
    CheckpointError,
    CorruptionError,
    StateMismatchError,
    StorageError,
    _engine,
    fencing,
    lazy,
    tier,
    tiered,
    verify,
)
from megatron_uring.drain import Drain
from megatron_uring.pending import in_flight
from megatron_uring.tiered import TieredDrain

MIB = 1 << 20


def state_of(value, mebibytes=5):
    elements = mebibytes * MIB // 4 - 1000
    return {"w": torch.arange(elements) * 0.5 + value, "b": torch.full((7,), value), "n": value}


def assert_holds(directory, value, config):
    restored = megatron_uring.restore(directory, config=config)
    expected = state_of(value, restored["w"].numel() * 4 // MIB + 1)
    assert torch.equal(restored["w"], expected["w"]) and restored["n"] == value
    assert torch.equal(restored["b"], expected["b"])


def local_files(staging):
    return [path for path in staging.rglob("*") if path.is_file() and path.name != "lock"]


def data_file(staging):
    (found,) = [path for path in local_files(staging) if path.suffix != ".json"]
    return found


def slow_down(directory, delay_s=0.1):
    _engine.inject_fault("write", "delay", count=-1, path_contains=f"{directory}/", delay_s=delay_s)


def wait_until(condition, within_s=30.0):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger="megatron_uring")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture
def saved(save, tmp_path):
    """A directory with a committed checkpoint of the value 1."""
    directory = tmp_path / "run" / "iter_0000001"
    save(state_of(1), directory)
    return directory


@pytest.mark.parametrize("slab_count", [1, 2])
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_what_went_two_ways_is_proved_good(
    save_tiered, config, world, staging, tmp_path, warnings, direct, slab_count
):
    directory = tmp_path / "run" / "iter_0000001"
    options = {"direct": direct, "slab_count": slab_count, "staging_bytes": MIB}
    pending = save_tiered(state_of(1, 11), directory, config, **options)
    report = pending.wait()
    assert 0 < report.acknowledged_s <= report.drained_s
    findings = verify.verify(str(directory), world, config)
    assert findings.good, findings.problems
    assert_holds(directory, 1, config)
    assert len(local_files(staging)) == 2 and warnings() == []


def test_it_is_acknowledged_while_the_checkpoint_directory_is_slow(
    save_tiered, posix, saved, staging
):
    slow_down(saved, 0.2)
    pending = save_tiered(state_of(2), saved)
    wait_until(pending.acknowledged)
    assert not pending.drained() and not pending.poll()
    assert megatron_uring.fence() < 0.2 and fencing._state.staging == []
    assert_holds(saved, 1, posix)
    # it goes on without the main thread
    wait_until(pending.drained)
    assert_holds(saved, 1, posix)
    assert pending.wait().save_id == pending.save_id
    assert_holds(saved, 2, posix)


def test_what_changes_after_the_fence_is_not_in_the_checkpoint(save_tiered, posix, tmp_path, world):
    weight = torch.nn.Parameter(torch.ones(3 * MIB // 4))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    first = save_tiered({"w": weight}, tmp_path / "run" / "a")
    optimizer.step()
    first.wait()
    slow_down(tmp_path / "run", 0.1)
    second = save_tiered({"w": weight}, tmp_path / "run" / "b", verify_staging="full")
    optimizer.step()
    assert second.wait().lazy_bytes == 3 * MIB
    for name, value in (("a", 1.0), ("b", 0.0)):
        restored = megatron_uring.restore(tmp_path / "run" / name, config=posix)
        assert torch.equal(restored["w"], torch.full_like(weight, value))
    assert weight.unique().tolist() == [-1.0]


def test_without_the_option_and_for_plain_saves_nothing_is_tiered(
    save_tiered, save, posix, staging, tmp_path
):
    pending = save_tiered(state_of(1), tmp_path / "a", staging_directory="")
    assert type(pending._saving.drain) is Drain
    assert pending.wait().acknowledged_s == 0.0 and pending.acknowledged()
    save(state_of(1), tmp_path / "b", config=posix)
    assert local_files(staging) == []


def test_the_pool_need_not_hold_what_the_node_holds(save_tiered, tmp_path, posix):
    own = {"queue_depth": 5}  # of no other test: an engine of its own
    pending = save_tiered(state_of(1, 12), tmp_path / "run" / "a", **own)
    pending.wait()
    assert pending._saving.engine.slab_count == posix.slab_count
    pending = save_tiered(state_of(2, 12), tmp_path / "run" / "b", staging_bytes=6 * MIB, **own)
    pending.wait()
    assert pending._saving.engine.slab_count == 6
    assert_holds(tmp_path / "run" / "b", 2, posix)


def test_a_state_without_bytes_needs_no_copy(save_tiered, staging, tmp_path, posix):
    pending = save_tiered({"empty": torch.zeros(0)}, tmp_path / "run" / "a")
    assert pending.wait().files == 2
    assert megatron_uring.restore(tmp_path / "run" / "a", config=posix)["empty"].numel() == 0


def test_the_rate_is_kept_on_the_way_to_the_checkpoint_directory(save_tiered, tmp_path, posix):
    began = time.perf_counter()
    pending = save_tiered(state_of(1, 12), tmp_path / "run" / "a", drain_bytes_per_s=8 * MIB)
    wait_until(pending.acknowledged)
    acknowledged_s = time.perf_counter() - began
    drained_s = pending.wait().drained_s
    assert acknowledged_s < 1.0 and 1.25 < drained_s < 4.0
    assert_holds(tmp_path / "run" / "a", 1, posix)


# -------------------------------------------------------------------------------------------------
# the local tier is full, fails, is damaged


def test_a_full_staging_directory_is_left_out(save_tiered, small_disk, saved, posix, warnings):
    disk = small_disk("2m")
    report = save_tiered(state_of(2), saved, staging_directory=str(disk)).wait()
    assert report.acknowledged_s == 0.0
    assert_holds(saved, 2, posix)
    assert local_files(disk) == [] and len(warnings()) == 1
    assert "No space left on device" in warnings()[0]


def test_a_staging_directory_on_a_disk_that_is_not_mounted_is_left_out(
    save_tiered, saved, posix, warnings, tmp_path
):
    disk = tmp_path / "disk"
    report = save_tiered(state_of(2), saved, staging_directory=str(disk / "staging")).wait()
    assert report.acknowledged_s == 0.0 and not disk.exists()
    assert_holds(saved, 2, posix)
    assert len(warnings()) == 1 and f"found no directory {disk}" in warnings()[0]


def test_older_copies_make_room(save_tiered, small_disk, tmp_path, posix, warnings):
    disk = small_disk("8m")
    for value in (1, 2):
        directory = tmp_path / "run" / f"iter_{value:07d}"
        report = save_tiered(state_of(value), directory, staging_directory=str(disk)).wait()
        assert report.acknowledged_s > 0.0
        assert report.save_id in data_file(disk).name
        assert_holds(directory, value, posix)
    assert warnings() == []


@pytest.mark.fault
def test_a_copy_that_is_half_removed_is_a_leftover(save_tiered, staging, tmp_path):
    directory = tmp_path / "run" / "a"
    save_id = save_tiered(state_of(1), directory).wait().save_id
    _engine.inject_fault("remove", "eio", skip=1, path_contains=str(staging))
    tier.sweep(str(staging), str(directory), keep=0)
    assert len(local_files(staging)) == 1
    assert tier.copies(str(staging), str(directory), save_id) == []
    tier.sweep(str(staging), str(directory))
    assert local_files(staging) == []


def test_older_copies_go_while_another_rank_still_holds_its_own(save_tiered, staging, tmp_path):
    save_tiered(state_of(1), tmp_path / "run" / "a").wait()
    pending = save_tiered(state_of(2), tmp_path / "run" / "b")
    wait_until(pending.acknowledged)
    (folder,) = staging.rglob(pending.save_id)
    with open(folder / "of-another-rank", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        pending.wait()
        assert [path for path in folder.parent.iterdir() if path.is_dir()] == [folder]


@pytest.mark.fault
@pytest.mark.parametrize("fault", ["eio", "enospc"])
@pytest.mark.parametrize("skip", [1, 3])
def test_a_local_write_that_fails_is_made_good_from_the_tensors(
    save_tiered, saved, posix, staging, warnings, fault, skip
):
    _engine.inject_fault("write", fault, skip=skip, count=-1, path_contains=str(staging))
    slow_down(saved, 0.05)
    pending = save_tiered(state_of(2), saved, verify_staging="full")
    report = pending.wait()
    assert report.acknowledged_s == 0.0 and report.staged_s > 0.0
    assert_holds(saved, 2, posix)
    assert local_files(staging) == [] and len(warnings()) == 1
    assert str(staging) in warnings()[0] and "straight" in warnings()[0]


@pytest.fixture
def weight():
    """A parameter that an optimizer was seen to change: it is copied while the caller goes on."""
    weight = torch.nn.Parameter(torch.ones(5 * MIB // 4))
    weight.grad = torch.ones_like(weight)
    undo = lazy.watch()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.step()  # to 0
    weight.step = optimizer.step
    yield weight
    undo()


@pytest.mark.fault
@pytest.mark.parametrize("skip", [1, 4])
def test_the_fence_holds_tensors_until_a_failed_local_write_is_made_good(
    save_tiered, saved, posix, staging, warnings, weight, skip
):
    _engine.inject_fault("write", "eio", skip=skip, count=-1, path_contains=str(staging))
    slow_down(saved, 0.05)
    pending = save_tiered({"w": weight}, saved, verify_staging="full")
    weight.step()
    assert pending.wait().lazy_bytes == 5 * MIB and len(warnings()) == 1
    restored = megatron_uring.restore(saved, config=posix)["w"]
    assert restored.unique().tolist() == [0.0] and weight.unique().tolist() == [-1.0]


@pytest.mark.fault
@pytest.mark.parametrize("fault", ["delay", "eio"])
def test_a_tensor_that_changed_without_a_fence_fails_the_save(
    save_tiered, saved, posix, staging, weight, fault
):
    # a depth that no other test has: a pool of its own, smaller than the tensor
    options = {"verify_staging": "full", "staging_bytes": 2 * MIB, "queue_depth": 3}
    _engine.inject_fault("write", fault, skip=1, count=-1, path_contains=str(staging), delay_s=0.1)
    slow_down(saved, 0.1)
    pending = save_tiered({"w": weight}, saved, **options)
    weight.data.fill_(5.0)
    with pytest.raises(StateMismatchError, match="stage tensor 'w'"):
        pending.wait()
    _engine.clear_faults()
    assert_holds(saved, 1, posix)
    assert local_files(staging) == []


@pytest.mark.fault
def test_bytes_that_changed_on_the_node_fail_the_save(save_tiered, saved, posix, staging):
    slow_down(saved, 0.2)
    pending = save_tiered(state_of(2, 9), saved)
    wait_until(pending.acknowledged)
    path = data_file(staging)
    with open(path, "r+b") as file:
        file.seek(8 * MIB)
        file.write(b"other bytes")
    with pytest.raises(CorruptionError, match="drain staging directory") as caught:
        pending.wait()
    assert str(path) in str(caught.value) and "offset 8388608" in str(caught.value)
    _engine.clear_faults()
    assert_holds(saved, 1, posix)
    assert local_files(staging) == [] and len(list(saved.glob("data-*"))) == 1
    save_tiered(state_of(3), saved).wait()
    assert_holds(saved, 3, posix)


def test_a_copy_that_somebody_unlinks_is_drained_all_the_same(save_tiered, saved, posix, staging):
    slow_down(saved, 0.1)
    pending = save_tiered(state_of(2), saved)
    wait_until(pending.acknowledged)
    data_file(staging).unlink()
    pending.wait()
    assert_holds(saved, 2, posix)


@pytest.mark.fault
@pytest.mark.parametrize("operation", ["write", "sync"])
def test_an_error_of_the_checkpoint_directory_fails_the_save(
    save_tiered, saved, posix, staging, operation
):
    _engine.inject_fault(operation, "eio", count=-1, path_contains=f"{saved}/data-")
    with pytest.raises(CheckpointError, match="Input/output error"):
        save_tiered(state_of(2), saved).wait()
    _engine.clear_faults()
    assert_holds(saved, 1, posix)
    assert local_files(staging) == [] and in_flight() == []


@pytest.mark.fault
def test_a_commit_that_fails_leaves_no_copy(save_tiered, saved, posix, staging):
    pending = save_tiered(state_of(2), saved)
    _engine.inject_fault("rename", "eio", path_contains="index")
    with pytest.raises(CheckpointError, match="Input/output error"):
        pending.wait()
    assert_holds(saved, 1, posix)
    assert local_files(staging) == []


@pytest.mark.fault
def test_a_copy_that_cannot_be_marked_costs_a_warning(save_tiered, saved, posix, staging, warnings):
    _engine.inject_fault("rename", "enospc", count=-1, path_contains=str(staging))
    save_tiered(state_of(2), saved).wait()
    assert_holds(saved, 2, posix)
    assert local_files(staging) == [] and len(warnings()) == 1


@pytest.mark.fault
def test_a_local_tier_that_hangs_is_given_up_in_time(save_tiered, saved, posix, staging, warnings):
    _engine.inject_fault("write", "delay", count=-1, path_contains=str(staging), delay_s=8.0)
    report = save_tiered(state_of(2), saved, timeout_s=0.5, staging_bytes=16 * MIB).wait()
    assert report.acknowledged_s == 0.0
    assert_holds(saved, 2, posix)
    assert len(warnings()) == 1 and "without progress" in warnings()[0]


def test_a_staging_directory_that_does_not_answer_holds_nobody_up(
    save_tiered, saved, posix, staging, monkeypatch, weight
):
    asleep = threading.Event()

    def reserve(*arguments):
        asleep.wait(30.0)
        return original(*arguments)

    original = tier.reserve
    monkeypatch.setattr(tier, "reserve", reserve)
    monkeypatch.setattr(tiered, "_GRACE_S", 0.2)
    pending = save_tiered({"w": weight}, saved, timeout_s=0.3)
    began = time.monotonic()
    weight.step()
    assert time.monotonic() - began < 5.0
    with pytest.raises(StorageError, match="no progress for"):
        pending.wait()
    asleep.set()
    pending._saving.drain._thread.join(10.0)
    # it woke up, and began nothing
    assert local_files(staging) == [] and pending._saving.drain.acknowledged_s == 0.0
    assert_holds(saved, 1, posix)


def test_a_thread_that_cannot_be_had_fails_the_save(save_tiered, saved, posix, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        pending = save_tiered(state_of(2), saved)
    megatron_uring.fence()
    with pytest.raises(CheckpointError, match="can't start new thread"):
        pending.wait()
    assert_holds(saved, 1, posix)


# -------------------------------------------------------------------------------------------------
# giving up, overwriting, several at once


def test_abort_leaves_the_old_checkpoint_and_nothing_else(save_tiered, saved, posix, staging):
    for wait_first in (False, True):
        slow_down(saved, 0.2)
        pending = save_tiered(state_of(2, 9), saved)
        if wait_first:
            wait_until(pending.acknowledged)
        began = time.monotonic()
        pending.abort()
        assert time.monotonic() - began < 5.0
        _engine.clear_faults()
        assert in_flight() == [] and local_files(staging) == []
        assert sorted(path.name.partition("-")[0] for path in saved.iterdir()) == [
            "data",
            "index.h5",
            "timeline",
        ]
        assert "megatron_uring-tier" not in [thread.name for thread in threading.enumerate()]
        with pytest.raises(CheckpointError, match="aborted"):
            pending.wait()
    assert_holds(saved, 1, posix)


def test_of_saves_over_each_other_the_last_one_and_its_copy_stay(
    save_tiered, saved, posix, staging
):
    for value in (2, 3, 4):
        pending = save_tiered(state_of(value), saved)
    report = pending.wait()
    assert_holds(saved, 4, posix)
    assert report.save_id in data_file(staging).name


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_so_many_copies_stay(save_tiered, tmp_path, staging, keep):
    ids = []
    for value in (1, 2, 3):
        directory = tmp_path / "run" / f"iter_{value:07d}"
        ids.append(save_tiered(state_of(value), directory, staging_keep=keep).wait().save_id)
    found = {path.parent.name for path in local_files(staging)}
    assert found == set(ids[3 - keep :])


def test_two_saves_drain_at_once(save_tiered, tmp_path, posix, staging):
    slow_down(tmp_path / "run", 0.05)
    directories = [tmp_path / "run" / f"iter_{value:07d}" for value in (1, 2)]
    first, second = [save_tiered(state_of(n + 1), d) for n, d in enumerate(directories)]
    second.wait()
    first.wait()
    for value, directory in enumerate(directories):
        assert_holds(directory, value + 1, posix)
    assert len(local_files(staging)) == 2


# -------------------------------------------------------------------------------------------------
# the process dies

PROGRAM = """
import os, sys, time, torch
import megatron_uring
from megatron_uring import Config, _engine
from megatron_uring.comm import SingleCommunicator

directory, staging, ends, *killed = sys.argv[1:]
config = Config(
    engine="posix", slab_bytes=1 << 20, slab_count=2, staging_directory=staging
)
if killed:
    _engine.inject_fault(killed[0], "kill", skip=int(killed[2]), path_contains=killed[1])
else:
    _engine.inject_fault("write", "delay", count=-1, path_contains=directory + "/", delay_s=0.5)
state = {"w": torch.arange(2_000_000) * 0.5 + 2, "n": 2}
pending = megatron_uring.save_async(
    state, directory, config=config, communicator=SingleCommunicator(30.0, "test", "host")
)
while not pending.acknowledged():
    time.sleep(0.005)
print("acknowledged", flush=True)
if ends == "waits":
    sys.stdin.read()
if ends == "commits":
    pending.wait()
"""


def run_program(path, *arguments):
    path.write_text(PROGRAM)
    return subprocess.run(
        [sys.executable, str(path), *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(megatron_uring.__file__).parents[1])},
    )


@pytest.fixture
def acknowledged(tmp_path, staging, saved):
    """A process whose save over `saved` was acknowledged, and is not drained."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    child = subprocess.Popen(
        [sys.executable, str(program), str(saved), str(staging), "waits"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(megatron_uring.__file__).parents[1])},
    )
    assert child.stdout.readline() == b"acknowledged\n"
    yield child
    child.kill()
    child.communicate()


@pytest.mark.fault
def test_killed_between_acknowledgement_and_commit_the_old_checkpoint_is_there(
    acknowledged, saved, staging, posix, restore_near, save_tiered
):
    acknowledged.send_signal(signal.SIGKILL)
    acknowledged.wait()
    assert len(local_files(staging)) == 1
    state, report = restore_near(saved)
    assert state["n"] == 1 and report.local_bytes == 0
    assert local_files(staging) == []
    report = save_tiered(state_of(3), saved).wait()
    assert report.acknowledged_s > 0.0
    assert_holds(saved, 3, posix)
    assert sorted(path.name for path in saved.iterdir()) == sorted(
        [f"data-{report.save_id}-00000.bin", "index.h5", f"timeline-{report.save_id}.jsonl"]
    )


@pytest.mark.fault
def test_the_next_save_removes_the_leftovers_of_a_killed_one(
    acknowledged, saved, staging, posix, save_tiered
):
    acknowledged.send_signal(signal.SIGKILL)
    acknowledged.wait()
    left = data_file(staging)
    report = save_tiered(state_of(3), saved.parent / "iter_0000002").wait()
    assert not left.exists() and report.save_id in data_file(staging).name
    assert_holds(saved, 1, posix)


def test_what_a_living_process_drains_is_left_alone(
    acknowledged, saved, staging, restore_near, save_tiered
):
    alive = data_file(staging)
    assert restore_near(saved)[0]["n"] == 1
    save_tiered(state_of(3), saved.parent / "iter_0000002").wait()
    assert alive.exists()


def test_a_process_that_ends_without_waiting_aborts_its_save(tmp_path, saved, staging, posix):
    done = run_program(tmp_path / "program.py", saved, staging, "ends")
    assert done.returncode == 0
    assert "nobody called wait()" in done.stderr
    assert local_files(staging) == []
    assert_holds(saved, 1, posix)


def test_the_drain_of_a_tiered_save_is_a_tiered_one(save_tiered, tmp_path):
    pending = save_tiered(state_of(1), tmp_path / "run" / "a")
    assert type(pending._saving.drain) is TieredDrain
    pending.wait()


@pytest.mark.fault
@pytest.mark.parametrize(
    ("operation", "where", "skip", "value"),
    [
        ("preallocate", "staging", 1, 1),
        ("write", "staging", 3, 1),
        ("read", "staging", 2, 1),
        ("write", "run", 3, 1),
        ("sync", ".json", 0, 1),
        ("rename", ".json", 0, 1),
        ("truncate", "run", 0, 1),
        ("rename", "index.h5", 0, 1),
        ("sync_directory", "run", 2, 2),
        ("remove", "run", 1, 2),  # the first one is the probe of the directory
    ],
)
def test_killed_anywhere_one_of_both_checkpoints_loads(
    tmp_path, saved, staging, restore_near, save_tiered, posix, operation, where, skip, value
):
    arguments = (saved, staging, "commits", operation, where, skip)
    assert run_program(tmp_path / "program.py", *arguments).returncode == -signal.SIGKILL
    state, report = restore_near(saved)
    assert state["n"] == value and state["w"][0] == value
    # what was committed is read from the node, and what was not is gone from it
    assert (report.local_bytes > 0) == (value == 2)
    assert bool(local_files(staging)) == (value == 2)
    newer = save_tiered(state_of(3), saved).wait()
    assert_holds(saved, 3, posix)
    assert newer.save_id in data_file(staging).name
