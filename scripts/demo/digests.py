"""Digests of the whole training state that do not depend on how it is spread over ranks.

Guarantees:

- Every model parameter and buffer that Megatron saves, and every optimizer tensor (float32 main
  parameter, exp_avg, exp_avg_sq) counts with all its bytes, its name, shape and type.
- The bytes are those in the memory of the ranks at the time of the call. No file is read.
- Global tensors are put together from their pieces on rank 0, one at a time, so the digests are
  equal at every tensor-, pipeline- and data-parallel size.
- Replicas count too: if a rank's copy of a piece differs from the main copy, or the pieces do not
  cover the tensor exactly once, `state_digests` raises on rank 0 and names the tensor.

Megatron's own `sharded_state_dict` says which piece of which global tensor a rank holds; for the
optimizer it also gathers the pieces of the data-parallel ranks. Objects (random state, step) are
not tensors and do not count.

`megatron_on_cpu.install()` must have run before this module is imported.
"""

import hashlib
from collections import defaultdict
from dataclasses import dataclass

import checkpointing
import torch
from gpt import Training
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica

OPTIMIZER_PREFIX = "optimizer.state."


@dataclass(frozen=True)
class _Piece:
    """What rank 0 must know about one rank's piece of a global tensor, before any byte comes."""

    rank: int
    key: str
    offset: tuple[int, ...]
    box: tuple[int, ...]  # without the prepended axes, which have length 1
    shape: tuple[int, ...]  # of the global tensor
    flat_range: tuple[int, int] | None  # of the flattened box, where only that part is there
    dtype: torch.dtype
    bytes: int
    is_main: bool
    sha256: str

    @property
    def place(self) -> tuple:
        return self.offset, self.box, self.flat_range


def state_digests(training: Training) -> dict[str, str] | None:
    """Digest the state of model and optimizer. Collective.

    Returns
    -------
    dict or None
        On rank 0: "model" and each kind of optimizer state ("param", "exp_avg", "exp_avg_sq") with
        the SHA-256 of its tensors, and "all" with that of everything. None on other ranks.
    """
    state = checkpointing.sharded_state(training, checkpointing.content_metadata())
    rank = torch.distributed.get_rank()
    local = []
    for shard in checkpointing.shards_of(state):
        data = _bytes_of(shard.data)
        local.append((_describe(shard, data, rank), data))
    # The order in which every rank sends is the order in which rank 0 asks.
    local.sort(key=lambda item: (item[0].key, item[0].place))
    gathered = [None] * torch.distributed.get_world_size() if rank == 0 else None
    torch.distributed.gather_object([piece for piece, _ in local], gathered, dst=0)
    own = {(piece.key, piece.place): data for piece, data in local if piece.is_main}
    if rank != 0:
        for data in own.values():
            torch.distributed.send(data, dst=0)
        return None
    pieces_by_key = defaultdict(list)
    for piece in (piece for pieces in gathered for piece in pieces):
        pieces_by_key[piece.key].append(piece)
    tensors = {key: _digest_tensor(key, pieces_by_key[key], own) for key in sorted(pieces_by_key)}
    return _summarize(tensors)


def _describe(shard: ShardedTensor, data: torch.Tensor, rank: int) -> _Piece:
    flat_range = getattr(shard, "flattened_range", None)
    return _Piece(
        rank=rank,
        key=shard.key,
        offset=tuple(shard.global_offset),
        box=tuple(shard.local_shape),
        shape=tuple(shard.global_shape),
        flat_range=(flat_range.start, flat_range.stop) if flat_range else None,
        dtype=shard.data.dtype,
        bytes=data.numel(),
        is_main=bool(is_main_replica(shard.replica_id)),
        sha256=hashlib.sha256(data.numpy()).hexdigest(),
    )


def _digest_tensor(key: str, pieces: list[_Piece], own: dict) -> str:
    """Receive the main pieces of one global tensor, put it together and digest it."""
    main = sorted((piece for piece in pieces if piece.is_main), key=lambda p: (p.rank, p.place))
    first = pieces[0]
    whole = torch.empty(first.shape, dtype=first.dtype)
    filled = torch.zeros(first.shape, dtype=torch.uint8)
    for piece in main:
        if piece.rank == 0:
            data = own[key, piece.place]
        else:
            data = torch.empty(piece.bytes, dtype=torch.uint8)
            torch.distributed.recv(data, src=piece.rank)
        if (piece.shape, piece.dtype) != (first.shape, first.dtype):
            raise RuntimeError(f"{key}: ranks disagree about its shape or type")
        _place(piece, data.view(piece.dtype), whole)
        _place(piece, torch.ones(data.numel() // piece.dtype.itemsize, dtype=torch.uint8), filled)
    covered = sum(piece.bytes for piece in main)
    if not bool(filled.all()) or covered != whole.numel() * whole.element_size():
        raise RuntimeError(f"{key}: its pieces do not cover it exactly once")
    sha256_of_main = {piece.place: piece.sha256 for piece in main}
    for piece in pieces:
        if sha256_of_main.get(piece.place, piece.sha256) != piece.sha256:
            raise RuntimeError(f"{key}: the copy at {piece.offset} on rank {piece.rank} differs")
    digest = hashlib.sha256(f"{key}\0{first.dtype}\0{first.shape}\0".encode())
    digest.update(_bytes_of(whole).numpy())
    return digest.hexdigest()


def _place(piece: _Piece, values: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy a piece's values to their place in the global tensor."""
    prepended = len(piece.shape) - len(piece.box)
    extent = (1,) * prepended + piece.box
    box = whole[tuple(slice(o, o + n) for o, n in zip(piece.offset, extent, strict=True))]
    if piece.flat_range is None:
        box.copy_(values.view(extent))
    else:
        flat = box.clone(memory_format=torch.contiguous_format).view(-1)
        flat[slice(*piece.flat_range)] = values
        box.copy_(flat.view(extent))


def _summarize(tensors: dict[str, str]) -> dict[str, str]:
    """Digest the digests of each group of tensors, in the order of their names."""
    groups = defaultdict(hashlib.sha256)
    for key, digest in sorted(tensors.items()):
        # Up to 0.14 and with several chained optimizers, "chained_0." may stand in front.
        _, is_optimizer, rest = key.partition(OPTIMIZER_PREFIX)
        group = rest.split(".")[0] if is_optimizer else "model"
        for name in (group, "all"):
            groups[name].update(f"{key} {digest}\n".encode())
    return {name: groups[name].hexdigest() for name in sorted(groups)}


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
