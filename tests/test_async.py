"""Asynchronous saves in one process: what is saved, what fails, and what is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import megatron_uring
from megatron_uring import (
    CheckpointError,
    Config,
    StateMismatchError,
    StorageError,
    _engine,
    pending,
    progress,
    stage,
)

MIB = 1 << 20
SMALL = Config(engine="posix", slab_bytes=MIB, slab_count=1, staging_bytes=MIB)
ELEMENTS = MIB


@pytest.fixture
def trained():
    """Parameters and an optimizer that has stepped once, seen by the fence."""
    return trained_of(ELEMENTS)


def trained_of(elements):
    parameters = [torch.nn.Parameter(torch.rand(elements)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    step(optimizer)
    return optimizer


def step(optimizer):
    for parameter in parameters_of(optimizer):
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()


def parameters_of(optimizer):
    return optimizer.param_groups[0]["params"]


def state_of(optimizer):
    """Its parameters and momenta, and an object."""
    parameters = parameters_of(optimizer)
    return {
        "p": {str(n): one for n, one in enumerate(parameters)},
        "m": {str(n): optimizer.state[one]["momentum_buffer"] for n, one in enumerate(parameters)},
        "step": 1,
    }


def copied(state):
    return {name: {k: v.detach().clone() for k, v in state[name].items()} for name in ("p", "m")}


def assert_holds(directory, expected):
    found = megatron_uring.restore(directory)
    for name, tensors in expected.items():
        for key, tensor in tensors.items():
            assert torch.equal(found[name][key], tensor), (name, key)


@pytest.fixture
def begin(world, tmp_path):
    """`save_async` in one process, under the first watch of this module."""
    megatron_uring.save_async({}, tmp_path / "watch", config=SMALL, communicator=world).wait()

    def run(state, name="c", config=SMALL):
        return megatron_uring.save_async(state, tmp_path / name, config=config, communicator=world)

    yield run
    for one in pending.in_flight():
        one.abort()


@pytest.fixture
def slow():
    _engine.inject_fault("write", "delay", count=-1, path_contains="data-", delay_s=0.1)


# -------------------------------------------------------------------------------------------------
# what is saved


@pytest.mark.parametrize("engine", ["io_uring", "posix"])
def test_two_hundred_saves_under_a_mutator_are_what_synchronous_ones_are(begin, tmp_path, engine):
    config = Config(engine=engine, slab_bytes=MIB, slab_count=4, verify_staging="full")
    names, trained = ("even", "odd"), trained_of(ELEMENTS // 4)
    for number in range(100):  # times two engines
        expected = copied(state_of(trained))
        save = begin(state_of(trained), names[number % 2], config)
        step(trained)
        assert save.wait().lazy_bytes == 4 * ELEMENTS
        assert_holds(tmp_path / names[number % 2], expected)


def test_every_tear_is_caught_without_a_fence(begin, trained, tmp_path):
    """A thread changes tensors all the time, and tells nobody."""
    config = Config(engine="posix", slab_bytes=MIB, slab_count=2, verify_staging="full")
    step(trained)
    parameter, ended = parameters_of(trained)[0], threading.Event()

    def mutate():
        value = 0.0
        while not ended.wait(0.002):
            value += 1
            parameter.data[:: ELEMENTS // 64].fill_(value)

    torn = whole = 0
    thread = threading.Thread(target=mutate)
    thread.start()
    try:
        for _ in range(60):
            save = begin({"p": parameter}, config=config)
            try:
                save.wait()
                whole += 1
            except StateMismatchError as error:
                torn += 1
                assert "'p'" in str(error) and "fence" in str(error), error
    finally:
        ended.set()
        thread.join()
    assert torn, (torn, whole)
    if whole:  # what was committed has one value: that of one moment
        found = megatron_uring.restore(tmp_path / "c")["p"]
        assert len(set(found[:: ELEMENTS // 64].tolist())) == 1


@pytest.mark.parametrize(("level", "caught"), [("full", True), ("sampled", True), ("off", False)])
def test_what_each_level_catches(begin, trained, slow, level, caught):
    config = Config(
        engine="posix", slab_bytes=MIB, slab_count=1, staging_bytes=MIB, verify_staging=level
    )
    save = begin(state_of(trained), config=config)
    with torch.no_grad():
        for parameter in parameters_of(trained):
            parameter.zero_()  # no step, no fence
    if caught:
        with pytest.raises(StateMismatchError, match=r"stage tensor 'p/[01]'"):
            save.wait()
    else:
        save.wait()


def test_what_is_collected_and_replaced_after_the_call_is_kept(begin, slow, tmp_path):
    state = {"a": torch.rand(3 * ELEMENTS), "object": {"x": [1]}}
    expected = state["a"].clone()
    save = begin(state)
    state["object"]["x"].append(2)
    state["a"].fill_(1)
    del state
    save.wait()
    found = megatron_uring.restore(tmp_path / "c")
    assert torch.equal(found["a"], expected) and found["object"] == {"x": [1]}


def test_several_in_flight_are_each_what_they_were(begin, trained, tmp_path, slow):
    expected, saves = {}, {}
    for number in range(4):
        expected[number] = copied(state_of(trained))
        saves[number] = begin(state_of(trained), f"c{number}")
        step(trained)
    assert len(pending.in_flight()) == 4
    assert sorted(map(str, (one.directory for one in pending.in_flight())))[0].endswith("c0")
    for number in (2, 0, 3, 1):
        saves[number].wait()
    assert not pending.in_flight()
    for number in range(4):
        assert_holds(tmp_path / f"c{number}", expected[number])


def test_another_save_to_the_directory_finishes_the_first(begin, trained, tmp_path, slow, save):
    first = begin(state_of(trained))
    step(trained)
    expected = copied(state_of(trained))
    second = begin(state_of(trained))
    assert first.wait().save_id == first.save_id  # is there already
    second.wait()
    assert_holds(tmp_path / "c", expected)
    third = begin(state_of(trained))
    save({"other": torch.ones(3)}, tmp_path / "c")
    assert third.wait() and megatron_uring.restore(tmp_path / "c")["other"].tolist() == [1, 1, 1]


# -------------------------------------------------------------------------------------------------
# how it goes on


def test_polls_and_waits(begin, trained, slow):
    save = begin(state_of(trained))
    began = time.perf_counter()
    assert not save.poll() and not save.poll() and not save.drained()
    assert time.perf_counter() - began < 0.1
    while not save.poll():
        time.sleep(0.01)
    assert save.drained()
    report = save.wait()
    assert save.wait() is report and save.poll()
    assert megatron_uring.status()["last_save"]["save_id"] == report.save_id
    assert report.drained_s >= 0.1 and report.slowest_s == pytest.approx(report.drained_s, abs=0.1)
    assert report.seconds >= report.blocked_s > 0
    assert report.directory in report.line() and "rank 0 slowest" in report.line()


def test_the_pool_is_bounded(begin, trained):
    stage.close_engines()
    parts = "slabs of 1 MiB"
    for bound, slabs in ((3 * MIB, 3), (100 * MIB, 17 + 2)):
        config = Config(
            engine="posix", slab_bytes=MIB, slab_count=2, staging_bytes=bound, posix_threads=3
        )
        report = begin(state_of(trained), config=config).wait()
        assert report.staging.startswith(f"{slabs} {parts}"), report.staging
    stage.close_engines()


def test_the_rate_is_limited(begin, trained):
    config = Config(
        engine="posix", slab_bytes=MIB, slab_count=1, drain_bytes_per_s=40 * MIB, posix_threads=2
    )
    save = begin(state_of(trained), config=config)
    waited_s = megatron_uring.fence()
    report = save.wait()
    assert report.drained_s >= 0.3  # 16 MiB, of which the first is written at once
    assert waited_s < 0.2, "copies are not limited"


@pytest.mark.parametrize("engine", ["io_uring", "posix"])
@pytest.mark.parametrize("priority", ["low", "idle"])
def test_a_priority_changes_nothing_but_the_time(begin, trained, tmp_path, engine, priority):
    config = Config(engine=engine, slab_bytes=MIB, slab_count=2, drain_priority=priority)
    expected = copied(state_of(trained))
    begin(state_of(trained), config=config).wait()
    assert_holds(tmp_path / "c", expected)


def test_no_process_is_made_and_no_shared_memory_left(begin, trained):
    def children():
        found = []
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
                found += file.read().split()
        return found

    before = children(), sorted(os.listdir("/dev/shm"))
    save = begin(state_of(trained))
    during = children()
    save.wait()
    assert before == (children(), sorted(os.listdir("/dev/shm"))) and during == before[0]


# -------------------------------------------------------------------------------------------------
# what fails


@pytest.mark.parametrize(
    ("operation", "fault", "text"),
    [
        ("write", "enospc", "No space left"),
        ("write", "eio", "Input/output"),
        ("sync", "eio", "sync"),
    ],
)
def test_what_fails_later_is_raised_by_wait_and_the_old_checkpoint_stays(
    begin, trained, tmp_path, operation, fault, text
):
    begin(state_of(trained)).wait()
    expected, files = copied(state_of(trained)), sorted(os.listdir(tmp_path / "c"))
    _engine.inject_fault(operation, fault, skip=2 * (operation == "write"), path_contains="data-")
    save = begin(state_of(trained))
    step(trained)  # the fence does not raise
    while not save.poll():
        time.sleep(0.01)
    for _ in range(2):
        with pytest.raises(StorageError, match=text):
            save.wait()
    assert sorted(os.listdir(tmp_path / "c")) == files
    assert_holds(tmp_path / "c", expected)
    begin(state_of(trained)).wait()
    assert_holds(tmp_path / "c", copied(state_of(trained)))


def test_a_full_disk_fails_the_save_alone(begin, trained, small_disk, world):
    place = small_disk("8m")
    with pytest.raises(CheckpointError, match="No space left on device"):
        save = megatron_uring.save_async(
            state_of(trained), place / "c", config=SMALL, communicator=world
        )
        save.wait()
    step(trained)
    assert [name for name in os.listdir(place / "c") if name.startswith("data-")] == []


def test_a_stuck_disk_is_given_up_and_training_goes_on(begin, trained, tmp_path):
    begin(state_of(trained)).wait()
    expected = copied(state_of(trained))
    _engine.inject_fault("write", "delay", count=1, path_contains="data-", delay_s=3.0)
    config = Config(engine="posix", slab_bytes=MIB, slab_count=1, staging_bytes=MIB, timeout_s=0.5)
    save = begin(state_of(trained), config=config)
    step(trained)
    with pytest.raises(StorageError, match="without progress"):
        save.wait()
    assert_holds(tmp_path / "c", expected)


def test_an_aborted_save_leaves_the_old_checkpoint_and_no_file(begin, trained, tmp_path, slow):
    begin(state_of(trained)).wait()
    expected, files = copied(state_of(trained)), sorted(os.listdir(tmp_path / "c"))
    save = begin(state_of(trained))
    save.abort()
    save.abort()
    with pytest.raises(StorageError, match="aborted"):
        save.wait()
    assert save.poll() and not pending.in_flight()
    assert sorted(os.listdir(tmp_path / "c")) == files
    assert_holds(tmp_path / "c", expected)


FORK = """
import os, sys, time
import torch
import megatron_uring
from megatron_uring import Config, _engine

