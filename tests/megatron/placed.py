"""A GPT with its optimizer, of which every element follows from its tensor's name and its place.

Guarantees
----------
- The same model has the same global tensors at every layout. So the memory of a rank that was
  filled is what a load must give there, whatever the layout of the save.
- Nothing is trained: no forward pass runs, so that layouts can be built on a CPU which Megatron
  trains on GPUs alone (experts under tensor parallelism, grouped experts).

`checking.start` must have run before.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import zlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import checking
import torch
from checking import helpers
from matrix import DP_ONLY, FULLY, MODEL_ONLY, NOT_DISTRIBUTED, Layout
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import experts

gpt, checkpointing = helpers.gpt, helpers.checkpointing

LAYERS, HIDDEN, HEADS, POSITIONS, EXPERTS = 4, 32, 4, 16, 4
VOCABULARY, PADDED_VOCABULARY = 50, 64  # rows of padding are zero, as a load makes missing ones
ITERATION = 5
BUCKET_ELEMENTS = 5000  # so that a buffer has several
SPOILT = 7.0
_KINDS = ("param", "exp_avg", "exp_avg_sq")

_groups_of: list[Layout] = []


class Placed:
    """Model and optimizer on this rank. Collective.

    Parameters
    ----------
    model, format, precision
        As in `matrix`.
    layout
        Its world must be that of torch.distributed.
    """

    def __init__(self, model: str, format: str, precision: str, layout: Layout) -> None:
        self.format = format
        _use_groups(layout)
        config = _config(model, precision, layout)
        self.chunks = [_chunk(config, model, layout, stage) for stage in range(layout.virtual)]
        self.optimizer = self._optimizer(config) if format != MODEL_ONLY else None
        self.fill()
        self.expected = {name: value.clone() for name, value in self.memory()}

    @staticmethod
    def metadata_of(format: str) -> dict[str, Any]:
        """What Megatron calls content metadata, for a save."""
        metadata: dict[str, Any] = {
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        }
        if format not in (NOT_DISTRIBUTED, MODEL_ONLY):
            metadata["distrib_optim_sharding_type"] = format
        if format == FULLY:
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
        return metadata

    def state(self) -> dict[str, Any]:
        """All of it, as `dist_checkpointing.save` takes it."""
        return {
            "iteration": ITERATION,
            "checkpoint_version": 3.0,
            "args": checkpointing.megatron_args(argparse.Namespace()),
            **self.request(self.metadata_of(self.format), is_loading=False),
        }

    def request(self, metadata: dict[str, Any], *, is_loading: bool = True) -> dict[str, Any]:
        """The sharded part, as `dist_checkpointing.load` takes it."""
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        metadata = {**metadata, "dp_cp_group": group}
        state = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in self._named()}
        if self.optimizer is not None:
            state["optimizer"] = self.optimizer.sharded_state_dict(
                dict(state), is_loading=is_loading, metadata=metadata
            )
        return state

    def apply(self, loaded: dict[str, Any]) -> None:
        """Give model and optimizer what a load returned."""
        for name, chunk in self._named():
            chunk.load_state_dict(loaded[name])
        if self.optimizer is not None:
            with torch.no_grad():  # in float32 it copies into views of parameters
                self.optimizer.load_state_dict(loaded["optimizer"])

    def memory(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor that a load fills, with a name that is unique on this rank."""
        for number, chunk in enumerate(self.chunks):
            for name, tensor in chunk.state_dict(keep_vars=True).items():
                if torch.is_tensor(tensor):
                    yield f"{number} {name}", tensor.detach()
                    for kind, own, _ in self._optimized(tensor):
                        yield f"{number} {name} {kind}", own
        for number, group in enumerate(self._groups()):
            yield f"step {number}", torch.tensor(group["step"])

    def fill(self) -> None:
        """Give every tensor its content."""
        with torch.no_grad():
            for _, chunk in self._named():
                for sharded in nested_values(chunk.sharded_state_dict(metadata={})):
                    if isinstance(sharded, ShardedBase) and torch.is_tensor(sharded.data):
                        self._fill(sharded)
        for group in self._groups():
            group["step"] = ITERATION

    def spoil(self) -> None:
        """Change every tensor."""
        for _, tensor in self.memory():
            tensor.fill_(SPOILT)
        for group in self._groups():
            group["step"] = 0

    def _fill(self, sharded: Any) -> None:
        for kind, own, part in self._optimized(sharded.data):
            own.copy_(_content(sharded, kind).reshape(-1)[part].view(own.shape))
        sharded.data.copy_(_content(sharded, "param"))

    def _named(self) -> list[tuple[str, Any]]:
        """The chunks by the names that ``megatron.training`` gives them."""
        if len(self.chunks) == 1:
            return [("model", self.chunks[0])]
        return [(f"model{number}", chunk) for number, chunk in enumerate(self.chunks)]

    def _parts(self) -> list[Any]:
        return list(getattr(self.optimizer, "chained_optimizers", [self.optimizer]))

    def _groups(self) -> Iterator[dict[str, Any]]:
        """The groups of parameters that count steps."""
        if self.optimizer is not None:
            for part in self._parts():
                yield from (group for group in part.optimizer.param_groups if group["params"])

    def _optimized(self, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, slice]]:
        """The optimizer's tensors of `parameter` here: kind, memory, and range of its elements."""
        if self.optimizer is None or not isinstance(parameter, torch.nn.Parameter):
            return
        for part in self._parts():
            if parameter in getattr(part, "model_param_group_index_map", ()):
                found = part._get_main_param_and_optimizer_states(parameter)
                range_ = part._get_model_param_range_map(parameter)["param"]
                own = slice(range_.start, range_.end)
            else:
                main = getattr(parameter, "main_param", parameter)
                state = part.optimizer.state.get(main)
                if not state:
                    continue
                found, own = {"param": main, **state}, slice(None)
            for kind in _KINDS:
                yield kind, found[kind].detach(), own

    def _optimizer(self, config: Any) -> Any:
        """Megatron's, after one step, so that it has a state."""
        distributed = self.format != NOT_DISTRIBUTED
        half = config.bf16
        several = self.format == DP_ONLY
        wrapped = [
            gpt.DistributedDataParallel(
                config,
                gpt.DistributedDataParallelConfig(
                    use_distributed_optimizer=distributed,
                    grad_reduce_in_fp32=True,
                    overlap_grad_reduce=several,  # without, Megatron makes one bucket
                    bucket_size=BUCKET_ELEMENTS if several else None,
                ),
                gpt.Float16Module(config, chunk) if half else chunk,
            )
            for chunk in self.chunks
        ]
        optimizer = gpt.get_megatron_optimizer(
            gpt.OptimizerConfig(
                optimizer="adam",
                lr=1e-3,
                bf16=half,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=distributed,
            ),
            wrapped,
        )
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        optimizer.step()
        return optimizer


