"""Any GPT of Megatron-Core as a workload: what a rank writes of it, whole or with fewer layers.

Guarantees
----------
- Tensors are those of `megatron_model`; fewer layers, never smaller tensors.
- All ranks keep the same layers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_uring.bench.suite.megatron_model import Layout, Model, ModelShard, shards
from megatron_uring.bench.suite.workloads import EMBEDDING, FINAL_NORM, HEAD, OPTIMIZER, Workload


def workload(model: Model, layout: Layout, rank: int, name: str = "megatron") -> Workload:
    """The shards that `rank` writes; each layer's are a group."""
    owned = [shard for shard in shards(model, layout, rank) if shard.owner]
    return Workload(
        name,
        tuple(f"{shard.key}@{','.join(map(str, shard.offset))}" for shard in owned),
        np.array([shard.shard_bytes for shard in owned], np.int64),
        tuple(_group(shard) for shard in owned),
    )


def scale_to(model: Model, layout: Layout, rank: int, bytes_per_rank: int) -> Workload:
    """The `workload` of a model with as many layers as fit, at least one for each stage.

    Parameters
    ----------
    model, layout, rank
        As in `shards`.
    bytes_per_rank
        What the largest rank may write, so that all keep the same layers.
    """
    stages = layout.pipeline_parallel

    def fits(layers: int) -> bool:
        smaller = replace(model, layers=layers * stages)
        return _largest_bytes(smaller, layout) <= bytes_per_rank

    most = model.layers // stages
    fewest = 1
    while fewest < most:  # the most that fit, halving what lies between
        middle = (fewest + most + 1) // 2
        fewest, most = (middle, most) if fits(middle) else (fewest, middle - 1)
    layers = fewest * stages
    name = f"megatron, {layers} of {model.layers} layers"
    return workload(replace(model, layers=layers), layout, rank, name)


def _largest_bytes(model: Model, layout: Layout) -> int:
    """What the rank that writes most writes."""
    return max(workload(model, layout, rank).total_bytes for rank in range(layout.ranks))


def _group(shard: ModelShard) -> str:
    if shard.key.startswith("optimizer."):
        return OPTIMIZER
    if shard.key.startswith("decoder.layers."):
        return f"layer {shard.offset[0]}"
    beginnings = {"embedding.": EMBEDDING, "output_layer.": HEAD, "decoder.final": FINAL_NORM}
    return next(group for text, group in beginnings.items() if shard.key.startswith(text))
