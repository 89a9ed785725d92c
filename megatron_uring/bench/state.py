"""What is saved: states of random bytes, alike in every run.

Guarantees
----------
- The same rank and sizes give the same bytes. Keys name their rank: each tensor has one owner.
- Equality is that of bytes: a NaN equals itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_uring import _engine
from megatron_uring.bench.measure import DifferentError
from megatron_uring.columns import Int64Array
from megatron_uring.config import KIBIBYTE, MEBIBYTE
from megatron_uring.providers import Shard

LARGE_BYTES = 64 * MEBIBYTE
TINY_LARGE_TENSORS = 64
_ITEM_BYTES = 64
_ODD_EVERY = 10


@dataclass(frozen=True)
class State:
    """The tensors of one rank, by key."""

    tensors: dict[str, torch.Tensor]

    @property
    def total_bytes(self) -> int:
        """Of this rank."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def shards(self, prefix: str = "", *, owner: bool = True) -> dict[str, Shard]:
        """Each tensor as a whole global tensor, owned by this rank unless it is said otherwise."""
        return {
            prefix + key: Shard(tensor, tuple(tensor.shape), (0,) * tensor.dim(), owner)
            for key, tensor in self.tensors.items()
        }

    def empty(self) -> State:
        """The same tensors with other memory, already touched."""
        return State({key: torch.zeros_like(tensor) for key, tensor in self.tensors.items()})

    def wipe(self) -> None:
        """Zeros everywhere."""
        for tensor in self.tensors.values():
            tensor.zero_()

    def read(self) -> None:
        """Read every byte, as an optimizer step has just before a save: what nobody read for some
        seconds may have been taken away by the system below.
        """
        for tensor in self.tensors.values():
            _engine.crc32c(tensor.view(torch.uint8).numpy().data)

    def check_equal(self, found: State) -> None:
        """Raise `DifferentError` naming the first key that differs."""
        for key, tensor in self.tensors.items():
            other = found.tensors[key]
            if not torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)):
                raise DifferentError(f"{key} came back different")


def large_state(rank: int, gigabytes: float, tensor_bytes: int = LARGE_BYTES) -> State:
    """At least one tensor of `tensor_bytes` uint8, about `gigabytes` (10^9 bytes) of them."""
    count = max(1, round(gigabytes * 1e9 / tensor_bytes))
    fill = _filler(rank)
    return State({f"rank{rank}/tensor{n}": fill(tensor_bytes) for n in range(count)})


def workload_state(rank: int, names: Sequence[str], tensor_bytes: Int64Array) -> State:
    """uint8 tensors of these names and sizes, int64 [tensors]."""
    fill = _filler(rank)
    sizes = zip(names, tensor_bytes.tolist(), strict=True)
    return State({f"rank{rank}/{name}": fill(size) for name, size in sizes})


def small_state(rank: int, count: int) -> State:
    """float32 and bfloat16 in turn, 4 to 256 KiB; one in ten is no multiple of 64 bytes."""
    sizes = np.random.default_rng(rank).integers(
        4 * KIBIBYTE // _ITEM_BYTES, 256 * KIBIBYTE // _ITEM_BYTES, count, endpoint=True
    )
    fill, tensors = _filler(rank), {}
    for number, items in enumerate(sizes.tolist()):
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        size = items * _ITEM_BYTES - (4 * (number % 15) if number % _ODD_EVERY == 3 else 0)
        tensors[f"rank{rank}/layer{number // 12}/weight{number % 12}"] = fill(size).view(dtype)
    return State(tensors)


def tiny_and_large_state(rank: int, count: int, large_count: int) -> tuple[State, State]:
    """`count` tensors of 1 to 64 KiB, and the same bytes as `large_count` tensors.

    The tiny ones lie in memory in another order than their keys, as those of a model do.
    """
    generator = np.random.default_rng(rank)
    sizes = generator.integers(
        KIBIBYTE // _ITEM_BYTES, 64 * KIBIBYTE // _ITEM_BYTES, count, endpoint=True
    )
    ends = np.cumsum(sizes) * _ITEM_BYTES
    buffer = _filler(rank)(int(ends[-1]))
    order = generator.permutation(count)
    tiny = {
        f"rank{rank}/tiny{number}": buffer[ends[place] - sizes[place] * _ITEM_BYTES : ends[place]]
        for number, place in enumerate(order.tolist())
    }
    cuts = np.linspace(0, len(buffer), large_count + 1).astype(int).tolist()
    large = {
        f"rank{rank}/large{number}": buffer[begin:end]
        for number, (begin, end) in enumerate(itertools.pairwise(cuts))
    }
    return State(tiny), State(large)


def _filler(rank: int) -> Callable[[int], torch.Tensor]:
    """Makes uint8 tensors of random bytes."""
    generator = torch.Generator().manual_seed(rank)

    def fill(size: int) -> torch.Tensor:
        tensor = torch.zeros(size, dtype=torch.uint8)
        words = size // 8 * 8
        # eight bytes at a time, which is far faster; the top bit of each word stays clear
        tensor[:words].view(torch.int64).random_(generator=generator)
        return tensor

    return fill
