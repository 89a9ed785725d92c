"""Bytes of a GPU that come back: round trips, and saves under an optimizer that changes them.

Guarantees
----------
- What is compared are the bytes of the elements, so that NaNs and the sign of zero count.
- Before each of the repeated saves the tensors are emptied, and refilled by work that is still
  queued on the GPU when the save is called: a copy that does not wait for it has other bytes.
- Digests of the repeated saves are compared with those of synchronous saves of the same state.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from contextlib import nullcontext
from typing import Any

import torch

from megatron_uring import checkpoint, lazy, tensors
from megatron_uring.bench.gpu.setting import (
    FAILED,
    NOT_RUN,
    PASSED,
    Row,
    Setting,
    bytes_of,
    digest,
    save,
    save_async,
)

SAVES = 50
_SAMPLE_S = 0.005
_SLEEP_CYCLES = 20_000_000  # about 10 ms


def round_trips(setting: Setting) -> list[Row]:
    """Synchronous and asynchronous saves of every kind of tensor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, that a dtype is experimental
        state, refused = _every_kind(setting)
    rows = [Row(f"dtype {name}", NOT_RUN, why) for name, why in refused.items()]
    undo = lazy.watch()
    try:
        optimizer, parameters = _stepped(setting, 1, 1 << 18)  # lazy as long as there is one
        state["parameter"] = parameters[0]
        state["average"] = optimizer.state[parameters[0]]["exp_avg"]
        for asynchronous in (False, True):
            rows += _round_trip(setting, state, asynchronous)
    finally:
        undo()
    return rows


def _round_trip(setting: Setting, state: dict[str, torch.Tensor], asynchronous: bool) -> list[Row]:
    kind = "save_async" if asynchronous else "save"
    with setting.directories(1) as (path,):
        if asynchronous:
            report = save_async(state, path, setting.config(verify_staging="full")).wait()
        else:
            report = save(state, path, setting.config())
        config = setting.config()
        restored = checkpoint.restore(path, config=config)
        targets = {
            key: torch.empty(tensor.shape, dtype=tensor.dtype, device=setting.device)
            for key, tensor in state.items()
        }
        checkpoint.restore(path, targets, config=config)
    wrong = sorted(
        key
        for key, tensor in state.items()
        if not bytes_of(restored[key]) == bytes_of(targets[key]) == bytes_of(tensor)
    )
    found = f"{len(state)} tensors, restored to the host and to {setting.device}"
    if wrong:
        found += f"; different: {', '.join(wrong[:5])}"
    staging = report.staging
    return [
        Row(f"round trip, {kind}", FAILED if wrong else PASSED, f"{found}; {staging}", "same bytes")
    ]


