"""Peers, each in its best fair use: one call for the whole state, durable when it returns.

Guarantees
----------
- Where a peer does not sync its files, that is done for it inside the clock, by all ranks together.
- A peer that is not installed, or that has no process group, says so (`UnavailableError`).
- Nothing of a peer is imported before it is used. Megatron runs without CUDA too: for the length
  of its calls the few CUDA functions that it calls are replaced by ones that do nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from megatron_uring.bench.formats import Action, Format
from megatron_uring.bench.measure import PEER, UnavailableError
from megatron_uring.bench.state import State
from megatron_uring.comm import Communicator
from megatron_uring.progress import step

THREADS = 2  # of a rank, where a peer has a choice


def peers(names: list[str], world: Communicator, no_group: str) -> list[Format]:
    """The peers of these names (see `NAMES`); `no_group` says why torch.distributed is not
    initialised, if it is not.
    """
    for name in names:
        if name not in NAMES:
            raise UnavailableError(f"no peer {name!r}; there are {', '.join(NAMES)}")
    return [NAMES[name](world, no_group) for name in names]


def missing_requirements() -> list[str]:
    """Requirements of the ``peers`` extra that are not installed."""
    from importlib import metadata

    from packaging.requirements import Requirement

    found = []
    for requirement in map(Requirement, metadata.requires("megatron-uring") or []):
        marker = requirement.marker
        if marker is None or marker.evaluate() or not marker.evaluate({"extra": "peers"}):
            continue
        try:
            metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError:
            found.append(f"{requirement.name}{requirement.specifier}")
    return found


def load_module(name: str) -> Any:
    """Import a peer, or say that it is not installed."""
    if importlib.util.find_spec(name.split(".", maxsplit=1)[0]) is None:
        raise UnavailableError("not installed")
    return importlib.import_module(name)


def require_group(no_group: str) -> None:
    """Raise `UnavailableError` if there is a reason why torch.distributed is not initialised."""
    # without a group these libraries would write one rank's state over the other's
    if no_group:
        raise UnavailableError(f"torch.distributed is not initialised: {no_group}")


def sync_folder(folder: str, world: Communicator) -> None:
    """Sync all files in turns, then the folders; what was synced before costs nothing."""
    files, folders = [], []
    for path, _, names in os.walk(folder):
        folders.append(path)
        files += [os.path.join(path, name) for name in names]
    # a file that one rank writes last, and others may not see yet, has a name with a dot in front
    # or ends in json: it is rank 0's
    late = [path for path in files if os.path.basename(path).startswith(".")]
    late += [path for path in files if path.endswith((".json", "common.pt"))]
    data = sorted(set(files) - set(late))
    own = data[world.rank :: world.size] + (late + folders if world.rank == 0 else [])
    for path in own:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# -------------------------------------------------------------------------------------------------
# torch


def _torch_save(world: Communicator, _: str) -> Format:
    path = f"rank{world.rank}.pt"

    def saver(state: State) -> Action:
        def save(folder: str) -> None:
            with open(os.path.join(folder, path), "wb") as file:
                torch.save(state.tensors, file)
                file.flush()
                os.fsync(file.fileno())

        return save

    return Format("torch.save + fsync", PEER, saver, _torch_loader(path, memory_map=False))


def torch_load_mapped(world: Communicator) -> Format:
    """``torch.load`` through a memory map, of what `torch.save` wrote; it saves nothing."""

    def saver(_: State) -> Action:
        raise UnavailableError("loads only")

    loader = _torch_loader(f"rank{world.rank}.pt", memory_map=True)
    return Format("torch.load mmap", PEER, saver, loader)


def _torch_loader(path: str, *, memory_map: bool) -> Callable[[State], Action]:
    def loader(into: State) -> Action:
        def load(folder: str) -> None:
            found = torch.load(os.path.join(folder, path), weights_only=True, mmap=memory_map)
            for key, tensor in into.tensors.items():
                tensor.copy_(found[key])

        return load

    return loader


def _distributed_checkpoint(_: Communicator, no_group: str) -> Format:
    def saver(state: State) -> Action:
        require_group(no_group)
        dcp = load_module("torch.distributed.checkpoint")

        def save(folder: str) -> None:
            writer = dcp.FileSystemWriter(folder, sync_files=True, thread_count=THREADS)
            dcp.save(dict(state.tensors), storage_writer=writer)

        return save

    def loader(into: State) -> Action:
        dcp = load_module("torch.distributed.checkpoint")

        def load(folder: str) -> None:
            dcp.load(dict(into.tensors), storage_reader=dcp.FileSystemReader(folder))

        return load

    return Format("DCP", PEER, saver, loader)


def _torchsnapshot(world: Communicator, no_group: str) -> Format:
    def saver(state: State) -> Action:
        require_group(no_group)
        module = load_module("torchsnapshot")
        application = {"state": module.StateDict(**state.tensors)}

        def save(folder: str) -> None:
            module.Snapshot.take(folder, application)
            sync_folder(folder, world)

        return save

    def loader(into: State) -> Action:
        module = load_module("torchsnapshot")
        application = {"state": module.StateDict(**into.tensors)}

        def load(folder: str) -> None:
            module.Snapshot(folder).restore(application)

        return load

    return Format("TorchSnapshot", PEER, saver, loader)


def _torch_checkpointing(world: Communicator, no_group: str) -> Format:
    def manager() -> Any:
        require_group(no_group)
        module = load_module("torch_checkpointing")
        storage = load_module("torch_checkpointing.storage.filesystem")
        # its O_DIRECT writes are not aligned, which ext4 and XFS refuse with EINVAL
        config = module.CheckpointManager.Config(
            save=module.SyncCheckpointSaverConfig(
                writer_config=module.CheckpointWriterConfig(file_write_max_threads=THREADS)
            ),
            storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False),
        )
        return config.build()

    def items(state: State) -> dict[str, dict[str, torch.Tensor]]:
        """As many files as threads."""
        keys = list(state.tensors)
        return {
            f"part{number}": {key: state.tensors[key] for key in keys[number::THREADS]}
            for number in range(min(THREADS, len(keys)))
        }

    def saver(state: State) -> Action:
        built, payload = manager(), items(state)

        def save(folder: str) -> None:
            # it renames onto a path that is not there
            path = os.path.join(folder, "checkpoint")
            with step(world, "save"):  # a rank that fails must not leave the others waiting
                built.save(path, payload)
            sync_folder(folder, world)

        return save

    def loader(into: State) -> Action:
        built, payload = manager(), items(into)

        def load(folder: str) -> None:
            built.load(os.path.join(folder, "checkpoint"), into=payload, strict=True)

        return load

    return Format("torch_checkpointing", PEER, saver, loader)


# -------------------------------------------------------------------------------------------------
# Megatron


def _megatron(world: Communicator, no_group: str) -> Format:
    def saver(state: State) -> Action:
        require_group(no_group)
        with megatron_on_host() as megatron:
            strategies = load_module("megatron.core.dist_checkpointing.strategies.torch")
            strategy = strategies.TorchDistSaveShardedStrategy(
                "torch_dist", 1, thread_count=THREADS, cached_metadata=True
            )
            sharded = megatron_state(megatron, state)

        def save(folder: str) -> None:
            with megatron_on_host():
                megatron.save(sharded, folder, strategy, validate_access_integrity=False)
            sync_folder(folder, world)

        return save

    def loader(into: State) -> Action:
        with megatron_on_host() as megatron:
            sharded = megatron_state(megatron, into)

        def load(folder: str) -> None:
            with megatron_on_host():
                megatron.load(sharded, folder, validate_access_integrity=False)

        return load

    return Format("Megatron torch_dist", PEER, saver, loader)


def megatron_state(megatron: Any, state: State, prefix: str = "") -> dict[str, Any]:
    """The state as Megatron's ``ShardedTensor`` objects, each a whole global tensor."""
    make = megatron.ShardedTensor.from_rank_offsets
    return {prefix + key: make(prefix + key, tensor) for key, tensor in state.tensors.items()}


@contextlib.contextmanager
def megatron_on_host() -> Iterator[Any]:
    """``megatron.core.dist_checkpointing``, which may be called within, without CUDA too."""
    megatron = load_module("megatron.core.dist_checkpointing")
    if torch.cuda.is_available():
        yield megatron
        return
    saver = load_module("megatron.core.dist_checkpointing.strategies.state_dict_saver")
    with (
        mock.patch.object(torch.cuda, "current_device", lambda: "cpu"),
        mock.patch.object(torch.cuda, "synchronize", lambda *_: None),
        mock.patch.object(saver, "torch", _TorchOnHost()),
    ):
        yield megatron


class _TorchOnHost:
    """torch, whose `tensor` knows no device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *arguments: Any, device: Any = None, **options: Any) -> torch.Tensor:
        """A tensor on the host; `device` is not used."""
        return torch.tensor(*arguments, **options)


NAMES: dict[str, Callable[[Communicator, str], Format]] = {
    "torch_save": _torch_save,
    "dcp": _distributed_checkpoint,
    "megatron": _megatron,
    "torchsnapshot": _torchsnapshot,
    "torch_checkpointing": _torch_checkpointing,
}


if __name__ == "__main__":
    print("\n".join(missing_requirements()))
