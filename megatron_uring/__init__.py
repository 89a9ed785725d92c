"""Checkpoints of Megatron-Core, written and read by native io_uring writers.

``import megatron_uring; megatron_uring.enable()`` routes Megatron's ``dist_checkpointing`` through
this package. ``save`` and ``restore`` do the same for any nested dict of tensors;
``open_checkpoint`` reads parts of a checkpoint.

Guarantees
----------
- Importing this package imports neither MPI nor Megatron and starts nothing; `enable` only patches.
"""

from __future__ import annotations

from megatron_uring.checkpoint import restore, save, save_async
from megatron_uring.config import Config
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
