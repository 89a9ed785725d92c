"""view: what plain HDF5 reads through it, in a process that does not know us."""

import json
import os
import subprocess
import sys

import h5py
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import megatron_uring
from megatron_uring import Config, cli, providers
from megatron_uring.errors import NotACheckpointError, StorageError
from megatron_uring.layout import DTYPE_NAMES
from megatron_uring.view import dataset_names, write_view

# Prints every dataset's path, type and elements; the elements as the bytes that numpy has of them.
READER = """
import json, sys
import h5py
path = sys.argv[1]
assert not any(name.startswith(("megatron", "torch")) for name in sys.modules)
found = {}
with h5py.File(path, "r") as file:
    def read(name, each):
        if isinstance(each, h5py.Dataset):
            found[name] = [str(each.dtype), list(each.shape), each[()].tobytes().hex(),
                           each.attrs["dtype"].decode(), str(each.attrs.get("key", ""))]
    file["tensors"].visititems(lambda name, each: read(name, each))
    file["objects"].visititems(lambda name, each: read("objects:" + name, each))
print(json.dumps(found))
"""
READS_AS = {
    "bfloat16": torch.float32,
    "float8_e5m2": torch.float16,
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), torch.uint8
    ),
}
HOSTILE = ["a", "a/b", "a/b/c", "", ".", "..", "../x", "x/./y", "//", "/", "50%", "%2E", "%"]
HOSTILE += ["a%", "ключ 🔑", "lone \ud800", "n\0l", "k" * 4096, "l" * 70_000, "l" * 70_001]


