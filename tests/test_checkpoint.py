"""save and restore: every dtype, every shape, every way a tensor can lie in memory, bit by bit."""

import os
import pickle
import struct

import numpy as np
import pytest
import torch

import megatron_uring
from megatron_uring import Config, Shard, StateMismatchError, checkpoint, index, providers
from megatron_uring.errors import (
    MissingKeyError,
    NotACheckpointError,
    StorageError,
    UnsupportedError,
)
from megatron_uring.layout import DTYPE_NAMES, timeline_name

DTYPES = [name for name in DTYPE_NAMES if hasattr(torch, name)]
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


class Custom:
    def __init__(self, value):
        self.value = value


CUSTOM = f"{__name__}.Custom"


def data_bytes(directory):
    """Bytes that the subfiles of a checkpoint take on disk."""
    return sum(
        os.stat(entry.path).st_blocks * 512
        for entry in os.scandir(directory)
        if entry.name.startswith("data-")
    )


@pytest.fixture
def round_trip(save, config, tmp_path, bytes_of):
    """Save, restore into new tensors, and compare dtype, shape and bytes of each leaf."""

    def run(state):
        save(state, tmp_path / "c", config)
        restored = megatron_uring.restore(tmp_path / "c", config=config)
        expected = dict(providers.flatten(state))
        found = dict(providers.flatten(restored))
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert found[key].dtype == tensor.dtype, key
            assert found[key].shape == tensor.shape, key
            assert bytes_of(found[key]) == bytes_of(tensor), key
        return restored

    return run


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_bit_by_bit_in_every_shape(round_trip, random_tensor, name):
    shapes = [(), (0,), (3, 0, 2), (0, 0), (1,), (1, 1, 1), (7,), (3, 5, 2), (1001, 3)]
    dtype = getattr(torch, name)
    round_trip({str(shape): random_tensor(dtype, shape, seed=len(shape)) for shape in shapes})


def test_nan_payloads_and_the_sign_of_zero_are_kept(round_trip):
    bits = [0x7FC00001, 0xFFC12345 - (1 << 32), 0x7F800001, -(1 << 31), 0]
    state = {"x": torch.tensor(bits, dtype=torch.int32).view(torch.float32)}
    restored = round_trip(state)
    assert restored["x"].view(torch.int32).tolist() == bits


def views():
    base = torch.arange(6000, dtype=torch.float64)
    grid = base.reshape(60, 100)
    cube = base.reshape(10, 20, 30)
    return {
        "transposed": grid.t(),
        "permuted": cube.permute(2, 0, 1),
        "stepped": grid[3::7, 5::3],
        "stepped, transposed": grid[::2, 1::9].t(),
        "inner slice": cube[2:5, 3:9, 7:20],
        "column": grid[:, 17],
        "expanded": base[:5].reshape(5, 1).expand(5, 4),
        "expanded scalar": torch.tensor(3, dtype=torch.int16).expand(3, 3),
        "gaps": base.as_strided((4, 5, 2), (1000, 100, 7), 11),
        "overlapping windows": base.unfold(0, 8, 3),
        "flipped": grid.flip(0),
        "channels last": torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).to(
            memory_format=torch.channels_last
        ),
        "empty view": grid[5:5, ::2],
        "size-1 with odd stride": base.as_strided((1, 3), (777, 2), 1),
    }  # fmt: skip


@pytest.mark.parametrize("name", views())
def test_views_are_saved_as_their_own_elements(round_trip, name):
    round_trip({"view": views()[name]})


def test_a_small_view_of_a_big_storage_makes_a_small_file(save, config, tmp_path):
    big = torch.ones(1 << 26, dtype=torch.uint8)
    save({"view": big[1000:1100], "column": big.view(1 << 13, 1 << 13)[:, 5]}, tmp_path, config)
    assert data_bytes(tmp_path) < 3 << 20
    assert torch.equal(megatron_uring.restore(tmp_path)["view"], big[:100])


def test_conjugated_and_negated_views_come_back_resolved(round_trip, random_tensor):
    values = random_tensor(torch.complex64, (5, 3))
    restored = round_trip({"conj": values.conj(), "imag": values.conj().imag, "h": values.mH})
    assert not restored["conj"].is_conj() and not restored["imag"].is_neg()


def test_parameters_come_back_and_keep_their_gradients(round_trip):
    parameter = torch.nn.Parameter(torch.randn(4, 4))
    leaf = torch.randn(3, requires_grad=True)
    round_trip({"p": parameter, "computed": leaf * 2, "leaf": leaf})
    assert parameter.requires_grad


