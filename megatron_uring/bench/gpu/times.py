"""How long an asynchronous save blocks, and its fence waits, beside a plain copy to the host.

Guarantees
----------
- The plain copy is one pass over the same tensors into one page-locked buffer; nothing on the host
  can be faster. Trials are interleaved, after warm-ups in which pool and buffer are page-locked;
  medians and ranges are told.
- A trial ends at its fence, and its save is given up then; the last one is committed, restored and
  compared. The disk is written meanwhile, as in a job.
- Other numbers of copy threads have a pool of their own each, so that they come one after the
  other, not interleaved; their rows say so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from megatron_uring import checkpoint, fencing, lazy, stage
from megatron_uring.bench.gpu.setting import (
    FAILED,
    MEASURED,
    MISSED,
    PASSED,
    NotRunError,
    Row,
    Setting,
    save_async,
)
from megatron_uring.config import MEBIBYTE

BLOCKED_TARGET_S = 0.020
TARGET_STATE_BYTES = 8_000_000_000
_TENSOR_BYTES = 64 * MEBIBYTE
_WARM_UPS = 2
_LEVELS = ("sampled", "off")

State = dict[str, torch.Tensor]


def blocking_and_fence(setting: Setting) -> list[Row]:
    """The main figures, and that what was saved is what was there."""
    setting.require_time(100)
    undo = lazy.watch()
    try:
        state = _large_state(setting)
        buffer = _pinned(setting, state)
        blocked: dict[str, list[float]] = {level: [] for level in _LEVELS}
        fenced: dict[str, list[float]] = {level: [] for level in _LEVELS}
        plain: list[float] = []
        for trial in range(_WARM_UPS + setting.trials):
            for level in _LEVELS if trial % 2 else reversed(_LEVELS):
                called_s, fence_s = _trial(setting, state, level, 0)
                if trial >= _WARM_UPS:
                    blocked[level].append(called_s)
                    fenced[level].append(fence_s)
            copied_s = _plain_copy(setting, state, buffer)
            if trial >= _WARM_UPS:
                plain.append(copied_s)
        del buffer
        return [
            *(_blocked_row(setting, level, blocked[level]) for level in _LEVELS),
            _plain_row(setting, plain),
            *(_fence_row(level, fenced[level], blocked[level], plain) for level in _LEVELS),
            _committed(setting, state),
        ]
    finally:
        undo()


def copy_threads(setting: Setting) -> list[Row]:
    """The fence's wait with more threads."""
    undo = lazy.watch()
    rows = []
    try:
        state = _large_state(setting)
        for threads in (1, 2, 4):
            setting.require_time(45)
            times = [_trial(setting, state, "off", threads)[1] for _ in range(_WARM_UPS + 3)]
            stage.close_engines()
            kept = times[_WARM_UPS:]
            rate = setting.state_bytes / statistics.median(kept) / 1e9
            rows.append(
                Row(
                    f"fence wait, copy_threads={threads}",
                    MEASURED,
                    f"{_text(kept)}, {rate:.1f} GB/s; not interleaved",
                    seconds=tuple(kept),
                )
            )
    except NotRunError:
        if not rows:
            raise
    finally:
        undo()
    return rows


def _large_state(setting: Setting) -> State:
    """Parameters of `state_bytes`, and an optimizer that was seen to step."""
    seen = torch.nn.Parameter(torch.zeros(8, device=setting.device))
    seen.grad = torch.ones_like(seen)
    _optimizers.append(torch.optim.SGD([seen], lr=0.1))
    _optimizers[-1].step()
    elements = min(_TENSOR_BYTES, setting.state_bytes) // 4
    count = max(setting.state_bytes // (elements * 4), 1)
    return {
        f"parameter{number}": torch.nn.Parameter(
            torch.randn(elements, device=setting.device), requires_grad=False
        )
        for number in range(count)
    }


_optimizers: list[torch.optim.Optimizer] = []  # laziness forgets one that is gone


def _state_bytes(state: State) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def _pinned(setting: Setting, state: State) -> torch.Tensor:
    return torch.empty(_state_bytes(state), dtype=torch.uint8, pin_memory=setting.on_gpu)


def _trial(setting: Setting, state: State, level: str, threads: int) -> tuple[float, float]:
    """Seconds in the call, and at the fence right after it."""
    options: dict[str, object] = {"verify_staging": level}
    options["staging_bytes"] = _state_bytes(state) + 256 * MEBIBYTE
    if threads:
        options["copy_threads"] = threads
    config = setting.config(**options)
    with setting.directories(1) as (path,):
        setting.synchronize()
        began = time.perf_counter()
        pending = save_async(state, path, config)
        called_s = time.perf_counter() - began
        fence_s = fencing.fence()
        pending.abort()
    return called_s, fence_s


def _plain_copy(setting: Setting, state: State, buffer: torch.Tensor) -> float:
    setting.synchronize()
    began = time.perf_counter()
    at = 0
    for tensor in state.values():
        source = tensor.detach().view(torch.uint8)
        buffer[at : at + len(source)].copy_(source, non_blocking=True)
        at += len(source)
    setting.synchronize()
    return time.perf_counter() - began


def _committed(setting: Setting, state: State) -> Row:
    config = setting.config(staging_bytes=_state_bytes(state) + 256 * MEBIBYTE)
    with setting.directories(1) as (path,):
        report = save_async(state, path, config).wait()
        restored = checkpoint.restore(path, config=config)
        wrong = [
            key
            for key, tensor in state.items()
            if not torch.equal(restored[key].to(setting.device), tensor)
        ]
    found = f"{report.line()}; {report.staging}"
    return Row(
        "that state, committed and restored",
        FAILED if wrong else PASSED,
        found + (f"; different: {', '.join(wrong[:5])}" if wrong else ""),
        "same bytes",
    )


def _blocked_row(setting: Setting, level: str, seconds: Sequence[float]) -> Row:
    what = f"save_async blocks, {setting.state_bytes / 1e9:.1f} GB, verify_staging={level}"
    if setting.state_bytes < TARGET_STATE_BYTES or not setting.on_gpu:
        return Row(what, MEASURED, f"{_text(seconds)}; the target is for 8 GB", "", tuple(seconds))
    kept = statistics.median(seconds) <= BLOCKED_TARGET_S
    return Row(what, PASSED if kept else MISSED, _text(seconds), "median <= 20 ms", tuple(seconds))


def _plain_row(setting: Setting, seconds: Sequence[float]) -> Row:
    rate = setting.state_bytes / statistics.median(seconds) / 1e9
    found = f"{_text(seconds)}, {rate:.1f} GB/s"
    return Row("plain copy into page-locked memory", MEASURED, found, "", tuple(seconds))


def _fence_row(
    level: str, fenced: Sequence[float], blocked: Sequence[float], plain: Sequence[float]
) -> Row:
    """Of the trials with `level`; the call is told with it, since copies begin there."""
    both = [call + wait for call, wait in zip(blocked, fenced, strict=True)]
    ratio = statistics.median(fenced) / statistics.median(plain)
    whole = statistics.median(both) / statistics.median(plain)
    found = f"{_text(fenced)}; {ratio:.2f} of the plain copy, {whole:.2f} with the call"
    return Row(f"fence wait, verify_staging={level}", MEASURED, found, "", tuple(fenced))


def _text(seconds: Sequence[float]) -> str:
    middle = statistics.median(seconds) * 1e3
    return f"{middle:.1f} ms ({min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f})"