directory = sys.argv[1]
config = Config(engine="posix", slab_bytes=1 << 20, slab_count=2)
_engine.inject_fault("write", "delay", count=-1, path_contains="data-", delay_s=0.2)
save = megatron_uring.save_async({"p": torch.ones(1 << 21)}, directory, config=config)
child = os.fork()
if not child:
    assert megatron_uring.fence() == 0.0 and not megatron_uring.status()["in_flight"]
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
save.wait()
assert megatron_uring.restore(directory)["p"].eq(1).all()
"""


def test_a_forked_child_that_ends_does_nothing_to_the_save(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(FORK)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), str(tmp_path / "c")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "given up" not in done.stderr


PROGRAM = """
import os, signal, sys, time
import torch
import megatron_uring
from megatron_uring import Config, _engine

directory, how = sys.argv[1:]
config = Config(engine="posix", slab_bytes=1 << 20, slab_count=2)
parameter = torch.nn.Parameter(torch.full((1 << 21,), 1.0))
megatron_uring.save_async({"p": parameter}, directory, config=config).wait()
_engine.inject_fault("write", "delay", count=-1, path_contains="data-", delay_s=0.2)
with torch.no_grad():
    parameter.fill_(2.0)
save = megatron_uring.save_async({"p": parameter}, directory, config=config)
if how == "exit":
    sys.exit(0)
