"""Program for two ranks: asynchronous saves of Megatron, with training going on beside them."""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from checking import (
    MegatronCannotError,
    folder,
    helpers,
    main,
    meet,
    raised,
    rank,
    same,
    size,
    start,
)
from megatron.core import dist_checkpointing as dc
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest

import megatron_uring
from megatron_uring import CommunicationError, StorageError, _engine

Tiny, gpt = helpers.Tiny, helpers.gpt
MIB = 1 << 20


def enable(**options: Any) -> None:
    """A pool of one small slab, so that copies wait for the disk."""
    small = {"slab_bytes": MIB, "slab_count": 1, "staging_bytes": MIB}
    megatron_uring.enable(**{**small, "verify_staging": "full", **options})


def begin() -> None:
    start()
    enable()


@contextmanager
def slow(seconds: float = 0.1) -> Iterator[None]:
    """Every write to a subfile takes so long."""
    _engine.inject_fault("write", "delay", count=-1, path_contains="data-", delay_s=seconds)
    try:
        yield
    finally:
        _engine.clear_faults()


def cut(key: str, data: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data, (0, rank(), size()))


def state(value: float, elements: int = 3 * MIB) -> dict[str, Any]:
    return {
        "a": cut("a", torch.full((elements,), value)),
        "o": ShardedObject("o", {"value": value}, (size(),), (rank(),)),
        "step": int(value),
    }


def schedule(queue: AsyncCallsQueue, value: float, path: Path) -> list[str]:
    """A save of `state(value)`; what this returns says when it is finalized."""
    finalized: list[str] = []
    request = dc.save(state(value), str(path), async_sharded_save=True)
    request.add_finalize_fn(lambda: finalized.append("tracker"))
    queue.schedule_async_request(request)
    return finalized


def finish(queue: AsyncCallsQueue) -> None:
    """Poll until nothing is in flight; the answers of all ranks are the same at each poll."""
    while queue.get_num_unfinalized_calls():
        found = queue.maybe_finalize_async_calls(blocking=False)
        answers = torch.tensor([len(found)])
        every = [torch.zeros_like(answers) for _ in range(size())]
        torch.distributed.all_gather(every, answers)
        assert len({int(one) for one in every}) == 1, every
        time.sleep(0.005)


def expect(path: Path, value: float) -> None:
    meet()
    found = dc.load(state(0.0), str(path))
    same(found["a"], torch.full((3 * MIB,), value))
    assert found["step"] == int(value) and found["o"] == {"value": value}
    meet()


def subfiles(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir() if one.name.startswith("data-"))


def train_beside_saves(
    tiny: Any, name: str, iterations: int = 3, before: Callable[[], None] = lambda: None
) -> None:
    """A save in each iteration is what the state was at its call, `before` which something is done
    as Megatron's own loop does it.
    """
    queue, digests = AsyncCallsQueue(), {}
    tiny.train(1)
    for number in range(iterations):
        before()
        digests[number] = tiny.digests()
        with slow(0.02):
            request = tiny.save(folder(f"{name}/{number}"), async_sharded_save=True)
            queue.schedule_async_request(request)
            tiny.train(1)
        queue.maybe_finalize_async_calls(blocking=False)
    assert megatron_uring.status()["in_flight"]
    queue.maybe_finalize_async_calls(blocking=True)
    assert not megatron_uring.status()["in_flight"]
    report = megatron_uring.status()["last_save"]
    assert report["lazy_bytes"] > 0 or rank() > 0, report
    meet()
    for number in range(iterations):
        tiny.spoil()
        tiny.load(folder(f"{name}/{number}"))
        assert tiny.digests() == digests[number], number
    queue.close()


def check_training_beside_saves() -> None:
    waited = megatron_uring.status()["fences"]["waited"]
    train_beside_saves(Tiny(), "dense")
    assert megatron_uring.status()["fences"]["waited"] > waited


def check_tensor_parallel() -> None:
    train_beside_saves(Tiny(tensor_parallel=2, swiglu=True), "parallel")


def check_chained_optimizers() -> None:
    tiny = Tiny(experts=4, expert_parallel=2)
    assert len(tiny.training.optimizer.chained_optimizers) > 1
    train_beside_saves(tiny, "chained")


