"""convert: each direction against the tensors in memory, and what must not come of a conversion."""

import io
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

sys.path.insert(0, str(Path(__file__).parent / "mpi"))

from launch import PROGRAMS, run_mpi

import megatron_uring
from megatron_uring import Config, cli, providers, tensors
from megatron_uring.convert import convert, parts, safetensors_layout
from megatron_uring.convert import convert as convert_module
from megatron_uring.convert.files import Files
from megatron_uring.errors import (
    CorruptionError,
    MissingKeyError,
    NotACheckpointError,
    StorageError,
    UnsupportedError,
)
from megatron_uring.layout import DTYPE_NAMES

ODD_KEYS = ["a", "a/b", ".", "..", "ключ 🔑", "x" * 4096, "[*]", "a.b", "/"]
CONFIG = Config(engine="posix", slab_bytes=1 << 20, slab_count=2)
OBJECTS = {"rng": (3, torch.arange(3)), "step": 7}


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch):
    """So that tensors of a few MiB need several."""
    monkeypatch.setattr(parts, "WINDOW_BYTES", 1 << 20)


@pytest.fixture
def state(random_tensor):
    """Every dtype that all formats hold, every kind of shape, keys of every kind."""
    found = {
        f"dtype/{name}": random_tensor(getattr(torch, name), (5, 3), seed)
        for seed, name in enumerate(safetensors_layout.NAME_OF_DTYPE)
        if hasattr(torch, name)
    }
    found |= {key: random_tensor(torch.float32, (3, 2), seed) for seed, key in enumerate(ODD_KEYS)}
    found["scalar"] = torch.tensor(1.5, dtype=torch.bfloat16)
    found["empty"] = torch.empty(0, 3)
    found["long row"] = random_tensor(torch.float64, (2, 400_001), 50)
    found["large"] = random_tensor(torch.bfloat16, (1000, 1500), 51)
    found["deep"] = random_tensor(torch.uint8, (3, 1, 5, 7, 2), 52)
    return found


def cut(tensor):
    """The tensor in shards: of uneven rows, or in a grid, where it can be cut."""
    shape = tuple(tensor.shape)
    if tensor.dim() < 2 or min(shape[:2]) < 2:
        yield providers.Shard(tensor, shape, (0,) * len(shape))
        return
    rows, columns = shape[0] // 2, shape[1] - 1
    for row, height in ((0, rows), (rows, shape[0] - rows)):
        for column, width in ((0, columns), (columns, shape[1] - columns)):
            piece = tensor[row : row + height, column : column + width]
            yield providers.Shard(piece, shape, (row, column) + (0,) * (len(shape) - 2))


@pytest.fixture
def ours(state, save, tmp_path):
    """A checkpoint of ours, of shards and objects."""
    shards = [(key, shard) for key, tensor in state.items() for shard in cut(tensor)]
    provider = providers.CompositeProvider(
        [providers.TensorProvider(shards), providers.ObjectProvider(OBJECTS)]
    )
    save(provider, tmp_path / "ours")
    return tmp_path / "ours"


@pytest.fixture
def torch_dist(state, tmp_path):
    """What torch's own writer makes of the state."""
    path = tmp_path / "torch_dist"
    dcp.save({**state, **OBJECTS}, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    return path


@pytest.fixture
def safe(state, tmp_path):
    """What the safetensors library makes of the state, in two files."""
    path = tmp_path / "safe"
    path.mkdir()
    halves = [dict(list(state.items())[number::2]) for number in range(2)]
    for number, half in enumerate(halves):
        safetensors.torch.save_file(half, path / f"model-{number}.safetensors")
    return path


def load(kind, path):
    """All tensors and objects, by readers that are not the converter's."""
    if kind == "ours":
        found = megatron_uring.open_checkpoint(path)
        return {
            key: found[key].read() if key in found.tensors else found[key]
            for key in found
            if key != megatron_uring.dcp.PLANNER_KEY
        }
    if kind == "torch_dist":
        reader = dcp.FileSystemReader(path)
        return dict(_load_state_dict_from_keys(storage_reader=reader))
    index = json.loads((path / "model.safetensors.index.json").read_text())
    found = {}
    for name in sorted(path.glob("*.safetensors")):
        here = safetensors.torch.load_file(name)
        assert all(index["weight_map"][key] == name.name for key in here)
        found.update(here)
    assert found.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in found.values())
    return found