if how == "exception":
    raise ValueError("of training")
if how == "wait":
    save.wait()
    sys.exit(0)
os.kill(os.getpid(), getattr(signal, how))
time.sleep(10)
"""


@pytest.mark.parametrize("how", ["exit", "exception", "wait", "SIGTERM", "SIGKILL"])
def test_a_process_that_ends_finishes_it_or_leaves_the_old_one(tmp_path, how, save):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "c"), how],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    statuses = {"exit": 0, "exception": 1, "wait": 0}
    assert done.returncode == statuses.get(how, -getattr(signal, how, 0)), done.stderr
    expected = 2.0 if how == "wait" else 1.0
    assert torch.equal(
        megatron_uring.restore(tmp_path / "c")["p"], torch.full((2 * MIB,), expected)
    )
    subfiles = [name for name in os.listdir(tmp_path / "c") if name.startswith("data-")]
    killed = how.startswith("SIG")
    assert len(subfiles) == 1 + killed
    if how in ("exit", "exception"):
        assert "given up" in done.stderr and "wait()" in done.stderr
    save({"next": torch.ones(2)}, tmp_path / "c")
    assert len([name for name in os.listdir(tmp_path / "c") if name.startswith("data-")]) == 1


def test_a_provider_of_the_users_is_asked_in_the_call(begin, trained, tmp_path, slow):
    class LoaderState:
        """As the README has it."""

        def __init__(self):
            self.position = 1

        def collect(self):
            state = {"loader/0": {"position": self.position}}
            return megatron_uring.ObjectProvider(state).collect()

    loader, parameter = LoaderState(), parameters_of(trained)[0]
    expected = parameter.detach().clone()
    weights = [("weight", megatron_uring.Shard(parameter, (ELEMENTS,), (0,)))]
    save = begin(megatron_uring.CompositeProvider([megatron_uring.TensorProvider(weights), loader]))
    loader.position = 2
    step(trained)
    assert save.wait().lazy_bytes == 4 * ELEMENTS
    found = megatron_uring.restore(tmp_path / "c", keys=["weight", "loader/0"])
    assert torch.equal(found["weight"], expected) and found["loader"]["0"] == {"position": 1}


# -------------------------------------------------------------------------------------------------
# misuse


def test_a_wait_inside_of_a_wait_is_refused_and_the_save_is_committed(
    begin, trained, tmp_path, slow
):
    save, refused = begin(state_of(trained)), []

    def again(*_):
        try:
            save.wait()
        except StorageError as error:
            refused.append(str(error))

    before = signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        report = save.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert save.wait() is report
    assert len(refused) == 1 and "being finished" in refused[0]
    assert_holds(tmp_path / "c", copied(state_of(trained)))


def test_memory_that_a_tensor_no_longer_has_is_kept(begin, trained, tmp_path, slow):
    parameter = parameters_of(trained)[0]
    expected = parameter.detach().clone()
    save = begin({"p": parameter})
    parameter.data = torch.zeros(3)
    garbage = [torch.full((ELEMENTS,), 7.0) for _ in range(4)]  # takes memory that was given back
    save.wait()
    assert torch.equal(megatron_uring.restore(tmp_path / "c")["p"], expected) and garbage


def test_a_relative_directory_stays_where_it_was(begin, trained, tmp_path, world, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    save = megatron_uring.save_async(
        state_of(trained), "relative", config=SMALL, communicator=world
    )
    monkeypatch.chdir(tmp_path / "other")
    save.wait()
    assert_holds(tmp_path / "relative", copied(state_of(trained)))


@pytest.mark.parametrize("engine", ["io_uring", "posix"])
def test_a_limited_save_is_aborted_soon_and_is_not_taken_for_a_stuck_disk(begin, engine):
    slow_rate = Config(
        engine=engine, slab_bytes=MIB, slab_count=2, drain_bytes_per_s=MIB, timeout_s=0.4
    )
    assert begin({"x": torch.ones(ELEMENTS // 2)}, config=slow_rate).wait().drained_s > 0.9
    held = len(progress._held)
    save = begin({"x": torch.ones(ELEMENTS * 2)}, config=slow_rate)
    began = time.perf_counter()
    save.abort()
    assert time.perf_counter() - began < 2.0
    assert len(progress._held) == held
