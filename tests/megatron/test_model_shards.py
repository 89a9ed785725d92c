"""`bench.megatron_model` against Megatron-Core itself: every sharded tensor of every rank.

A program too: started on several ranks it builds each configuration's real model and optimizer,
takes one step so that the optimizer has a state, and compares what Megatron would save.
"""

import math

import programs
import pytest

from megatron_uring.bench.suite.megatron_model import Layout, Model, shards

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

RANKS = (3, 4)

GPT2 = Model(layers=4, hidden=64, heads=4, vocabulary=200, max_position_embeddings=24)
LLAMA = Model(
    layers=4,
    hidden=64,
    heads=8,
    vocabulary=700,
    ffn_hidden=160,
    query_groups=4,
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    position_embedding_type="rope",
    normalization="RMSNorm",
)
# Nothing a multiple of 64, so that the flat buffer has gaps between parameters.
UNEVEN = Model(
    layers=2,
    hidden=36,
    heads=12,
    vocabulary=131,
    ffn_hidden=60,
    query_groups=12,
    kv_channels=7,
    max_position_embeddings=13,
    make_vocab_size_divisible_by=1,
    swiglu=True,
)
UNEVEN_UNTIED = Model(
    layers=4,
    hidden=36,
    heads=12,
    vocabulary=1001,
    query_groups=2,
    add_bias_linear=False,
    add_qkv_bias=True,
    untie_embeddings_and_output_weights=True,
    normalization="RMSNorm",
    max_position_embeddings=13,
    make_vocab_size_divisible_by=3,
)
MODELS = {"gpt2": GPT2, "llama": LLAMA, "uneven": UNEVEN, "uneven_untied": UNEVEN_UNTIED}


def layouts(size, model):
    """(tensor, pipeline, data) sizes over `size` ranks that divide the model."""
    for tensor in range(1, size + 1):
        for pipeline in range(1, size // tensor + 1):
            if size % (tensor * pipeline) == 0 and divides(model, tensor, pipeline):
                yield tensor, pipeline, size // (tensor * pipeline)


def divides(model, tensor, pipeline):
    groups = model.query_groups or model.heads
    return (
        model.heads % tensor == 0
        and model.layers % pipeline == 0
        and (groups % tensor == 0 or tensor % groups == 0)
        and (model.ffn_hidden or 4 * model.hidden) % tensor == 0
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", RANKS)
def test_shards_are_those_of_megatron(size, name, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / f"model_shards_{size}"
    checks = [check for check in MODELS if any(layouts(size, MODELS[check]))]
    done = programs.run("test_model_shards", "alone", size, folder, *checks)
    programs.require(name, size, done)


def test_every_split_is_covered():
    splits = {
        split for size in RANKS for model in MODELS.values() for split in layouts(size, model)
    }
    assert {(4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2)} <= splits
    assert {(3, 1, 1), (1, 1, 3)} <= splits


# -------------------------------------------------------------------------------------------------
# the program


def check_gpt2():
    compare(GPT2)


def check_llama():
    compare(LLAMA)


def check_uneven():
    compare(UNEVEN)


def check_uneven_untied():
    compare(UNEVEN_UNTIED)


def compare(model):
    """Every layout of these ranks, with every optimizer, with and without buckets."""
    for tensor, pipeline, data in layouts(checking.size(), model):
        start_parallel(tensor, pipeline)
        for optimizer in ("none", "adam", "distributed"):
            agree(model, Layout(tensor, pipeline, data, optimizer))
        for elements in (1, 5000):
            agree(model, Layout(tensor, pipeline, data, "distributed", True, elements))
    agree(model, Layout(tensor, pipeline, data, "distributed", True))  # Megatron's own size


def start_parallel(tensor, pipeline):
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    gpt.initialize_parallel(tensor, pipeline)


def agree(model, layout):
    """Both give the same shards, or both refuse."""
    try:
        ours = shards(model, layout, checking.rank())
    except ValueError as error:
        assert "none in elements" in str(error), error
        refused = checking.outcome(lambda _: real_shards(model, layout), "")
        assert "empty bucket" in str(refused), refused
        return
    expected = sorted(map(as_tuple, real_shards(model, layout)))
    found = [(s.key, s.global_shape, s.local_shape, s.offset, s.dtype, s.owner) for s in ours]
    missing = [shard for shard in expected if shard not in found]
    extra = [shard for shard in found if shard not in expected]
    assert not missing and not extra, f"{layout}\nMegatron has {missing[:9]}\nwe have {extra[:9]}"
    assert sorted(found) == expected, layout


def as_tuple(shard):
    owner = shard.replica_id in (0, (0, 0, 0))
    assert owner == checkpointing.is_main_replica(shard.replica_id)
    return (
        shard.key,
        tuple(shard.global_shape),
        tuple(shard.local_shape),
        tuple(shard.global_offset),
        str(shard.dtype).removeprefix("torch."),
        owner,
    )


def real_shards(model, layout):
    """All of Megatron's, as ``megatron.training`` asks for them."""
    built = real_model(model, layout)
    half = gpt.Float16Module(built.config, built)  # in place: also without an optimizer
    data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {
        "distrib_optim_sharding_type": "dp_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": data_group,
    }
    if layout.optimizer == "none":
        return list(helpers.shards_of({"model": built.sharded_state_dict(metadata=metadata)}))
    distributed = layout.optimizer == "distributed"
    wrapped = gpt.DistributedDataParallel(
        built.config,
        gpt.DistributedDataParallelConfig(
            use_distributed_optimizer=distributed,
            overlap_grad_reduce=layout.overlap_grad_reduce,
            bucket_size=layout.bucket_size,
            grad_reduce_in_fp32=True,
        ),
        half,
    )
    assert wrapped.ddp_config.bucket_size == layout.bucket_elements
    config = gpt.OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=distributed,
    )
    optimizer = gpt.get_megatron_optimizer(config, [wrapped])
    wrapped.zero_grad_buffer()
    optimizer.step()
    state = {"model": built.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata)
    return list(helpers.shards_of(state))


def real_model(model, layout):
    """A ``GPTModel`` with local layers, in bf16, as `Model` describes it."""
    gated = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    config = gpt.TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        ffn_hidden_size=model.ffn_hidden,
        num_query_groups=model.query_groups,
        kv_channels=model.kv_channels,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        normalization=model.normalization,
        tensor_model_parallel_size=layout.tensor_parallel,
        pipeline_model_parallel_size=layout.pipeline_parallel,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        **(gated if model.swiglu else {}),
    )
    multiple = model.make_vocab_size_divisible_by * layout.tensor_parallel
    built = gpt.GPTModel(
        config=config,
        transformer_layer_spec=gpt.get_gpt_layer_local_spec(normalization=model.normalization),
        vocab_size=math.ceil(model.vocabulary / multiple) * multiple,
        max_sequence_length=model.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
    )
    with torch.no_grad():  # what was not initialised may be NaN, which a step refuses
        for parameter in built.parameters():
            parameter.zero_()
    return built


if __name__ == "__main__":
    import checking
    import torch
    from checking import helpers, main

    checkpointing, gpt = helpers.checkpointing, helpers.gpt
    parallel_state = helpers.parallel_state
    main(globals())
