"""Workloads of the benchmarks: measured figures, scaling by layers, arithmetic of shards."""

import dataclasses
import json
import math
from collections import Counter, defaultdict
from importlib import resources

import numpy as np
import pytest

from megatron_uring.bench.suite import model_workload, workloads
from megatron_uring.bench.suite.megatron_model import Layout, Model, shards
from megatron_uring.bench.suite.workloads import Workload, inventory, scale_to, synthetic

MEASURED = ("3b", "7b")
# Bytes of a file of the logs that are no tensor's, by its number of tensors.
HEADER_BYTES = {1: 40, 6: 424}
PAPER = json.loads(
    resources.files("megatron_uring.bench.suite").joinpath("inventory.json").read_text("utf-8")
)["workloads"]
STAGE_LAYERS = {"3b": 28, "7b": 16, "13b": 10}
WHAT = {
    "optimizer": "optimizer",
    "embedding": "embedding_or_head",
    "head": "embedding_or_head",
    "final norm": "tiny",
    "model parallel rank": "model_parallel_rank",
}
GPT = Model(layers=4, hidden=64, heads=4, vocabulary=1000, max_position_embeddings=32)
LLAMA = Model(
    layers=4,
    hidden=64,
    heads=8,
    vocabulary=1024,
    ffn_hidden=160,
    query_groups=4,
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    position_embedding_type="rope",
    normalization="RMSNorm",
)


def files(workload):
    """Sizes of the tensors of each group."""
    found = defaultdict(list)
    for size, group in zip(workload.tensor_bytes.tolist(), workload.group, strict=True):
        found[group].append(size)
    return found


def whole(name):
    """Every file of a measured checkpoint: (what the logs call it, sizes of its tensors)."""
    for rank in range(PAPER[name]["ranks"]):
        found = inventory(name, rank, PAPER[name]["ranks"], STAGE_LAYERS[name])
        for group, sizes in files(found).items():
            yield WHAT.get(group, "layer"), sizes


# -------------------------------------------------------------------------------------------------
# inventories


@pytest.mark.parametrize("name", MEASURED)
def test_files_of_an_inventory_are_those_of_the_logs(name):
    counts = Counter(what for what, _ in whole(name))
    assert counts == {group["what"]: group["files"] for group in PAPER[name]["groups"]}
    assert sum(counts.values()) == PAPER[name]["files"]
    tensors = {group["what"]: group["tensors_per_file"] for group in PAPER[name]["groups"]}
    for what, sizes in whole(name):
        assert len(sizes) == tensors[what], what


@pytest.mark.parametrize("name", MEASURED)
def test_bytes_of_an_inventory_are_those_of_the_logs(name):
    expected = {group["what"]: group["bytes_per_file"] for group in PAPER[name]["groups"]}
    for what, sizes in whole(name):
        if what in ("layer", "tiny"):  # to the byte
            assert sum(sizes) + HEADER_BYTES[len(sizes)] == expected[what]
        else:  # rounded there
            assert sum(sizes) == pytest.approx(expected[what], rel=2e-5)
    total = sum(sum(sizes) for _, sizes in whole(name))
    assert total == pytest.approx(PAPER[name]["bytes"], rel=5e-6)


def test_a_layer_of_13b_has_about_the_size_that_is_known():
    found = files(inventory("13b", 5, 16, 10))
    assert sorted(group for group in found if group.startswith("layer")) == sorted(
        f"layer {number}" for number in range(10, 20)
    )
    assert sum(found["layer 10"]) == pytest.approx(PAPER["13b"]["layer_file_bytes"], rel=0.05)
    # 13.0 billion parameters: two bytes each, norms on all four ranks
    total = sum(
        size
        for rank in range(16)
        for group, sizes in files(inventory("13b", rank, 16, 10)).items()
        if group not in ("optimizer", "model parallel rank")
        for size in sizes
    )
    assert total / 2 == pytest.approx(13.0e9, rel=0.005)


@pytest.mark.parametrize("name", STAGE_LAYERS)
def test_fewer_layers_leave_sizes_as_they_are(name):
    ranks = PAPER[name]["ranks"]
    for rank in (0, ranks - 1):
        many = files(inventory(name, rank, ranks, STAGE_LAYERS[name]))
        few = files(inventory(name, rank, ranks, 2))
        layers = [group for group in few if group.startswith("layer")]
        assert len(layers) == 2
        sizes = {tuple(found[g]) for found in (many, few) for g in found if g.startswith("layer")}
        assert len(sizes) == 1
        for group in few:
            if group not in (*layers, "optimizer"):
                assert few[group] == many[group], group


