"""The HDF5 index: both directions, damage, and what must not be believed."""

import dataclasses
import io
import shutil

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import megatron_uring
from megatron_uring import index as index_module
from megatron_uring.errors import CheckpointError, CorruptionError, NotACheckpointError
from megatron_uring.index_rules import Index, with_common, without_tensors
from megatron_uring.layout import BLOCK_BYTES
from megatron_uring.providers import Shard, TensorProvider
from megatron_uring.tables import Extents, Regions

SAVE_ID = "0123456789abcdef"


def same(left, right):
    for field in dataclasses.fields(left):
        one, other = getattr(left, field.name), getattr(right, field.name)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype and one.shape == other.shape, field.name
            assert np.array_equal(one, other), field.name
        elif dataclasses.is_dataclass(one):
            same(one, other)
        else:
            assert one == other, field.name
    return True


def columns(*values, dtype=np.int64):
    return np.array(values, dtype)


def make_index(shapes, objects=(), **fields):
    """An index of whole tensors (key, shape) and objects (key, length) in one region."""
    shards = (
        TensorProvider(
            (k, Shard(torch.empty(s, dtype=torch.bfloat16), s, (0,) * len(s))) for k, s in shapes
        )
        .collect()
        .shards
    )
    lengths = [*shards.lengths().tolist(), *(length for _, length in objects)]
    starts = 4096 + np.concatenate([[0], np.cumsum([-(-n // 64) * 64 for n in lengths])])
    total = -(-int(starts[-1]) // 4096) * 4096
    count = len(shards)
    blocks = -(-total // BLOCK_BYTES)
    return Index(
        SAVE_ID,
        shards,
        Extents(np.zeros(count, np.int32), starts[:count].astype(np.int64), shards.lengths()),
        tuple(key for key, _ in objects),
        Extents(
            np.zeros(len(objects), np.int32),
            starts[count:-1].astype(np.int64),
            columns(*lengths[count:]),
        ),
        Regions(
            columns(3, dtype=np.int32),
            columns(0, dtype=np.int32),
            columns(0),
            columns(total),
            np.arange(blocks, dtype=np.uint32),
        ),
        columns(0, dtype=np.int32),
        columns(total),
        **fields,
    )


MIXED = [("s", ()), ("a/b", (3, 4)), ("ключ 𝄞", (2, 3, 4, 5)), ("z", (0, 7)), ("k" * 4096, (1,))]


@pytest.mark.parametrize(
    "index",
    [
        make_index([]),
        make_index([("only", ())]),
        make_index([("zero", (0,))]),
        make_index([], [("o", 100)]),
        make_index(MIXED, [("rng/~1", 4097), ("empty", 0)]),
        make_index([("big", (1 << 22,))]),
        make_index(MIXED, facts={"versions": '{"torch": "2"}', "note": "é"}),
        with_common(make_index(MIXED), 12345, 0xFFFFFFFF),
    ],
    ids=["empty", "0-d", "zero-size", "objects", "mixed", "blocks", "facts", "common"],
)
def test_an_index_survives_encoding(index):
    assert same(index_module.decode(index_module.encode(index), "f"), index)


@pytest.mark.parametrize("index", [make_index([]), make_index(MIXED, [("o", 100)])])
def test_shards_may_be_encoded_before_the_rest_and_for_several_images(index):
    encoded = index_module.EncodedShards(index.shards, index.shard_extents)
    for _ in range(2):
        image = index_module.encode(index, encoded)
        assert same(index_module.decode(image, "f"), index)
    # compressed as they would have been
    assert len(image) <= len(index_module.encode(index)) + 4096


def test_an_index_without_subfiles_survives():
    nothing = make_index([])
    empty = Regions(*(np.zeros(0, d) for d in (np.int32, np.int32, np.int64, np.int64, np.uint32)))
    index = dataclasses.replace(
        nothing,
        regions=empty,
        subfile_number=np.zeros(0, np.int32),
        subfile_length=np.zeros(0, np.int64),
    )
    assert same(index_module.decode(index_module.encode(index), "f"), index)


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=8), st.lists(st.integers(0, 3), max_size=4).map(tuple), max_size=8
    )
)
def test_any_mixture_of_shapes_and_keys_survives(shapes):
    index = make_index(list(shapes.items()))
    assert same(index_module.decode(index_module.encode(index), "f"), index)


def test_many_keys_survive_and_stay_small():
    index = make_index([(f"layers.{i}.weight", (4,)) for i in range(30_000)])
    image = index_module.encode(index)
    assert len(image) < 1 << 20
    assert index_module.decode(image, "f").shards.keys == index.shards.keys


def test_names_in_gives_what_has_a_byte_in_the_range():
    index = make_index([("a", (32,)), ("b", (32,)), ("none", (0,))], [("o", 10)])
    assert index.names_in(0, 4096, 4097) == ["a"]
    assert index.names_in(0, 4096 + 63, 4096 + 65) == ["a", "b"]
    assert index.names_in(0, 4096 + 128, 4096 + 129) == ["o"]
    assert index.names_in(0, 0, 4096) == index.names_in(1, 0, 1 << 20) == []


def test_tensors_can_be_taken_out_by_prefix():
    index = without_tensors(make_index([("a.x", (2,)), ("b", (3,)), ("a.y", ())]), "a.")
    assert index.shards.keys == ("b",) and len(index.shard_extents) == 1
    assert same(index_module.decode(index_module.encode(index), "f"), index)
    assert without_tensors(index, "b").shards.keys == ()


# -------------------------------------------------------------------------------------------------
# images that must not be believed


def edited(edit, index=None):
    """An image after `edit(file)`; its checksums are right, its content is not."""
    buffer = io.BytesIO(index_module.encode(index or make_index(MIXED, [("o", 10)])))
    with h5py.File(buffer, "r+") as file:
        edit(file)
    return buffer.getvalue()


def replaced(name, change):
    def edit(file):
        old = file[name][()]
        del file[name]
        file[name] = change(old)

    return edit


DATASETS = [
    "tensors/key_text", "tensors/key_bytes", "tensors/dtype", "tensors/ndim", "tensors/shape",
    "shards/tensor", "shards/offset", "shards/shape", "shards/subfile", "shards/start",
    "shards/length", "objects/key_text", "objects/key_bytes", "objects/subfile", "objects/start",
    "objects/length", "regions/rank", "regions/subfile", "regions/start", "regions/length",
    "regions/crc32c", "subfiles/number", "subfiles/length",
]  # fmt: skip


def test_the_list_of_datasets_is_complete():
    found = []
    with h5py.File(io.BytesIO(index_module.encode(make_index(MIXED)))) as file:
        file.visititems(lambda name, node: found.append(name) if hasattr(node, "shape") else None)
    assert sorted(found) == sorted(DATASETS)


@pytest.mark.parametrize("name", DATASETS)
def test_a_missing_dataset_is_corruption(name):
    def remove(file):
        del file[name]

    with pytest.raises(CorruptionError, match=r"parse index: /d/index\.h5"):
        index_module.decode(edited(remove), "/d/index.h5")


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize(
    "change",
    [
        lambda old: old.astype(np.float64),
        lambda old: old[:, None],
        lambda old: old[:-1],
        lambda old: np.append(old, old[-1:]),
    ],
    ids=["dtype", "dimensions", "shorter", "longer"],
)
def test_a_column_of_the_wrong_dtype_or_length_is_corruption(name, change):
    with pytest.raises(CorruptionError):
        index_module.decode(edited(replaced(name, change)), "f")


def filled(value):
    return lambda old: np.full_like(old, value)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tensors/dtype", filled(21)),
        ("tensors/ndim", filled(17)),
        ("shards/tensor", filled(-1)),
        ("shards/tensor", filled(5)),
        ("shards/shape", filled(-1)),
        ("shards/length", filled(1 << 40)),
        ("shards/length", filled(-2)),
        ("shards/start", filled(-64)),
        ("shards/start", filled(1 << 50)),
        ("shards/subfile", filled(1)),
        ("shards/subfile", filled(-1)),
        ("objects/start", filled(1 << 30)),
        ("objects/start", filled(-1)),
        ("objects/length", filled(1 << 30)),
        ("objects/length", filled(-1)),
        ("regions/start", filled(4096)),
        ("regions/start", filled(1 << 20)),
        ("regions/length", filled(0)),
        ("regions/length", filled(100)),
        ("regions/length", filled(-4096)),
        ("regions/length", filled(1 << 40)),
        ("regions/subfile", filled(2)),
        ("subfiles/length", filled(0)),
        ("subfiles/number", filled(1)),
        ("tensors/key_bytes", filled(-1)),
        ("tensors/key_text", filled(0xFF)),
    ],
)
def test_a_column_that_points_outside_is_corruption(name, change):
    with pytest.raises(CorruptionError):
        index_module.decode(edited(replaced(name, change)), "f")


def test_two_regions_that_overlap_are_corruption():
    index = make_index(MIXED)
    regions = Regions.concatenate([index.regions, index.regions])
    image = index_module.encode(dataclasses.replace(index, regions=regions))
    with pytest.raises(CorruptionError):
        index_module.decode(image, "f")


@pytest.mark.parametrize(("attribute", "value"), [("format", "other"), ("version", 2)])
def test_another_format_or_version_is_not_a_checkpoint_of_ours(attribute, value):
    image = edited(lambda file: file.attrs.__setitem__(attribute, value))
    with pytest.raises(NotACheckpointError, match=rf"found.* {value}"):
        index_module.decode(image, "f")


@pytest.mark.parametrize("attribute", ["version", "save_id", "common_length", "common_crc32c"])
def test_a_missing_attribute_is_corruption(attribute):
    with pytest.raises(CorruptionError):
        index_module.decode(edited(lambda file: file.attrs.__delitem__(attribute)), "f")


@pytest.mark.parametrize("image", [b"", b"no hdf5", bytes(4096)])
def test_what_is_no_hdf5_is_corruption(image):
    with pytest.raises(CorruptionError):
        index_module.decode(image, "f")


# -------------------------------------------------------------------------------------------------
# the file


@pytest.fixture(scope="module")
def sealed():
    return index_module.sealed(make_index(MIXED, [("o", 10)]))


def read(directory, data):
    (directory / "index.h5").write_bytes(data)
    return index_module.read_index(str(directory))


def test_a_sealed_index_is_read_back(tmp_path, sealed):
    assert same(read(tmp_path, sealed), make_index(MIXED, [("o", 10)]))


def test_plain_h5py_opens_the_file(tmp_path, sealed):
    path = tmp_path / "index.h5"
    path.write_bytes(sealed)
    with h5py.File(path, "r") as file:
        assert file.attrs["format"] == "megatron_uring" and file.attrs["version"] == 1
        assert file.attrs["save_id"] == SAVE_ID and file.attrs["block_bytes"] == 1 << 20
        assert file["tensors/ndim"][()].tolist() == [0, 2, 4, 2, 1]
        assert file["tensors/shape"][:2].tolist() == [3, 4]


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_any_flipped_byte_is_refused(tmp_path, sealed, data):
    damaged = bytearray(sealed)
    damaged[data.draw(st.integers(0, len(sealed) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CheckpointError, match=r"index\.h5"):
        read(tmp_path, bytes(damaged))


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_any_truncation_or_extension_is_refused(tmp_path, sealed, data):
    length = data.draw(st.integers(0, len(sealed) - 1))
    for damaged in (sealed[:length], sealed + sealed[: length + 1]):
        if damaged[-64:] != sealed[-64:]:
            with pytest.raises(CheckpointError, match=r"index\.h5"):
                read(tmp_path, damaged)


def test_an_image_of_another_save_under_this_trailer_is_refused(tmp_path):
    image = index_module.encode(make_index(MIXED))
    with pytest.raises(CorruptionError, match="save id ffffffffffffffff"):
        read(tmp_path, image + index_module.seal(image, "f" * 16))


def test_no_directory_an_empty_one_and_a_file_are_no_checkpoint(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name, text in (("no", "no directory"), ("empty", "an empty directory"), ("file", "file")):
        with pytest.raises(NotACheckpointError, match=text):
            index_module.read_index(str(tmp_path / name))
    shutil.rmtree(tmp_path / "empty")


def test_a_footer_is_read_from_the_end_of_a_subfile(tmp_path):
    index = make_index(MIXED)
    image = index_module.encode(index)
    path = tmp_path / "f"
    data = b"s" * 8192 + image + bytes(100) + index_module.seal(image, SAVE_ID, 8192)
    path.write_bytes(data)
    with open(path, "rb") as file:
        assert same(index_module.read_footer(file, str(path), len(data)), index)
        with pytest.raises(CorruptionError, match="read trailer"):
            index_module.read_footer(file, str(path), len(data) - 1)


def test_a_file_that_is_longer_than_its_trailer_says_is_refused_before_it_is_read(tmp_path, posix):
    megatron_uring.save({"x": torch.ones(3)}, tmp_path, config=posix)
    path = tmp_path / "index.h5"
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(CorruptionError, match="read index"):
        index_module.read_index(str(tmp_path))
