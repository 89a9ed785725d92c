"""save(), save_async() and restore(): the data path, from a state dict to a committed checkpoint
and back.

Guarantees
----------
- `save` is collective. An error on one rank is raised on all, before the next step that depends on
  it; the checkpoint that was there before is still there then, and nothing of the failed save is
  left that could be taken for one.
- When `save` returns, the checkpoint is durable, and is the one that `restore` finds in the
  directory.
- `save_async` is `save` in two parts: the second one, which commits, is `PendingSave.wait`.
- `restore` is not collective: any rank, any subset of ranks, or a single process may call it.
- `restore` reads only what is asked for, checks each block that it reads, and runs no code from the
  checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_uring import (
    _engine,
    claims,
    comm,
    dtensors,
    lazy,
    pending,
    plan,
    providers,
    roots,
    stage,
    tensors,
)
from megatron_uring import index as index_module
from megatron_uring.config import Config, config_or_default
from megatron_uring.errors import MissingKeyError, StateMismatchError
from megatron_uring.fencing import fence
from megatron_uring.index_rules import Index
from megatron_uring.nesting import flatten, unflatten
from megatron_uring.objects import class_name
from megatron_uring.pending import PendingSave
from megatron_uring.progress import MEETING, Clock, announce, step, together
from megatron_uring.report import Report
from megatron_uring.restoring import Request, Restored, restore_requests
from megatron_uring.saving import Saving

_restored: dict[str, Report] = {}


def last_reports() -> dict[str, Report]:
    """Reports of this process's last save and restore, under ``"save"`` and ``"restore"``."""
    saved = pending.last_save()
    return {**({} if saved is None else {"save": saved}), **_restored}


def save(
    state: Mapping[str, object] | providers.StateProvider,
    directory: str | os.PathLike[str],
    *,
    config: Config | None = None,
    common: bytes | None = None,
    communicator: comm.Communicator | None = None,
) -> Report:
    """Write a checkpoint; collective over all ranks.

    Parameters
    ----------
    state
        A nested dict whose leaves are tensors, DTensors, `Shard` and picklable objects, or a state
        provider.
    directory
        Made if it is missing; a committed checkpoint in it is replaced only by the commit of this
        one.
    config
        Default: from the ``MEGATRON_URING_*`` variables.
    common
        On rank 0, bytes of the state common to all ranks, kept in a file of its own.
    communicator
        Default: MPI or gloo, chosen at the first save (`comm.current`).

    Raises
    ------
    CheckpointError
        On every rank, whichever rank it happened on.
    """
    return _begin(state, directory, config, common, communicator, lazy=False).wait()


def save_async(
    state: Mapping[str, object] | providers.StateProvider,
    directory: str | os.PathLike[str],
    *,
    config: Config | None = None,
    common: bytes | None = None,
    communicator: comm.Communicator | None = None,
) -> PendingSave:
    """Begin to write a checkpoint, and return while it is written; collective over all ranks.

    Objects are serialized, and tensors that may change at any time copied, before this returns.
    Parameters of the model and tensors of its optimizers are copied while the caller goes on: until
    then nothing may change, move or free them. Steps of PyTorch optimizers and ``load_state_dict``
    wait for that by themselves; a loop that changes them in another way calls `fence` before it
    does. Which tensors those are: `lazy`; those of optimizers that stepped since `enable` or the
    first call of this, which so copies all by itself.

    Parameters
    ----------
    state, directory, config, common, communicator
        As in `save`.

    Returns
    -------
    PendingSave
        The checkpoint exists when its ``wait()`` has returned: call that on all ranks, or
        ``poll()`` from time to time and ``wait()`` when it says so.

    Raises
    ------
    CheckpointError
        On every rank, whichever rank it happened on; what happens later is raised by ``wait()``.
    """
    if not _watched:
        _watched.append(lazy.watch())
    return _begin(state, directory, config, common, communicator, lazy=True)


_watched: list[lazy.Undo] = []


def _begin(
    state: Mapping[str, object] | providers.StateProvider,
    directory: str | os.PathLike[str],
    config: Config | None,
    common: bytes | None,
    communicator: comm.Communicator | None,
    *,
    lazy: bool,
) -> PendingSave:
    """Everything up to the beginning of the writes."""
    config = config_or_default(config)
    world = communicator or comm.current(config.timeout_s, config.communicator)
    directory = os.fspath(directory)
    if lazy:  # the caller may be somewhere else when it is finished
        directory = os.path.abspath(directory)
    pending.finish_in(directory)
    clock = Clock()
    with together(world):
        with step(world, "collect state"):
            provider = providers.as_provider(state, world.rank, config.allowed_globals)
            provided = provider.collect()
            # who writes what is claimed is not known yet
            host = None if len(provided.claims) else stage.host_tensors(provided, lazily=lazy)
        clock.lap(MEETING)
        provided, decided = claims.settle(world, provided)
        if decided:
            with step(world, "collect state"):
                host = host or stage.host_tensors(provided, lazily=lazy)
        assert host is not None
        saving = Saving.begin(world, directory, config, provided, clock)
        saving.lazy = lazy
        placed = saving.place(provided)
        with step(world, "open engine"):
            engine = saving.choose_engine(placed, host)
        clock.lap("engine")
        try:
            saving.open_subfile(engine, placed)
            saving.begin_drain(placed, provided, host)
        except BaseException:
            saving.discard()
            raise
    return PendingSave(saving, placed, common, clock.began)


