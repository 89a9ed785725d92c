"""Workloads: the sizes of the tensors that one rank saves, and which of them belong together.

Guarantees
----------
- The same arguments give the same tensors in the same order, by arithmetic alone.
- A workload is made smaller by fewer layers or fewer ranks. A tensor of a layer has the same size
  however few layers are kept; only flat tensors over all parameters of a rank follow their number.
- Names are unique within a rank; two ranks may use the same ones.
- Sizes are those of the tensors. What a format adds to a file, its headers, is no part of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from megatron_uring.columns import Int64Array

OPTIMIZER, EMBEDDING, HEAD, FINAL_NORM = "optimizer", "embedding", "head", "final norm"
MODEL_PARALLEL_RANK = "model parallel rank"
_BF16_BYTES, _FP32_BYTES = 2, 4
# What mixed-precision Adam holds of each parameter, all in float32.
_OPTIMIZER_STATES = ("parameter", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Workload:
    """The tensors of one rank.

    Parameters
    ----------
    name
        Of the workload, for tables.
    names
        Of the tensors; unique.
    tensor_bytes
        int64 ``[tensors]``, each above 0.
    group
        Of each tensor: the file that it goes to in a framework which writes several per rank.
    """

    name: str
    names: tuple[str, ...]
    tensor_bytes: Int64Array
    group: tuple[str, ...]

    def __post_init__(self) -> None:
        lengths = (len(self.names), len(self.tensor_bytes), len(self.group))
        if len(set(lengths)) != 1:
            raise ValueError(
                f"{self.name}: expected as many names and groups as sizes, found "
                f"{lengths[0]} names, {lengths[2]} groups and {lengths[1]} sizes"
            )
        if len(set(self.names)) != len(self.names):
            double = next(name for name in self.names if self.names.count(name) > 1)
            raise ValueError(f"{self.name}: expected unique names, found {double!r} twice")
        if len(self.names) and self.tensor_bytes.min() < 1:
            raise ValueError(
                f"{self.name}: expected tensors of at least 1 byte, found one of "
                f"{self.tensor_bytes.min()} bytes"
            )

    @property
    def total_bytes(self) -> int:
        """Of all tensors."""
        return int(self.tensor_bytes.sum())


@dataclass(frozen=True)
class _Tensor:
    """One tensor of a workload; `no_decay` are the vectors, which Adam does not decay."""

    name: str
    elements: int
    group: str
    no_decay: bool = False


@dataclass(frozen=True)
class _Inventory:
    """A model and how it is spread over ranks, of `inventory.json`."""

    name: str
    ranks: int
    tensor_parallel: int
    pipeline_parallel: int
    layers: int
    hidden: int
    query_heads: int
    query_groups: int
    head_channels: int
    ffn_hidden: int
    vocabulary: int
    rank_file_bytes: int
    rank_file_tensors: int

    @property
    def stage_layers(self) -> int:
        """Layers of each rank: those of its pipeline stage."""
        return self.layers // self.pipeline_parallel


def synthetic(bytes_per_rank: int, tensor_bytes: int) -> Workload:
    """Tensors of equal size.

    Parameters
    ----------
    bytes_per_rank
        Of all tensors together.
    tensor_bytes
        Of each tensor but the last, which is smaller where they do not divide.
    """
    _require_positive("bytes_per_rank", bytes_per_rank)
    _require_positive("tensor_bytes", tensor_bytes)
    count = -(-bytes_per_rank // tensor_bytes)
    sizes = np.full(count, tensor_bytes, np.int64)
    sizes[-1] = bytes_per_rank - (count - 1) * tensor_bytes
    names = tuple(f"tensor {number}" for number in range(count))
    return Workload("synthetic", names, sizes, ("synthetic",) * count)


def inventory(name: str, rank: int, ranks: int, layers: int, *, inner: bool = False) -> Workload:
    """One rank of a checkpoint of which the files are known.

    Parameters
    ----------
    name
        ``"3b"`` or ``"7b"``, as measured; ``"13b"``, mostly derived. See `inventory.json`.
    rank, ranks
        The first `ranks` ranks of the checkpoint are taken, and of these the rank `rank`: with
        tensor-parallel ranks side by side, the first stages of the pipeline.
    layers
        Of this rank, so at most those of a pipeline stage.
    inner
        Whether the rank is of an inner stage of a longer pipeline: with neither embedding nor head.

    Raises
    ------
    ValueError
        For a name, rank or number of layers that the inventory does not have.
    """
    found = _find(name)
    _check_ranks(found, rank, ranks)
    if not 1 <= layers <= found.stage_layers:
        raise ValueError(
            f"{name}: expected 1 to {found.stage_layers} layers per rank, found {layers}"
        )
    tensors = _parameters(found, rank, layers, inner)
    names = [tensor.name for tensor in tensors]
    sizes = [tensor.elements * _BF16_BYTES for tensor in tensors]
    groups = [tensor.group for tensor in tensors]
    for tensor in _optimizer_tensors(tensors):
        names.append(tensor.name)
        sizes.append(tensor.elements * _FP32_BYTES)
        groups.append(tensor.group)
    for number, size in enumerate(_equal_parts(found.rank_file_bytes, found.rank_file_tensors)):
        names.append(f"{MODEL_PARALLEL_RANK}.{number}")
        sizes.append(size)
        groups.append(MODEL_PARALLEL_RANK)
    return Workload(
        f"{name}, {layers} of {found.stage_layers} layers" + (", inner stage" if inner else ""),
        tuple(names),
        np.array(sizes, np.int64),
        tuple(groups),
    )


def scale_to(name: str, rank: int, ranks: int, bytes_per_rank: int) -> Workload:
    """An `inventory` with as many layers as fit.

    Parameters
    ----------
    name, rank, ranks
        As in `inventory`.
    bytes_per_rank
        What the largest of the `ranks` ranks may have, so that all keep the same layers. Where
        not even one layer fits beside embedding or head, which are larger than it, there are as
        many layers of an inner stage as do, at least one.
    """
    _require_positive("bytes_per_rank", bytes_per_rank)
    found = _find(name)
    _check_ranks(found, rank, ranks)
    largest = _largest_rank(found, ranks)

    def fits(layers: int, inner: bool) -> bool:
        needed = inventory(name, largest, ranks, layers, inner=inner).total_bytes
        return needed <= bytes_per_rank

    inner = not fits(1, False)
    layers = 1
    while layers < found.stage_layers and fits(layers + 1, inner):
        layers += 1
    return inventory(name, rank, ranks, layers, inner=inner)


def inventory_ranks(name: str) -> int:
    """How many ranks an inventory has."""
    return _find(name).ranks


def _largest_rank(found: _Inventory, ranks: int) -> int:
    # ranks of one stage are alike, and the last stage has the final norm besides the head
    stages = range(0, ranks, found.tensor_parallel)
    return max(stages, key=lambda rank: inventory(found.name, rank, ranks, 1).total_bytes)


def _parameters(found: _Inventory, rank: int, layers: int, inner: bool) -> list[_Tensor]:
    """The parameters of a rank, of which each group is a file of its own."""
    stage = rank // found.tensor_parallel
    vocabulary = found.vocabulary // found.tensor_parallel * found.hidden
    tensors = []
    if stage == 0 and not inner:
        tensors.append(_Tensor(f"{EMBEDDING}.weight", vocabulary, EMBEDDING))
    for number in range(stage * layers, (stage + 1) * layers):
        tensors += _layer(found, f"layer {number}")
    if stage == found.pipeline_parallel - 1 and not inner:
        tensors.append(_Tensor(f"{FINAL_NORM}.weight", found.hidden, FINAL_NORM, no_decay=True))
        tensors.append(_Tensor(f"{HEAD}.weight", vocabulary, HEAD))
    return tensors


def _layer(found: _Inventory, group: str) -> list[_Tensor]:
    """The six tensors of a layer: the only number with which a LLaMA-like layer has the measured
    size is that with query, key and value in one matrix, and gate and up projection in another.

    The two norms are whole on every rank; the four matrices are split over tensor parallelism. In
    bf16 that is the measured file less 424 bytes for both measured models, so the sizes are taken
    to be exact and these bytes to be the file's header.
    """
    hidden, parallel = found.hidden, found.tensor_parallel
    query = found.query_heads * found.head_channels
    key_and_value = 2 * found.query_groups * found.head_channels
    return [
        _Tensor(f"{group}.input_norm.weight", hidden, group, no_decay=True),
        _Tensor(
            f"{group}.attention.qkv.weight", (query + key_and_value) * hidden // parallel, group
        ),
        _Tensor(f"{group}.attention.projection.weight", query * hidden // parallel, group),
        _Tensor(f"{group}.feed_forward_norm.weight", hidden, group, no_decay=True),
        _Tensor(
            f"{group}.feed_forward.gate_and_up.weight",
            2 * found.ffn_hidden * hidden // parallel,
            group,
        ),
        _Tensor(f"{group}.feed_forward.down.weight", found.ffn_hidden * hidden // parallel, group),
    ]


def _optimizer_tensors(parameters: list[_Tensor]) -> list[_Tensor]:
    """Flat ones, six of them as measured: three states of what is decayed and of what is not."""
    tensors = []
    for no_decay, what in ((False, "decayed"), (True, "not_decayed")):
        elements = sum(tensor.elements for tensor in parameters if tensor.no_decay == no_decay)
        tensors += [
            _Tensor(f"{OPTIMIZER}.{what}.{state}", elements, OPTIMIZER)
            for state in _OPTIMIZER_STATES
        ]
    return tensors


def _equal_parts(total_bytes: int, parts: int) -> list[int]:
    # the logs give number and sum of these tensors, and nothing tells them apart
    return [total_bytes * (n + 1) // parts - total_bytes * n // parts for n in range(parts)]


@cache
def _read() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("inventory.json").read_text(encoding="utf-8")
    workloads: dict[str, Any] = json.loads(text)["workloads"]
    return workloads


@cache
def _find(name: str) -> _Inventory:
    if name not in _read():
        raise ValueError(f"expected one of {', '.join(_read())} as inventory, found {name!r}")
    entry = _read()[name]
    (rank_file,) = [g for g in entry["groups"] if g["what"] == "model_parallel_rank"]
    return _Inventory(
        name=name,
        ranks=entry["ranks"],
        tensor_parallel=entry["tp"],
        pipeline_parallel=entry["pp"],
        rank_file_bytes=rank_file["bytes_per_file"],
        rank_file_tensors=rank_file["tensors_per_file"],
        **entry["model"],
    )


def _check_ranks(found: _Inventory, rank: int, ranks: int) -> None:
    if not 1 <= ranks <= found.ranks:
        raise ValueError(f"{found.name}: expected 1 to {found.ranks} ranks, found {ranks}")
    if not 0 <= rank < ranks:
        raise ValueError(f"{found.name}: expected a rank from 0 to {ranks - 1}, found {rank}")


def _require_positive(what: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"expected {what} of at least 1, found {value}")