def read(path, **environment):
    """All datasets of a view."""
    done = subprocess.run(
        [sys.executable, "-c", READER, str(path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("shards", [1, 4])
def test_every_dtype_is_read_as_it_is(shards, random_tensor, save, tmp_path, bytes_of):
    state, cut = {}, []
    for seed, name in enumerate(DTYPE_NAMES):
        state[name] = tensor = random_tensor(getattr(torch, name), (6, 5), seed)
        if name in ("bfloat16", "float8_e5m2"):  # of a NaN HDF5 keeps that it is one, and no more
            state[name] = tensor = tensor.float().nan_to_num(1.5).to(tensor.dtype)
        for row in (0, 2) if shards == 4 else (0,):
            for column in (0, 3) if shards == 4 else (0,):
                height, width = ((4 if row else 2), (2 if column else 3)) if shards == 4 else (6, 5)
                box = tensor[row : row + height, column : column + width]
                cut.append((name, providers.Shard(box, (6, 5), (row, column))))
    save(providers.TensorProvider(cut), tmp_path / "c")
    done = write_view(tmp_path / "c")
    assert (done.tensors, done.shards) == (len(state), shards * len(state))
    assert set(done.as_bytes) == {n for n, kind in READS_AS.items() if kind is torch.uint8}
    found = read(done.path)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        dtype, shape, data, attribute, _ = found[name]
        assert shape == [6, 5] and attribute == name
        kind = READS_AS.get(name)
        as_read = tensor if kind in (None, torch.uint8) else tensor.to(kind)
        assert bytes.fromhex(data) == bytes_of(as_read), (name, dtype)
    assert found["bool"][0] == "bool" and found["complex64"][0] == "complex64"


def test_infinities_subnormals_and_nan_of_the_short_floats(save, tmp_path):
    values = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 2.0**-16, 1e-39, 57344.0]
    state = {
        "b": torch.tensor(values).bfloat16(),
        "f": torch.tensor(values).to(torch.float8_e5m2),
    }
    save(state, tmp_path / "c")
    with h5py.File(write_view(tmp_path / "c").path, "r") as file:
        for key, tensor in state.items():
            np.testing.assert_array_equal(file["tensors"][key][()], tensor.float().numpy())
            signs = np.signbit(file["tensors"][key][:2])
            assert signs.tolist() == [False, True]


def test_scalars_empty_tensors_and_objects(save, tmp_path):
    shard = providers.Shard
    tensors = providers.TensorProvider(
        [
            ("scalar", shard(torch.tensor(2.5), (), ())),
            ("empty", shard(torch.empty(0, 3), (0, 3), (0, 0))),
            ("half empty", shard(torch.ones(2, 3), (2, 3), (0, 0))),
            ("half empty", shard(torch.empty(0, 3), (2, 3), (2, 0))),
        ]
    )
    objects = providers.ObjectProvider({"rng/shard_0_1": {"seed": 3}})
    save(providers.CompositeProvider([tensors, objects]), tmp_path / "c")
    found = read(write_view(tmp_path / "c").path)
    assert found["scalar"][:3] == ["float32", [], torch.tensor(2.5).numpy().tobytes().hex()]
    assert found["empty"][:3] == ["float32", [0, 3], ""]
    assert bytes.fromhex(found["half empty"][2]) == torch.ones(2, 3).numpy().tobytes()
    kind, shape, data, attribute, _ = found["objects:rng/shard_0_1"]
    assert (kind, attribute) == ("uint8", "torch.save archive") and shape == [len(data) // 2]
    (tmp_path / "o.pt").write_bytes(bytes.fromhex(data))
    assert torch.load(tmp_path / "o.pt", weights_only=True) == {"seed": 3}


def test_every_key_has_its_dataset_and_is_told_by_it(save, tmp_path):
    given = [
        (key, providers.Shard(torch.tensor([number]), (1,), (0,)))
        for number, key in enumerate(HOSTILE)
    ]
    save(providers.TensorProvider(given), tmp_path / "c")
    done = write_view(tmp_path / "c")
    names = dataset_names(HOSTILE)
    assert done.tensors == len(HOSTILE) == len(set(names))
    with h5py.File(done.path, "r") as file:
        for number, (key, name) in enumerate(zip(HOSTILE, names, strict=True)):
            dataset = file[f"tensors/{name}"]
            assert dataset[()].tolist() == [number]
            told = dataset.attrs.get("key", name)
            if isinstance(told, np.void):
                told = told.tobytes().decode("utf-8", "surrogatepass")
            assert told == key
        assert set(file) == {"tensors", "objects", "shards"}


@given(st.lists(st.text(st.sampled_from("a./%\0\ud800"), max_size=5), unique=True))
def test_names_are_different_and_none_is_a_group_of_another(keys):
    names = dataset_names(keys)
    assert len(set(names)) == len(names)
    groups = {name[:at] for name in names for at, letter in enumerate(name) if letter == "/"}
    assert not groups & set(names)
    for name in names:
        parts = name.split("/")
        assert not {"", ".", ".."} & set(parts) and "\0" not in name and name.encode()


def test_the_view_may_lie_elsewhere_and_move_if_paths_are_absolute(save, tmp_path, monkeypatch):
    save({"w": torch.arange(5)}, tmp_path / "run: a, b" / "iter_0000003")
    done = write_view(tmp_path / "run: a, b", tmp_path / "v.h5")
    assert done.directory.endswith("iter_0000003")
    os.rename(done.path, tmp_path / "w.h5")
    expected = torch.arange(5).numpy().tobytes().hex()
    assert read(tmp_path / "w.h5")["w"][2] == expected


def test_relative_paths_go_with_the_checkpoint_where_readers_are_told(save, tmp_path):
    save({"w": torch.arange(5)}, tmp_path / "c")
    write_view(tmp_path / "c", relative=True)
    write_view(tmp_path / "c", tmp_path / "beside.h5", relative=True)
    (tmp_path / "moved").mkdir()
    for name in ("c", "beside.h5"):
        os.rename(tmp_path / name, tmp_path / "moved" / name)
    expected = torch.arange(5).numpy().tobytes().hex()
    for view in ("c/view.h5", "beside.h5"):
        found = read(tmp_path / "moved" / view, HDF5_EXTFILE_PREFIX="${ORIGIN}")
        assert found["w"][2] == expected
        with pytest.raises(AssertionError, match="unable to open external raw data file"):
            read(tmp_path / "moved" / view)


def test_an_older_view_is_replaced_and_nothing_else_is(save, tmp_path):
    save({"w": torch.zeros(5)}, tmp_path / "c")
    path = tmp_path / "c" / "view.h5"
    for _ in range(2):
        save({"w": torch.ones(5)}, tmp_path / "c")
        write_view(tmp_path / "c")
        assert read(path)["w"][2] == torch.ones(5).numpy().tobytes().hex()
    save({"w": torch.ones(6)}, tmp_path / "c")  # the subfiles of the old view are gone
    with pytest.raises(AssertionError, match="unable to open external raw data file"):
        read(path)
    index = (tmp_path / "c" / "index.h5").read_bytes()
    (tmp_path / "text").write_text("not ours")
    for other in (tmp_path / "c" / "index.h5", tmp_path / "text", tmp_path / "c"):
        with pytest.raises(StorageError, match="another file"):
            write_view(tmp_path / "c", other)
    assert (tmp_path / "c" / "index.h5").read_bytes() == index
    with pytest.raises(StorageError, match="nowhere"):
        write_view(tmp_path / "c", tmp_path / "nowhere" / "v.h5")
    with pytest.raises(NotACheckpointError):
        write_view(tmp_path / "none")
    assert not [one for one in (tmp_path / "c").iterdir() if ".writing-" in one.name]
    assert megatron_uring.restore(tmp_path / "c")["w"].shape == (6,)


def test_the_command_names_what_it_wrote(save, tmp_path):
    state = {"w": torch.ones(3), "f": torch.ones(2).to(torch.float8_e4m3fn), "step": 3}
    save(state, tmp_path / "c", config=Config(engine="posix", slab_count=2))
    done = CliRunner().invoke(cli.main, ["view", str(tmp_path / "c")])
    assert done.exit_code == 0, done.output
    assert (
        "2 tensors in 2 shards, 1 objects: " in done.stdout and "shown as bytes: f" in done.stdout
    )
    output = str(tmp_path / "v.h5")
    done = CliRunner().invoke(cli.main, ["view", str(tmp_path / "c"), "--output", output])
    assert done.exit_code == 0 and os.path.exists(output)
    done = CliRunner().invoke(cli.main, ["view", str(tmp_path)])
    assert done.exit_code == 1 and done.stderr.startswith("megatron-uring: ")
