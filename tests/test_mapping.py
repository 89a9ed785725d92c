"""open_checkpoint: a part of a tensor equals that part of it in memory, and little else is read."""

import itertools
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_uring
from megatron_uring import Config, Shard, checkpoint, open_checkpoint, providers
from megatron_uring.comm import SingleCommunicator
from megatron_uring.errors import (
    CheckpointError,
    CorruptionError,
    MissingKeyError,
    NotACheckpointError,
    StateMismatchError,
    UnsupportedError,
)
from megatron_uring.layout import DTYPE_NAMES, subfile_name

sys.path.insert(0, str(Path(__file__).parent / "mpi"))
from launch import run_mpi

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
POSIX = Config(engine="posix", slab_bytes=MIB, slab_count=2)
DTYPES = [name for name in DTYPE_NAMES if hasattr(torch, name)]


def cells(whole, *edges):
    """`whole` cut at `edges` along each dimension, as shards; some of them are empty."""
    axes = [[0, *cut, size] for cut, size in zip(edges, whole.shape, strict=True)]
    boxes = [[]]
    for axis in axes:
        boxes = [[*box, pair] for box in boxes for pair in itertools.pairwise(axis)]
    for box in boxes:
        part = whole[tuple(slice(low, high) for low, high in box)]
        yield Shard(part, tuple(whole.shape), tuple(low for low, _ in box))


TENSORS = {
    "layers/weight": torch.arange(7 * 6 * 10, dtype=torch.float32).reshape(7, 6, 10),
    "model.layers.norm": torch.arange(40, dtype=torch.int64).reshape(8, 5),
    "line": torch.arange(300).to(torch.uint8),
    "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
    "empty": torch.empty(3, 0, 2),
}
CUTS = {
    "layers/weight": ([2, 2, 3], [5], [1, 7]),
    "model.layers.norm": ([], [2]),
    "line": ([17, 101],),
    "scalar": (),
    "empty": ([1], [], []),
}
OBJECTS = {"rng/0": {"seed": 1, (1, 2): np.arange(3)}, "rng/1": None, "step": 7}