@pytest.mark.parametrize("layers", [1, 3, 16])
@pytest.mark.parametrize("rank", [0, 7])
def test_the_optimizer_is_twelve_bytes_of_each_parameter_kept(rank, layers):
    found = files(inventory("7b", rank, 8, layers))
    optimizer = found.pop("optimizer")
    found.pop("model parallel rank")
    assert sum(optimizer) == sum(map(sum, found.values())) // 2 * 12
    assert len(optimizer) == 6 and len(set(optimizer)) == 2


def test_stages_hold_different_layers_and_the_ends_of_the_model():
    first, last = (inventory("7b", rank, 8, 3) for rank in (3, 4))
    assert {"layer 0", "layer 2", "embedding"} <= set(first.group)
    assert {"layer 3", "layer 5", "head", "final norm"} <= set(last.group)
    assert not {"head", "final norm"} & set(first.group) and "embedding" not in last.group


def test_fewer_ranks_are_the_first_ones():
    alone, among = inventory("7b", 1, 2, 4), inventory("7b", 1, 8, 4)
    assert alone.names == among.names
    assert np.array_equal(alone.tensor_bytes, among.tensor_bytes)
    assert alone.name == "7b, 4 of 16 layers"


# -------------------------------------------------------------------------------------------------
# scaled to a size


@pytest.mark.parametrize(("name", "ranks"), [("3b", 4), ("7b", 4), ("7b", 8), ("13b", 16)])
def test_as_many_layers_as_fit(name, ranks):
    room = 6 * 10**9
    found = [scale_to(name, rank, ranks, room) for rank in range(ranks)]
    (text,) = {one.name for one in found}
    layers = int(text.split()[1])
    assert 1 < layers < STAGE_LAYERS[name]
    assert max(one.total_bytes for one in found) <= room
    more = [inventory(name, rank, ranks, layers + 1).total_bytes for rank in range(ranks)]
    assert max(more) > room


def test_at_least_one_layer_and_at_most_all():
    assert scale_to("3b", 0, 4, 1).name == "3b, 1 of 28 layers, inner stage"
    assert scale_to("3b", 0, 4, 10**12).name == "3b, 28 of 28 layers"


def test_a_size_that_fits_exactly_is_used():
    exact = inventory("3b", 2, 4, 5)
    assert scale_to("3b", 2, 4, exact.total_bytes).name == exact.name
    assert scale_to("3b", 2, 4, exact.total_bytes - 1).name == "3b, 4 of 28 layers"


# -------------------------------------------------------------------------------------------------
# equal tensors, and what every workload keeps to


@pytest.mark.parametrize(
    ("total", "size", "expected"),
    [(10, 4, [4, 4, 2]), (8, 4, [4, 4]), (3, 4, [3]), (1, 1, [1])],
)
def test_synthetic(total, size, expected):
    found = synthetic(total, size)
    assert found.tensor_bytes.tolist() == expected
    assert found.tensor_bytes.dtype == np.int64
    assert found.total_bytes == total and len(set(found.names)) == len(expected)


