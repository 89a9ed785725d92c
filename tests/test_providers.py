"""What a state gives: columns, views, owners, objects, nested keys."""

import argparse
import collections
import dataclasses
import io
import pickle
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megatron_uring
from megatron_uring import tensors
from megatron_uring.errors import StateMismatchError, UnsupportedError
from megatron_uring.layout import DTYPE_NAMES
from megatron_uring.nesting import flatten, unflatten
from megatron_uring.objects import deserialize_object, serialize_object
from megatron_uring.providers import (
    CompositeProvider,
    ObjectProvider,
    Shard,
    TensorProvider,
    as_provider,
    provide_state,
)
from megatron_uring.tensors import plain_tensor

sys.path.insert(0, str(Path(__file__).parent / "mpi"))

from launch import ROOT, run_processes


class Custom:
    """A class that torch does not load without being told that it may."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return type(other) is Custom and self.value == other.value

    __hash__ = None


CUSTOM = f"{__name__}.Custom"


# -------------------------------------------------------------------------------------------------
# nested keys

leaves = st.one_of(st.integers(), st.text(max_size=3), st.none(), st.just({}), st.just([]))
nested = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(
            st.one_of(st.integers(-3, 3), st.text(alphabet="a~/.|[]{}(){0}1é", max_size=4)),
            inner,
            max_size=4,
        ),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=12,
)


def same_nesting(left, right):
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_nesting(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same_nesting, left, right))
    return left == right


@given(nested)
def test_unflatten_is_the_inverse_of_flatten(state):
    pairs = list(flatten(state))
    assert len({key for key, _ in pairs}) == len(pairs)
    assert same_nesting(unflatten(dict(pairs)), state)


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b": 1}, "a.b": 2, "a/b": 3, "a|b": 4, "a~b": 5, "a~1b": 6},
        {"": {"x": 1}, "x": 2},
        {"": 1},
        {"": {"": 1}},
        {1: "int", "1": "str", -1: "negative"},
        {"..": {".": 1}, "../etc": 2, "~": 3, "~[0]": 4, "~{1}": 5},
        {"k" * 4096: 1, "schlüssel/𝄞": 2},
        {"empty": [{}, [], (), {"in": ()}]},
        [(), (1, [2, (3,)]), list(range(12))],
        {},
        [],
        7,
    ],
)
def test_awkward_keys_and_containers_come_back(state):
    pairs = list(flatten(state))
    assert len({key for key, _ in pairs}) == len(pairs)
    assert same_nesting(unflatten(dict(pairs)), state)


def test_keys_are_written_as_documented():
    state = {"a/b": {"~": [7, (8,)], 5: 9}, "": 10}
    assert dict(flatten(state)) == {
        "a~1b/~0/~[0]": 7,
        "a~1b/~0/~[1]/~(0)": 8,
        "a~1b/~{5}": 9,
        "~": 10,
    }


def test_a_dict_with_other_keys_is_one_leaf():
    state = {"a": {(1, 2): 3}, "b": {True: 4}}
    assert dict(flatten(state)) == state


# -------------------------------------------------------------------------------------------------
# tensors


def test_a_plain_view_is_described_by_its_own_elements_and_not_copied():
    storage = torch.arange(1000, dtype=torch.int32)
    view = storage.as_strided((3, 4), (100, 7), 5)
    (provided,) = [TensorProvider([("v", Shard(view, (3, 4), (0, 0)))]).collect()]
    assert provided.tensors[0].data_ptr() == view.data_ptr() == storage.data_ptr() + 20
    assert provided.strides.tolist() == [[400, 28]]
    assert provided.shards.lengths().tolist() == [48]


def test_columns_have_a_row_for_each_shard_and_a_key_once():
    part = torch.zeros(2, 3, dtype=torch.bfloat16)
    provided = TensorProvider(
        [
            ("w", Shard(part, (4, 3), (0, 0))),
            ("s", Shard(torch.tensor(1.0), (), ())),
            ("w", Shard(part, (4, 3), (2, 0), owner=False)),
        ]
    ).collect()
    shards = provided.shards
    assert shards.keys == ("w", "s")
    assert shards.tensor.tolist() == [0, 1, 0]
    assert [DTYPE_NAMES[code] for code in shards.dtype] == ["bfloat16", "float32", "bfloat16"]
    assert shards.ndim.tolist() == [2, 0, 2]
    assert shards.offset.tolist() == [[0, 0], [0, 0], [2, 0]]
    assert provided.owner.tolist() == [True, True, False]
    assert provided.strides.tolist() == [[6, 2], [0, 0], [6, 2]]


def test_prepended_axes_have_size_1():
    table = TensorProvider([("w", Shard(torch.zeros(5), (3, 2, 5), (1, 0, 0)))]).collect().shards
    assert table.shape.tolist() == [[1, 1, 5]]
    assert table.global_shape.tolist() == [[3, 2, 5]]


@pytest.mark.parametrize(
    ("tensor", "global_shape", "offset"),
    [
        (torch.zeros(2, 2), (4,), (0,)),
        (torch.zeros(2), (4,), (0, 0)),
        (torch.zeros(()), (1,) * 17, (0,) * 17),
    ],
)
def test_numbers_of_dimensions_that_do_not_fit_are_refused_by_key(tensor, global_shape, offset):
    with pytest.raises(StateMismatchError, match="'my/key'") as caught:
        TensorProvider([("my/key", Shard(tensor, global_shape, offset))]).collect()
    assert f"offset {offset} (the tensor has the shape {tuple(tensor.shape)})" in str(caught.value)


@pytest.mark.parametrize(
    ("global_shape", "offset", "name"), [((8,), 4, "offset"), (8, (4,), "global shape")]
)
def test_a_number_in_the_place_of_a_tuple_is_refused_by_key(global_shape, offset, name):
    fits = ("fits", Shard(torch.zeros(4), (8,), (0,)))
    wrong = ("my/key", Shard(torch.zeros(4), global_shape, offset))
    with pytest.raises(StateMismatchError, match=f"'my/key'.*as its {name} a tuple.*found [48]"):
        TensorProvider([fits, wrong]).collect()


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"w": Shard(torch.zeros(2), (2,), (0,))}, "builtins.dict"),
        ([("w", torch.zeros(2))], "torch.Tensor"),
        ([torch.zeros(2, 2)], "torch.Tensor"),
        (["ab"], "builtins.str"),
        ([(0, Shard(torch.zeros(2), (2,), (0,)))], "builtins.int"),
    ],
    ids=["dict", "plain tensors", "no pairs", "keys", "numbers"],
)
def test_what_is_no_pair_of_key_and_shard_is_refused_with_what_to_do(given, found):
    with pytest.raises(
        StateMismatchError,
        match=rf"pairs of key and Shard, found {found} .*CompositeProvider\(\[",
    ):
        TensorProvider(given)


def test_a_shard_of_something_else_than_a_tensor_is_refused_by_key():
    with pytest.raises(StateMismatchError, match=r"'w'.*torch.Tensor, found one of numpy.ndarray"):
        TensorProvider([("w", Shard(np.zeros(2), (2,), (0,)))])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
        torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged),
    ],
    ids=["sparse", "meta", "nested"],
)
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_tensors_without_dense_data_are_refused_by_key(tensor):
    with pytest.raises(UnsupportedError, match="save tensor 'k'"):
        plain_tensor("k", tensor)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_dtype_that_the_format_does_not_know_is_refused_by_key():
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with pytest.raises(UnsupportedError, match=r"save tensor 'q'.*found torch.qint8"):
        TensorProvider([("q", Shard(quantized, (3,), (0,)))]).collect()


def test_conjugated_and_negated_views_are_resolved():
    values = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(plain_tensor("k", values.conj()).view(torch.float32), torch.view_as_real(
        torch.tensor([1 - 2j, 3 + 4j])).reshape(-1))  # fmt: skip
    negated = values.conj().imag
    assert negated.is_neg()
    plain = plain_tensor("k", negated)
    assert not plain.is_neg() and plain.tolist() == [-2.0, 4.0]


def test_a_subclass_with_plain_storage_keeps_its_dtype_and_is_not_copied():
    class Named(torch.nn.Parameter):
        pass

    for dtype in (torch.bfloat16, torch.int64):
        given = torch.tensor([2**20 + 1, 3], dtype=torch.int64).to(dtype)
        tensor = Named(given, requires_grad=False)
        plain = plain_tensor("k", tensor)
        assert plain.dtype == dtype and plain.data_ptr() == given.data_ptr()


def test_a_quantized_subclass_is_dequantized():
    class Quantized(torch.Tensor):
        def dequantize(self):
            return self.as_subclass(torch.Tensor) * 2

    plain = plain_tensor("k", torch.ones(2).as_subclass(Quantized))
    assert type(plain) is torch.Tensor and plain.tolist() == [2.0, 2.0]


def test_every_dtype_code_goes_both_ways():
    for code in range(len(DTYPE_NAMES)):
        assert tensors.DTYPE_CODE[tensors.torch_dtype(code)] == code


# -------------------------------------------------------------------------------------------------
# composition


STATE = {
    "t": torch.arange(3.0),
    "shard": Shard(torch.zeros(1), (2,), (1,)),
    "n": 5,
    "deep": {"o": "text"},
}


def test_rank_0_owns_what_is_replicated():
    provided = provide_state(STATE, rank=0).collect()
    assert provided.owner.tolist() == [True, True]
    assert provided.object_keys == ("n", "deep/o")


def test_other_ranks_own_only_their_shards():
    provided = provide_state(STATE, rank=1).collect()
    assert dict(zip(provided.shards.keys, provided.owner.tolist(), strict=True)) == {
        "t": False,
        "shard": True,
    }
    assert provided.object_keys == ()


def test_composed_parts_keep_order_and_pad_strides():
    first = TensorProvider([("a", Shard(torch.zeros(2), (2,), (0,)))])
    second = TensorProvider([("b", Shard(torch.zeros(2, 3, 4), (2, 3, 4), (0, 0, 0)))])
    provided = CompositeProvider([first, ObjectProvider({"o": 1}), second]).collect()
    assert provided.shards.keys == ("a", "b")
    assert provided.strides.tolist() == [[4, 0, 0], [48, 16, 4]]
    assert provided.object_keys == ("o",)
    assert [tuple(tensor.shape) for tensor in provided.tensors] == [(2,), (2, 3, 4)]


@pytest.mark.parametrize("rank", [0, 1])
def test_dicts_are_composed_beside_providers_however_deep(rank):
    objects = ObjectProvider({f"o/{rank}": 1})
    inner = CompositeProvider([{"inner": torch.ones(1)}, objects])
    provided = as_provider(CompositeProvider([STATE, inner]), rank).collect()
    assert provided.shards.keys == ("t", "shard", "inner")
    assert provided.owner.tolist() == [rank == 0, True, rank == 0]
    replicated = ("n", "deep/o")
    assert provided.object_keys == (*(() if rank else replicated), f"o/{rank}")
    assert provided.replicas == (replicated if rank else ())


def test_allowed_globals_hold_for_composed_dicts(save, posix, tmp_path):
    state = CompositeProvider([{"custom": Custom(3)}])
    with pytest.raises(StateMismatchError, match=r"'custom'.*not allowed"):
        save(state, tmp_path)
    config = dataclasses.replace(posix, allowed_globals=[CUSTOM])
    save(state, tmp_path, config)
    assert megatron_uring.restore(tmp_path, config=config) == {"custom": Custom(3)}


def test_a_composed_provider_that_gives_something_else_is_named(save, tmp_path):
    class Wrong:
        def collect(self):
            return {"a": 1}

    with pytest.raises(StateMismatchError, match=r"from .*Wrong: expected Provided"):
        save(CompositeProvider([{"b": 1}, Wrong()]), tmp_path)


def test_a_subclass_that_collects_in_its_own_way_is_asked(save, posix, tmp_path):
    class Own(CompositeProvider):
        def collect(self):
            return ObjectProvider({"own": 1}).collect()

    save(Own([{"not": "asked"}]), tmp_path)
    assert megatron_uring.restore(tmp_path, config=posix) == {"own": 1}


def test_a_dict_whose_rank_nobody_knows_is_refused():
    with pytest.raises(StateMismatchError, match="CompositeProvider itself to the save"):
        CompositeProvider([{"a": 1}]).collect()
    with pytest.raises(StateMismatchError, match=r"CompositeProvider\(\[\{"):
        CompositeProvider({"a": 1})


@pytest.mark.parametrize(
    "provider",
    [lambda: TensorProvider([]), lambda: ObjectProvider({}), lambda: CompositeProvider([])],
)
def test_a_provider_inside_a_dict_is_refused_with_what_to_do(save, tmp_path, provider):
    with pytest.raises(
        StateMismatchError, match=r"'deep/p'.*state provider.*CompositeProvider\(\[\{\.\.\.\}, pro"
    ):
        save({"a": torch.ones(1), "deep": {"p": provider()}}, tmp_path)


def test_an_object_with_a_collect_that_is_allowed_is_an_object(save, posix, tmp_path):
    config = dataclasses.replace(posix, allowed_globals=[f"{__name__}.Collector"])
    save({"c": Collector()}, tmp_path, config)
    assert type(megatron_uring.restore(tmp_path, config=config)["c"]) is Collector


class Collector:
    """No provider, in spite of its method."""

    def collect(self):
        return []


@pytest.mark.parametrize(
    "state",
    [
        lambda: torch.nn.Linear(2, 2),
        lambda: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1),
    ],
    ids=["module", "optimizer"],
)
def test_a_module_or_optimizer_itself_is_refused_with_what_to_save(save, tmp_path, state):
    with pytest.raises(StateMismatchError, match=r"torch\..*\(save its \.state_dict\(\)\)"):
        save(state(), tmp_path)
    with pytest.raises(StateMismatchError, match=r"'m': found torch\..*\(save its \.state_dict"):
        save({"m": state()}, tmp_path)


def test_a_list_of_parts_is_refused_with_what_to_do(save, tmp_path):
    with pytest.raises(
        StateMismatchError, match=r"builtins.list \(CompositeProvider\(\[\.\.\.\]\)"
    ):
        save([{"a": 1}], tmp_path)


README_PROGRAM = """
import sys
import torch
import megatron_uring

