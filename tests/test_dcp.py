"""torch.distributed.checkpoint over our storage: on real ranks, and in this process alone."""

from __future__ import annotations

import io
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

sys.path.insert(0, str(Path(__file__).parent / "mpi"))

from launch import PROGRAMS, run_processes

import megatron_uring
from megatron_uring import Config, StorageReader, StorageWriter, UnsupportedError, cli, providers
from megatron_uring.dcp import PLANNER_KEY

CONFIG = Config(engine="posix", slab_bytes=1 << 20, slab_count=2)
STATE = {
    "model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.tensor(1.5)},
    "layers": [{"w": torch.ones(2)}, {"w": torch.zeros(2)}],
    "step": 3,
    "note": "a/b",
}


class Custom:
    def __init__(self, number):
        self.number = number


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.fixture
def directory(tmp_path):
    dcp.save(STATE, storage_writer=StorageWriter(tmp_path / "c", config=CONFIG))
    return tmp_path / "c"


def failure(error):
    """Of rank 0, in what DCP made of it."""
    return str(error.value.failures[0][0])


@pytest.mark.slow
def test_dtensors_and_fsdp_on_four_ranks_and_then_on_two(tmp_path):
    done = run_processes(1, PROGRAMS / "dcp_states.py", str(tmp_path), timeout_s=200)
    assert done.output.count("passed write") == 4, done.output
    assert done.output.count("passed elsewhere") == 2, done.output
    for name in ("dcp", "own", "async", "fsdp", "own tp"):
        assert CliRunner().invoke(cli.main, ["verify", str(tmp_path / name)]).exit_code == 0
    whole = megatron_uring.restore(tmp_path / "own")["model"]  # one process, without any group
    into = {"model": {key: torch.empty_like(tensor) for key, tensor in whole.items()}}
    dcp.load(into, storage_reader=StorageReader(tmp_path / "dcp"), no_dist=True)
    for key, tensor in whole.items():
        assert tensor.numel() == 0 or tensor.any()
        assert torch.equal(into["model"][key], tensor), key


def test_a_state_comes_back_as_from_torchs_own_storage(directory, tmp_path):
    dcp.save(STATE, storage_writer=dcp.FileSystemWriter(tmp_path / "torch"))
    found = _load_state_dict_from_keys(storage_reader=StorageReader(directory, config=CONFIG))
    expected = _load_state_dict_from_keys(storage_reader=dcp.FileSystemReader(tmp_path / "torch"))
    flat, wanted = dict(providers.flatten(found)), dict(providers.flatten(expected))
    assert flat.keys() == wanted.keys() == dict(providers.flatten(STATE)).keys()
    for key, value in wanted.items():
        assert torch.equal(flat[key], value) if torch.is_tensor(value) else flat[key] == value
    ours = StorageReader(directory).read_metadata()
    theirs = dcp.FileSystemReader(tmp_path / "torch").read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data


def test_it_is_a_checkpoint_of_ours(directory):
    state = megatron_uring.restore(directory)
    planner_data = state.pop(PLANNER_KEY)["planner_data"]
    assert planner_data["layers.0.w"] == ("layers", 0, "w")
    assert state.keys() == planner_data.keys()
    assert torch.equal(state["model.w"], STATE["model"]["w"]) and state["note"] == "a/b"
    subfile = next(directory.glob("data-*"))
    piece = (
        StorageReader(directory)
        .read_metadata()
        .storage_data[dcp.metadata.MetadataIndex("model.w", (0, 0))]
    )
    data = (directory / piece.relative_path).read_bytes()[piece.offset :][: piece.length]
    assert piece.relative_path == subfile.name
    assert data == STATE["model"]["w"].numpy().tobytes()


