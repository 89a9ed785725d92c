"""The shards that Megatron-Core saves of a GPT and its optimizer, by arithmetic alone.

Guarantees
----------
- For what `Model` and `Layout` can say, `shards` gives exactly the sharded tensors of each rank
  that Megatron-Core 0.16 builds of a ``GPTModel`` with local layers (without Transformer Engine)
  and bf16 parameters: key, shapes, offset, dtype and which rank writes.
- No Megatron, no torch, no memory for the tensors: any model takes milliseconds.
- A layout that does not divide the model, or leaves a rank without parameters: `ValueError`.

Layers are homogeneous, so those of all stages lie in one global tensor along a leading axis. Not
covered: experts, context and virtual pipeline parallelism, multi-token prediction, norms of query
and key, fp8 and fp32 parameters; of the distributed optimizer other formats than
``dp_reshardable``. The non-tensor state (extra states, parameter groups) has no shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_uring.layout import DTYPE_BYTES, DTYPE_NAMES, round_up

_POSITIONS = ("learned_absolute", "rope")
_PARAMETER_DTYPE, _STATE_DTYPE = "bfloat16", "float32"
# Megatron aligns a parameter in a buffer to 128 bytes, a bucket to 256, of bf16.
_PARAMETER_ALIGNMENT, _BUCKET_ALIGNMENT = 64, 128
_BUFFER_DTYPES = "(torch.bfloat16, torch.float32)"  # of parameters and, in training, of gradients


@dataclass(frozen=True)
class Model:
    """A GPT; names and values are those of Megatron's arguments.

    Parameters
    ----------
    layers, hidden, heads, vocabulary
        Number of layers, width, attention heads; tokens before padding.
    ffn_hidden, query_groups, kv_channels
        Width of the feed-forward network (of each half with `swiglu`), heads of key and value,
        width of a head; by default 4 * `hidden`, `heads`, `hidden` / `heads`.
    add_bias_linear, add_qkv_bias
        Biases of all linear layers, or of that of query, key and value.
    untie_embeddings_and_output_weights
        Whether the output layer has a weight of its own.
    position_embedding_type, max_position_embeddings
        ``"learned_absolute"``, of so many positions, or ``"rope"``, which holds no parameters.
    normalization
        ``"LayerNorm"``, with a bias, or ``"RMSNorm"``.
    make_vocab_size_divisible_by
        The vocabulary is padded to a multiple of this times the tensor-parallel size.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    ffn_hidden: int | None = None
    query_groups: int | None = None
    kv_channels: int | None = None
    swiglu: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    untie_embeddings_and_output_weights: bool = False
    position_embedding_type: str = "learned_absolute"
    max_position_embeddings: int = 2048
    normalization: str = "LayerNorm"
    make_vocab_size_divisible_by: int = 128

    def __post_init__(self) -> None:
        _require_known("position_embedding_type", self.position_embedding_type, _POSITIONS)
        _require_known("normalization", self.normalization, ("LayerNorm", "RMSNorm"))
        _require_positive(self)
        if self.kv_channels is None:
            _divide("hidden", self.hidden, "heads", self.heads)
        _divide("heads", self.heads, "query_groups", self.query_groups or self.heads)


