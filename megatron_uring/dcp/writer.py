"""The storage writer: a save of ours, of what DCP's planner gave each rank to write.

DCP calls ``prepare_global_plan`` on its coordinator, which refuses ranks that this writer cannot
reach; ``write_data`` on every rank, which is a whole save, commit included, since nothing after it
is called on all ranks; and ``finish`` on the coordinator, which has nothing left to do.

Guarantees
----------
- An error on one rank of ``write_data`` is raised on all, and leaves the checkpoint that was there.
  A rank that does not come to it (its planner failed) is waited for until ``timeout_s``.
- Objects that need code to be loaded are refused when they are saved, by key and class.
- Saves use a communicator of their own (`comm.beside`) in whichever thread DCP runs them: one at
  a time over each process group, which all ranks must come to in the same order.
"""

from __future__ import annotations

import io
import os
import socket
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.futures import Future

from megatron_uring import checkpoint, comm, pending, providers
from megatron_uring.comm import Communicator
from megatron_uring.config import Config, config_or_default
from megatron_uring.dcp.place import Place
from megatron_uring.errors import (
    StateMismatchError,
    StorageError,
    UnsupportedError,
    as_checkpoint_error,
)
from megatron_uring.objects import class_name, prove_loadable
from megatron_uring.tables import Provided

PLANNER_KEY = "torch.distributed.checkpoint"
"""Object under which the planner's data is saved: ``{"planner_data": ...}``."""

_SAVE = "save through torch.distributed.checkpoint"


class StorageWriter(Place, storage.StorageWriter):
    """Writes checkpoints of our format for ``dcp.save`` and ``dcp.async_save``.

    With ``async_save`` the thread that DCP starts makes the save; a process
    (``AsyncCheckpointerType.PROCESS``) and ``use_collectives=False`` are refused. Saves that
    overlap need a `process_group` each. `megatron_uring.save_async` blocks training for less: it
    does not copy the state first.

    Parameters
    ----------
    directory
        May be left out if each ``dcp.save`` names its ``checkpoint_id``. A committed checkpoint in
        it is replaced only by the commit of the new one.
    config
        Default: from the ``MEGATRON_URING_*`` variables.
    process_group
        The one that ``dcp.save`` is given, if it is not of all ranks or if saves overlap.

    Raises
    ------
    torch.distributed.checkpoint.CheckpointException
        What DCP makes of errors, on all ranks; its ``failures`` hold our `CheckpointError` by rank.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        config: Config | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__(directory)
        self._config, self._group = config, process_group
        self._coordinates = self._alone = False

    def storage_meta(self) -> StorageMeta:
        """What DCP tells its planner of this checkpoint."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse what cannot be done before any rank begins."""
        self._coordinates, self._alone = is_coordinator, False
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                _SAVE,
                expected="use_collectives=True",
                found="False",
                cause="a checkpoint has one index, which describes what all ranks wrote",
            )
        directory = self.chosen_directory()
        if threading.current_thread() is not threading.main_thread():
            _refuse_in_flight(directory)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are, if this writer's communicator spans the ranks that made them."""
        self._alone = len(plans) == 1
        size = 1 if self._alone else _group_size(self._group)
        if len(plans) != size:
            raise UnsupportedError(
                _SAVE,
                expected=f"plans of {size} ranks",
                found=len(plans),
                cause="give dcp.save and StorageWriter the same process_group",
            )
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[storage.WriteResult]]:
        """A whole save, commit included; collective."""
        directory = self.chosen_directory()
        config = config_or_default(self._config)
        state = _PlannedState(plan, planner, config.allowed_globals, self._coordinates)
        with self._communicator(config) as world:
            world.agree(f"{_SAVE} to {directory}")
            checkpoint.save(state, directory, config=config, communicator=world)
        done: Future[list[storage.WriteResult]] = Future()
        done.set_result(
            [
                storage.WriteResult(item.index, item.tensor_storage_size() or 0, None)
                for item in plan.items
            ]
        )
        return done

    def _communicator(self, config: Config) -> AbstractContextManager[Communicator]:
        if self._alone:
            alone = comm.SingleCommunicator(config.timeout_s, "single: alone", socket.gethostname())
            return nullcontext(alone)
        return comm.beside(config.timeout_s, self._group)

    def finish(self, metadata: Metadata, results: list[list[storage.WriteResult]]) -> None:
        """Nothing is left to do: the checkpoint was committed when `write_data` returned."""
        metadata.storage_meta = self.storage_meta()

    def __reduce__(self) -> Any:
        raise UnsupportedError(
            "send a StorageWriter to another process",
            expected="async_checkpointer_type=AsyncCheckpointerType.THREAD",
            cause="or megatron_uring.save_async, which writes with native threads",
        )


class _PlannedState:
    """State provider over what DCP's planner gave this rank to write."""

    def __init__(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        allowed_globals: tuple[str, ...],
        coordinates: bool,
    ) -> None:
        self._plan, self._planner = plan, planner
        self._allowed_globals, self._coordinates = allowed_globals, coordinates

    def collect(self) -> Provided:
        """Tensors without a copy; objects as the planner serialized them, loaded on trial."""
        shards, objects = providers.TensorProvider(()), dict[str, bytes]()
        for item in self._plan.items:
            key = item.index.fqn
            try:
                data: Any = self._planner.resolve_data(item)
            except Exception as error:
                raise as_checkpoint_error(error, f"resolve {key!r}") from error
            if item.type == WriteItemType.BYTE_IO:
                objects[key] = self._checked_bytes(key, data)
            else:
                shards.add(key, _shard(key, item.tensor_data, data))
        given = replace(
            shards.collect(), object_keys=tuple(objects), objects=tuple(objects.values())
        )
        if not self._coordinates:
            return given
        # of DefaultSavePlanner and its children; its plans may lack it (enable_plan_caching)
        metadata = getattr(self._planner, "metadata", self._plan)
        own = {PLANNER_KEY: {"planner_data": metadata.planner_data}}
        planner = providers.ObjectProvider(own, allowed_globals=self._allowed_globals)
        return providers.CompositeProvider([providers.Given(given), planner]).collect()

    def _checked_bytes(self, key: str, data: Any) -> bytes:
        if not isinstance(data, io.BytesIO):
            raise StateMismatchError(
                f"save object {key!r}",
                expected="io.BytesIO of the planner",
                found=class_name(data),
            )
        serialized = data.getvalue()
        prove_loadable(key, serialized, self._allowed_globals)
        return serialized


def _shard(key: str, planned: Any, data: Any) -> providers.Shard:
    """A tensor that was resolved, as the piece that was planned."""
    if not isinstance(data, torch.Tensor) or data.shape != planned.chunk.sizes:
        raise StateMismatchError(
            f"save tensor {key!r}",
            expected=f"a piece of shape {list(planned.chunk.sizes)}, as planned",
            found=list(data.shape) if isinstance(data, torch.Tensor) else class_name(data),
        )
    return providers.Shard(data, tuple(planned.size), tuple(planned.chunk.offsets))


def _group_size(group: Any) -> int:
    size: int = torch.distributed.get_world_size(group)
    return size


def _refuse_in_flight(directory: str) -> None:
    """A save_async to the same directory is finished by the main thread, and by no other."""
    for one in pending.in_flight():
        if os.path.realpath(one.directory) == os.path.realpath(directory):
            raise StorageError(
                _SAVE,
                path=directory,
                cause="a save_async to it is in flight; wait() for that first",
            )
