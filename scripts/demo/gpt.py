"""A small Megatron-Core GPT, its distributed optimizer and its schedule, on a CPU or a GPU.

Guarantees:

- Same options and seed: same initial weights at every tensor-parallel size (Megatron draws the
  whole matrix on the CPU and cuts it).
- No dropout: the loss is a function of weights and batch alone.
- The layers are Megatron's own ("local" specification), without Transformer Engine or Apex.

`megatron_on_cpu.install()` must have run before this module is imported.
"""

from dataclasses import dataclass, replace

import megatron_on_cpu
import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

megatron_on_cpu.install_into_megatron()

LEARNING_RATE = 3e-4
WEIGHT_DECAY = 0.01
WARMUP_ITERATIONS = 5
DECAY_ITERATIONS = 1000
PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class GPTOptions:
    """What the model is, apart from how it is spread over ranks.

    Parameters
    ----------
    layers, hidden, heads, sequence_length, vocabulary_size : int
        The transformer. Hidden, heads and vocabulary must divide by the tensor-parallel size.
    precision : str
        "bf16" (float32 main parameters live in the optimizer) or "fp32".
    swiglu : bool
        Gated linear units; Megatron saves their first matrix through a ShardedTensorFactory.
    experts : int
        Experts of each layer's mixture, or 0 for a dense model. Not with tensor parallelism: that
        needs sequence parallelism, which Megatron does not have for torch's layer norm.
    """

    layers: int = 4
    hidden: int = 512
    heads: int = 8
    sequence_length: int = 64
    vocabulary_size: int = 256
    precision: str = "bf16"
    swiglu: bool = False
    experts: int = 0


@dataclass
class Training:
    """Everything that a checkpoint holds the state of.

    Attributes
    ----------
    wrapped : DistributedDataParallel
        The model as the schedules take it.
    model : GPTModel
        The same model without its wrappers, as checkpoints take it.
    optimizer : MegatronOptimizer
    scheduler : OptimizerParamScheduler
    """

    wrapped: DistributedDataParallel
    model: GPTModel
    optimizer: object
    scheduler: OptimizerParamScheduler


