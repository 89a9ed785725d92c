"""save() and restore(): the data path, from a state dict to a committed checkpoint and back.

Guarantees
----------
- `save` is collective. An error on one rank is raised on all, before the next step that depends on
  it; the checkpoint that was there before is still there then, and nothing of the failed save is
  left that could be taken for one.
- When `save` returns, the checkpoint is durable, and is the one that `restore` finds in the
  directory.
- `restore` is not collective: any rank, any subset of ranks, or a single process may call it.
- `restore` reads only what is asked for, checks each block that it reads, and runs no code from the
  checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_uring import comm, commit, providers, stage, tensors
from megatron_uring import index as index_module
from megatron_uring.config import Config
from megatron_uring.errors import StateMismatchError
from megatron_uring.index_rules import Index
from megatron_uring.nesting import flatten, unflatten
from megatron_uring.progress import Clock, step, together
from megatron_uring.restoring import Request, restore_requests
from megatron_uring.saving import Saving


@dataclass(frozen=True)
class Report:
    """What one save or restore did, as this rank saw it.

    Attributes
    ----------
    directory, save_id
    state_bytes
        Tensors and objects of all ranks (save) or of this rank (restore).
    file_bytes, files
        On disk, index included (save), or read (restore).
    seconds
        From the call until the data is durable (save) or in place (restore).
    phases_s
        The same, by step.
    engine, communicator, aggregation, staging
        What ran, and why.
    direct
        Whether O_DIRECT was in force on this rank's subfile (save), or on all that were read
        (restore).
    shared_bytes
        What other ranks of the node had read already (restore), beyond `file_bytes`.
    copy_s, checksum_s
        Seconds of the native threads, beside the writing or reading.
    """

    directory: str
    save_id: str
    state_bytes: int
    file_bytes: int
    files: int
    seconds: float
    phases_s: dict[str, float] = field(default_factory=dict)
    engine: str = ""
    communicator: str = ""
    aggregation: str = ""
    staging: str = ""
    direct: bool = False
    shared_bytes: int = 0
    copy_s: float = 0.0
    checksum_s: float = 0.0


_last: dict[str, Report] = {}


def last_reports() -> dict[str, Report]:
    """Reports of this process's last save and restore, under ``"save"`` and ``"restore"``."""
    return dict(_last)


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
        A nested dict whose leaves are tensors, `Shard` and picklable objects, or a state provider.
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
    config = config or Config.from_environment()
    world = communicator or comm.current(config.timeout_s, config.communicator)
    with together(world):
        clock = Clock()
        with step(world, "collect state"):
            provider = providers.as_provider(state, world.rank, config.allowed_globals)
            provided = provider.collect()
            host = stage.host_tensors(provided)
        clock.lap("collect")
        saving = Saving.begin(world, os.fspath(directory), config, provided, clock)
        with step(world, "open engine"):
            engine = stage.open_engine(saving.config)
        clock.lap("engine")
        placed = saving.place(provided)
        with saving.subfile(engine, placed) as file:
            saving.write(engine, file, placed, provided, host)
            contents = saving.finish_subfile(engine, file, placed)
        saving.commit(placed, contents, common)
    _last["save"] = report = saving.report(Report, engine)
    return report


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
        The structure wanted: tensors and `Shard` leaves are filled in place, other leaves replaced
        by the saved objects. None: everything, in new tensors on the CPU.
    keys
        Without `state`, only these keys (see `nesting.flatten` for how nested keys are
        written).
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
    clock = Clock()
    directory = commit.resolve_latest(os.fspath(directory))
    index = index_module.read_index(directory)
    clock.lap("index")
    leaves = dict(flatten(state)) if state is not None else _empty_leaves(index, keys)
    clock.lap("allocate")
    requests, object_keys = [], []
    for key, leaf in leaves.items():
        if isinstance(leaf, providers.Shard):
            requests.append(Request(key, leaf.tensor, leaf.global_shape, leaf.offset))
        elif tensors.is_tensor(leaf):
            shape = tuple(leaf.shape)  # type: ignore[attr-defined]
            requests.append(Request(key, leaf, shape, (0,) * len(shape)))
        else:
            object_keys.append(key)
    objects = restore_into(
        directory, requests, object_keys, index=index, config=config, clock=clock
    )
    filled = {
        key: leaf.tensor if isinstance(leaf, providers.Shard) else objects.get(key, leaf)
        for key, leaf in leaves.items()
    }
    return unflatten(filled)  # type: ignore[return-value]


def restore_into(
    directory: str,
    requests: Sequence[Request],
    object_keys: Sequence[str] = (),
    *,
    index: Index | None = None,
    config: Config | None = None,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Fill the tensors of `requests` in place and return the objects by key; not collective.

    `clock` has been running since the caller's work for it began; default: from now on.

    Raises
    ------
    CheckpointError
        As `restore`.
    """
    clock = clock or Clock()
    config = config or Config.from_environment()
    index = index or index_module.read_index(directory)
    clock.lap("index")
    engine = stage.open_engine(config)
    clock.lap("allocate")
    restored = restore_requests(directory, index, requests, object_keys, engine, config, clock)
    _last["restore"] = Report(
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
        copy_s=restored.copy_s,
        checksum_s=restored.checksum_s,
    )
    return restored.objects


def _empty_leaves(index: Index, keys: Iterable[str] | None) -> dict[str, object]:
    """A leaf for each wanted key: a new tensor, or None for an object."""
    shards = index.shards
    first = shards.first_rows().tolist()
    leaves: dict[str, object] = {}
    known = dict(zip(shards.keys, first, strict=True))
    wanted = list(keys) if keys is not None else [*shards.keys, *index.object_keys]
    for key in wanted:
        row = known.get(key)
        leaves[key] = (
            None
            if row is None
            else tensors.new_tensor(
                int(shards.dtype[row]), shards.global_shape[row, : shards.ndim[row]].tolist()
            )
        )
    return leaves
