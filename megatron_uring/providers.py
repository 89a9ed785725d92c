"""State providers: each gives a part of the state as shards and objects; providers compose.

Guarantees
----------
- A plain tensor becomes a shard without a copy: address, shape and strides of its own elements,
  never of the storage it is a view of. The provided state keeps a reference to it until the save is
  over.
- A DTensor is the piece that this rank holds of it, written by one of the ranks that hold it
  (`dtensors`).
- A tensor subclass without plain storage (quantized), a conjugated or negated view and a sparse
  tensor are turned into plain tensors first, as `torch_dist` does, or refused by name.
- Objects are serialized before `collect` returns, and loaded back on trial with
  ``weights_only=True``: what could not be restored fails now, naming key and class. Loading never
  runs code from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from megatron_uring import dtensors, tensors
from megatron_uring.claims import claim
from megatron_uring.columns import Int64Array
from megatron_uring.errors import StateMismatchError
from megatron_uring.nesting import flatten
from megatron_uring.objects import class_name, cure_for, serialize_object
from megatron_uring.shards import ShardTable
from megatron_uring.tables import Provided


@dataclass(frozen=True, slots=True)  # there may be 200,000: no dict for each
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
        Whether this rank writes it. Of all ranks that hold the same piece exactly one does. None:
        one of those that say so is chosen.
    """

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    owner: bool | None = True


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

    Raises
    ------
    StateMismatchError
        For anything else: plain tensors, or a dict of them.
    """

    def __init__(self, shards: Iterable[tuple[str, Shard]]) -> None:
        # lists side by side: a tuple kept for each shard would keep the garbage collector busy
        self._keys: list[str] = []
        self._shards: list[Shard] = []
        if isinstance(shards, Mapping):
            raise _not_shards("make a TensorProvider", shards)
        for pair in shards:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise _not_shards("make a TensorProvider", pair)
            self.add(*pair)

    def add(self, key: str, shard: Shard) -> None:
        """One more."""
        if not isinstance(shard, Shard) or not isinstance(key, str):
            raise _not_shards(f"add tensor {key!r}", shard if isinstance(key, str) else key)
        if not isinstance(shard.tensor, torch.Tensor):
            raise StateMismatchError(
                f"add tensor {key!r}",
                expected="a Shard of a torch.Tensor",
                found=f"one of {class_name(shard.tensor)}",
            )
        self._keys.append(key)
        self._shards.append(shard)

    def collect(self) -> Provided:
        """Columns over the shards; no element is copied unless this rank writes it and the tensor
        has no plain storage.
        """
        owned: list[Any] = []
        given, global_shapes, offsets = [], [], []
        for shard in self._shards:  # one pass over them: they are rarely in the cache
            owned.append(shard.owner)
            given.append(shard.tensor)
            global_shapes.append(shard.global_shape)
            offsets.append(shard.offset)
        undecided = [number for number, one in enumerate(owned) if one is None]
        claims = np.zeros(len(owned) if undecided else 0, np.int64)
        for number in undecided:
            claims[number] = claim(self._keys[number], offsets[number], given[number].shape)
            owned[number] = True
        plain = tensors.plain_tensors(self._keys, given, owned)
        table, strides = tensors.describe(self._keys, plain, global_shapes, offsets)
        return Provided(table, np.array(owned, bool), tuple(plain), strides, (), (), claims=claims)


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


class Given:
    """A part of the state that was collected before."""

    def __init__(self, provided: Provided) -> None:
        self._provided = provided

    def collect(self) -> Provided:
        """It."""
        return self._provided


class CompositeProvider:
    """Several parts of the state as one.

    Parameters
    ----------
    parts
        Providers, and nested dicts as `save` takes them; what is a dict is made a provider of by
        the save, which knows the rank.
    """

    def __init__(self, parts: Iterable[StateProvider | Mapping[str, object]]) -> None:
        if isinstance(parts, Mapping) or not isinstance(parts, Iterable):
            raise StateMismatchError(
                "make a CompositeProvider",
                expected="a list of state providers and dicts",
                found=class_name(parts),
                cause="CompositeProvider([{...}, provider])",
            )
        self._parts = list(parts)

    def of_rank(self, rank: int, allowed_globals: Sequence[str] = ()) -> CompositeProvider:
        """The same with each part as the provider that it is on `rank` (`as_provider`)."""
        return CompositeProvider(as_provider(part, rank, allowed_globals) for part in self._parts)

    def collect(self) -> Provided:
        """Everything that the parts give, in order.

        Raises
        ------
        StateMismatchError
            If a part is a dict: `of_rank` makes a provider of it.
        """
        parts = [_require_provider(part).collect() for part in self._parts]
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
            self._claims(parts),
        )

    @staticmethod
    def _claims(parts: Sequence[Provided]) -> Int64Array:
        if not any(len(part.claims) for part in parts):
            return np.zeros(0, np.int64)
        every = (
            part.claims if len(part.claims) else np.zeros(len(part.shards), np.int64)
            for part in parts
        )
        return np.concatenate([*every])


# -------------------------------------------------------------------------------------------------
# nested state dicts


def as_provider(state: object, rank: int, allowed_globals: Sequence[str] = ()) -> StateProvider:
    """`state` as a provider: one already, or a nested dict (`provide_state`).

    Raises
    ------
    StateMismatchError
        For anything else, saying what to pass in its place.
    """
    if isinstance(state, Mapping):
        return provide_state(state, rank=rank, allowed_globals=allowed_globals)
    if isinstance(state, CompositeProvider) and type(state).collect is CompositeProvider.collect:
        return state.of_rank(rank, allowed_globals)
    return _CheckedProvider(_require_provider(state))


def _require_provider(state: object) -> StateProvider:
    if callable(getattr(state, "collect", None)):
        provider: StateProvider = state  # type: ignore[assignment]
        return provider
    cause = cure_for(state)
    if isinstance(state, Mapping):
        cause = "pass the CompositeProvider itself to the save, which knows the rank"
    elif isinstance(state, list | tuple):
        cause = "CompositeProvider([...]) makes one of several"
    raise StateMismatchError(
        "collect state",
        expected="a dict, or a state provider",
        found=class_name(state),
        cause=cause,
    )


def _not_shards(operation: str, found: object) -> StateMismatchError:
    return StateMismatchError(
        operation,
        expected="pairs of key and Shard",
        found=class_name(found),
        cause="a dict of plain tensors needs no provider: save({...}), or "
        "CompositeProvider([{...}, provider]) beside one; of a dict of Shards pass its items()",
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

    `Shard` leaves are taken as they are, DTensors as their placements say. Every other tensor or
    object is taken to be replicated: rank 0 writes it, and a key that rank 0 does not have is
    refused when the ranks compare.
    """
    provider, objects = TensorProvider(()), dict[str, object]()
    for key, leaf in flatten(state):
        if isinstance(leaf, Shard):
            provider.add(key, leaf)
        elif dtensors.is_dtensor(leaf):
            piece = dtensors.local_shard(key, leaf)
            if piece is not None:
                provider.add(
                    key, Shard(piece.tensor, piece.global_shape, piece.offset, piece.owner)
                )
        elif isinstance(leaf, torch.Tensor):
            shape = tensors.shape_of(key, leaf)
            provider.add(key, Shard(leaf, shape, (0,) * len(shape), owner=rank == 0))
        else:
            _refuse_provider(key, leaf, allowed_globals)
            objects[key] = leaf
    if rank != 0:
        return CompositeProvider([provider, _ReplicaProvider(objects)])
    return CompositeProvider([provider, ObjectProvider(objects, allowed_globals=allowed_globals)])


def _refuse_provider(key: str, leaf: object, allowed_globals: Sequence[str]) -> None:
    """An object with a `collect` is meant as a provider, unless somebody named its class."""
    if callable(getattr(type(leaf), "collect", None)) and class_name(leaf) not in allowed_globals:
        raise StateMismatchError(
            f"save object {key!r}",
            expected="tensors, Shards and objects in a dict",
            found=f"the state provider {class_name(leaf)}",
            cause="pass CompositeProvider([{...}, provider]) instead",
        )