def _every_kind(setting: Setting) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors by key; and what this PyTorch cannot have on the device, with the reason."""
    state: dict[str, torch.Tensor] = {}
    refused = {}
    for dtype in tensors.DTYPE_CODE:
        name = str(dtype).removeprefix("torch.")
        try:
            flat = _random(dtype, 3 * 5 * 7 * 64).to(setting.device)
            cube = flat.view(3, 5, 7 * 64)
            kinds = {
                "whole": cube,
                "turned": cube.permute(2, 0, 1),
                "stepped": cube[:, :, ::3],
                "view": flat[11:99],
                "scalar": flat[5].reshape(()),
                "empty": flat[:0],
                "spread": flat[:1].expand(9),
            }
            for tensor in kinds.values():
                bytes_of(tensor)
            state.update({f"{name}.{kind}": tensor for kind, tensor in kinds.items()})
        except (RuntimeError, NotImplementedError, TypeError) as error:
            refused[name] = str(error).splitlines()[0]
    module = torch.nn.BatchNorm1d(300).to(setting.device)
    state.update({f"module.{key}": tensor for key, tensor in module.state_dict().items()})
    large = torch.randn(5_000_011, device=setting.device)  # more than a slab, and of an odd size
    state.update({"large": large, "within": large[1:4_000_000], "on the host": torch.ones(1000)})
    return state, refused


def _random(dtype: torch.dtype, count: int) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,)).to(torch.bool)
    size = count * torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype)


def _stepped(
    setting: Setting, count: int, elements: int
) -> tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]:
    """An optimizer that was seen to step, and its parameters."""
    parameters = [
        torch.nn.Parameter(torch.randn(elements, device=setting.device)) for _ in range(count)
    ]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer, parameters


# -------------------------------------------------------------------------------------------------
# saves under an optimizer


def mutated_saves(setting: Setting, count: int = SAVES, elements: int = 1 << 20) -> list[Row]:
    """Asynchronous saves, each followed at once by a step; and what they left in the system."""
    setting.require_time(60)
    undo = lazy.watch()
    watch = _Watch()
    try:
        optimizer, parameters = _stepped(setting, 4, elements)
        wrong, lazy_bytes = [], 0
        with watch:
            for number in range(count):
                equal, lazy_bytes = _mutated_save(setting, optimizer, parameters, number)
                if not equal:
                    wrong.append(str(number))
    finally:
        undo()
    found = f"{count - len(wrong)} of {count} equal, {lazy_bytes / 1e6:.0f} MB of each copied late"
    if wrong:
        found += f"; different: {', '.join(wrong[:10])}"
    right = not wrong and lazy_bytes > 0
    return [
        Row(
            f"{count} saves under a mutating optimizer",
            PASSED if right else FAILED,
            found,
            "digests of synchronous saves",
        ),
        *watch.rows(),
    ]


def _mutated_save(
    setting: Setting,
    optimizer: torch.optim.Optimizer,
    parameters: list[torch.nn.Parameter],
    number: int,
) -> tuple[bool, int]:
    state: dict[str, torch.Tensor] = {}
    for place, one in enumerate(parameters):
        state[f"parameter{place}"] = one
        state[f"average{place}"] = optimizer.state[one]["exp_avg"]
    state["buffer"] = torch.full((1000,), float(number), device=setting.device)
    config = setting.config(verify_staging="full" if number % 3 == 0 else "off")
    with setting.directories(2) as (synchronous, asynchronous):
        save(state, synchronous, config)
        kept = [one.detach().clone() for one in parameters]
        with torch.no_grad():
            for one in parameters:
                one.zero_()
        setting.synchronize()
        with _odd_ones_elsewhere(setting, number):
            _refill_late(setting, parameters, kept)
            pending = save_async(state, asynchronous, config)
            state["buffer"].zero_()
            optimizer.step()
        setting.synchronize()
        report = pending.wait()
        first = digest(checkpoint.restore(synchronous, config=config))
        second = digest(checkpoint.restore(asynchronous, config=config))
    return first == second, report.lazy_bytes


def _odd_ones_elsewhere(setting: Setting, number: int) -> Any:
    """A stream other than the default one, every second time."""
    if not setting.on_gpu or number % 2 == 0:
        return nullcontext()
    elsewhere = torch.cuda.Stream(setting.device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(elsewhere)


def _refill_late(
    setting: Setting, parameters: list[torch.nn.Parameter], kept: list[torch.Tensor]
) -> None:
    if setting.on_gpu:
        torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for one, values in zip(parameters, kept, strict=True):
            one.copy_(values)


# -------------------------------------------------------------------------------------------------
# what saves leave in the system


class _Watch:
    """Looks at children of this process and at shared memory while it lasts."""

    def __init__(self) -> None:
        self.children: set[str] = set()
        self.files: set[str] = set()
        self.starts: list[str] = []
        self._over = threading.Event()
        self._active = False
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> None:
        self._children_before, self._files_before = _children(), _shared_files()
        self._active = True
        sys.addaudithook(self._hear)  # there is no way to take one away
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._active = False
        self._over.set()
        self._thread.join()

    def _hear(self, event: str, _: tuple[Any, ...]) -> None:
        if self._active and event in ("os.fork", "os.posix_spawn", "subprocess.Popen"):
            self.starts.append(event)

    def _look(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            self.children |= _children() - self._children_before
            self.files |= _shared_files() - self._files_before

    def rows(self) -> list[Row]:
        """What there was."""
        processes, files = len(self.children) + len(self.starts), len(self.files)
        return [
            Row(
                "processes created by them",
                FAILED if processes else PASSED,
                f"{len(self.starts)} by Python; {len(self.children)} other children seen, looked "
                f"for every {_SAMPLE_S * 1e3:.0f} ms",
                "0",
            ),
            Row(
                "files in /dev/shm by them",
                FAILED if files else PASSED,
                f"{files}, of any process"
                + "".join(f"; {name}" for name in sorted(self.files)[:3]),
                "0",
            ),
        ]


def _children() -> set[str]:
    found: set[str] = set()
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children", encoding="ascii") as table:
                found.update(table.read().split())
        except OSError:  # a thread that has ended, or a kernel without the table
            continue
    return found


def _shared_files() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