directory, example = sys.argv[1:]
torch.distributed.init_process_group("gloo")
rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
model, weight = torch.nn.Linear(2, 1), torch.full((512, 512), float(rank))
loader = torch.nn.Linear(1, 1)
torch.nn.init.ones_(model.weight)
torch.nn.init.constant_(loader.weight, rank)
exec(compile(example, "README.md", "exec"))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def test_the_readmes_example_of_providers_runs_on_two_ranks(tmp_path, posix):
    text = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"```python\n(class LoaderState.*?)```", text, re.DOTALL)
    program = tmp_path / "program.py"
    program.write_text(README_PROGRAM)
    run_processes(2, program, str(tmp_path / "c"), example)
    found = megatron_uring.restore(tmp_path / "c", config=posix)
    assert found["step"] == 7 and torch.equal(found["model"]["weight"], torch.ones(1, 2))
    assert found["weight"].reshape(2, -1).unique(dim=1).tolist() == [[0.0], [1.0]]
    assert [found["loader"][rank]["weight"].item() for rank in ("0", "1")] == [0.0, 1.0]


def test_nothing_composed_is_empty():
    provided = CompositeProvider([]).collect()
    assert len(provided.shards) == 0 and provided.objects == ()


# -------------------------------------------------------------------------------------------------
# objects