def initialize_parallel(
    tensor_parallel: int, pipeline_parallel: int = 1, expert_parallel: int = 1, seed: int = 1234
) -> None:
    """Build Megatron's process groups and seed its generators, after `init_process_group`."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=pipeline_parallel,
        expert_model_parallel_size=expert_parallel,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def build_model(options: GPTOptions, initialize: bool = True) -> GPTModel:
    """Build this rank's part of the model, on the CPU or the current CUDA device.

    Parameters
    ----------
    options : GPTOptions
    initialize : bool
        Draw initial weights; without, the parameters hold whatever memory held.
    """
    specification = get_gpt_layer_local_spec(
        num_experts=options.experts or None, moe_grouped_gemm=False
    )
    model = GPTModel(
        config=_transformer_config(options, initialize),
        transformer_layer_spec=specification,
        vocab_size=options.vocabulary_size,
        max_sequence_length=options.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )
    return model.cuda()  # where CUDA is absent, megatron_on_cpu makes this a no-op


def build_training(options: GPTOptions) -> Training:
    """Build model, distributed optimizer and learning-rate schedule, all freshly initialised."""
    model = build_model(options)
    config = model.config
    half = options.precision == "bf16"
    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=False, grad_reduce_in_fp32=True
        ),
        Float16Module(config, model) if half else model,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            min_lr=LEARNING_RATE / 10,
            weight_decay=WEIGHT_DECAY,
            clip_grad=1.0,
            bf16=half,
            params_dtype=PRECISIONS[options.precision],
            use_distributed_optimizer=True,
        ),
        [wrapped],
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return Training(wrapped, model, optimizer, _scheduler(optimizer))


def run_forward_backward(model, options: GPTOptions, batch: dict, forward_only: bool = False):
    """Run one micro batch through all pipeline stages, and back unless `forward_only`.

    Parameters
    ----------
    model : torch.nn.Module
        A `Training.wrapped`, or a model of `build_model`.
    options : GPTOptions
    batch : dict
        `tokens` and `labels` of shape (samples, sequence length).
    forward_only : bool

    Returns
    -------
    torch.Tensor
        The mean loss of the batch, a float32 scalar on the CPU, on all ranks of the pipeline.
    """
    losses = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=iter([batch]),
        model=[model],
        num_microbatches=1,
        seq_length=options.sequence_length,
        micro_batch_size=batch["tokens"].shape[0],
        forward_only=forward_only,
    )
    # Only the last stage knows the loss.
    loss = losses[0]["loss"].cpu() if losses else torch.zeros(())
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        device_loss = loss.cuda()
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        torch.distributed.broadcast(device_loss, last, group=group)
        loss = device_loss.cpu()
    return loss


def train_step(training: Training, options: GPTOptions, batch: dict, before_step=None) -> float:
    """Train on one batch.

    Parameters
    ----------
    training : Training
    options : GPTOptions
    batch : dict
    before_step : callable, optional
        Called between the backward pass and the optimizer step.

    Returns
    -------
    float
        The loss, averaged over data-parallel ranks.
    """
    training.wrapped.zero_grad_buffer()
    training.optimizer.zero_grad()
    loss = run_forward_backward(training.wrapped, options, batch)
    if before_step is not None:
        before_step()
    training.optimizer.step()
    training.scheduler.step(increment=1)
    group = parallel_state.get_data_parallel_group()
    loss = loss.cuda()
    torch.distributed.all_reduce(loss, group=group)
    return (loss / group.size()).item()


def held_out_loss(training: Training, options: GPTOptions, batch: dict) -> float:
    """Compute the loss on one batch in float32, whatever the precision of training.

    bfloat16 rounds partial sums, and where a sum is cut depends on the tensor-parallel size: the
    loss would differ between layouts by more than any fault of a restore. So the parameters are
    copied into a float32 model, and the training model, its optimizer and the random generators
    stay untouched.
    """
    wide = replace(options, precision="fp32")
    model = build_model(wide, initialize=False)
    model.load_state_dict(training.model.state_dict())
    model.eval()
    with torch.no_grad():
        return run_forward_backward(model, wide, batch, forward_only=True).item()


def _forward_step(batches, model):
    batch = {name: value.cuda() for name, value in next(batches).items()}
    tokens = batch["tokens"]
    length = tokens.shape[1]
    positions = torch.arange(length, device=tokens.device)[None].expand_as(tokens)
    causal = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)
    losses = model(tokens, positions, causal, labels=batch["labels"])

    def mean(output):
        loss = output.float().mean()
        return loss, {"loss": loss.detach()}

    return losses, mean


def _transformer_config(options: GPTOptions, initialize: bool) -> TransformerConfig:
    dtype = PRECISIONS[options.precision]
    values = {
        "num_layers": options.layers,
        "hidden_size": options.hidden,
        "num_attention_heads": options.heads,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": options.precision == "bf16",
        "use_cpu_initialization": True,
        "perform_initialization": initialize,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        # Each of these needs a CUDA kernel.
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
    }
    if options.swiglu:
        silu = torch.nn.functional.silu
        values.update(gated_linear_unit=True, activation_func=silu, add_bias_linear=False)
    if options.experts:
        values.update(
            num_moe_experts=options.experts,
            moe_router_topk=2,
            moe_grouped_gemm=False,
            moe_ffn_hidden_size=options.hidden,
            moe_router_load_balancing_type="none",
            moe_router_enable_expert_bias=True,
            moe_router_score_function="sigmoid",
            moe_token_dispatcher_type="allgather",
            add_bias_linear=False,
            expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        )
    return TransformerConfig(**values)


def _scheduler(optimizer) -> OptimizerParamScheduler:
    """Build a schedule that does not depend on the number of iterations of this run."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=LEARNING_RATE,
        min_lr=LEARNING_RATE / 10,
        lr_warmup_steps=WARMUP_ITERATIONS,
        lr_decay_steps=DECAY_ITERATIONS,
        lr_decay_style="cosine",
        start_wd=WEIGHT_DECAY,
        end_wd=WEIGHT_DECAY,
        wd_incr_steps=DECAY_ITERATIONS,
        wd_incr_style="constant",
    )