def test_names_are_unique():
    for rank in (0, 5):
        names = inventory("7b", rank, 8, 16).names
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("call", "fragments"),
    [
        (lambda: synthetic(0, 4), ("bytes_per_rank", "found 0")),
        (lambda: synthetic(4, -1), ("tensor_bytes", "found -1")),
        (lambda: inventory("5b", 0, 1, 1), ("3b, 7b, 13b", "'5b'")),
        (lambda: inventory("3b", 0, 5, 1), ("1 to 4 ranks", "found 5")),
        (lambda: inventory("3b", 0, 0, 1), ("1 to 4 ranks", "found 0")),
        (lambda: inventory("3b", 2, 2, 1), ("0 to 1", "found 2")),
        (lambda: inventory("3b", -1, 2, 1), ("0 to 1", "found -1")),
        (lambda: inventory("7b", 0, 8, 17), ("1 to 16 layers", "found 17")),
        (lambda: inventory("7b", 0, 8, 0), ("1 to 16 layers", "found 0")),
        (lambda: scale_to("3b", 0, 4, 0), ("bytes_per_rank", "found 0")),
        (lambda: scale_to("3b", 4, 4, 1), ("0 to 3", "found 4")),
    ],
)
def test_bad_arguments(call, fragments):
    with pytest.raises(ValueError, match="expected") as caught:
        call()
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("names", "sizes", "groups", "fragment"),
    [
        (("a", "b"), [1], ("g",), "2 names, 1 groups and 1 sizes"),
        (("a", "a"), [1, 2], ("g", "g"), "'a' twice"),
        (("a", "b"), [1, 0], ("g", "g"), "0 bytes"),
    ],
)
def test_a_workload_that_makes_no_sense(names, sizes, groups, fragment):
    with pytest.raises(ValueError, match="expected") as caught:
        Workload("odd", names, np.array(sizes, np.int64), groups)
    assert fragment in str(caught.value)


# -------------------------------------------------------------------------------------------------
# shards of Megatron


def parameters(model, tensor_parallel):
    """Of the whole model, counted by hand."""
    multiple = model.make_vocab_size_divisible_by * tensor_parallel
    words = math.ceil(model.vocabulary / multiple) * multiple * model.hidden
    ffn, groups = model.ffn_hidden or 4 * model.hidden, model.query_groups or model.heads
    qkv = model.hidden + 2 * groups * model.hidden // model.heads
    up = 2 * ffn if model.swiglu else ffn
    layer = model.hidden * (qkv + model.hidden + up + ffn)
    if model.add_bias_linear:
        layer += qkv + model.hidden + up + model.hidden
    norm = model.hidden * (2 if model.normalization == "LayerNorm" else 1)
    total = model.layers * (layer + 2 * norm) + norm + words
    if model.untie_embeddings_and_output_weights:
        total += words
    if model.position_embedding_type == "learned_absolute":
        total += model.max_position_embeddings * model.hidden
    return total


LAYOUTS = [(1, 1, 1), (2, 1, 1), (4, 2, 1), (1, 4, 2), (2, 2, 3)]


@pytest.mark.parametrize("model", [GPT, LLAMA])
@pytest.mark.parametrize("sizes", LAYOUTS)
@pytest.mark.parametrize(("optimizer", "each"), [("none", 2), ("adam", 14)])
def test_every_parameter_is_written_once(model, sizes, optimizer, each):
    layout = Layout(*sizes, optimizer)
    written = sum(
        model_workload.workload(model, layout, rank).total_bytes for rank in range(layout.ranks)
    )
    assert written == parameters(model, layout.tensor_parallel) * each


@pytest.mark.parametrize("model", [GPT, LLAMA])
@pytest.mark.parametrize("sizes", LAYOUTS)
@pytest.mark.parametrize("optimizer", ["none", "adam", "distributed"])
def test_owners_tile_every_global_tensor(model, sizes, optimizer):
    layout = Layout(*sizes, optimizer, overlap_grad_reduce=True, bucket_size=20_000)
    covered = {}
    for rank in range(layout.ranks):
        for shard in shards(model, layout, rank):
            table = covered.setdefault(shard.key, np.zeros(shard.global_shape, np.uint8))
            assert table.shape == shard.global_shape, shard
            local = (1,) * (table.ndim - len(shard.local_shape)) + shard.local_shape
            box = tuple(slice(o, o + n) for o, n in zip(shard.offset, local, strict=True))
            assert table[box].shape == local, shard
            if shard.owner:
                table[box] += 1
    for key, table in covered.items():
        assert table.min() == table.max() == 1, key


def bucket_elements(model, layout):
    found = {s.key: s.global_shape[0] for s in shards(model, layout, 0)}
    return [elements for key, elements in found.items() if key.endswith(".exp_avg")]


def test_default_buckets_are_those_of_forty_million_elements():
    hidden = 2048
    model = Model(layers=4, hidden=hidden, heads=16, vocabulary=50_000)
    found = bucket_elements(model, Layout(optimizer="distributed", overlap_grad_reduce=True))
    # from the end: a bucket is full with the matrix of query, key and value; the projection of
    # that layer and its first norm begin the next one
    layer, rest = 12 * hidden**2 + 13 * hidden, hidden**2 + 3 * hidden
    embeddings = (50_048 + 2048) * hidden
    assert found == [2 * hidden + layer - rest, layer, layer, layer, rest + embeddings]
    assert bucket_elements(model, Layout(optimizer="distributed")) == [sum(found)]
    assert Layout(data_parallel=64, overlap_grad_reduce=True).bucket_elements == 64_000_000