@pytest.mark.parametrize(
    "value",
    [
        None,
        3.5,
        "text",
        b"bytes",
        {"a": [1, (2, {3})]},
        collections.OrderedDict(x=1),
        torch.float16,
        torch.Size([2, 3]),
        {(1, 2): "tuple key"},
    ],
    ids=repr,
)
def test_plain_objects_survive(value):
    back = deserialize_object("k", serialize_object("k", value))
    assert back == value and type(back) is type(value)


def test_tensors_inside_objects_survive():
    back = deserialize_object("k", serialize_object("k", {(1,): torch.arange(4)}))
    assert torch.equal(back[(1,)], torch.arange(4))


@pytest.mark.parametrize("value", [lambda: 1, (x for x in ()), open], ids=["lambda", "generator",
                         "function"])  # fmt: skip
def test_an_object_that_cannot_be_saved_fails_naming_key_and_class(value):
    with pytest.raises(StateMismatchError) as caught:
        ObjectProvider({"the/key": value}).collect()
    assert "'the/key'" in str(caught.value)


def test_an_unpicklable_object_is_named_with_its_class():
    with pytest.raises(StateMismatchError, match=r"object 'k': found builtins.generator"):
        serialize_object("k", (x for x in ()))


def test_a_custom_class_fails_at_save_naming_key_and_class():
    with pytest.raises(StateMismatchError) as caught:
        ObjectProvider({"opt/extra": Custom(3)}).collect()
    text = str(caught.value)
    assert "'opt/extra'" in text and CUSTOM in text and "MEGATRON_URING_ALLOWED_GLOBALS" in text


