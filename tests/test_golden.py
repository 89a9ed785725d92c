"""A checkpoint that release 0.1.0 wrote: every later release opens it, byte for byte."""

import json
import struct
import tarfile
from pathlib import Path

import h5py
import pytest
import torch

import megatron_uring
from megatron_uring import _engine, commit, verify
from megatron_uring import index as index_module

GOLDEN = Path(__file__).parent / "golden"
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    root = tmp_path_factory.mktemp("golden")
    with tarfile.open(GOLDEN / "v1.tar.gz") as archive:
        archive.extractall(root, filter="data")
    return root / "v1"


@pytest.fixture(scope="module")
def subfile(golden):
    (path,) = golden.glob("data-*.bin")
    return path.read_bytes()


def test_the_committed_files_are_small():
    assert sum(path.stat().st_size for path in GOLDEN.iterdir() if path.is_file()) < 200_000


def test_every_tensor_and_object_comes_back(golden, config, bytes_of):
    expected = json.loads((GOLDEN / "v1.json").read_text())
    restored = megatron_uring.restore(golden, config=config)
    leaves = dict(megatron_uring.providers.flatten(restored))
    tensors = {key: leaf for key, leaf in leaves.items() if torch.is_tensor(leaf)}
    assert tensors.keys() == expected.keys() and len(tensors) == 27
    for key, (dtype, shape, data) in expected.items():
        assert str(tensors[key].dtype) == f"torch.{dtype}", key
        assert list(tensors[key].shape) == shape, key
        assert bytes_of(tensors[key]).hex() == data, key
    assert restored["object"] == (
        {"rng": b"\x00\x01", "list": [1, 2.5, None, "ключ"], (1, 2): "tuple key"},
    )
    assert restored["awkward/~key"][7][1][0] == 3


def test_the_sharded_tensor_lies_in_two_regions_of_two_ranks(golden, config):
    index = index_module.read_index(str(golden))
    rows = [n for n, t in enumerate(index.shards.tensor) if index.shards.keys[t] == "sharded"]
    assert index.shards.offset[rows, 0].tolist() == [0, 2]
    starts = index.shard_extents.start[rows]
    assert starts[0] < 1 << 20 <= starts[1]
    assert {0, 1} <= set(index.regions.rank.tolist())
    part = torch.zeros(2, 3, dtype=torch.int32)
    shard = megatron_uring.Shard(part, (4, 6), (1, 2))
    megatron_uring.restore(golden, {"sharded": shard}, config=config)
    assert part.tolist() == [[8, 9, 10], [14, 15, 16]]


def test_it_is_proved_good_and_its_common_state_is_there(golden, posix, world):
    findings = verify.verify(str(golden), world, posix)
    assert findings.good, findings.problems
    index = index_module.read_index(str(golden))
    data = commit.read_common(str(golden), index.save_id, index.common_length, index.common_crc32c)
    assert data == b"common state of version 1"


def test_the_superblock_lies_where_the_format_says(golden, subfile):
    save_id = index_module.read_index(str(golden)).save_id
    assert subfile[:8] == b"MURDATA\0"
    assert struct.unpack_from("<IIQII", subfile, 8) == (1, 1 << 20, int(save_id, 16), 0, 0)
    assert struct.unpack_from("<I", subfile, 32)[0] == _engine.crc32c(subfile[:32])
    assert not any(subfile[36:4096])


@pytest.mark.parametrize("name", ["index", "subfile"])
def test_the_trailer_lies_where_the_format_says(golden, subfile, name):
    data = (golden / "index.h5").read_bytes() if name == "index" else subfile
    trailer = data[-64:]
    assert trailer[:8] == b"MURTAIL\0"
    version, zero, save_id, offset, length = struct.unpack_from("<IIQQQ", trailer, 8)
    assert (version, zero) == (1, 0)
    assert f"{save_id:016x}" == index_module.read_index(str(golden)).save_id
    assert trailer[40:56] == bytes(16)
    crc32c, own = struct.unpack_from("<II", trailer, 56)
    image = data[offset : offset + length]
    assert image[:8] == b"\x89HDF\r\n\x1a\n"
    assert crc32c == _engine.crc32c(image) and own == _engine.crc32c(trailer[:60])
    assert not any(data[offset + length : -64])


def test_plain_h5py_reads_where_a_tensor_lies(golden, subfile):
    with h5py.File(golden / "index.h5", "r") as file:
        ends = file["tensors/key_bytes"][()].cumsum()
        text = file["tensors/key_text"][()].tobytes()
        keys = [text[a:b].decode() for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        row = file["shards/tensor"][()].tolist().index(keys.index("transposed"))
        start, length = file["shards/start"][row], file["shards/length"][row]
    assert struct.unpack("<6f", subfile[start : start + length]) == (0, 3, 1, 4, 2, 5)