def same(found, expected, bytes_of):
    """Tensors to the last bit, objects by their values."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if torch.is_tensor(value):
            assert found[key].dtype == value.dtype and found[key].shape == value.shape, key
            assert bytes_of(found[key]) == bytes_of(value), key
        else:
            assert repr(found[key]) == repr(value), key


DIRECTIONS = [
    (source, to)
    for source in ("ours", "torch_dist", "safe")
    for to in ("ours", "torch_dist", "safetensors")
    if not to.startswith(source)
]


@pytest.mark.parametrize(("source", "to"), DIRECTIONS)
def test_each_direction_gives_the_tensors_in_memory(
    source, to, state, request, tmp_path, bytes_of, world, config
):
    path = request.getfixturevalue(source)
    target = tmp_path / "target"
    done = convert(path, target, to, config=config, communicator=world)
    with_objects = source != "safe" and to != "safetensors"
    expected = {**state, **OBJECTS} if with_objects else state
    same(load(to, target), expected, bytes_of)
    assert (done.tensors, done.objects) == (len(state), 2 if with_objects else 0)
    assert done.nbytes == sum(tensor.nbytes for tensor in state.values())
    assert (done.source, done.destination) == (str(path), str(target))
    assert done.files == len(list(target.iterdir()))
    assert [note[:11] for note in done.notes] == (
        ["safetensors"] if source != "safe" and to == "safetensors" else []
    )
    assert not list(tmp_path.glob(".*")), "something was left beside it"
    if to == "ours":
        assert CliRunner().invoke(cli.main, ["verify", str(target)]).exit_code == 0


def test_what_lies_between_tensors_of_ours_is_zero(ours, safe, tmp_path, world):
    convert(safe, tmp_path / "t", "ours", config=CONFIG, communicator=world)
    index = megatron_uring.index.read_index(str(tmp_path / "t"))
    data = bytearray(next((tmp_path / "t").glob("data-*")).read_bytes())
    extents, regions = index.shard_extents, index.regions
    data[:4096] = bytes(4096)  # the superblock, which has its own rule
    for start, length in zip(extents.start.tolist(), extents.length.tolist(), strict=True):
        data[start : start + length] = bytes(length)
    assert not any(data[: regions.start[1:].min()])


def test_each_tensor_of_a_safetensors_file_is_aligned(ours, state, tmp_path, world):
    convert(ours, tmp_path / "t", "safetensors", communicator=world)
    (file,) = (tmp_path / "t").glob("*.safetensors")
    for one in safetensors_layout.read_header(Files(str(tmp_path / "t")), file.name):
        assert one.start % state[one.key].element_size() == 0, one


def test_there_and_back_again_is_the_same(ours, state, tmp_path, bytes_of, world):
    kinds = ["torch_dist", "safetensors", "ours", "safetensors", "torch_dist", "ours"]
    path = ours
    for number, kind in enumerate(kinds):
        convert(path, tmp_path / str(number), kind, config=CONFIG, communicator=world)
        path = tmp_path / str(number)
    same(load("ours", path), state, bytes_of)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_dtypes_that_safetensors_lacks_go_between_the_others_and_are_refused_by_name(
    random_tensor, save, tmp_path, bytes_of, world
):
    lacking = {"complex32", "complex128", "float8_e8m0fnu"}
    assert {*DTYPE_NAMES} - {*safetensors_layout.NAME_OF_DTYPE} == lacking
    state = {name: random_tensor(getattr(torch, name), (4, 3)) for name in lacking}
    save(state, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "dcp", "torch_dist", communicator=world)
    same(load("torch_dist", tmp_path / "dcp"), state, bytes_of)
    convert(tmp_path / "dcp", tmp_path / "back", "ours", communicator=world)
    same(load("ours", tmp_path / "back"), state, bytes_of)
    for name in lacking:
        with pytest.raises(UnsupportedError, match=f"'{name}'.*found {name}"):
            convert(
                tmp_path / "ours", tmp_path / "s", "safetensors", keys=[name], communicator=world
            )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "dcp", "ours"]


@pytest.mark.parametrize("key", ["__metadata__", "lone \ud800"])
def test_keys_that_safetensors_cannot_hold_are_refused(key, save, tmp_path, world):
    save({key: torch.ones(2)}, tmp_path / "ours")
    with pytest.raises(UnsupportedError, match="write tensor"):
        convert(tmp_path / "ours", tmp_path / "s", "safetensors", communicator=world)
    convert(tmp_path / "ours", tmp_path / "dcp", "torch_dist", communicator=world)
    assert load("torch_dist", tmp_path / "dcp")[key].tolist() == [1, 1]


def test_nested_states_of_dcp_keep_their_nesting(tmp_path, world):
    state = {"model": {"w": torch.ones(3)}, "layers": [{"b": torch.zeros(2)}, {"b": 5}]}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "a"), no_dist=True)
    convert(tmp_path / "a", tmp_path / "b", "ours", communicator=world)
    convert(tmp_path / "b", tmp_path / "c", "torch_dist", communicator=world)
    for found in (
        load("torch_dist", tmp_path / "c"),
        _load_state_dict_from_keys(storage_reader=megatron_uring.StorageReader(tmp_path / "b")),
    ):
        assert repr(found) == repr(state)


def test_a_piece_that_was_saved_transposed_is_read(tmp_path, world):
    state = {"t": torch.arange(12.0).reshape(3, 4).t(), "u": torch.arange(6)[::2]}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "a"), no_dist=True)
    convert(tmp_path / "a", tmp_path / "b", "safetensors", communicator=world)
    found = load("safetensors", tmp_path / "b")
    assert all(torch.equal(found[key], state[key]) for key in state)


def test_ranges_of_flattened_shards_get_their_own_shape_back(tmp_path, world):
    """As Megatron-Core up to 0.15 saves optimizer state: [4, 6] in shards of [2, 3], each cut."""
    whole = torch.arange(24.0).reshape(4, 6)
    described = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size((2, 2, 6)), [])
    results = []
    with open(tmp_path / "__0_0.distcp", "wb") as file:
        for row in range(2):
            for column in range(2):
                shard = whole[2 * row : 2 * row + 2, 3 * column : 3 * column + 3].reshape(-1)
                for start, stop in ((0, 2), (2, 6)):
                    offset, at = torch.Size((row, column, start)), file.tell()
                    size = torch.Size((1, 1, stop - start))
                    torch.save(shard[start:stop].clone().view(size), file)
                    described.chunks.append(ChunkStorageMetadata(offset, size))
                    info = dcp.filesystem._StorageInfo(file.name[-12:], at, file.tell() - at)
                    info.relative_path = "__0_0.distcp"
                    index = MetadataIndex("m", offset)
                    results.append(dcp.filesystem.WriteResult(index, 0, info))
    metadata = Metadata({"m": described})
    metadata.mcore_data = {"m": {"nd_reformulated_orig_global_shape": (4, 6)}}
    dcp.FileSystemWriter(tmp_path).finish(metadata, [results])
    convert(tmp_path, tmp_path.parent / "flat ours", "ours", communicator=world)
    found = megatron_uring.open_checkpoint(tmp_path.parent / "flat ours")["m"]
    assert torch.equal(found.read(), whole)
    assert found.shards == 12  # 2 elements are a part of a row, the other 4 a row and a part
    convert(tmp_path, tmp_path.parent / "flat safe", "safetensors", communicator=world)
    assert torch.equal(load("safetensors", tmp_path.parent / "flat safe")["m"], whole)


def test_the_common_state_and_metadata_of_megatron_go_along(save, tmp_path, world):
    """As Megatron writes them; with Megatron itself: tests/megatron/test_interchange.py."""
    common = {"iteration": 3, "args": {"lr": 0.5, "betas": (0.9, 0.99), "t": torch.ones(1)}}
    data = io.BytesIO()
    torch.save(common, data)
    state = providers.CompositeProvider(
        [
            providers.TensorProvider([("w", next(cut(torch.ones(3))))]),
            providers.ObjectProvider({"rng/shard_0_1": {"seed": 5}}),
        ]
    )
    save(state, tmp_path / "a", common=data.getvalue())
    (tmp_path / "a" / "metadata.json").write_text(
        '{"sharded_backend": "megatron_uring", "sharded_backend_version": 1, "more": 2}'
    )
    convert(tmp_path / "a", tmp_path / "b", "torch_dist", communicator=world)
    assert json.loads((tmp_path / "b" / "metadata.json").read_text()) == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "more": 2,
    }
    assert (tmp_path / "b" / "common.pt").read_bytes() == data.getvalue()
    assert load("torch_dist", tmp_path / "b")["rng/shard_0_1"] == [{"seed": 5}]
    convert(tmp_path / "b", tmp_path / "c", "ours", communicator=world)
    found = megatron_uring.open_checkpoint(tmp_path / "c")
    assert found["rng/shard_0_1"] == {"seed": 5}
    assert found.common() == common
    assert (tmp_path / "c" / "common.pt").read_bytes() == data.getvalue()
    convert(tmp_path / "b", tmp_path / "d", "safetensors", communicator=world)
    index = json.loads((tmp_path / "d" / "model.safetensors.index.json").read_text())
    assert json.loads(index["metadata"]["common"]) == {
        "iteration": 3,
        "args": {"lr": 0.5, "betas": [0.9, 0.99]},
    }


def test_the_common_state_of_newer_megatron_is_one_again(tmp_path, world):
    """From 0.19 on it is an object beside the tensors, a list of one element as they all are."""
    path = tmp_path / "a"
    state = {"w": torch.ones(3), "common_state/shard_0_1": [{"iteration": 3}]}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), planner=planner, no_dist=True)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    convert(path, tmp_path / "b", "ours", communicator=world)
    found = megatron_uring.open_checkpoint(tmp_path / "b")
    assert found.common() == {"iteration": 3} and list(found) == ["w"]
    convert(tmp_path / "b", tmp_path / "c", "torch_dist", communicator=world)
    assert torch.load(tmp_path / "c" / "common.pt", weights_only=True) == {"iteration": 3}


# -------------------------------------------------------------------------------------------------
# options


def test_keys_and_file_size_are_as_asked_for(ours, state, tmp_path, world):
    done = convert(
        ours,
        tmp_path / "s",
        "safetensors",
        keys=["dtype/*", "large", "long row", "rng"],
        max_file_bytes=4_000_000,
        communicator=world,
    )
    found = load("safetensors", tmp_path / "s")
    assert found.keys() == {key for key in state if key.startswith(("dtype/", "large", "long"))}
    names = sorted(path.name for path in (tmp_path / "s").glob("*.safetensors"))
    assert names == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert done.notes == ("safetensors holds no objects: 1 left out (rng)",)
    convert(ours, tmp_path / "d", "torch_dist", keys=["s*"], communicator=world)
    assert load("torch_dist", tmp_path / "d").keys() == {"scalar", "step"}


def test_what_cannot_be_done_is_refused_and_leaves_nothing(ours, safe, tmp_path, world):
    def refused(error, text, *arguments, **options):
        with pytest.raises(error, match=text):
            convert(*arguments, communicator=world, **options)

    target = tmp_path / "t"
    refused(UnsupportedError, "a source that is not ours", ours, target, "ours")
    refused(UnsupportedError, "a source that is not safe", safe, target, "safetensors")
    refused(UnsupportedError, "found hdf5", ours, target, "hdf5")
    refused(MissingKeyError, "nothing", ours, target, "torch_dist", keys=["nothing"])
    refused(UnsupportedError, "a list of patterns", ours, target, "torch_dist", keys="large")
    refused(UnsupportedError, "max_file_bytes", ours, target, "safetensors", max_file_bytes=0)
    refused(NotACheckpointError, "no such directory", tmp_path / "none", target, "ours")
    refused(NotACheckpointError, r"\.metadata or \*", tmp_path, target, "ours")
    refused(StorageError, "No such file", ours, tmp_path / "none" / "t", "torch_dist")
    refused(StorageError, "nothing is overwritten", ours, safe, "torch_dist")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "safe"]
    target.mkdir()
    convert(ours, target, "torch_dist", communicator=world)
    assert (target / ".metadata").exists()


def test_a_save_root_gives_its_newest_checkpoint(save, tmp_path, world):
    for number in (1, 2):
        save({"w": torch.full((2,), number)}, tmp_path / "run" / f"iter_000000{number}")
    convert(tmp_path / "run", tmp_path / "t", "torch_dist", communicator=world)
    assert load("torch_dist", tmp_path / "t")["w"].tolist() == [2, 2]


def test_the_command_says_what_it_did(ours, safe, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_URING_ENGINE", "posix")

    def run(*arguments):
        return CliRunner().invoke(cli.main, ["convert", *map(str, arguments)])

    done = run(ours, tmp_path / "a", "--to", "safetensors", "--keys", "dtype/*", "--keys", "rng")
    assert done.exit_code == 0, done.output
    assert "ours to safetensors: " in done.stdout and "read back and equal" in done.stdout
    assert "note: safetensors holds no objects: 1 left out (rng)" in done.stdout
    one_file = next(safe.glob("*.safetensors"))
    done = run(one_file, tmp_path / "b", "--to", "ours", "--json")
    found = json.loads(done.stdout)
    assert found["source_format"] == "safetensors" and found["tensors"] > 5, found
    done = run(ours, tmp_path / "b", "--to", "torch_dist")
    assert done.exit_code == 1 and "nothing is overwritten" in done.stderr


# -------------------------------------------------------------------------------------------------
# damage and malice


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def small(tmp_path):
    path = tmp_path / "evil"
    state = {"w": torch.arange(100_000), "o": ("k", 1)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    return path


def rewrite(path, change):
    """Change what ``.metadata`` holds."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def replaced_tensor(path, value):
    """Another archive in the place of the tensor's."""
    with open(path / "evil.distcp", "wb") as file:
        torch.save(value, file)
        length = file.tell()

    def change(metadata):
        for index in metadata.storage_data:
            if index.fqn == "w":
                info = dcp.filesystem._StorageInfo("evil.distcp", 0, length)
                metadata.storage_data[index] = info

    rewrite(path, change)