def check_gathering_of_parameters_beside_the_forward_pass() -> None:
    made = gpt.DistributedDataParallelConfig

    def overlapping(**options: Any) -> Any:
        return made(**{**options, "overlap_grad_reduce": True, "overlap_param_gather": True})

    with mock.patch.object(gpt, "DistributedDataParallelConfig", overlapping):
        tiny = Tiny()
    config = tiny.training.wrapped.ddp_config
    assert config.overlap_param_gather

    def gather() -> None:
        tiny.training.wrapped.start_param_sync(force_sync=True)

    # the next forward pass gathers again, and writes the same bytes while they are copied
    train_beside_saves(tiny, "gathering", before=gather)


def check_a_step_that_is_skipped() -> None:
    tiny, queue, path = Tiny(), AsyncCallsQueue(), folder("skipped")
    tiny.train(1)
    digests = tiny.digests()
    with slow(0.02):
        queue.schedule_async_request(tiny.save(path, async_sharded_save=True))
        with mock.patch.object(
            type(tiny.training.optimizer.chained_optimizers[0]), "prepare_grads", lambda _: True
        ):
            tiny.train(1)
        assert tiny.digests() == digests
        tiny.train(1)
    assert tiny.digests() != digests or rank() > 0
    queue.maybe_finalize_async_calls(blocking=True)
    tiny.load(path)
    assert tiny.digests() == digests


def check_loading_beside_a_save() -> None:
    tiny, queue = Tiny(), AsyncCallsQueue()
    old, new = folder("loading/old"), folder("loading/new")
    tiny.save(old)
    before = tiny.digests()
    tiny.train(1)
    after = tiny.digests()
    with slow(0.02):
        queue.schedule_async_request(tiny.save(new, async_sharded_save=True))
        tiny.load(old)
    assert tiny.digests() == before
    queue.maybe_finalize_async_calls(blocking=True)
    tiny.load(new)
    assert tiny.digests() == after


def check_polls_agree_and_do_not_wait() -> None:
    queue, path = AsyncCallsQueue(), folder("polls")
    if rank() == 1:
        _engine.inject_fault("write", "delay", count=-1, path_contains="data-", delay_s=0.1)
    finalized = schedule(queue, 1.0, path)
    for _ in range(3):
        began = time.perf_counter()
        assert queue.maybe_finalize_async_calls(blocking=False) == [] and not finalized
        assert time.perf_counter() - began < 0.09
        meet()
    (active,) = queue.async_calls
    done = active.async_caller.is_current_async_call_done(blocking=False, no_dist=True)
    assert not done or rank() == 0
    assert not (path / "metadata.json").exists()
    finish(queue)
    _engine.clear_faults()
    assert finalized == ["tracker"]
    expect(path, 1.0)


def check_several_in_flight_are_finalized_in_order() -> None:
    queue, order = AsyncCallsQueue(persistent=True), []
    with slow(0.02):
        for number in range(3):
            path = folder(f"order/{number}")
            request = dc.save(state(1.0 + number), str(path), async_sharded_save=True)
            request.add_finalize_fn(lambda number=number: order.append(number))
            assert queue.schedule_async_request(request) == number
        assert queue.get_num_unfinalized_calls() == 3
        finish(queue)
    assert order == [0, 1, 2]
    for number in range(3):
        expect(folder(f"order/{number}"), 1.0 + number)
    queue.close()


def check_no_process_is_made() -> None:
    def children() -> list[str]:
        return [
            child
            for task in Path("/proc/self/task").iterdir()
            for child in (task / "children").read_text().split()
        ]

    before = children()
    shared = sorted(os.listdir("/dev/shm"))
    for persistent in (False, True):
        queue = AsyncCallsQueue(persistent)
        schedule(queue, 1.0, folder(f"processes_{persistent}"))
        assert children() == before
        queue.maybe_finalize_async_calls(blocking=True)
        queue.close()
    assert children() == before
    meet()
    left = [n for n in set(os.listdir("/dev/shm")) - set(shared) if "megatron" in n or "torch" in n]
    assert not left, left


def check_a_request_that_nobody_schedules() -> None:
    path = folder("unscheduled")
    request = dc.save(state(4.0), str(path), async_sharded_save=True)
    request.execute_sync()
    assert (path / "metadata.json").exists()
    expect(path, 4.0)


def check_finalize_functions_that_a_later_request_runs() -> None:
    tiny, queue, path = Tiny(), AsyncCallsQueue(), folder("moved")
    digests = tiny.digests()
    first = tiny.save(path, async_sharded_save=True)
    later = AsyncRequest(None, (), first.finalize_fns.copy())  # as 0.19 does with its logits
    first.finalize_fns.clear()
    for request in (first, later):
        queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    assert (path / "metadata.json").exists() and megatron_uring.status()["in_flight"] == []
    tiny.spoil()
    tiny.load(path)
    assert tiny.digests() == digests


