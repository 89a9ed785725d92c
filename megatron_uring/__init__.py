"""Checkpoints of Megatron-Core, written and read by native io_uring writers.

``import megatron_uring; megatron_uring.enable()`` routes Megatron's ``dist_checkpointing`` through
this package. ``save`` and ``restore`` do the same for any nested dict of tensors;
``open_checkpoint`` reads parts of a checkpoint; `StorageWriter` and `StorageReader` are for
``torch.distributed.checkpoint``.

Guarantees
----------
- Importing this package imports neither MPI, Megatron nor torch and starts nothing; `enable` only
  patches.
- A name is imported when it is first used, so that `megatron-uring run` leaves the import of torch
  to the program that it runs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_uring.checkpoint import restore, save, save_async
    from megatron_uring.config import Config
    from megatron_uring.dcp import StorageReader, StorageWriter
    from megatron_uring.errors import (
        CheckpointError,
        CommunicationError,
        CorruptionError,
        MissingKeyError,
        NotACheckpointError,
        StateMismatchError,
        StorageError,
        UnsupportedError,
    )
    from megatron_uring.fencing import fence
    from megatron_uring.mapping import SavedCheckpoint, SavedTensor, open_checkpoint
    from megatron_uring.megatron.switch import disable, enable, status
    from megatron_uring.pending import PendingSave
    from megatron_uring.providers import (
        CompositeProvider,
        ObjectProvider,
        Shard,
        StateProvider,
        TensorProvider,
    )
    from megatron_uring.report import Report

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CommunicationError",
    "CompositeProvider",
    "Config",
    "CorruptionError",
    "MissingKeyError",
    "NotACheckpointError",
    "ObjectProvider",
    "PendingSave",
    "Report",
    "SavedCheckpoint",
    "SavedTensor",
    "Shard",
    "StateMismatchError",
    "StateProvider",
    "StorageError",
    "StorageReader",
    "StorageWriter",
    "TensorProvider",
    "UnsupportedError",
    "disable",
    "enable",
    "fence",
    "open_checkpoint",
    "restore",
    "save",
    "save_async",
    "status",
]

_HOMES = {
    "CheckpointError": "errors",
    "CommunicationError": "errors",
    "CompositeProvider": "providers",
    "Config": "config",
    "CorruptionError": "errors",
    "MissingKeyError": "errors",
    "NotACheckpointError": "errors",
    "ObjectProvider": "providers",
    "PendingSave": "pending",
    "Report": "report",
    "SavedCheckpoint": "mapping",
    "SavedTensor": "mapping",
    "Shard": "providers",
    "StateMismatchError": "errors",
    "StateProvider": "providers",
    "StorageError": "errors",
    "StorageReader": "dcp",
    "StorageWriter": "dcp",
    "TensorProvider": "providers",
    "UnsupportedError": "errors",
    "disable": "megatron.switch",
    "enable": "megatron.switch",
    "fence": "fencing",
    "open_checkpoint": "mapping",
    "restore": "checkpoint",
    "save": "checkpoint",
    "save_async": "checkpoint",
    "status": "megatron.switch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
