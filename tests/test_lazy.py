"""Which tensors are copied after a save has returned, and what waits for that."""

import subprocess
import sys

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

import megatron_uring
from megatron_uring import Config, _engine, fencing, lazy, stage

CONFIG = Config(engine="posix", slab_bytes=1 << 20, slab_count=1, staging_bytes=1 << 20)
ELEMENTS = 1 << 20


@pytest.fixture
def trained():
    """A parameter that an optimizer has stepped, under the watch."""
    undo = lazy.watch()
    parameter = torch.nn.Parameter(torch.rand(ELEMENTS))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    yield parameter, optimizer
    undo()


@pytest.fixture
def slow(tmp_path):
    """Writes to subfiles take a tenth of a second each, so that a slab is long in coming."""
    _engine.inject_fault("write", "delay", count=-1, path_contains="data-", delay_s=0.1)
    yield
    _engine.clear_faults()


def begin(world, tmp_path, state, config=CONFIG):
    return megatron_uring.save_async(state, tmp_path / "c", config=config, communicator=world)


# -------------------------------------------------------------------------------------------------
# what may wait


def kinds(parameter, optimizer):
    moment = optimizer.state[parameter]["exp_avg"]
    flat = torch.zeros(64)
    return {
        "a parameter": (parameter, True),
        "what an optimizer keeps": (moment, True),
        "a view of a parameter": (parameter.detach()[5:99], True),
        "a strided view of it": (parameter.detach().view(1024, 1024)[3:7, ::5], True),
        "a view of what it keeps": (moment[100:200], True),
        "an empty view of it": (moment[3:3], True),
        "a parameter of no optimizer": (torch.nn.Parameter(torch.zeros(3)), True),
        "a buffer": (torch.zeros(5), False),
        "a copy of a parameter": (parameter.detach().clone(), False),
        "a sum": (parameter.detach() + 1, False),
        "a view of a buffer": (flat[8:16], False),
    }


KINDS = (
    "a parameter",
    "what an optimizer keeps",
    "a view of a parameter",
    "a strided view of it",
    "a view of what it keeps",
    "an empty view of it",
    "a parameter of no optimizer",
    "a buffer",
    "a copy of a parameter",
    "a sum",
    "a view of a buffer",
)


@pytest.mark.parametrize("kind", KINDS)
def test_what_may_wait(trained, kind):
    tensor, expected = kinds(*trained)[kind]
    assert lazy.may_wait([tensor]).tolist() == [expected]


def test_main_parameters_of_an_optimizer_may_wait(trained):
    main = torch.rand(100)  # a plain tensor, as Megatron's are
    optimizer = torch.optim.SGD([main], lr=0.1)
    assert not lazy.may_wait([main])[0]  # nobody has seen it
    main.grad = torch.ones(100)
    optimizer.step()
    assert lazy.may_wait([main, main[3:50]]).all()
    del optimizer
    assert not lazy.may_wait([main])[0]


def test_what_reaches_beyond_a_known_tensor_may_not_wait(trained):
    base = torch.rand(100)
    inside = base[10:20]
    optimizer = torch.optim.SGD([inside], lr=0.1)
    inside.grad = torch.ones(10)
    optimizer.step()
    found = lazy.may_wait([base[10:20], base[9:20], base[10:21], base[10:20:3], base[9:19:3]])
    assert found.tolist() == [True, False, False, True, False]


def test_what_lies_between_the_elements_of_a_known_tensor_may_not_wait(trained):
    base = torch.rand(64, 64)
    parameter = torch.nn.Parameter(base[:, :32])
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert lazy.may_wait([parameter, base[:-1, 32:]]).tolist() == [True, False]


def test_nothing_may_wait_where_no_fence_stands():
    parameter = torch.nn.Parameter(torch.rand(3))
    for optimizer in list(lazy._optimizers):
        lazy._optimizers.discard(optimizer)
    undo = lazy.watch()
    try:
        assert not lazy.may_wait([parameter])[0]  # no step was seen
    finally:
        undo()


FIRST = """
import sys
import torch
from megatron_uring import Config, save_async

weight = torch.nn.Parameter(torch.ones(1 << 18))
optimizer = torch.optim.SGD([weight], lr=0.1)
for expected in (0, 1 << 20, 1 << 20):
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    pending = save_async({"w": weight}, sys.argv[1], config=Config(engine="posix", slab_count=2))
    assert pending.wait().lazy_bytes == expected, expected
"""


def test_the_first_save_of_a_process_copies_all_in_the_call_as_documented(tmp_path):
    """A step that came before the hooks was not seen."""
    command = [sys.executable, "-W", "error", "-c", FIRST, str(tmp_path / "c")]
    subprocess.run(command, check=True, timeout=120)