@dataclass(frozen=True)
class Layout:
    """How a model and its optimizer are spread over ranks, tensor-parallel ones side by side.

    Parameters
    ----------
    tensor_parallel, pipeline_parallel, data_parallel
        Their product is the number of ranks.
    optimizer
        ``"none"``; ``"adam"``, with float32 main parameters, sharded as the model is; or
        ``"distributed"``, flat buckets cut over data-parallel ranks (``dp_reshardable``).
    overlap_grad_reduce
        Only with it, and only on the first stage, does Megatron cut its buffer into buckets.
    bucket_size
        In elements; Megatron's default is by the data-parallel size.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    optimizer: str = "none"
    overlap_grad_reduce: bool = False
    bucket_size: int | None = None

    def __post_init__(self) -> None:
        _require_known("optimizer", self.optimizer, ("none", "adam", "distributed"))
        _require_positive(self)

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def bucket_elements(self) -> int | None:
        """With how many elements a bucket is full; None where the buffer is one bucket."""
        if not self.overlap_grad_reduce:
            return None
        if self.bucket_size is None:
            return max(40_000_000, 1_000_000 * self.data_parallel)
        return self.bucket_size


@dataclass(frozen=True, slots=True)
class ModelShard:
    """What one rank holds of a global tensor, in the terms of Megatron's ``ShardedTensor``.

    Parameters
    ----------
    key
        Of the global tensor; a rank may hold several shards of it.
    global_shape, local_shape, offset
        Of a key of layers, the first and the last have a leading axis over them.
    dtype, owner
        ``"bfloat16"`` or ``"float32"``; whether this rank writes it: its replica id is all zero.
    """

    key: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    offset: tuple[int, ...]
    dtype: str
    owner: bool

    @property
    def shard_bytes(self) -> int:
        """Of the local data."""
        return math.prod(self.local_shape) * int(DTYPE_BYTES[DTYPE_NAMES.index(self.dtype)])


@dataclass(frozen=True)
class _Parameter:
    """Of one rank: split along `split_axis` over tensor parallelism, or whole on each rank.

    `gated`: two in one, each of them split. `shared`: tied embeddings of the first or the last of
    several stages. `copy`: the last stage's, which the first one writes.
    """

    key: str
    local_shape: tuple[int, ...]
    split_axis: int | None = None
    layer: int | None = None
    gated: bool = False
    shared: bool = False
    copy: bool = False


@dataclass(frozen=True)
class _Bucket:
    """A part of the flat buffer; `placed` are begin and end of each parameter in it, in elements.

    A checkpoint holds it without the padding at its end: `unpadded_elements`.
    """

    placed: tuple[tuple[int, int], ...]
    unpadded_elements: int
    elements: int


def shards(model: Model, layout: Layout, rank: int) -> list[ModelShard]:
    """All sharded tensors of a rank: those of the model, then those of its optimizer.

    Parameters
    ----------
    model, layout
        A layout that does not divide the model raises `ValueError`.
    rank
        Of all ranks; its tensor-parallel rank changes fastest, its pipeline stage slowest.
    """
    if not 0 <= rank < layout.ranks:
        raise ValueError(f"expected a rank from 0 to {layout.ranks - 1}, found {rank}")
    rest, tensor = divmod(rank, layout.tensor_parallel)
    stage, replica = divmod(rest, layout.data_parallel)
    parameters = list(_parameters(model, layout, stage))
    found = list(_as_shards(parameters, model.layers, layout.tensor_parallel, tensor, replica))
    if layout.optimizer == "adam":
        found += [
            replace(shard, key=f"optimizer.state.{state}.{shard.key}", dtype=_STATE_DTYPE)
            for state in ("fp32_param", "exp_avg", "exp_avg_sq")
            for shard in found
        ]
    elif layout.optimizer == "distributed":
        group = tensor + layout.tensor_parallel * stage
        found += _flat_shards(_buckets(parameters, layout, stage), layout, group, replica)
    return found


def _parameters(model: Model, layout: Layout, stage: int) -> Iterator[_Parameter]:
    """Of one stage, in the order of ``named_parameters``: the flat buffer is in its reverse."""
    parallel = layout.tensor_parallel
    multiple = model.make_vocab_size_divisible_by * parallel
    words = (round_up(model.vocabulary, multiple) // parallel, model.hidden)
    first, last = stage == 0, stage == layout.pipeline_parallel - 1
    tied = not model.untie_embeddings_and_output_weights
    embedding = "embedding.word_embeddings.weight"
    if first:
        yield _Parameter(embedding, words, 0, shared=tied and not last)
        if model.position_embedding_type == "learned_absolute":
            shape = (model.max_position_embeddings, model.hidden)
            yield _Parameter("embedding.position_embeddings.weight", shape)
    layers = _divide("layers", model.layers, "pipeline_parallel", layout.pipeline_parallel)
    for layer in range(stage * layers, (stage + 1) * layers):
        yield from _layer(model, parallel, layer)
    if last:
        yield from _norm(model, "decoder.final_layernorm.", None)
        if not tied:
            yield _Parameter("output_layer.weight", words, 0)
        elif not first:
            yield _Parameter(embedding, words, 0, shared=True, copy=True)


def _layer(model: Model, parallel: int, layer: int) -> Iterator[_Parameter]:
    hidden, heads, size = model.hidden, model.heads, "tensor_parallel"
    groups = model.query_groups or heads
    channels = model.kv_channels or hidden // heads
    _divide("heads", heads, size, parallel)
    if groups % parallel and parallel % groups:
        raise ValueError(
            f"expected query_groups to divide tensor_parallel or to be divided by it, found "
            f"{groups} and {parallel}"
        )
    outputs = (heads + 2 * groups) * channels
    outputs = _divide("outputs of query, key and value", outputs, size, parallel)
    width = _divide("ffn_hidden", model.ffn_hidden or 4 * hidden, size, parallel)
    inputs = heads * channels // parallel
    attention, network = "decoder.layers.self_attention.", "decoder.layers.mlp."
    bias, up = model.add_bias_linear, 2 * width if model.swiglu else width
    yield from _norm(model, f"{attention}linear_qkv.layer_norm_", layer)
    yield from _linear(f"{attention}linear_proj.", (hidden, inputs), 1, layer, bias)
    qkv_bias = bias or model.add_qkv_bias
    yield from _linear(f"{attention}linear_qkv.", (outputs, hidden), 0, layer, qkv_bias)
    yield from _norm(model, f"{network}linear_fc1.layer_norm_", layer)
    yield from _linear(f"{network}linear_fc1.", (up, hidden), 0, layer, bias, model.swiglu)
    yield from _linear(f"{network}linear_fc2.", (hidden, width), 1, layer, bias)


def _linear(
    prefix: str, shape: tuple[int, int], axis: int, layer: int, bias: bool, gated: bool = False
) -> Iterator[_Parameter]:
    yield _Parameter(f"{prefix}weight", shape, axis, layer, gated)
    if bias:  # as long as the output, which only a matrix that is cut along axis 0 cuts
        yield _Parameter(f"{prefix}bias", shape[:1], None if axis else 0, layer, gated)


def _norm(model: Model, prefix: str, layer: int | None) -> Iterator[_Parameter]:
    yield _Parameter(f"{prefix}weight", (model.hidden,), None, layer)
    if model.normalization == "LayerNorm":
        yield _Parameter(f"{prefix}bias", (model.hidden,), None, layer)


def _as_shards(
    parameters: list[_Parameter], layers: int, parallel: int, tensor: int, replica: int
) -> Iterator[ModelShard]:
    """One of each, or two of a gated matrix: all gates lie before all up projections."""
    for parameter in parameters:
        axis, halves = parameter.split_axis, 2 if parameter.gated else 1
        local = (parameter.local_shape[0] // halves, *parameter.local_shape[1:])
        stack = [] if parameter.layer is None else [(layers, parameter.layer)]
        first = replica == 0 and (axis is not None or tensor == 0)
        for half in range(halves):
            whole, offset = list(local), [0] * len(local)
            if axis is not None:
                whole[axis] *= parallel * halves
                offset[axis] = local[axis] * (half * parallel + tensor)
            yield ModelShard(
                parameter.key,
                (*(count for count, _ in stack), *whole),
                local,
                (*(number for _, number in stack), *offset),
                _PARAMETER_DTYPE,
                owner=first and not parameter.copy,
            )


def _buckets(parameters: list[_Parameter], layout: Layout, stage: int) -> list[_Bucket]:
    """The flat buffer, cut as Megatron does. Stages after the first are one bucket, but for tied
    embeddings, whose bucket is their own so that first and last stage cut them alike.
    """
    full = layout.bucket_elements if stage == 0 else None
    multiple = math.lcm(layout.data_parallel, _BUCKET_ALIGNMENT)
    buckets: list[_Bucket] = []
    placed: list[tuple[int, int]] = []
    end = 0
    for parameter in reversed(parameters):
        begin = round_up(end, _PARAMETER_ALIGNMENT)
        if parameter.shared and placed:
            # Megatron has aligned the parameter before it closes the bucket, and counts that in
            buckets.append(_Bucket(tuple(placed), begin, round_up(begin, multiple)))
            placed, begin = [], 0
        end = begin + math.prod(parameter.local_shape)
        placed.append((begin, end))
        if parameter.shared or (full is not None and end >= full):
            buckets.append(_Bucket(tuple(placed), end, round_up(end, multiple)))
            placed, end = [], 0
    if placed:
        buckets.append(_Bucket(tuple(placed), end, round_up(end, multiple)))
    return buckets


def _flat_shards(
    buckets: list[_Bucket], layout: Layout, group: int, replica: int
) -> Iterator[ModelShard]:
    """Of the distributed optimizer; every rank writes its own part of each bucket."""
    prefix = f"optimizer.distributed.dp_group_idx_{group}.gbuf_idx_0.dtype_{_BUFFER_DTYPES}"
    for number, bucket in enumerate(buckets):
        share = bucket.elements // layout.data_parallel
        begin = replica * share
        for first, last in _pieces(bucket, begin, share):
            for state in ("param", "exp_avg", "exp_avg_sq"):
                yield ModelShard(
                    f"{prefix}.bucket_idx_{number}.{state}",
                    (bucket.unpadded_elements,),
                    (last - first,),
                    (begin + first,),
                    _STATE_DTYPE,
                    True,
                )


def _pieces(bucket: _Bucket, begin: int, share: int) -> list[tuple[int, int]]:
    """Begin and end in a rank's share of what is saved: each parameter's part, and each gap."""
    pieces, end = [], 0

    def fill(until: int) -> None:
        # the padding at the end of the bucket is not saved: other ranks would have less of it
        if until > end and begin + end < bucket.unpadded_elements:
            pieces.append((end, until))

    for start, stop in bucket.placed:
        first, last = max(start - begin, 0), min(stop - begin, share)
        if last > first:
            fill(first)
            pieces.append((first, last))
            end = last
    if not pieces:
        raise ValueError(
            f"expected a parameter in each data-parallel rank's part of a bucket, found none in "
            f"elements {begin} to {begin + share} of {bucket.unpadded_elements}"
        )
    fill(share)
    return pieces


def _divide(what: str, value: int, by: str, parts: int) -> int:
    if value % parts:
        raise ValueError(f"expected {what} to be a multiple of {by}, found {value} and {parts}")
    return value // parts


def _require_known(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"expected {what} to be one of {', '.join(known)}, found {value!r}")


def _require_positive(numbers: Model | Layout) -> None:
    for what, value in vars(numbers).items():
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise ValueError(f"expected {what} of at least 1, found {value}")