@pytest.mark.parametrize("where", ["metadata", "planner", "tensor", "object", "common"])
@pytest.mark.parametrize("to", ["ours", "safetensors"])
def test_no_code_of_a_checkpoint_is_run(where, to, tmp_path, world):
    path, touched = small(tmp_path), tmp_path / "touched"
    evil = Touch(touched)
    if where == "metadata":
        (path / ".metadata").write_bytes(pickle.dumps(evil))
    elif where == "planner":
        rewrite(path, lambda metadata: metadata.planner_data.update(w=evil))
    elif where == "tensor":
        replaced_tensor(path, evil)
    elif where == "object":
        data = io.BytesIO()
        torch.save(evil, data)
        with open(path / "o.distcp", "wb") as file:
            file.write(data.getvalue())

        def change(metadata):
            info = dcp.filesystem._StorageInfo("o.distcp", 0, len(data.getvalue()))
            metadata.storage_data[MetadataIndex("o")] = info

        rewrite(path, change)
    else:
        torch.save({"step": evil}, path / "common.pt")
        (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        rewrite(path, lambda metadata: metadata.state_dict_metadata.pop("o"))
    if where in ("metadata", "planner", "tensor") or (where, to) == ("object", "ours"):
        refused = r"posix\.mkdir|Weights only load failed"
        with pytest.raises(megatron_uring.CheckpointError, match=refused):
            convert(path, tmp_path / "t", to, communicator=world)
        assert sorted(one.name for one in tmp_path.iterdir()) == ["evil"]
    else:
        done = convert(path, tmp_path / "t", to, communicator=world)
        # what no format of ours looks into goes along as it is, and that is said
        assert where == "object" or any("posix.mkdir" in note for note in done.notes)
        assert not any("weights_only" in note for note in done.notes), "advice to run it"
    assert not touched.exists()


def test_a_path_that_leads_out_of_the_source_is_refused(tmp_path, world):
    path = small(tmp_path)

    def change(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = "../" + info.relative_path

    rewrite(path, change)
    with pytest.raises(UnsupportedError, match="a file beside it"):
        convert(path, tmp_path / "t", "ours", communicator=world)


@pytest.mark.parametrize("kept", [0, 10, 5000, 200_000])
def test_a_distcp_file_that_was_cut_is_an_error_that_names_it(kept, tmp_path, world):
    path = small(tmp_path)
    os.truncate(path / "__0_0.distcp", kept)
    for to in ("ours", "safetensors"):
        with pytest.raises(CorruptionError, match=r"__0_0\.distcp"):
            convert(path, tmp_path / "t", to, keys=["w"], communicator=world)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["evil"]


@pytest.mark.parametrize("kept", [0, 5, 100, -1, 1])
def test_a_safetensors_file_of_another_length_is_an_error_that_names_it(kept, safe, tmp_path):
    file = safe / "model-0.safetensors"
    os.truncate(file, kept if kept >= 0 and kept != 1 else file.stat().st_size + kept)
    with pytest.raises(CorruptionError, match=r"model-0\.safetensors"):
        convert(safe, tmp_path / "t", "torch_dist", config=CONFIG)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["safe"]


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["large"].update(data_offsets=[0, 8]),
        lambda header: header["large"].update(shape=[-1, 5]),
        lambda header: header["large"].update(dtype="F7"),
        lambda header: header["large"].pop("shape"),
        lambda header: header.pop("large"),
        lambda header: header["one"].update(data_offsets=header["large"]["data_offsets"]),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(change, random_tensor, tmp_path, world):
    state = {name: random_tensor(torch.int8, (9,)) for name in ("large", "one", "two")}
    safetensors.torch.save_file(state, tmp_path / "a")
    data = (tmp_path / "a").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file = tmp_path / "b.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises((CorruptionError, UnsupportedError), match=r"b\.safetensors"):
        convert(file, tmp_path / "t", "torch_dist", communicator=world)


def test_a_piece_that_is_missing_is_found_before_anything_is_written(tmp_path, world):
    path = small(tmp_path)

    def change(metadata):
        metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size((99_999,))

    rewrite(path, change)
    with pytest.raises(CorruptionError, match="'w'"):
        convert(path, tmp_path / "t", "ours", communicator=world)


@pytest.mark.parametrize("to", ["ours", "torch_dist", "safetensors"])
def test_what_changes_between_write_and_read_back_is_found(to, ours, safe, tmp_path, monkeypatch):
    forget = convert_module.__globals__["_forget_cached"]

    def damaged(job):
        files = sorted(Path(job.directory).iterdir(), key=lambda one: one.stat().st_size)
        with open(files[-1], "r+b") as file:
            file.seek(files[-1].stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        forget(job)

    monkeypatch.setitem(convert_module.__globals__, "_forget_cached", damaged)
    with pytest.raises(CorruptionError, match=r"large|long row"):
        convert(safe if to == "ours" else ours, tmp_path / "t", to, config=CONFIG)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["ours", "safe"]


def test_a_common_state_that_changes_before_it_is_read_back_is_found(
    save, tmp_path, monkeypatch, world
):
    data = io.BytesIO()
    torch.save({"iteration": 3}, data)
    save({"w": torch.ones(2)}, tmp_path / "a", common=data.getvalue())

    def damaged(job):
        with open(job.path("common.pt"), "ab") as file:
            file.write(b"more")

    monkeypatch.setitem(convert_module.__globals__, "_forget_cached", damaged)
    with pytest.raises(megatron_uring.CheckpointError, match="read back"):
        convert(tmp_path / "a", tmp_path / "b", "torch_dist", communicator=world)
    assert not (tmp_path / "b").exists()


KILLED = """
import os, signal, sys
from megatron_uring import Config, _engine
from megatron_uring.convert import convert, job, parts
source, target, to, when = sys.argv[1:]
parts.WINDOW_BYTES = 1 << 20
if when == "rename":
    _engine.inject_fault("rename", "kill", path_contains=".converting-")
else:
    moved, left = job.Job.moved, [int(when)]
    def killed(self, count):
        moved(self, count)
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
    job.Job.moved = killed
convert(source, target, to, config=Config(engine="posix", slab_bytes=1 << 20, slab_count=2))
"""


@pytest.mark.fault
@pytest.mark.parametrize("when", ["2", "rename"])
@pytest.mark.parametrize("to", ["ours", "torch_dist", "safetensors"])
def test_a_conversion_that_is_killed_leaves_no_destination(to, when, ours, safe, tmp_path):
    source, target = (safe if to == "ours" else ours), tmp_path / "t"
    command = [sys.executable, "-c", KILLED, str(source), str(target), to, when]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not target.exists()
    assert [one.name[:14] for one in tmp_path.glob(".*")] == [".t.converting-"]


@pytest.mark.fault
@pytest.mark.parametrize("to", ["ours", "torch_dist", "safetensors"])
def test_a_full_disk_leaves_nothing_behind(to, save, tmp_path, small_disk, world, posix):
    big = {"w": torch.arange(6 << 20, dtype=torch.float32), "o": {"step": 3}}
    save(big, tmp_path / "ours")
    source = tmp_path / "ours"
    if to == "ours":
        source = tmp_path / "theirs"
        convert(tmp_path / "ours", source, "torch_dist", communicator=world)
    disk = small_disk("8M")
    with pytest.raises(megatron_uring.StorageError, match="No space left"):
        convert(source, disk / "t", to, config=posix, communicator=world)
    assert list(disk.iterdir()) == []
    convert(source, tmp_path / "t", to, config=posix, communicator=world)


MEMORY = """
import sys
from megatron_uring import Config
from megatron_uring.convert import convert, parts
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024
config = Config(engine="posix", slab_bytes=1 << 20, slab_count=4)
parts.WINDOW_BYTES = 16 << 20
small, folder, *kinds = sys.argv[1:]
for number, to in enumerate(kinds):  # what is imported and allocated once comes first
    convert(small, f"{folder}/small{number}", to, config=config)
    small = f"{folder}/small{number}"
begin = peak()
source = f"{folder}/large"
for number, to in enumerate(kinds):
    convert(source, f"{folder}/large{number}", to, config=config)
    source = f"{folder}/large{number}"
print(peak() - begin)
"""


def test_memory_does_not_grow_with_the_state(save, tmp_path):
    """Of 160 MB, half of it one tensor, with windows of 16 MiB."""
    save({"one": torch.ones(10)}, tmp_path / "small")
    save({"one": torch.ones(20_000_000), "two": torch.ones(8, 2_500_000)}, tmp_path / "large")
    kinds = ["torch_dist", "ours", "safetensors", "ours"]
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "small"), str(tmp_path), *kinds]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100 << 20


@pytest.mark.mpi
def test_two_ranks_share_the_work_and_their_errors(tmp_path):
    done = run_mpi(2, PROGRAMS / "convert_ranks.py", str(tmp_path), timeout_s=100)
    assert done.output.count("passed") == 2, done.output


# -------------------------------------------------------------------------------------------------
# planning


def table(shapes):
    return tensors.describe(
        [str(number) for number in range(len(shapes))],
        [torch.empty(shape, dtype=torch.int16) for shape in shapes],
        shapes,
        [(0,) * len(shape) for shape in shapes],
    )[0]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=5), st.integers(2, 40))
