"""A training loop to measure saves beside, with each way to save in every iteration.

Guarantees
----------
- All loops compute and change the same, and save the same tensors.
- A loop's time ends with its last optimizer step; the time until the last save is durable is told
  apart. Where an earlier save is not over when the next one begins, it is waited for or not as its
  library has it.
- Megatron's own saves run with this package switched off.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_uring import checkpoint
from megatron_uring.bench.peers import THREADS, load_module, megatron_on_host, require_group
from megatron_uring.comm import Communicator
from megatron_uring.config import MEBIBYTE, Config
from megatron_uring.pending import PendingSave
from megatron_uring.providers import Shard
from megatron_uring.report import Report

_MATRIX_ROWS = 768
_TENSOR_BYTES = 64 * MEBIBYTE
_FOLDERS = 2  # a save is never written over the one before it


class _Drift(torch.optim.Optimizer):
    """Changes every element a little: a step that reads and writes all memory once."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1.0001)


class Training:
    """Parameters of one rank in float32, and what a loop does with them.

    Parameters
    ----------
    world
        Of all ranks; keys name their rank.
    gigabytes
        10^9 bytes of parameters, in tensors of 64 MiB.
    """

    def __init__(self, world: Communicator, gigabytes: float) -> None:
        self.world = world
        count = max(1, round(gigabytes * 1e9 / _TENSOR_BYTES))
        generator = torch.Generator().manual_seed(world.rank)
        self.parameters = [
            torch.nn.Parameter(torch.rand(_TENSOR_BYTES // 4, generator=generator))
            for _ in range(count)
        ]
        self.optimizer = _Drift(self.parameters)
        self._matrix = torch.rand(_MATRIX_ROWS, _MATRIX_ROWS, generator=generator)
        self._products_per_s = 0.0

    @property
    def total_bytes(self) -> int:
        """Of this rank."""
        return len(self.parameters) * _TENSOR_BYTES

    def state(self) -> dict[str, torch.Tensor]:
        """By key."""
        return {f"rank{self.world.rank}_{n}": one for n, one in enumerate(self.parameters)}

    def shards(self) -> dict[str, Shard]:
        """Each a whole tensor of this rank's own."""
        return {
            key: Shard(one, tuple(one.shape), (0,) * one.dim()) for key, one in self.state().items()
        }

    def calibrate(self) -> None:
        """Measure how many matrix products a second has, all ranks computing."""
        self.world.barrier()
        self._multiply(2)
        began, products = time.perf_counter(), 0
        while time.perf_counter() - began < 1.0:
            self._multiply(4)
            products += 4
        self._products_per_s = products / (time.perf_counter() - began)

    def compute(self, seconds: float) -> None:
        """Matrix products, as many as take so long where nothing else runs."""
        self._multiply(max(1, round(seconds * self._products_per_s)))

    def _multiply(self, products: int) -> None:
        for _ in range(products):
            torch.mm(self._matrix, self._matrix)


@dataclass(frozen=True)
class LoopTimes:
    """Seconds of this rank: of the loop, until the last save was durable, and blocked in calls that
    save.
    """

    loop_s: float
    durable_s: float
    blocked_s: float


class Saver(Protocol):
    """A way to save while training goes on; all methods are collective."""

    def begin(self, folder: str) -> None:
        """Begin a save."""
        ...

    def poll(self) -> None:
        """Between computation and step: finish what can be finished without waiting."""
        ...

    def finish(self) -> None:
        """Wait for all."""
        ...


def run_loop(
    training: Training, saver: Saver, folder: str, iterations: int, compute_s: float
) -> LoopTimes:
    """Iterations of a save, computation, and an optimizer step."""
    training.world.barrier()
    began, blocked_s = time.perf_counter(), 0.0
    for number in range(iterations):
        called = time.perf_counter()
        saver.begin(os.path.join(folder, str(number % _FOLDERS)))
        blocked_s += time.perf_counter() - called
        training.compute(compute_s)
        called = time.perf_counter()
        saver.poll()
        blocked_s += time.perf_counter() - called
        training.optimizer.step()
    loop_s = time.perf_counter() - began
    saver.finish()
    return LoopTimes(loop_s, time.perf_counter() - began, blocked_s)


# -------------------------------------------------------------------------------------------------
# ways to save


class NoSaver:
    """Saves nothing."""

    def begin(self, folder: str) -> None:
        """Nothing."""

    def poll(self) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""


class OurSaver:
    """`megatron_uring.save_async`, polled once in each iteration."""

    def __init__(self, training: Training, config: Config) -> None:
        self._training, self._config = training, config
        self._pending: list[PendingSave] = []
        self.reports: list[Report] = []

    def begin(self, folder: str) -> None:
        """Returns when what has to be copied at once is copied."""
        self._pending.append(
            checkpoint.save_async(
                self._training.shards(),
                folder,
                config=self._config,
                communicator=self._training.world,
            )
        )

    def poll(self) -> None:
        """Commit what is durable on all ranks."""
        while self._pending and self._pending[0].poll():
            self.reports.append(self._pending.pop(0).wait())

    def is_drained(self) -> bool:
        """Whether this rank's part of all is durable; not collective."""
        return all(one.drained() for one in self._pending)

    def finish(self) -> None:
        """Commit all."""
        while self._pending:
            self.reports.append(self._pending.pop(0).wait())


class MegatronSaver:
    """Megatron's asynchronous ``torch_dist`` save and its queue, which forks a process for each."""

    def __init__(self, training: Training, no_group: str) -> None:
        require_group(no_group)
        self._training = training
        with megatron_on_host() as megatron:
            async_utils = load_module("megatron.core.dist_checkpointing.strategies.async_utils")
            strategies = load_module("megatron.core.dist_checkpointing.strategies.torch")
            self._queue = async_utils.AsyncCallsQueue()
            self._strategy = strategies.TorchDistSaveShardedStrategy(
                "torch_dist", 1, thread_count=THREADS, cached_metadata=True
            )
            make = megatron.ShardedTensor.from_rank_offsets
            self._state = {key: make(key, one) for key, one in training.state().items()}

    def begin(self, folder: str) -> None:
        """Plan, fork."""
        _make(folder, self._training.world)
        with megatron_on_host() as megatron:
            request = megatron.save(
                dict(self._state),
                folder,
                self._strategy,
                validate_access_integrity=False,
                async_sharded_save=True,
            )
            self._queue.schedule_async_request(request)

    def poll(self) -> None:
        """As Megatron's loop does in each iteration."""
        with megatron_on_host():
            self._queue.maybe_finalize_async_calls(blocking=False)

    def finish(self) -> None:
        """Wait for all."""
        with megatron_on_host():
            self._queue.maybe_finalize_async_calls(blocking=True)


class DcpSaver:
    """``torch.distributed.checkpoint.async_save``: copies all at the call, a thread writes."""

    def __init__(self, training: Training, no_group: str) -> None:
        require_group(no_group)
        self._training = training
        self._dcp = load_module("torch.distributed.checkpoint")
        self._future: Any = None

    def begin(self, folder: str) -> None:
        """One at a time, as its documentation asks for."""
        self.finish()
        _make(folder, self._training.world)
        writer = self._dcp.FileSystemWriter(
            folder, sync_files=True, thread_count=THREADS, overwrite=True
        )
        state = {key: one.detach() for key, one in self._training.state().items()}
        self._future = self._dcp.async_save(state, storage_writer=writer)

    def poll(self) -> None:
        """It finishes by itself."""

    def finish(self) -> None:
        """Wait for the one in flight."""
        if self._future is not None:
            self._future.result()
            self._future = None


def _make(folder: str, world: Communicator) -> None:
    if world.rank == 0:
        os.makedirs(folder, exist_ok=True)
    world.barrier()


SAVERS: dict[str, Callable[[Training, Config, str], Saver]] = {
    "none": lambda training, config, no_group: NoSaver(),
    "ours": lambda training, config, no_group: OurSaver(training, config),
    "megatron": lambda training, config, no_group: MegatronSaver(training, no_group),
    "dcp": lambda training, config, no_group: DcpSaver(training, no_group),
}