def test_groups_of_a_megatron_workload():
    layout = Layout(pipeline_parallel=2, optimizer="adam")
    first, last = (model_workload.workload(LLAMA, layout, rank) for rank in (0, 1))
    assert set(first.group) == {"embedding", "layer 0", "layer 1", "optimizer"}
    assert set(last.group) == {"layer 2", "layer 3", "final norm", "head", "optimizer"}
    assert first.name == "megatron" and isinstance(first, workloads.Workload)


@pytest.mark.parametrize(
    ("call", "fragments"),
    [
        (lambda: shards(GPT, Layout(2), 2), ("0 to 1", "found 2")),
        (lambda: shards(GPT, Layout(2), -1), ("0 to 1", "found -1")),
        (lambda: shards(GPT, Layout(8), 0), ("heads", "tensor_parallel", "4 and 8")),
        (lambda: shards(GPT, Layout(1, 3), 0), ("layers", "pipeline_parallel", "4 and 3")),
        (lambda: shards(LLAMA, Layout(1, 1, 2, "distributed", True, 1), 1), ("found none in",)),
        (lambda: Layout(optimizer="sgd"), ("none, adam, distributed", "'sgd'")),
        (lambda: Layout(0), ("tensor_parallel", "found 0")),
        (lambda: Model(0, 64, 4, 1000), ("layers", "found 0")),
        (lambda: Model(1, 66, 4, 1000), ("hidden", "heads", "66 and 4")),
        (lambda: Model(1, 64, 4, 1000, query_groups=3), ("query_groups", "4 and 3")),
        (lambda: Model(1, 64, 4, 1000, normalization="batch"), ("RMSNorm", "'batch'")),
        (lambda: Model(1, 64, 4, 1000, position_embedding_type="x"), ("rope", "'x'")),
    ],
)
def test_what_megatron_would_refuse(call, fragments):
    with pytest.raises(ValueError, match="expected") as caught:
        call()
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_where_no_layer_fits_beside_the_embedding_a_rank_is_of_an_inner_stage():
    whole, inner = inventory("3b", 0, 4, 1), scale_to("3b", 0, 4, 400 << 20)
    assert whole.total_bytes > 400 << 20 >= inner.total_bytes
    sizes = dict(zip(whole.names, whole.tensor_bytes.tolist(), strict=True))
    layer = [name for name in inner.names if name.startswith("layer")]
    assert len(layer) == 6
    for name, size in zip(inner.names, inner.tensor_bytes.tolist(), strict=True):
        assert size == sizes[name] or name.startswith("optimizer"), name
    parameters = sum(sizes[name] for name in layer) // 2
    optimizer = sum(
        size
        for name, size in zip(inner.names, inner.tensor_bytes.tolist(), strict=True)
        if name.startswith("optimizer")
    )
    assert optimizer == 12 * parameters
    assert not {"embedding", "head", "final norm"} & set(inner.group)


def test_a_model_keeps_within_its_size_by_fewer_layers_alike_on_all_ranks():
    layout = Layout(
        tensor_parallel=2, pipeline_parallel=2, data_parallel=2, optimizer="distributed"
    )
    deep, room = dataclasses.replace(LLAMA, layers=16), 10**6

    def found(room_bytes):
        return [model_workload.scale_to(deep, layout, rank, room_bytes) for rank in range(8)]

    scaled = found(room)
    (name,) = {one.name for one in scaled}
    layers = int(name.split()[1])
    assert 2 < layers < deep.layers and not layers % 2
    assert max(one.total_bytes for one in scaled) <= room
    more = dataclasses.replace(deep, layers=layers + 2)
    assert max(model_workload.workload(more, layout, rank).total_bytes for rank in range(8)) > room
    assert {one.name for one in found(1)} == {f"megatron, 2 of {deep.layers} layers"}
    whole = found(10**13)[0]
    assert whole.total_bytes == model_workload.workload(deep, layout, 0).total_bytes
