"""State providers: each gives a part of the state as shards and objects; providers compose.

Guarantees
----------
- A plain tensor becomes a shard without a copy: address, shape and strides of its own elements,
  never of the storage it is a view of. The provided state keeps a reference to it until the save is
  over.
- A tensor subclass without plain storage (quantized), a conjugated or negated view and a sparse
  tensor are turned into plain tensors first, as `torch_dist` does, or refused by name.
- Objects are serialized before `collect` returns, and loaded back on trial with
  ``weights_only=True``: what could not be restored fails now, naming key and class. Loading never
  runs code from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from megatron_uring.columns import Int64Array, byte_strides
from megatron_uring.errors import StateMismatchError, UnsupportedError
from megatron_uring.layout import DTYPE_NAMES, MAXIMUM_DIMENSIONS
from megatron_uring.nesting import flatten
from megatron_uring.objects import class_name, serialize_object
from megatron_uring.tables import Provided, ShardTable

_DTYPE_CODE = {
    getattr(torch, name): code for code, name in enumerate(DTYPE_NAMES) if hasattr(torch, name)
}


@dataclass(frozen=True)
class Shard:
    """A tensor as a piece of a global tensor.

    Parameters
    ----------
    tensor
        The local data, shape ``[...]``.
    global_shape, offset
        Of the global tensor and of this piece in it; as many dimensions as the global tensor has,
        which may be more than `tensor` has if the leading ones are of size 1.
    owner
        Whether this rank writes it. Of all ranks that hold the same piece exactly one does.
    """

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    owner: bool = True


class StateProvider(Protocol):
    """Gives a part of the state."""

    def collect(self) -> Provided:
        """The state as it is now; called once for each save, on every rank."""
        ...


class TensorProvider:
    """Shards by key.

    Parameters
    ----------
    shards
        Pairs of key and `Shard`; a key may come several times, with different pieces.
    """

    def __init__(self, shards: Iterable[tuple[str, Shard]]) -> None:
        self._shards = list(shards)

    def collect(self) -> Provided:
        """Columns over the shards; no element is copied unless this rank writes it and the tensor
        has no plain storage.
        """
        shards = [
            (key, replace(shard, tensor=plain_tensor(key, shard.tensor)) if shard.owner else shard)
            for key, shard in self._shards
        ]
        table = describe(shards)
        tensors = tuple(shard.tensor for _, shard in shards)
        owner = np.fromiter((shard.owner for _, shard in shards), bool, len(shards))
        strides = byte_strides(tensors, table.ndim, table.shape.shape[1])
        return Provided(table, owner, tensors, strides, (), ())


class ObjectProvider:
    """Python objects by key, of which this rank is the one that writes them."""

    def __init__(
        self, objects: Mapping[str, object], *, allowed_globals: Sequence[str] = ()
    ) -> None:
        self._objects = dict(objects)
        self._allowed_globals = tuple(allowed_globals)

    def collect(self) -> Provided:
        """The objects as bytes; raises `StateMismatchError` for one that could not be loaded
        again.
        """
        payloads = tuple(
            serialize_object(key, value, self._allowed_globals)
            for key, value in self._objects.items()
        )
        nothing = TensorProvider(()).collect()
        return Provided(
            nothing.shards, nothing.owner, (), nothing.strides, tuple(self._objects), payloads
        )


class _ReplicaProvider:
    """Objects that rank 0 writes; their names are compared with what it has."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = tuple(keys)

    def collect(self) -> Provided:
        return replace(TensorProvider(()).collect(), replicas=self._keys)


class CompositeProvider:
    """Several providers as one."""

    def __init__(self, providers: Iterable[StateProvider]) -> None:
        self._providers = list(providers)

    def collect(self) -> Provided:
        """Everything that the parts give, in order."""
        parts = [provider.collect() for provider in self._providers]
        table = ShardTable.concatenate([part.shards for part in parts])
        width = table.shape.shape[1]
        return Provided(
            table,
            np.concatenate([np.zeros(0, bool), *(part.owner for part in parts)]),
            tuple(tensor for part in parts for tensor in part.tensors),
            np.concatenate(
                [
                    np.zeros((0, width), np.int64),
                    *(
                        np.pad(part.strides, ((0, 0), (0, width - part.strides.shape[1])))
                        for part in parts
                    ),
                ]
            ),
            tuple(key for part in parts for key in part.object_keys),
            tuple(data for part in parts for data in part.objects),
            tuple(key for part in parts for key in part.replicas),
        )


# -------------------------------------------------------------------------------------------------
# nested state dicts


def as_provider(state: object, rank: int, allowed_globals: Sequence[str] = ()) -> StateProvider:
    """`state` as a provider: one already, or a nested dict (`provide_state`)."""
    if isinstance(state, Mapping):
        return provide_state(state, rank=rank, allowed_globals=allowed_globals)
    if callable(getattr(state, "collect", None)):
        provider: StateProvider = state  # type: ignore[assignment]
        return _CheckedProvider(provider)
    raise StateMismatchError(
        "collect state", expected="a dict, or a state provider", found=class_name(state)
    )


class _CheckedProvider:
    """A provider of the user's, whose result is what the next steps need."""

    def __init__(self, provider: StateProvider) -> None:
        self._provider = provider

    def collect(self) -> Provided:
        """What the provider gives."""
        provided = self._provider.collect()
        if not isinstance(provided, Provided):
            raise StateMismatchError(
                f"collect state from {class_name(self._provider)}",
                expected="Provided, as TensorProvider(...).collect() gives it",
                found=class_name(provided),
            )
        return provided