def test_tied_weights_come_back_under_both_keys(round_trip):
    weight = torch.randn(50, 20)
    round_trip({"in": weight, "out": weight, "part": weight[3:7], "flat": weight.view(-1)})


def test_tensors_over_several_slabs_come_back(round_trip, random_tensor):
    mib = 1 << 20
    big = random_tensor(torch.uint8, (5 * mib + 13,))
    round_trip(
        {
            "big": big,
            "exactly a block": big[:mib].clone(),
            "one byte short": big[: mib - 1].clone(),
            "one byte more": big[: mib + 1].clone(),
            "transposed": big[: 3 * mib].view(1536, 2048).t(),
            "small behind": torch.arange(7),
        }
    )


@pytest.mark.slow
def test_a_tensor_over_2_gib_comes_back(save, tmp_path, world):
    config = Config(slab_bytes=16 << 20, slab_count=4)
    size = (1 << 31) + 4097
    tensor = torch.zeros(size, dtype=torch.uint8)
    tensor[:: 1 << 20] = torch.arange(2049, dtype=torch.int64).to(torch.uint8)
    tensor[-4097:] = 77
    save({"huge": tensor}, tmp_path, config)
    found = torch.empty_like(tensor)
    megatron_uring.restore(tmp_path, {"huge": found}, config=config)
    assert torch.equal(found, tensor)


NESTED = {
    "model": {"layers": [{"w": 1}, {"w": (2, [3.5, "x"])}], 7: "int", "7": "str"},
    "a": {"b": 1},
    "a.b": 2,
    "a/b": 3,
    "..": {"..": 4},
    "../../etc/passwd": 5,
    "a|b~c": 6,
    "schlüssel 𝄞\n": 7,
    "k" * 4096: 8,
    "empty": {"d": {}, "l": [], "t": ()},
    "none": None,
    "": {"": "empty key"},
    "odd": {(1, 2): {"rng": b"\0\1"}},
}


def test_nested_objects_with_awkward_keys_come_back(save, config, tmp_path):
    save(NESTED, tmp_path, config)
    assert megatron_uring.restore(tmp_path, config=config) == NESTED


def test_nested_tensors_with_awkward_keys_come_back(round_trip):
    def as_tensors(value):
        if isinstance(value, dict) and value and all(type(k) in (str, int) for k in value):
            return {key: as_tensors(item) for key, item in value.items()}
        if isinstance(value, list | tuple) and value:
            return type(value)(map(as_tensors, value))
        return torch.tensor([len(str(value))])

    round_trip(as_tensors(NESTED))


@pytest.mark.parametrize("state", [{}, {"a": {}}, {"a": torch.empty(0)}, {"a": None}], ids=str)
def test_states_with_next_to_nothing_come_back(save, config, tmp_path, state):
    save(state, tmp_path, config)
    restored = megatron_uring.restore(tmp_path, config=config)
    assert str(restored) == str(state)


def test_lone_surrogates_in_keys_come_back(save, posix, tmp_path):
    save(dict([("\ud800", torch.ones(2)), ("x\udfff", 3)]), tmp_path)
    restored = megatron_uring.restore(tmp_path, config=posix)
    assert restored["x\udfff"] == 3 and torch.equal(restored["\ud800"], torch.ones(2))


def test_objects_and_tensors_may_not_be_mixed_up_by_a_key_with_zero_bytes(save, posix, tmp_path):
    state = {"\0object": {"x": torch.arange(3)}, "x": {"y": 5}}
    save(state, tmp_path)
    restored = megatron_uring.restore(tmp_path, config=posix)
    assert restored["x"] == {"y": 5}
    assert torch.equal(restored["\0object"]["x"], torch.arange(3))


# -------------------------------------------------------------------------------------------------
# destinations


def test_restore_fills_given_tensors_in_place(save, config, tmp_path, random_tensor, bytes_of):
    source = random_tensor(torch.float32, (40, 30))
    save({"x": source, "n": 5}, tmp_path, config)
    base = torch.full((100, 200), 7.0)
    destinations = {
        "contiguous": torch.empty(40, 30),
        "transposed": torch.empty(30, 40).t(),
        "stepped": base[10:90:2, 5:185:6],
        "parameter": torch.nn.Parameter(torch.empty(40, 30)),
        "permuted": torch.empty(30, 1, 40).permute(2, 0, 1)[:, :, 0],
    }
    for name, tensor in destinations.items():
        address = tensor.data_ptr()
        restored = megatron_uring.restore(tmp_path, {"x": tensor, "n": None}, config=config)
        assert restored["x"] is tensor and tensor.data_ptr() == address, name
        assert restored["n"] == 5
        assert bytes_of(tensor) == bytes_of(source), name
    kept = torch.ones(100, 200, dtype=torch.bool)
    kept[10:90:2, 5:185:6] = False
    assert torch.all(base[kept] == 7.0)


