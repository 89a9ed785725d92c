"""ShardedTensor and ShardedObject of Megatron against shards, objects and requests of ours.

Guarantees
----------
- Only main replicas are saved (`replica_id` all zero): exactly one owner, as Megatron defines it.
  The other replicas of a tensor are told to the save, which refuses one that nobody owns.
- A shard keeps Megatron's key, global shape and offset; prepended axes are leading dimensions of
  size 1. A range of a flattened shard (up to 0.15) is saved and loaded as the boxes that it fills.
- Loading copies into ``sh_ten.data`` in place and makes it, on the CPU, where it is None. With
  ``allow_shape_mismatch`` what the checkpoint does not hold is zero.
- An error that leaves this folder is a `CheckpointError`, Megatron's ``CheckpointingException`` and
  torch's ``CheckpointException`` at once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from torch.distributed.checkpoint.api import CheckpointException

from megatron_uring import flattened, providers, tensors
from megatron_uring.errors import CheckpointError, StateMismatchError
from megatron_uring.index_rules import Index
from megatron_uring.providers import Shard
from megatron_uring.restoring import Request
from megatron_uring.tables import Provided

# The keys of optimizer state that dp_reshardable saves.
_BUFFERS = "optimizer.distributed.dp_group_idx_"


class MegatronState:
    """State provider over a sharded state dict.

    Parameters
    ----------
    sharded_state_dict
        Nested; its leaves are ShardedTensors and ShardedObjects.
    failure
        An error of the common state, met on rank 0 before this save began; raised by `collect`,
        where all ranks learn of it.
    allowed_globals
        As in `Config`.
    """

    def __init__(
        self,
        sharded_state_dict: Any,
        failure: CheckpointError | None,
        allowed_globals: tuple[str, ...],
    ) -> None:
        self._leaves = list(nested_values(sharded_state_dict))
        self._failure = failure
        self._allowed_globals = allowed_globals

    def collect(self) -> Provided:
        """This rank's shards, and the objects of which it holds the main replica."""
        if self._failure is not None:
            raise self._failure
        shards, objects = [], {}
        for leaf in self._leaves:
            main = is_main_replica(leaf.replica_id)
            if isinstance(leaf, ShardedTensor) and (main or leaf.data is not None):
                shards += [(leaf.key, shard) for shard in _shards(leaf, owner=main)]
            elif isinstance(leaf, ShardedObject) and main:
                objects[leaf.unique_key] = leaf.data
        return providers.CompositeProvider(
            [
                providers.TensorProvider(shards),
                providers.ObjectProvider(objects, allowed_globals=self._allowed_globals),
            ]
        ).collect()


def _shards(leaf: ShardedTensor, *, owner: bool) -> Iterator[Shard]:
    if leaf.data is None:
        raise StateMismatchError(
            f"save tensor {leaf.key!r}", expected="data", found="none", cause="ShardedTensor.data"
        )
    for tensor, offset in _pieces(leaf):
        yield Shard(tensor, tuple(leaf.global_shape), offset, owner)


def _pieces(leaf: ShardedTensor) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """The memory of each box that the leaf is, and the box's global offset."""
    flat = getattr(leaf, "flattened_range", None)
    if flat is None:
        yield leaf.data, tuple(leaf.global_offset)
        return
    prepended = leaf.global_offset[: leaf.prepend_axis_num]
    own = leaf.global_offset[leaf.prepend_axis_num :]
    at = 0
    for offset, shape in flattened.boxes(tuple(leaf.local_shape), flat.start, flat.stop):
        elements = math.prod(shape)
        moved = (left + right for left, right in zip(own, offset, strict=True))
        yield leaf.data[at : at + elements].view(shape), (*prepended, *moved)
        at += elements


def requests(leaf: ShardedTensor) -> Iterator[Request]:
    """What must be read for `leaf`; its data is made, and zeroed where the checkpoint may not fill
    it.
    """
    if leaf.data is None:
        leaf.init_data("cpu", init_fn=torch.zeros if leaf.allow_shape_mismatch else torch.empty)
    elif leaf.allow_shape_mismatch:
        leaf.data.detach().zero_()
    for tensor, offset in _pieces(leaf):
        yield Request(
            leaf.key,
            tensor,
            tuple(leaf.global_shape),
            offset,
            partial=leaf.allow_shape_mismatch,
        )


def tensors_metadata(index: Index) -> dict[str, ShardedTensor]:
    """A ShardedTensor without data for each global tensor of the checkpoint."""
    shards = index.shards
    found: dict[str, ShardedTensor] = {}
    for row, number in enumerate(shards.tensor.tolist()):
        key = shards.keys[number]
        if key not in found:
            shape = shards.global_shape[row, : shards.ndim[row]].tolist()
            dtype = tensors.torch_dtype(int(shards.dtype[row]))
            whole = torch.empty(shape, dtype=dtype, device="meta")
            found[key] = ShardedTensor.from_rank_offsets(key, whole).without_data()
    return found


def objects_metadata(index: Index) -> dict[str, ShardedObject]:
    """A ShardedObject without data for each object of the checkpoint."""
    return {key: ShardedObject.empty_from_unique_key(key) for key in index.object_keys}


@contextlib.contextmanager
def megatron_errors() -> Iterator[None]:
    """Let `CheckpointError` leave as one that Megatron's own handlers catch too."""
    try:
        yield
    except CheckpointError as error:
        if isinstance(error, CheckpointingException):
            raise
        raised = _both(type(error))(_message(error))
        vars(raised).update(vars(error), _failures={})
        raise raised from (error.__cause__ or error)


def _message(error: CheckpointError) -> str:
    message = str(error)
    if isinstance(error, StateMismatchError) and _BUFFERS in message:
        message += (
            " (optimizer state saved as dp_reshardable can change its data parallelism alone: to "
            "change more, save it with --dist-ckpt-optim-fully-reshardable)"
        )
    return message


_both_kinds: dict[str, Any] = {}


def _both(kind: type[CheckpointError]) -> Any:
    name = kind.__name__
    if name not in _both_kinds:
        # torch's own, which torch_dist raises on a missing key, has another __str__
        parents = (kind, CheckpointingException, CheckpointException)
        own = {"__module__": kind.__module__, "__str__": lambda self: str(self.args[0])}
        _both_kinds[name] = type(name, parents, own)
    return _both_kinds[name]


def values(sharded_state_dict: Any, kind: type[Any]) -> Iterable[Any]:
    """Leaves of one class."""
    return [leaf for leaf in nested_values(sharded_state_dict) if isinstance(leaf, kind)]