def test_allowed_globals_let_a_class_pass_in_both_directions():
    data = serialize_object("k", Custom(3), [CUSTOM])
    assert deserialize_object("k", data, [CUSTOM]) == Custom(3)
    with pytest.raises(StateMismatchError, match=rf"load object 'k'.*{re.escape(CUSTOM)}"):
        deserialize_object("k", data)


@pytest.mark.parametrize(
    "value",
    [
        argparse.Namespace(layers=4, load=Path("/c"), nested={"x": [1]}),
        SimpleNamespace(a=1),
        Path("/a/b"),
        signal.SIGTERM,
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_classes_of_the_standard_library_need_no_megatron(value):
    data = serialize_object("k", value)
    assert deserialize_object("k", data) == value
    kept = deserialize_object("k", serialize_object("k", io.BytesIO(b"extra state")))
    assert kept.getvalue() == b"extra state"


def test_allowed_globals_do_not_stay_allowed():
    serialize_object("k", Custom(3), [CUSTOM])
    assert Custom not in torch.serialization.get_safe_globals()


def test_what_others_have_registered_as_safe_stays_so():
    kinds = [Custom, argparse.Namespace, np.ndarray]
    with torch.serialization.safe_globals(kinds):
        serialize_object("k", Custom(argparse.Namespace(a=np.arange(3))), [CUSTOM])
        assert set(kinds) <= set(torch.serialization.get_safe_globals())
    assert not set(kinds) & set(torch.serialization.get_safe_globals())


@pytest.mark.parametrize("name", ["nodots", "no.such.module.Name", f"{__name__}.Missing", ""])
def test_an_allowed_global_that_does_not_exist_is_refused_by_name(name):
    with pytest.raises(UnsupportedError, match=rf"allowed_globals.*{re.escape(repr(name))}"):
        serialize_object("k", Custom(3), [name])


class Malicious:
    """A pickle that touches a file when it is loaded without care."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_loading_a_malicious_object_runs_nothing(tmp_path):
    trap = tmp_path / "trap"
    for data in (pickle.dumps(Malicious(str(trap))), _saved(Malicious(str(trap)))):
        with pytest.raises(StateMismatchError, match="load object 'k'"):
            deserialize_object("k", data)
    assert not trap.exists()


def _saved(value):
    import io

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_damaged_object_bytes_are_an_error_of_the_family():
    data = serialize_object("k", {"a": 1})
    for bad in (b"", data[:20], bytes(len(data)), data[: len(data) // 2]):
        with pytest.raises(StateMismatchError, match="load object 'k'"):
            deserialize_object("k", bad)


def test_describing_nothing_gives_empty_columns():
    table = TensorProvider([]).collect().shards
    assert len(table) == 0 and table.shape.shape == (0, 0) and table.dtype.dtype == np.uint8


class Wrapper(torch.Tensor):
    """A subclass without memory of its own, as DTensor is."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return Wrapper(torch.ones(3)) if func is torch.ops.aten.detach.default else NotImplemented


def test_a_subclass_without_memory_is_refused_by_key():
    wrapped = Wrapper(torch.ones(3))
    with pytest.raises(UnsupportedError, match="'w'"):
        TensorProvider([("w", Shard(wrapped, (3,), (0,)))]).collect()