def without_padding(loaded: Any) -> Any:
    """The same without what ``dp_reshardable`` pads buckets with: nobody has set those bytes."""
    if isinstance(loaded, dict):
        return {key: without_padding(value) for key, value in loaded.items()}
    if isinstance(loaded, list):
        return [
            without_padding(value)
            for value in loaded
            if not (isinstance(value, dict) and value.get("padding"))
        ]
    return loaded


def _content(sharded: Any, kind: str) -> torch.Tensor:
    """What the memory behind a ShardedTensor, or a factory of them, must hold."""
    if isinstance(sharded, ShardedTensor):
        return _cut(sharded, kind)
    cut = dict_list_map_outplace(lambda leaf: _cut(leaf, kind), {"built": sharded.build()})
    merged: torch.Tensor = sharded.merge_fn(cut["built"])
    return merged.view(sharded.data.shape)


def _cut(sharded: Any, kind: str) -> Any:
    if not isinstance(sharded, ShardedTensor):
        return sharded
    seed = zlib.crc32(f"{kind} {sharded.key}".encode())
    rows, *rest = sharded.global_shape
    if sharded.allow_shape_mismatch:
        rows = VOCABULARY
    whole = torch.zeros(sharded.global_shape)
    whole[:rows] = torch.randn(rows, *rest, generator=torch.Generator().manual_seed(seed))
    extent = (1,) * sharded.prepend_axis_num + tuple(sharded.local_shape)
    box = zip(sharded.global_offset, extent, strict=True)
    return whole[tuple(slice(start, start + n) for start, n in box)].reshape(sharded.local_shape)


def _use_groups(layout: Layout) -> None:
    """Megatron's process groups are those of `layout`."""
    if _groups_of[-1:] == [layout]:
        return
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    assert layout.world == checking.size(), layout
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor or None,
    )
    model_parallel_cuda_manual_seed(1)
    _groups_of.append(layout)


def _config(model: str, precision: str, layout: Layout) -> Any:
    dtype = gpt.PRECISIONS[precision]
    values: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual if layout.virtual > 1 else None,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": precision == "bf16",
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
    }
    if model not in ("dense", "padded"):
        silu = torch.nn.functional.silu
        values.update(gated_linear_unit=True, activation_func=silu, add_bias_linear=False)
    if model in ("experts", "grouped"):
        values.update(
            num_moe_experts=EXPERTS,
            moe_router_topk=2,
            moe_grouped_gemm=model == "grouped",
            moe_ffn_hidden_size=HIDDEN,
            moe_router_load_balancing_type="none",
            moe_router_enable_expert_bias=True,
            moe_router_score_function="sigmoid",
            moe_token_dispatcher_type="allgather",
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor or layout.tensor,
        )
    if model in ("experts", "grouped") and layout.tensor > 1:
        values["sequence_parallel"] = True  # which Megatron demands here
    config = gpt.TransformerConfig(**values)
    config.sequence_parallel = False  # which torch's layer norm does not have; only passes use it
    return config


def _padded(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple


def _no_kernel_needed() -> Any:
    """Grouped experts can be built without the kernel that their forward pass would need."""
    return mock.patch.object(experts.gg, "assert_grouped_gemm_is_available", lambda: None)


def _chunk(config: Any, model: str, layout: Layout, stage: int) -> Any:
    """One chunk of this rank's pipeline stage."""
    virtual = {"ignore_virtual": False, "vp_stage": stage} if layout.virtual > 1 else {}
    grouped = model == "grouped"
    specification = gpt.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=grouped
    )
    with _no_kernel_needed() if grouped else contextlib.nullcontext():
        chunk = gpt.GPTModel(
            config=config,
            transformer_layer_spec=specification,
            vocab_size=_padded(VOCABULARY, 8 * layout.tensor)
            if model == "padded"
            else PADDED_VOCABULARY,
            max_sequence_length=POSITIONS,
            pre_process=parallel_state.is_pipeline_first_stage(**virtual),
            post_process=parallel_state.is_pipeline_last_stage(**virtual),
            share_embeddings_and_output_weights=False,
            vp_stage=stage if layout.virtual > 1 else None,
        )
    with torch.no_grad():  # what was not initialised may be NaN, which a step refuses
        for parameter in chunk.parameters():
            parameter.zero_()
    return chunk