def provide_state(
    state: Mapping[str, object], *, rank: int, allowed_globals: Sequence[str] = ()
) -> StateProvider:
    """Provider over a nested state dict.

    `Shard` leaves are taken as they are. Every other tensor or object is taken to be replicated:
    rank 0 writes it, and a key that rank 0 does not have is refused when the ranks compare.
    """
    shards: list[tuple[str, Shard]] = []
    objects: dict[str, object] = {}
    for key, leaf in flatten(state):
        if isinstance(leaf, Shard):
            shards.append((key, leaf))
        elif isinstance(leaf, torch.Tensor):
            shape = tuple(leaf.shape)
            shards.append((key, Shard(leaf, shape, (0,) * len(shape), owner=rank == 0)))
        else:
            objects[key] = leaf
    if rank != 0:
        return CompositeProvider([TensorProvider(shards), _ReplicaProvider(objects)])
    return CompositeProvider(
        [TensorProvider(shards), ObjectProvider(objects, allowed_globals=allowed_globals)]
    )


# -------------------------------------------------------------------------------------------------
# tensors


def describe(shards: Sequence[tuple[str, Shard]]) -> ShardTable:
    """The shards' columns.

    Raises
    ------
    StateMismatchError
        If shape, global shape and offset of one do not have fitting numbers of dimensions.
    UnsupportedError
        For a dtype that the format does not know.
    """
    for key, shard in shards:
        _check_dimensions(key, shard)
    count = len(shards)
    ndim = np.fromiter((len(shard.global_shape) for _, shard in shards), np.uint8, count)
    width = int(ndim.max()) if count else 0

    def padded(rows: Iterable[Sequence[int]], fill: int) -> Int64Array:
        filled = [[*row, *[fill] * (width - len(row))] for row in rows]
        return np.array(filled, np.int64).reshape(count, width)

    keys, tensor = _number_keys(key for key, _ in shards)
    return ShardTable(
        keys,
        tensor,
        np.fromiter((dtype_code(key, shard.tensor) for key, shard in shards), np.uint8, count),
        ndim,
        padded((shard.global_shape for _, shard in shards), 1),
        padded((shard.offset for _, shard in shards), 0),
        padded(
            (
                [*[1] * (len(shard.global_shape) - shard.tensor.ndim), *shard.tensor.shape]
                for _, shard in shards
            ),
            1,
        ),
    )


def is_tensor(value: object) -> bool:
    """Whether `value` is a torch tensor."""
    return isinstance(value, torch.Tensor)


def new_tensor(code: int, shape: Sequence[int]) -> torch.Tensor:
    """An uninitialised tensor on the CPU of an on-disk dtype."""
    return torch.empty(list(shape), dtype=torch_dtype(code), device="cpu")


def plain_tensor(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself, or a plain strided one with the same values where it has no plain storage.

    Raises
    ------
    UnsupportedError
        For sparse, meta and nested tensors.
    """
    # every tensor has a dequantize() that makes float32 of it; quantized classes have their own
    if type(tensor).dequantize is not torch.Tensor.dequantize:
        tensor = tensor.dequantize()
    tensor = tensor.detach()
    if not has_memory(tensor):
        raise UnsupportedError(
            f"save tensor {key!r}",
            expected="a dense tensor with data",
            found=f"{tensor.layout} on {tensor.device}",
        )
    return tensor.resolve_conj().resolve_neg()


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements lie at ``data_ptr()``.

    Not so for sparse, meta and nested tensors, and for subclasses that wrap others (DTensor).
    """
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        return False
    try:
        return tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:  # what FakeTensor and its like answer
        return False


def dtype_code(key: str, tensor: torch.Tensor) -> int:
    """On-disk code of the dtype; raises `UnsupportedError` for one that the format does not
    know.
    """
    code = _DTYPE_CODE.get(tensor.dtype)
    if code is None:
        known = ", ".join(DTYPE_NAMES)
        raise UnsupportedError(
            f"save tensor {key!r}", expected=f"a dtype of {known}", found=tensor.dtype
        )
    return code


def torch_dtype(code: int) -> torch.dtype:
    """Inverse of `dtype_code`; raises `UnsupportedError` where this torch lacks the dtype."""
    dtype = getattr(torch, DTYPE_NAMES[code], None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(
            "restore tensor", expected=f"a torch with {DTYPE_NAMES[code]}", found=torch.__version__
        )
    return dtype


def _check_dimensions(key: str, shard: Shard) -> None:
    tensor, ndim = shard.tensor, len(shard.global_shape)
    prepended = ndim - tensor.ndim
    if len(shard.offset) != ndim or prepended < 0 or ndim > MAXIMUM_DIMENSIONS:
        raise StateMismatchError(
            f"save tensor {key!r}",
            expected=f"global shape and offset of {tensor.ndim} to {MAXIMUM_DIMENSIONS} dimensions",
            found=f"global shape {shard.global_shape}, offset {shard.offset}",
        )


def _number_keys(keys: Iterable[str]) -> tuple[tuple[str, ...], npt.NDArray[np.int32]]:
    position: dict[str, int] = {}
    numbers = [position.setdefault(key, len(position)) for key in keys]
    return tuple(position), np.array(numbers, np.int32)