def save_flat(tensors, objects, directory):
    """Under these keys as they are; tensors cut as `CUTS` says. By one rank."""
    shards = [
        (key, shard)
        for key, whole in tensors.items()
        for shard in cells(whole, *CUTS.get(key, [[]] * whole.ndim))
    ]
    state = [providers.TensorProvider(shards), providers.ObjectProvider(objects)]
    world = SingleCommunicator(30.0, "test", "host")
    megatron_uring.save(
        providers.CompositeProvider(state), directory, config=POSIX, communicator=world
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Most tensors in several uneven shards."""
    root = tmp_path_factory.mktemp("mapping")
    save_flat(TENSORS, OBJECTS, root)
    return root


@pytest.fixture
def opened(directory):
    with open_checkpoint(directory, config=POSIX) as found:
        yield found


# -------------------------------------------------------------------------------------------------
# elements


def items(size):
    """What may stand at the place of a dimension of `size` elements."""
    edge = st.none() | st.integers(-size - 2, size + 2)
    slices = st.builds(slice, edge, edge, st.none() | st.integers(1, size + 1))
    return slices if not size else slices | st.integers(-size, size - 1)


@st.composite
def indices(draw):
    """The key of a tensor and an index of it, in all the ways that Python allows."""
    key = draw(st.sampled_from(sorted(TENSORS)))
    shape = TENSORS[key].shape
    count = draw(st.integers(0, len(shape)))
    left_out = draw(st.integers(0, count)) if draw(st.booleans()) else None
    if left_out is None:
        return key, tuple(draw(items(size)) for size in shape[:count])
    front = [draw(items(size)) for size in shape[:left_out]]
    back = [draw(items(size)) for size in shape[len(shape) - (count - left_out) :]]
    return key, (*front, ..., *back)


@settings(max_examples=250, deadline=None)
@given(indices(), st.booleans())
def test_an_index_gives_what_it_gives_in_memory(directory, drawn, strided):
    key, index = drawn
    saved, expected = open_checkpoint(directory, config=POSIX)[key], TENSORS[key][index]
    found = saved[index]
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert torch.equal(found, expected)
    around = torch.zeros([2 * size + 1 for size in expected.shape], dtype=expected.dtype)
    into = around[tuple(slice(1, None, 2) for _ in expected.shape)] if strided else found.zero_()
    assert saved.read(index, into=into) is into and torch.equal(into, expected)
    if strided and expected.ndim:
        assert torch.count_nonzero(around) == torch.count_nonzero(expected)


def test_one_item_needs_no_tuple_and_iterating_gives_layers(opened):
    saved, whole = opened["layers/weight"], TENSORS["layers/weight"]
    assert torch.equal(saved[np.int64(2)], whole[2]) and torch.equal(saved[-3:], whole[-3:])
    assert torch.equal(saved[...], whole) and torch.equal(saved.read(), whole)
    assert len(saved) == 7
    for layer, expected in zip(saved, whole, strict=True):
        assert torch.equal(layer, expected)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_is_sliced_bit_by_bit(save, tmp_path, random_tensor, bytes_of):
    state = {name: random_tensor(getattr(torch, name), (9, 5)) for name in DTYPES}
    save(state, tmp_path)
    opened = open_checkpoint(tmp_path, config=POSIX)
    for name, whole in state.items():
        assert opened[name].dtype == whole.dtype and opened[name].nbytes == whole.nbytes
        found = opened[name][1::3, -2]
        assert bytes_of(found) == bytes_of(whole[1::3, -2]), name


@pytest.mark.parametrize(
    ("key", "index", "texts"),
    [
        ("line", None, ["integers, slices and an ellipsis", "found None"]),
        ("line", True, ["found True"]),
        ("line", [1, 2], ["found [1, 2]", "index the tensor that a slice gives"]),
        ("line", torch.tensor([1]), ["found tensor([1])"]),
        ("line", 300, ["an index from -300 to 299", "found 300"]),
        ("line", -301, ["found -301"]),
        ("empty", (0, 0), ["found 0"]),
        ("line", (0, 0), ["at most 1 items"]),
        ("scalar", 0, ["at most 0 items"]),
        ("line", (..., ...), ["one ellipsis"]),
        ("line", slice(None, None, -1), ["a positive step", "flip()"]),
        ("line", slice(0, 5, 0), ["step cannot be zero"]),
        ("line", slice("a", None), ["slice('a', None, None)"]),
    ],
)
def test_an_index_that_means_nothing_is_refused(opened, key, index, texts):
    with pytest.raises(StateMismatchError) as caught:
        opened[key][index]
    for text in [f"index tensor {key!r}", *texts]:
        assert text in str(caught.value)
    assert opened.read_bytes == 0


def test_a_destination_that_does_not_fit_is_refused_and_stays(opened):
    saved = opened["model.layers.norm"]
    for into, text in [
        (torch.full((5, 1), -1), r"of shape \[5\].*found \[5, 1\]"),
        (torch.full((5,), -1, dtype=torch.int32), "expected dtype int32, found int64"),
        ([0] * 5, "found list"),
    ]:
        with pytest.raises(StateMismatchError, match=text):
            saved.read(1, into=into)
        assert not torch.is_tensor(into) or (into == -1).all()


def test_a_subclass_whose_views_are_not_its_own_is_filled_whole_or_refused(opened):
    class Wrapped(torch.Tensor):
        pass

    saved, whole = opened["model.layers.norm"], TENSORS["model.layers.norm"]
    row, column = (torch.zeros(size, dtype=torch.int64).as_subclass(Wrapped) for size in (5, 8))
    assert torch.equal(saved.read(1, into=row).as_subclass(torch.Tensor), whole[1])
    with pytest.raises(UnsupportedError, match="an inner dimension is dropped, found Wrapped"):
        saved.read((slice(None), 1), into=column)


# -------------------------------------------------------------------------------------------------
# how much is read


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A tensor with 4 layers of 8 rows of 3 MiB each, and its checkpoint."""
    generator = np.random.default_rng(5)
    whole = torch.from_numpy(generator.integers(0, 256, (4, 8, 3 * MIB), np.uint8))
    root = tmp_path_factory.mktemp("wide") / "c"
    world = SingleCommunicator(30.0, "test", "host")
    state = {"w": whole, "small": torch.arange(5), "step": 3}
    megatron_uring.save(state, root, config=POSIX, communicator=world)
    return whole, root


@pytest.mark.parametrize(
    ("index", "most_mib"),
    [
        (np.s_[2], 25),
        (np.s_[2, 3, MIB : MIB + 10], 2),
        (np.s_[:, :, :10], 32 * 2),
        (np.s_[::3, 1::4, 7], 4 * 2),
        (np.s_[1:3, 5, :: 2 * MIB], 4 * 2),
        (np.s_[4:], 0),
    ],
    ids=str,
)
def test_only_the_blocks_of_the_wanted_elements_are_read(wide, index, most_mib):
    whole, root = wide
    opened = open_checkpoint(root, config=Config(**{**vars(POSIX), "gap_bytes": 0}))
    assert torch.equal(opened["w"][index], whole[index])
    assert opened.read_bytes == checkpoint.last_reports()["restore"].file_bytes
    assert opened.read_bytes <= most_mib * MIB
    assert opened.read_bytes >= whole[index].numel()


def test_looking_reads_nothing_and_restoring_one_key_reads_its_bytes(wide):
    _, root = wide
    with open_checkpoint(root, config=POSIX) as opened:
        saved = opened["w"]
        assert (saved.key, saved.shape, saved.dtype) == ("w", (4, 8, 3 * MIB), torch.uint8)
        assert (saved.nbytes, saved.shards) == (96 * MIB, 1)
        assert list(opened) == ["w", "small", "step"] and opened.read_bytes == 0
        assert opened["step"] == 3 and opened.read_bytes <= MIB
    for keys, most in [(["small"], MIB), (["small", "step"], 2 * MIB)]:
        restored = megatron_uring.restore(root, keys=keys, config=POSIX)
        assert list(restored) == keys and restored["small"].tolist() == [0, 1, 2, 3, 4]
        assert checkpoint.last_reports()["restore"].file_bytes <= most


# -------------------------------------------------------------------------------------------------
# keys, objects, and what is known of the whole


def test_it_is_a_mapping_in_the_order_of_the_save(opened):
    assert list(opened) == [*TENSORS, *OBJECTS] and len(opened) == 8
    assert (opened.tensors, opened.objects) == (tuple(TENSORS), tuple(OBJECTS))
    assert "line" in opened and "step" in opened and "lines" not in opened and 3 not in opened
    assert opened["rng/0"]["seed"] == 1 and opened["rng/0"][(1, 2)].tolist() == [0, 1, 2]
    assert opened["rng/1"] is None and opened.get("nothing", 5) == 5
    assert [key for key, value in opened.items() if value == 7] == ["step"]
    assert opened in [opened] and opened != open_checkpoint(opened.directory)


def test_a_pattern_gives_keys_that_restore_takes(opened, directory):
    assert opened.matching("*layers*") == ("layers/weight", "model.layers.norm")
    assert opened.matching("rng/?") == ("rng/0", "rng/1")
    assert opened.matching("RNG/*") == opened.matching("") == ()
    keys = opened.matching("*.layers.*")
    restored = megatron_uring.restore(directory, keys=keys, config=POSIX)
    assert list(restored) == ["model.layers.norm"]
    assert torch.equal(restored["model.layers.norm"], TENSORS["model.layers.norm"])
    assert megatron_uring.restore(directory, keys=[], config=POSIX) == {}


def test_a_missing_key_is_a_key_error_that_names_the_nearest(opened, directory):
    for look_up in (
        lambda: opened["model.layer.norm"],
        lambda: megatron_uring.restore(directory, keys=["line", "model.layer.norm"], config=POSIX),
    ):
        with pytest.raises(MissingKeyError, match=r"'model.layer.norm'") as caught:
            look_up()
        assert isinstance(caught.value, KeyError) and isinstance(caught.value, StateMismatchError)
        assert str(caught.value).endswith("found 8 others; similar: 'model.layers.norm'")
        assert str(directory) in str(caught.value)
    with pytest.raises(MissingKeyError, match="1 keys below it: 'layers/weight'"):
        opened["layers"]


def test_what_it_says_of_itself(opened, directory):
    assert (opened.directory, opened.ranks, opened.files) == (str(directory), 1, 1)
    assert re.fullmatch("[0-9a-f]{16}", opened.save_id)
    tensors = sum(tensor.nbytes for tensor in TENSORS.values())
    assert tensors < opened.nbytes < tensors + 10_000
    assert opened["layers/weight"].shards == 24  # 6 of them are empty
    assert opened["empty"].shards == 2 and opened["scalar"].shards == 1
    assert repr(opened["line"]) == "<saved tensor 'line': [300] uint8 in 3 shards>"
    assert "5 tensors, 3 objects" in repr(opened)


def test_the_newest_checkpoint_of_a_save_root_is_opened(save, tmp_path):
    for iteration in (1, 2):
        save({"x": torch.tensor(iteration)}, tmp_path / f"iter_{iteration:07d}")
    opened = open_checkpoint(tmp_path)
    assert opened.directory.endswith("iter_0000002") and opened["x"].read() == 2
    with pytest.raises(NotACheckpointError, match="nowhere"):
        open_checkpoint(tmp_path / "nowhere")


def test_the_common_state_comes_back_and_classes_that_are_not_allowed_do_not(save, tmp_path):
    common = {"iteration": 12, "args": [1.5, "x"], "where": torch.ones(2)}
    data = providers.serialize_object("common state", common)
    save({"x": torch.ones(1)}, tmp_path / "with", common=data)
    found = open_checkpoint(tmp_path / "with", config=POSIX).common()
    assert found["iteration"] == 12 and torch.equal(found["where"], torch.ones(2))
    save({"x": torch.ones(1)}, tmp_path / "without")
    assert open_checkpoint(tmp_path / "without", config=POSIX).common() == {}
    strange = providers.serialize_object("common state", Strange(), [f"{__name__}.Strange"])
    save({"x": torch.ones(1)}, tmp_path / "strange", common=strange)
    with pytest.raises(
        StateMismatchError, match=r"load object 'common state'.*Strange is not allowed"
    ):
        open_checkpoint(tmp_path / "strange", config=POSIX).common()
    allowed = Config(**{**vars(POSIX), "allowed_globals": (f"{__name__}.Strange",)})
    assert isinstance(open_checkpoint(tmp_path / "strange", config=allowed).common(), Strange)


class Strange:
    pass


# -------------------------------------------------------------------------------------------------
# what may happen to it meanwhile


def test_one_that_was_overwritten_or_closed_says_so(save, tmp_path):
    save({"x": torch.arange(3), "o": 1}, tmp_path)
    opened = open_checkpoint(tmp_path, config=POSIX)
    saved = opened["x"]
    assert saved[1] == 1
    report = save({"x": torch.arange(5), "o": 2}, tmp_path)
    for read in (saved.read, lambda: opened["o"]):
        with pytest.raises(StateMismatchError) as caught:
            read()
        assert f"save {opened.save_id}, as when it was opened" in str(caught.value)
        assert f"found save {report.save_id}" in str(caught.value)
    (tmp_path / "index.h5").unlink()
    with pytest.raises(StateMismatchError, match="found no committed checkpoint"):
        saved.read()
    opened.close()
    opened.close()
    uses = (
        saved.read,
        lambda: saved.shape,
        lambda: opened["x"],
        lambda: list(opened),
        opened.common,
    )
    for use in uses:
        with pytest.raises(CheckpointError, match="it was closed"):
            use()
    assert repr(opened) == f"<closed checkpoint {tmp_path}>"


def test_damage_and_a_lost_file_are_named_with_all_that_lies_there(save, tmp_path):
    report = save({"x": torch.arange(3), "y": torch.arange(4)}, tmp_path)
    opened = open_checkpoint(tmp_path, config=POSIX)
    path = tmp_path / subfile_name(report.save_id, 0)
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match="verify block of 'x', 'y'"):
        opened["y"].read()
    path.unlink()
    with pytest.raises(CorruptionError, match="no such file"):
        opened["y"].read()