def check_a_failure_on_one_rank_is_raised_on_all() -> None:
    queue, path = AsyncCallsQueue(), folder("failing")
    schedule(queue, 1.0, path)
    finish(queue)
    expect(path, 1.0)
    written = (path / "metadata.json").stat().st_mtime_ns
    for blocking in (True, False):
        if rank() == 1:
            _engine.inject_fault("write", "enospc", skip=1, path_contains="data-")
        finalized = schedule(queue, 2.0, path)
        action = (
            (lambda: queue.maybe_finalize_async_calls(blocking=True))
            if blocking
            else (lambda: finish(queue))
        )
        raised(action, "No space left on device", kind=StorageError)
        _engine.clear_faults()
        assert not finalized and queue.get_num_unfinalized_calls() == 0
        assert (path / "metadata.json").stat().st_mtime_ns == written
        expect(path, 1.0)
        assert len(subfiles(path)) == size(), subfiles(path)
        meet()
    schedule(queue, 3.0, path)
    finish(queue)
    expect(path, 3.0)


def check_failures_that_are_only_told() -> None:
    enable(on_save_error="warn", save_errors_maximum=2)
    queue, path = AsyncCallsQueue(), folder("told")
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_uring").addHandler(handler)
    try:
        schedule(queue, 1.0, path)
        finish(queue)
        for number in (1, 2, 3):
            if rank() == 0:
                _engine.inject_fault("sync", "eio", path_contains="data-")
            finalized = schedule(queue, 2.0, path)
            if number < 3:
                finish(queue)
                assert any("training goes on" in text for text in records), records
            else:
                raised(lambda: finish(queue), "Input/output error", kind=StorageError)
            _engine.clear_faults()
            assert not finalized
            assert megatron_uring.status()["failed_saves"] == number
            expect(path, 1.0)
        schedule(queue, 5.0, path)
        finish(queue)
        expect(path, 5.0)
    finally:
        logging.getLogger("megatron_uring").removeHandler(handler)
        enable()


def check_a_queue_that_is_aborted() -> None:
    if "abort" not in inspect.signature(AsyncCallsQueue.close).parameters:
        raise MegatronCannotError("its queue cannot be aborted")
    queue, path = AsyncCallsQueue(), folder("aborted")
    schedule(queue, 1.0, path)
    finish(queue)
    with slow(0.1):
        finalized = schedule(queue, 2.0, path)
        schedule(queue, 3.0, folder("aborted_too"))
        began = time.perf_counter()
        if rank() == 1:
            time.sleep(1.0)  # the other one does not wait for this
        queue.close(abort=True)
        assert rank() == 1 or time.perf_counter() - began < 0.9
    assert not finalized and not megatron_uring.status()["in_flight"]
    expect(path, 1.0)
    assert len(subfiles(path)) == size()
    assert subfiles(folder("aborted_too")) == []
    queue = AsyncCallsQueue()
    schedule(queue, 4.0, path)
    finish(queue)
    expect(path, 4.0)


def check_disabled_in_flight() -> None:
    queue, path = AsyncCallsQueue(), folder("disabled")
    with slow(0.02):
        finalized = schedule(queue, 7.0, path)
        megatron_uring.disable()
        before = dc.serialization.save_config
        queue.maybe_finalize_async_calls(blocking=True)
    assert finalized == ["tracker"] and dc.serialization.save_config is before
    assert '"megatron_uring"' in (path / "metadata.json").read_text()
    enable()
    expect(path, 7.0)
    with slow(0.02):
        schedule(queue, 8.0, path)
        enable()  # again
        finish(queue)
    expect(path, 8.0)


def check_a_rank_that_never_finishes() -> None:  # the last: the communicator is broken after it
    os.environ["MEGATRON_URING_TIMEOUT_S"] = "1.5"  # which wins over what a program says
    enable()
    path = folder("never")
    request = dc.save(state(6.0), str(path), async_sharded_save=True)
    if rank() == 0:
        raised(request.finalize_fns[0], "rank 1", kind=CommunicationError)
    else:
        time.sleep(6.0)
    meet()


if __name__ == "__main__":
    main(globals(), begin)