def test_a_part_is_loaded_and_what_is_missing_stays_where_that_is_allowed(directory):
    into = {"model": {"w": torch.zeros(3, 4), "new": torch.full((2,), 7.0)}}
    with pytest.raises(CheckpointException, match=r"model\.new"):
        dcp.load(into, storage_reader=StorageReader(directory))
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(into, storage_reader=StorageReader(directory), planner=planner)
    assert torch.equal(into["model"]["w"], STATE["model"]["w"])
    assert into["model"]["new"].tolist() == [7.0, 7.0]


def test_dtypes_are_converted_as_dcp_does_unless_the_config_says_no(directory):
    into = {"model": {"w": torch.zeros(3, 4, dtype=torch.bfloat16)}}
    dcp.load(into, storage_reader=StorageReader(directory))
    assert torch.equal(into["model"]["w"].float(), STATE["model"]["w"])
    with pytest.raises(CheckpointException) as error:
        dcp.load(into, storage_reader=StorageReader(directory, config=CONFIG))
    assert "dtype bfloat16, found float32" in failure(error)


def test_what_needs_code_is_refused_when_it_is_saved(tmp_path):
    state = {"a": {"custom": Custom(5)}}
    with pytest.raises(CheckpointException) as error:
        dcp.save(state, storage_writer=StorageWriter(tmp_path / "c", config=CONFIG))
    assert "'a.custom'" in failure(error) and f"class {__name__}.Custom" in failure(error)
    allowed = replace(CONFIG, allowed_globals=(f"{__name__}.Custom",))
    dcp.save(state, storage_writer=StorageWriter(tmp_path / "c", config=allowed))
    into = {"a": {"custom": None}}
    with pytest.raises(CheckpointException) as error:
        dcp.load(into, storage_reader=StorageReader(tmp_path / "c", config=CONFIG))
    assert "'a.custom'" in failure(error)
    dcp.load(into, storage_reader=StorageReader(tmp_path / "c", config=allowed))
    assert into["a"]["custom"].number == 5


def test_loading_runs_no_code_of_a_checkpoint(save, tmp_path):
    """DCP's planner unpickles whatever the storage gives it."""
    data, touched = io.BytesIO(), tmp_path / "touched"
    torch.save(Touch(touched), data)
    safe = providers.ObjectProvider({"evil": 1}).collect()
    save(providers.Given(replace(safe, objects=(data.getvalue(),))), tmp_path / "c")
    into = {"evil": 0}
    with pytest.raises(CheckpointException) as error:
        dcp.load(into, storage_reader=StorageReader(tmp_path / "c"))
    assert "'evil'" in failure(error)
    assert not touched.exists() and into == {"evil": 0}


def test_what_our_own_save_wrote_is_loaded_flat(save, tmp_path):
    save({"model": {"w": torch.arange(3)}, "step": 4}, tmp_path / "c")
    into = {"model/w": torch.zeros(3, dtype=torch.int64), "step": 0}
    dcp.load(into, storage_reader=StorageReader(tmp_path / "c"))
    assert into["model/w"].tolist() == [0, 1, 2] and into["step"] == 4


def test_the_directory_may_come_with_each_call(tmp_path):
    writer, reader = StorageWriter(config=CONFIG), StorageReader()
    for number in range(2):
        state = {"a": torch.full((2,), number)}
        dcp.save(state, storage_writer=writer, checkpoint_id=tmp_path / str(number))
    for number in range(2):
        into = {"a": torch.zeros(2, dtype=torch.int64)}
        dcp.load(into, storage_reader=reader, checkpoint_id=tmp_path / str(number))
        assert into["a"].tolist() == [number, number]
    with pytest.raises(CheckpointException, match="use StorageReader"):
        dcp.load({"a": torch.zeros(2)}, storage_reader=StorageReader())


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path):
    with pytest.raises(CheckpointException, match=r"index\.h5"):
        dcp.load({"a": torch.zeros(2)}, storage_reader=StorageReader(tmp_path))


def test_a_process_of_its_own_is_refused():
    with pytest.raises(UnsupportedError, match=r"AsyncCheckpointerType\.THREAD"):
        pickle.dumps(StorageWriter("somewhere"))
