"""Laziness: which tensors may be copied after a save has returned, and what then has to wait.

Guarantees
----------
- Only what is known to change at optimizer steps alone is lazy: every ``nn.Parameter``, and memory
  of parameters and state of an optimizer that `watch` has seen step, of DTensors this rank's part.
  Everything else (buffers, FP8 scales, gathered or dequantized temporaries) is copied before the
  save returns.
- Nothing is lazy before an optimizer was seen to step: without steps that call the fence nothing
  would hold changes back.
- While `watch` is in force, the fence stands before each step of every PyTorch optimizer, before
  ``Optimizer.load_state_dict`` and before ``Module.load_state_dict``.

The hook is ``torch.optim.optimizer.register_optimizer_step_pre_hook``; subclasses of
``torch.optim.Optimizer`` that override ``step`` have it too.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from megatron_uring.columns import BoolArray, Int64Array
from megatron_uring.dtensors import local_tensor
from megatron_uring.fencing import fence
from megatron_uring.tensors import addresses, device_numbers, with_memory

_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()

Undo = Callable[[], None]


def may_wait(tensors: Sequence[torch.Tensor]) -> BoolArray:
    """Which of them may be copied later, bool [N]."""
    if not _watch.callers or not len(_optimizers):
        return np.zeros(len(tensors), np.bool_)
    parameters = [issubclass(kind, torch.nn.Parameter) for kind in map(type, tensors)]
    return np.array(parameters, np.bool_) | _within_optimizers(tensors)


def _within_optimizers(tensors: Sequence[torch.Tensor]) -> BoolArray:
    """Which of them lie wholly in memory of a parameter or a state of an optimizer."""
    known = [*chain.from_iterable(map(_tensors_of, list(_optimizers)))]
    # between the elements of one with gaps lie other tensors' elements
    owners = [one for one in with_memory(known) if _has_no_gaps(one)]
    device, owner_device = device_numbers(tensors), device_numbers(owners)
    held = np.zeros(len(tensors), np.bool_)
    for number in np.unique(device).tolist():  # an address means something on its device only
        here, owners_here = device == number, (owner_device == number).tolist()
        candidates = list(compress(tensors, here.tolist()))
        held[here] = _within(candidates, list(compress(owners, owners_here)))
    return held


def _within(tensors: Sequence[torch.Tensor], owners: Sequence[torch.Tensor]) -> BoolArray:
    """Which of `tensors` lie wholly in memory of `owners`; all are on one device."""
    begin, end = _spans(owners)
    if not len(begin):
        return np.zeros(len(tensors), np.bool_)
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order])
    # views of views overlap: joined, so that the span before a tensor is the one that may hold it
    first = np.flatnonzero(np.append(True, begin[1:] > end[:-1]))
    begin, end = begin[first], end[np.append(first[1:], len(end)) - 1]
    own_begin, own_end = _spans(tensors)
    place = np.searchsorted(begin, own_begin, side="right") - 1
    held: BoolArray = (own_end == own_begin) | (place >= 0) & (own_end <= end[place])
    return held


def _tensors_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from (local_tensor(one) for one in group["params"] if isinstance(one, torch.Tensor))
    for state in optimizer.state.values():
        if isinstance(state, dict):
            yield from (
                local_tensor(one) for one in state.values() if isinstance(one, torch.Tensor)
            )


def _spans(tensors: Sequence[torch.Tensor]) -> tuple[Int64Array, Int64Array]:
    """First byte and the one behind the last, int64 [N] each; of a strided tensor what it spans."""
    begin = addresses(tensors).astype(np.int64)
    return begin, begin + np.fromiter(map(_span_bytes, tensors), np.int64, len(tensors))


def _has_no_gaps(tensor: torch.Tensor) -> bool:
    return _span_bytes(tensor) <= tensor.numel() * tensor.element_size()


def _span_bytes(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.numel() * tensor.element_size()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


# -------------------------------------------------------------------------------------------------
# the hooks


@dataclass
class _Watch:
    """How many want the hooks, and how to take them away."""

    callers: int = 0
    undo: list[Undo] = field(default_factory=list)


_watch = _Watch()


def watch() -> Undo:
    """Put the fence where tensors change.

    Returns
    -------
    callable
        Ends this caller's watch; the last one takes the hooks away, after a fence.
    """
    ended = False

    def undo() -> None:
        nonlocal ended
        if ended:
            return
        ended = True
        _watch.callers -= 1
        if not _watch.callers:
            fence()  # nobody holds changes back after this
            while _watch.undo:
                _watch.undo.pop()()

    _watch.callers += 1
    if _watch.callers == 1:
        _watch.undo.append(register_optimizer_step_pre_hook(_before_step).remove)
        _watch.undo.append(fence_before(Optimizer, "load_state_dict"))
        _watch.undo.append(fence_before(torch.nn.Module, "load_state_dict"))
    return undo


def _before_step(optimizer: Optimizer, *arguments: Any) -> None:
    _optimizers.add(optimizer)
    fence()


def fence_before(owner: type[Any], name: str) -> Undo:
    """Let a method of `owner` begin with the fence, until what is returned is called."""
    original = vars(owner)[name]

    @functools.wraps(original)
    def fenced(*arguments: Any, **keywords: Any) -> Any:
        fence()
        return original(*arguments, **keywords)

    setattr(owner, name, fenced)

    def undo() -> None:
        if vars(owner).get(name) is fenced:  # else somebody wrapped ours: it stays, and only fences
            setattr(owner, name, original)

    return undo