def test_conjugated_and_negated_destinations_get_the_values(save, config, tmp_path):
    source = torch.tensor([1 + 2j, 3 - 4j])
    save({"x": source, "y": torch.tensor([5.0, 6.0])}, tmp_path, config)
    conj, negated = torch.zeros(2, dtype=torch.complex64).conj(), torch.zeros(2) + 0j
    imag = negated.conj().imag
    megatron_uring.restore(tmp_path, {"x": conj, "y": imag}, config=config)
    assert torch.equal(conj, source)
    assert imag.tolist() == [5.0, 6.0]


def test_a_destination_whose_elements_share_memory_is_refused_as_one_of_the_family(
    save, posix, tmp_path
):
    save({"x": torch.arange(4.0)}, tmp_path)
    with pytest.raises(megatron_uring.CheckpointError, match="'x'"):
        megatron_uring.restore(tmp_path, {"x": torch.zeros(1).expand(4)}, config=posix)


def test_a_tensor_with_gradient_is_filled_without_touching_autograd(save, posix, tmp_path):
    save({"x": torch.arange(4.0)}, tmp_path)
    destination = torch.zeros(4, requires_grad=True)
    megatron_uring.restore(tmp_path, {"x": destination}, config=posix)
    assert destination.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert destination.is_leaf and destination.grad_fn is None


def test_only_the_wanted_keys_are_read(save, posix, tmp_path):
    big = torch.zeros(8 << 20, dtype=torch.uint8)
    save({"big": big, "w": {"small": torch.arange(3)}, "o": 1}, tmp_path)
    restored = megatron_uring.restore(tmp_path, keys=["w/small", "o"], config=posix)
    assert restored["w"]["small"].tolist() == [0, 1, 2] and restored["o"] == 1
    assert "big" not in restored
    assert checkpoint.last_reports()["restore"].file_bytes <= 4 << 20


def test_of_a_given_state_only_the_wanted_keys_are_filled(save, posix, tmp_path):
    save({"a": torch.ones(2), "n": {"b": torch.ones(3), "step": 7}}, tmp_path)
    state = {"a": torch.zeros(2), "n": {"b": torch.zeros(3), "step": 0, "mine": "kept"}}
    found = megatron_uring.restore(tmp_path, state, keys=["n/b", "n/step"], config=posix)
    assert found["n"]["b"] is state["n"]["b"] and state["n"]["b"].tolist() == [1, 1, 1]
    assert found["n"]["step"] == 7 and found["n"]["mine"] == "kept"
    assert found["a"].tolist() == [0, 0]
    with pytest.raises(MissingKeyError, match=r"'n/stepp'.*given state.*'n/step'"):
        megatron_uring.restore(tmp_path, state, keys=["n/stepp"], config=posix)


def test_a_state_to_fill_that_is_no_dict_is_refused(save, posix, tmp_path):
    save({"a": torch.ones(2)}, tmp_path)
    with pytest.raises(StateMismatchError, match=r"a dict to fill.*TensorProvider"):
        megatron_uring.restore(tmp_path, providers.TensorProvider(()), config=posix)


def test_shards_are_resharded(save, config, tmp_path, random_tensor):
    whole = random_tensor(torch.int16, (12, 10))
    parts = [
        (slice(0, 5), slice(0, 10)),
        (slice(5, 12), slice(0, 3)),
        (slice(5, 12), slice(3, 10)),
    ]
    provider = providers.TensorProvider(
        ("w", Shard(whole[part], (12, 10), (part[0].start, part[1].start))) for part in parts
    )
    save(provider, tmp_path, config)
    assert torch.equal(megatron_uring.restore(tmp_path, config=config)["w"], whole)
    box = torch.zeros(6, 4, dtype=torch.int16)
    restored = megatron_uring.restore(tmp_path, {"w": Shard(box, (12, 10), (3, 2))}, config=config)
    assert torch.equal(restored["w"], whole[3:9, 2:6])


def test_partial_requests_fill_the_overlap_and_leave_the_rest(save, posix, tmp_path):
    save({"w": torch.arange(6.0)}, tmp_path)
    larger = torch.full((8,), -1.0)
    request = checkpoint.Request("w", larger, (8,), (0,), partial=True)
    checkpoint.restore_into(str(tmp_path), [request], config=posix)
    assert larger.tolist() == [0, 1, 2, 3, 4, 5, -1, -1]