def test_what_may_not_wait_is_copied_before_the_call_returns(trained, world, tmp_path, slow):
    parameter, _ = trained
    state = {"p": parameter, "buffer": torch.ones(3 * ELEMENTS), "b2": torch.arange(7)}
    expected = {key: value.detach().clone() for key, value in state.items()}
    pending = begin(world, tmp_path, state)
    assert not pending.drained()
    state["buffer"].zero_()
    state["b2"].resize_(0)
    report = pending.wait()
    assert report.lazy_bytes == 4 * ELEMENTS
    found = megatron_uring.restore(tmp_path / "c")
    assert all(torch.equal(found[key], expected[key]) for key in expected)


# -------------------------------------------------------------------------------------------------
# the fence


def changes(parameter, optimizer):
    module = torch.nn.Module()
    module.p = parameter
    zeros = {"p": torch.zeros(ELEMENTS)}
    kept = optimizer.state_dict()
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    return {
        "a step": optimizer.step,
        "a step of another optimizer": other.step,
        "a module's load_state_dict": lambda: module.load_state_dict(zeros),
        "an optimizer's load_state_dict": lambda: optimizer.load_state_dict(kept),
        "fence": megatron_uring.fence,
    }


@pytest.mark.parametrize(
    "change",
    [
        "a step",
        "a step of another optimizer",
        "a module's load_state_dict",
        "an optimizer's load_state_dict",
        "fence",
    ],
)
def test_changes_wait_until_all_is_copied(trained, world, tmp_path, slow, change):
    parameter, optimizer = trained
    expected = parameter.detach().clone()
    before = fencing.passed()
    pending = begin(world, tmp_path, {"p": parameter})
    changes(parameter, optimizer)[change]()
    after = fencing.passed()
    assert after.waited == before.waited + 1 and after.last_s > 0.1
    with torch.no_grad():
        parameter.fill_(-1)
    report = pending.wait()
    assert report.fence_s == pytest.approx(after.last_s, abs=0.05)
    assert report.blocked_s > report.fence_s and report.staged_s > 0
    assert torch.equal(megatron_uring.restore(tmp_path / "c")["p"], expected)


def test_the_fence_waits_for_copies_and_not_for_the_disk(trained, world, tmp_path, slow):
    parameter, _ = trained
    roomy = Config(engine="posix", slab_bytes=1 << 20, slab_count=1, posix_threads=1)
    pending = begin(world, tmp_path, {"p": parameter}, roomy)
    waited_s = megatron_uring.fence()
    assert waited_s < 0.25 and not pending.drained()  # five writes of 0.1 s each
    assert pending.wait().drained_s > 0.4
    stage.close_engines()


def test_restoring_into_tensors_waits(trained, world, tmp_path, slow):
    parameter, _ = trained
    expected = parameter.detach().clone()
    megatron_uring.save(
        {"p": torch.zeros(ELEMENTS)}, tmp_path / "old", config=CONFIG, communicator=world
    )
    pending = begin(world, tmp_path, {"p": parameter})
    megatron_uring.restore(tmp_path / "old", {"p": parameter.detach()}, config=CONFIG)
    assert not parameter.any()
    pending.wait()
    assert torch.equal(megatron_uring.restore(tmp_path / "c")["p"], expected)


def test_a_skipped_step_changes_nothing_and_the_next_one_waits(trained, world, tmp_path, slow):
    parameter, optimizer = trained
    scaler = torch.amp.GradScaler("cpu")
    expected = parameter.detach().clone()
    before = fencing.passed().waited
    pending = begin(world, tmp_path, {"p": parameter})
    for gradient, waits in ((float("inf"), 0), (1.0, 1)):
        optimizer.zero_grad()
        scaler.scale((parameter * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert fencing.passed().waited == before + waits
    assert not torch.equal(parameter, expected)
    pending.wait()
    assert torch.equal(megatron_uring.restore(tmp_path / "c")["p"], expected)


def test_the_last_watch_takes_the_hooks_away(monkeypatch):
    monkeypatch.setattr(lazy, "_watch", lazy._Watch())  # save_async of other tests keeps its own
    hooks = torch_optimizer._global_optimizer_pre_hooks
    before = len(hooks), torch.nn.Module.load_state_dict, torch.optim.Optimizer.load_state_dict
    first, second = lazy.watch(), lazy.watch()
    assert len(hooks) == before[0] + 1 and torch.nn.Module.load_state_dict is not before[1]
    first()
    first()
    assert len(hooks) == before[0] + 1
    second()
    after = len(hooks), torch.nn.Module.load_state_dict, torch.optim.Optimizer.load_state_dict
    assert after == before