def restore(
    directory: str | os.PathLike[str],
    state: Mapping[str, object] | None = None,
    *,
    keys: Iterable[str] | None = None,
    config: Config | None = None,
) -> dict[str, Any]:
    """Read a checkpoint that `save` wrote from a nested dict; not collective.

    Parameters
    ----------
    directory
        A checkpoint, or a save root with ``iter_*`` directories, of which the newest committed one
        is taken.
    state
        The structure wanted: tensors, DTensors and `Shard` leaves are filled in place, other leaves
        replaced by the saved objects. None: everything, in new tensors on the CPU.
    keys
        Only these keys (see `nesting.flatten` for how nested keys are written). A `state` that is
        given must have each of them; its other leaves stay as they are.
        ``open_checkpoint(directory).matching(pattern)`` gives those of a pattern.
    config
        Default: from the ``MEGATRON_URING_*`` variables.

    Returns
    -------
    dict
        The nested state.

    Raises
    ------
    CheckpointError
        A missing key, another shape or dtype, damage; naming key, file and offset.
    """
    if isinstance(keys, str):
        raise StateMismatchError("restore keys", expected="a list of keys", found=repr(keys))
    if state is not None and not isinstance(state, Mapping):
        raise StateMismatchError(
            "restore state", expected="a dict to fill", found=class_name(state)
        )
    config = config_or_default(config)
    clock = Clock()
    directory = roots.resolve_latest(os.fspath(directory))
    index = index_module.read_index(directory)
    clock.lap("index")
    if state is None:
        wanted = leaves = _empty_leaves(directory, index, keys)
    else:
        leaves = dict(flatten(state))
        wanted = leaves if keys is None else _selected(leaves, keys)
    clock.lap("allocate")
    requests, object_keys = [], []
    for key, leaf in wanted.items():
        if tensors.is_tensor(leaf) or isinstance(leaf, providers.Shard):
            requests += _request(key, leaf)
        else:
            object_keys.append(key)
    objects = restore_into(
        directory, requests, object_keys, index=index, config=config, clock=clock
    ).objects
    filled = {
        key: leaf.tensor if isinstance(leaf, providers.Shard) else objects.get(key, leaf)
        for key, leaf in leaves.items()
    }
    return unflatten(filled)  # type: ignore[return-value]


def _request(key: str, leaf: Any) -> list[Request]:
    """What of a tensor is wanted here; nothing of a DTensor whose mesh lies elsewhere."""
    if dtensors.is_dtensor(leaf):
        leaf = dtensors.local_shard(key, leaf, operation="restore")
        if leaf is None:
            return []
    elif tensors.is_tensor(leaf):
        leaf = providers.Shard(leaf, tuple(leaf.shape), (0,) * leaf.dim())
    return [Request(key, leaf.tensor, leaf.global_shape, leaf.offset)]


def restore_into(
    directory: str,
    requests: Sequence[Request],
    object_keys: Sequence[str] = (),
    *,
    index: Index | None = None,
    config: Config | None = None,
    clock: Clock | None = None,
) -> Restored:
    """Fill the tensors of `requests` in place; gives the objects by key, and how much was read; not
    collective.

    `clock` has been running since the caller's work for it began; default: from now on.

    Raises
    ------
    CheckpointError
        As `restore`.
    """
    fence()  # a save may still be copying from what is filled here
    announce(f"restore of {directory}")
    _engine.enter_step("restore")
    clock = clock or Clock()
    config = config_or_default(config)
    index = index or index_module.read_index(directory)
    clock.lap("index")
    engine = stage.open_engine(config)
    clock.lap("allocate")
    restored = restore_requests(directory, index, requests, object_keys, engine, config, clock)
    _engine.enter_step("nothing, the last restore is over")
    _restored["restore"] = Report(
        directory,
        index.save_id,
        restored.state_bytes,
        restored.read_bytes,
        restored.files,
        clock.seconds,
        dict(clock.phases_s),
        engine=engine.reason,
        direct=restored.direct,
        shared_bytes=restored.shared_bytes,
        local_bytes=restored.local_bytes,
        copy_s=restored.copy_s,
        checksum_s=restored.checksum_s,
    )
    return restored


def missing_key(operation: str, key: object, directory: str, index: Index) -> MissingKeyError:
    """The error of an `operation` on a key that is not there; names the nearest ones."""
    return MissingKeyError(
        f"{operation} key {key!r}",
        path=directory,
        expected="a key of the checkpoint",
        found=plan.similar_keys(str(key), [*index.shards.keys, *index.object_keys]),
    )


def _selected(leaves: Mapping[str, object], keys: Iterable[str]) -> dict[str, object]:
    """Those leaves of a given state that are wanted."""
    wanted = list(keys)
    for key in wanted:
        if key not in leaves:
            raise MissingKeyError(
                f"restore key {key!r}",
                expected="a key of the given state",
                found=plan.similar_keys(str(key), list(leaves)),
            )
    return {key: leaves[key] for key in wanted}


def _empty_leaves(directory: str, index: Index, keys: Iterable[str] | None) -> dict[str, object]:
    """A leaf for each wanted key: a new tensor, or None for an object."""
    shards = index.shards
    first = shards.first_rows().tolist()
    leaves: dict[str, object] = {}
    known = dict(zip(shards.keys, first, strict=True))
    wanted = list(keys) if keys is not None else [*shards.keys, *index.object_keys]
    objects = set(index.object_keys)
    for key in wanted:
        if key not in known and key not in objects:
            raise missing_key("restore", key, directory, index)
        row = known.get(key)
        leaves[key] = (
            None
            if row is None
            else tensors.new_tensor(
                int(shards.dtype[row]), shards.global_shape[row, : shards.ndim[row]].tolist()
            )
        )
    return leaves
