"""torch.distributed.checkpoint: a storage writer and a storage reader over our format.

``dcp.save(state, storage_writer=megatron_uring.StorageWriter(directory))`` and ``dcp.load(state,
storage_reader=megatron_uring.StorageReader(directory))``; ``dcp.async_save`` with
``AsyncCheckpointerType.THREAD``.

Guarantees
----------
- A checkpoint of DCP is one of ours: tensors under their fully qualified names, each piece written
  by the rank that DCP's planner gave it to, objects beside them, and DCP's mapping of flattened
  keys as one more object, `PLANNER_KEY`. Our ``restore`` and ``verify`` work on it.
- A state saved by `megatron_uring.save` can be loaded by DCP too: flat, under its keys.
"""

from megatron_uring.dcp.reader import StorageReader, StoredPiece
from megatron_uring.dcp.writer import PLANNER_KEY, StorageWriter

__all__ = ["PLANNER_KEY", "StorageReader", "StorageWriter", "StoredPiece"]