def test_pieces_are_small_boxes_in_order_and_cover_their_tensor(shapes, most):
    pieces = parts.row_pieces(table(shapes), most)
    assert (pieces.lengths() <= max(most, 2)).all()
    for number, shape in enumerate(shapes):
        count = np.zeros(shape, int)
        order = np.arange(count.size).reshape(shape)
        seen = []
        for row in np.flatnonzero(pieces.tensor == number):
            ndim = len(shape)
            box = tuple(
                slice(a, a + b)
                for a, b in zip(pieces.offset[row, :ndim], pieces.shape[row, :ndim], strict=True)
            )
            count[box] += 1
            seen += order[box].reshape(-1).tolist()
        assert (count == 1).all() and seen == list(range(count.size))


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 5))
def test_ranks_get_neighbouring_things_and_about_equal_shares(lengths, size):
    ranks = parts.share(np.array(lengths, np.int64), size)
    assert (np.diff(ranks) >= 0).all() and all(0 <= rank < size for rank in ranks)
    own = np.bincount(ranks, np.array(lengths), size) if lengths else np.zeros(size)
    assert own.max() <= sum(lengths) / size + max(lengths, default=0)


def test_a_catalog_of_bytes_alone_can_be_converted(tmp_path, world):
    dcp.save({"o": 5}, storage_writer=dcp.FileSystemWriter(tmp_path / "a"), no_dist=True)
    convert(tmp_path / "a", tmp_path / "b", "ours", communicator=world)
    assert megatron_uring.restore(tmp_path / "b") == {"o": 5}