def test_threads_may_share_one(opened):
    wrong = []

    def read(key):
        for number in range(20):
            index = number % len(TENSORS[key])
            if not torch.equal(opened[key][index], TENSORS[key][index]):
                wrong.append(key)

    threads = [threading.Thread(target=read, args=(key,)) for key in ("layers/weight", "line") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# -------------------------------------------------------------------------------------------------
# several ranks, and a process that is none


SAVE = """
import sys
import numpy as np, torch
import megatron_uring
from megatron_uring import comm
world = comm.connect(60.0, "mpi")
whole = torch.arange(40, dtype=torch.bfloat16).reshape(8, 5)
low, high = ((0, 0), (0, 8))[world.rank]
shard = megatron_uring.Shard(whole[low:high], (8, 5), (low, 0), True)
row = megatron_uring.Shard(whole[world.rank], (2, 5), (world.rank, 0), True)
state = megatron_uring.CompositeProvider([
    megatron_uring.TensorProvider([("layers", shard), ("rows", row)]),
    megatron_uring.ObjectProvider({f"rng/{world.rank}": {"rank": world.rank}}),
])
config = megatron_uring.Config(aggregation="rank")
megatron_uring.save(state, sys.argv[1], config=config, communicator=world)
"""

READ = """
import sys
import torch
import megatron_uring
with megatron_uring.open_checkpoint(sys.argv[1]) as checkpoint:
    assert checkpoint.objects == ("rng/0", "rng/1"), checkpoint.objects
    assert (checkpoint.ranks, checkpoint.files) == (2, 2)
    assert [checkpoint[key]["rank"] for key in checkpoint.matching("rng/*")] == [0, 1]
    assert checkpoint["layers"][::3, 1].tolist() == [1.0, 16.0, 31.0]
    assert checkpoint["rows"].shards == 2
    assert checkpoint["rows"][:, 3].tolist() == [3.0, 8.0]
restored = megatron_uring.restore(sys.argv[1], keys=["layers"])
assert restored["layers"].flatten().tolist() == list(map(float, range(40)))
assert not torch.distributed.is_initialized()
loaded = [name for name in sys.modules if name.split(".")[0] in ("mpi4py", "megatron")]
assert not loaded, loaded
"""


def test_plain_python_reads_what_several_ranks_saved(tmp_path):
    """Uneven shards, an empty one, and objects of each rank, in a subfile for each."""
    program = tmp_path / "save.py"
    program.write_text(SAVE)
    run_mpi(2, program, str(tmp_path / "c"))
    environment = {key: value for key, value in os.environ.items() if "MPI" not in key}
    command = [sys.executable, "-W", "error", "-c", READ, str(tmp_path / "c")]
    subprocess.run(command, check=True, cwd=ROOT, timeout=120, env=environment)


def test_the_readmes_example_runs(tmp_path):
    """Against a checkpoint with the keys that it names."""
    text = (ROOT / "README.md").read_text()
    section = text.split("\n## A part of a checkpoint\n")[1].split("\n## ")[0]
    (example,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    weight = torch.arange(24, dtype=torch.float32).reshape(4, 3, 2)
    keys = [f"decoder.layers.mlp.linear_fc{number}.weight" for number in (1, 2)]
    save_flat(dict.fromkeys(keys, weight), {"rng_state/shard_0_1": (5,)}, tmp_path)
    names = {"directory": tmp_path, "torch": torch}
    exec(compile(example, "README.md", "exec"), names)
    assert names["state"] == (5,)
    assert torch.equal(names["third"], weight[2])
    assert torch.equal(names["corner"], weight[1:3, :, ::2])
    assert torch.equal(names["buffer"], weight[0])
    assert list(names["some"]) == keys