# -------------------------------------------------------------------------------------------------
# what does not fit


@pytest.fixture
def small(save, tmp_path):
    save({"layer": {"weight": torch.arange(6.0), "bias": torch.ones(2)}, "step": 3}, tmp_path)
    return tmp_path


@pytest.mark.parametrize("verify_first", [False, True])
@pytest.mark.parametrize(
    ("wanted", "texts"),
    [
        (
            {"layer/wieght": torch.zeros(6)},
            ["restore tensor 'layer~1wieght'", "2 others"],
        ),
        (
            {"layer": {"weigth": torch.zeros(6)}},
            ["restore tensor 'layer/weigth'", "2 others; similar: 'layer/weight'"],
        ),
        ({"stop": None}, ["restore object 'stop'", "3 others; similar: 'step'"]),
        (
            {"layer": {"weight": torch.zeros(7)}},
            ["'layer/weight'", "expected global shape [7], found [6] in the checkpoint"],
        ),
        (
            {"layer": {"weight": torch.zeros(6, 1)}},
            ["'layer/weight'", "global shape [6, 1]"],
        ),
        (
            {"layer": {"weight": torch.zeros(6, dtype=torch.bfloat16)}},
            [
                "'layer/weight'",
                "expected dtype bfloat16, found float32 in the checkpoint",
                "MEGATRON_URING_ALLOW_DTYPE_CONVERSION",
            ],
        ),
        (
            {"layer": {"weight": Shard(torch.zeros(4), (6,), (3,))}},
            ["'layer/weight'", "3 of its 4 elements"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_key_and_nothing_is_touched(
    small, posix, wanted, texts, verify_first
):
    bias = torch.full((2,), 9.0)
    wanted = {**wanted, "layer": {**wanted.get("layer", {}), "bias": bias}}
    config = Config(**{**vars(posix), "verify_first": verify_first})
    with pytest.raises(StateMismatchError) as caught:
        megatron_uring.restore(small, wanted, config=config)
    for text in texts:
        assert text in str(caught.value)
    assert bias.tolist() == [9.0, 9.0]


def test_conversion_is_made_when_it_is_allowed(small, posix):
    config = Config(**{**vars(posix), "allow_dtype_conversion": True})
    for dtype in (torch.bfloat16, torch.int64, torch.float64):
        found = torch.zeros(6, dtype=dtype)
        megatron_uring.restore(small, {"layer": {"weight": found}}, config=config)
        assert torch.equal(found, torch.arange(6.0).to(dtype))


def test_a_wanted_tensor_that_was_saved_as_an_object_is_refused(small, posix):
    with pytest.raises(StateMismatchError, match="restore tensor 'step'"):
        megatron_uring.restore(small, {"step": torch.zeros(1)}, config=posix)


def test_a_directory_without_a_commit_is_no_checkpoint(tmp_path, posix):
    (tmp_path / "data-0123456789abcdef-00000.bin").write_bytes(b"x")
    for directory in (tmp_path, tmp_path / "missing", tmp_path / "data-0123456789abcdef-00000.bin"):
        with pytest.raises(NotACheckpointError, match=str(directory)):
            megatron_uring.restore(directory, config=posix)


def test_another_format_version_is_refused_naming_both(small, posix):
    from megatron_uring import _engine

    path = small / "index.h5"
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, len(data) - 56, 2)
    struct.pack_into("<I", data, len(data) - 4, _engine.crc32c(bytes(data[-64:-4])))
    path.write_bytes(data)
    with pytest.raises(NotACheckpointError, match="format version 1, found 2"):
        megatron_uring.restore(small, config=posix)


# -------------------------------------------------------------------------------------------------
# objects


def test_a_custom_class_fails_at_save_and_the_old_checkpoint_stays(save, small, posix):
    before = sorted(os.listdir(small))
    with pytest.raises(StateMismatchError, match=rf"'opt/extra'.*{CUSTOM}"):
        save({"opt": {"extra": Custom(1)}}, small)
    with pytest.raises(StateMismatchError, match="'f'"):
        save({"f": lambda: 1}, small)
    assert sorted(os.listdir(small)) == before
    assert megatron_uring.restore(small, config=posix)["step"] == 3


def test_a_custom_class_passes_both_ways_when_it_is_allowed(save, tmp_path, posix):
    config = Config(**{**vars(posix), "allowed_globals": (CUSTOM,)})
    save({"extra": Custom(5)}, tmp_path, config)
    assert megatron_uring.restore(tmp_path, config=config)["extra"].value == 5
    with pytest.raises(StateMismatchError, match=r"load object 'extra'.*ALLOWED_GLOBALS"):
        megatron_uring.restore(tmp_path, config=posix)


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_malicious_object_in_a_checkpoint_is_not_executed(save, tmp_path, posix, monkeypatch):
    trap = tmp_path / "trap"
    monkeypatch.setattr(
        providers, "serialize_object", lambda key, value, *_: pickle.dumps(Trap(str(trap)))
    )
    save({"rng": 1, "x": torch.ones(1)}, tmp_path / "c")
    with pytest.raises(StateMismatchError, match="load object 'rng'"):
        megatron_uring.restore(tmp_path / "c", config=posix)
    assert not trap.exists()


# -------------------------------------------------------------------------------------------------
# reports and options


def test_the_report_tells_what_is_on_disk(save, config, tmp_path):
    report = save({"x": torch.zeros(1000), "o": "text"}, tmp_path, config, common=b"shared")
    files = {entry.name: entry.stat().st_size for entry in os.scandir(tmp_path)}
    assert files.pop(timeline_name(report.save_id))
    assert len(files) == report.files == 3
    assert sum(files.values()) == report.file_bytes
    assert report.state_bytes > 4000
    assert report.engine.startswith(config.engine)
    assert report.seconds >= max(report.phases_s.values())
    assert 0 < report.copy_s < report.seconds and 0 < report.checksum_s < report.seconds
    assert all(report.save_id in name for name in files if name != "index.h5")
    assert checkpoint.last_reports()["save"] is report


@pytest.mark.parametrize("direct", ["on", "off"])
def test_direct_and_buffered_checkpoints_are_the_same_bytes(save, config, tmp_path, direct):
    options = Config(**{**vars(config), "direct": direct})
    report = save({"x": torch.arange(500_000)}, tmp_path, options)
    assert report.direct == (direct == "on")
    restored = megatron_uring.restore(tmp_path, config=options)
    assert torch.equal(restored["x"], torch.arange(500_000))


def test_a_large_stripe_moves_regions_and_nothing_else(save, posix, tmp_path):
    options = Config(**{**vars(posix), "stripe_bytes": 3 << 20})
    save({"x": torch.arange(10), "o": 1}, tmp_path, options)
    restored = megatron_uring.restore(tmp_path, config=posix)
    assert torch.equal(restored["x"], torch.arange(10)) and restored["o"] == 1


def test_ten_thousand_small_tensors_come_back(save, posix, tmp_path):
    state = {f"t{i}": torch.tensor([i, -i]) for i in range(10_000)}
    save(state, tmp_path)
    restored = megatron_uring.restore(tmp_path, config=posix)
    assert all(torch.equal(restored[key], tensor) for key, tensor in state.items())


def test_a_changed_state_of_the_same_structure_is_saved_anew(save, posix, tmp_path):
    tensor = torch.zeros(10)
    for step in range(3):
        save({"x": tensor.fill_(step).clone(), "step": step}, tmp_path)
        restored = megatron_uring.restore(tmp_path, config=posix)
        assert restored["x"].tolist() == [step] * 10 and restored["step"] == step


def test_shards_are_encoded_once_for_a_structure(save, tmp_path, monkeypatch):
    made = []
    encode = index._encode_shards
    monkeypatch.setattr(index, "_encode_shards", lambda *a: (made.append(1), encode(*a)))
    for step in range(3):
        save({"a structure of its own": torch.full((10,), step), "step": step}, tmp_path)
    assert len(made) == 1
    save({"another structure": torch.ones(10)}, tmp_path)
    assert len(made) == 2
    assert megatron_uring.restore(tmp_path)["another structure"].tolist() == [1] * 10


def test_an_unknown_dtype_is_refused_and_nothing_is_left(save, tmp_path):
    with pytest.raises(UnsupportedError, match="'bits'"):
        save({"bits": torch.empty(2, dtype=torch.bits8)}, tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_path_that_is_a_file_is_refused(save, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="file"):
        save({"a": torch.ones(1)}, tmp_path / "file")


def test_addresses_are_never_cached_between_saves(save, posix, tmp_path):
    state = {"x": torch.full((1000,), 1.0)}
    save(state, tmp_path)
    state["x"] = torch.full((1000,), 2.0)
    save(state, tmp_path)
    assert np.all(megatron_uring.restore(tmp_path, config=posix)["x"].numpy() == 2.0)


def test_a_restores_report_says_how_it_read(save, tmp_path):
    save({"w": torch.arange(1000)}, str(tmp_path))
    for direct in ("on", "off"):
        megatron_uring.restore(str(tmp_path), config=Config(engine="posix", direct=direct))
        assert checkpoint.last_reports()["restore"].direct == (direct == "on")
