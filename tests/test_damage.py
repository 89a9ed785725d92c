"""What lies where a checkpoint should: other things than files, and images made to mislead HDF5."""

import io
import os
import shutil
import socket

import h5py
import numpy as np
import pytest
import torch

import megatron_uring
from megatron_uring import commit, objects, roots, verify
from megatron_uring import index as index_module
from megatron_uring.errors import CheckpointError, CorruptionError
from megatron_uring.layout import (
    INDEX_NAME,
    METADATA_NAME,
    TRACKER_NAME,
    common_name,
    subfile_name,
)
from megatron_uring.regular import open_regular

STATE = {"weight": torch.arange(3000.0), "step": {"iteration": 7}}


@pytest.fixture
def directory(save, tmp_path):
    place = tmp_path / "checkpoint"
    save(STATE, place, common=b"args")
    return place


def _fifo(path):
    os.mkfifo(path)


def _socket(path):
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def _folder(path):
    path.mkdir()


def _device(path):
    path.symlink_to("/dev/zero")


@pytest.mark.timeout(20)  # a fifo that is opened would be waited for without end
@pytest.mark.parametrize("make", [_fifo, _socket, _folder, _device])
@pytest.mark.parametrize("part", ["index", "subfile", "common state"])
def test_what_is_no_file_is_refused_and_never_waited_for(directory, world, posix, part, make):
    save_id = index_module.read_index(str(directory)).save_id
    names = {"index": INDEX_NAME, "subfile": subfile_name(save_id, 0)}
    path = directory / names.get(part, common_name(save_id))
    path.unlink()
    make(path)
    if part != "common state":
        with pytest.raises(CheckpointError, match=r"regular file.*found (a|no)"):
            megatron_uring.restore(directory, config=posix)
    if part == "index":
        with pytest.raises(CheckpointError, match="regular file"):
            verify.verify(str(directory), world, posix)
    else:
        problems = verify.verify(str(directory), world, posix).problems
        assert any(str(path) in one and "regular file" in one for one in problems), problems


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [_fifo, _socket, _folder, _device])
def test_a_tracker_that_is_no_file_leaves_the_newest_iteration(save, tmp_path, make):
    save(STATE, tmp_path / "iter_0000003")
    make(tmp_path / TRACKER_NAME)
    assert roots.resolve_latest(str(tmp_path)) == str(tmp_path / "iter_0000003")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [_fifo, _socket, _folder, _device])
def test_metadata_that_is_no_file_is_refused_or_names_nothing(tmp_path, make):
    make(tmp_path / METADATA_NAME)
    assert commit.megatron_backend(str(tmp_path)) is None
    with pytest.raises(CheckpointError, match="regular file"):
        commit.read_metadata(str(tmp_path), "read metadata")


def test_files_behind_symbolic_links_are_files(directory, tmp_path, posix):
    for path in list(directory.iterdir()):
        moved = tmp_path / path.name
        shutil.move(path, moved)
        path.symlink_to(moved)
    state = megatron_uring.restore(directory, config=posix)
    assert torch.equal(state["weight"], STATE["weight"])


def test_an_absent_file_is_absent_not_damaged(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_regular(str(tmp_path / "none"), "read")


# ------------------------------------------------------------------------------------------------
# images whose checksum is right and whose content is not


def _secret(folder):
    path = folder / "secret"
    path.write_bytes(np.arange(64, dtype=np.int64).tobytes())
    return str(path)


def _external_link(file, folder):
    del file["shards/start"]
    file["shards/start"] = h5py.ExternalLink(_secret(folder), "/shards/start")


def _soft_link(file, folder):
    del file["shards/start"]
    file["shards/start"] = h5py.SoftLink("/shards/length")


def _soft_group(file, folder):
    file.move("shards", "elsewhere")
    file["shards"] = h5py.SoftLink("/elsewhere")


def _external_storage(file, folder):
    shape = file["shards/start"].shape
    del file["shards/start"]
    file.create_dataset("shards/start", shape, np.int64, external=[(_secret(folder), 0, 8)])


def _virtual(file, folder):
    shape = file["shards/start"].shape
    del file["shards/start"]
    layout = h5py.VirtualLayout(shape, np.int64)
    layout[:] = h5py.VirtualSource(_secret(folder), "/x", shape)
    file.create_virtual_dataset("shards/start", layout)


def _allocated_only_on_read(file, folder):
    del file["shards/start"]
    file.create_dataset("shards/start", (1 << 36,), np.int64, chunks=(1 << 16,))


def _one_huge_chunk(file, folder):
    del file["shards/start"]
    file.create_dataset(
        "shards/start", (1,), np.int64, chunks=(1 << 28,), maxshape=(None,), compression="gzip"
    )


def _group_instead(file, folder):
    del file["shards/start"]
    file.create_group("shards/start")


HOSTILE = [
    _external_link, _soft_link, _soft_group, _external_storage, _virtual, _allocated_only_on_read,
    _one_huge_chunk, _group_instead,
]  # fmt: skip


@pytest.mark.timeout(20)
@pytest.mark.parametrize("change", HOSTILE, ids=lambda change: change.__name__)
def test_a_column_lies_in_the_image_whole(directory, tmp_path, change):
    image = io.BytesIO(index_module.encode(index_module.read_index(str(directory))))
    with h5py.File(image, "r+") as file:
        change(file, tmp_path)
    with pytest.raises(CorruptionError, match="parse index"):
        index_module.decode(image.getvalue(), "path")


def _set(name, row, value):
    def change(file):
        file[name][row] = value

    change.__name__ = f"{name} {value}"
    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("shards/offset", 0, 1),
        _set("shards/offset", 0, -1),
        _set("shards/start", 0, (1 << 63) - 1),
        _set("shards/length", 0, (1 << 63) - 64),
        _set("regions/start", 0, 1 << 62),
        _set("regions/length", 0, (1 << 63) - 4096),
        _set("subfiles/length", 0, (1 << 63) - 1),
        _set("subfiles/number", 0, (1 << 31) - 1),
        _set("tensors/shape", 0, (1 << 63) - 1),
        _set("tensors/ndim", 0, 0),
    ],
    ids=lambda change: change.__name__,
)
def test_numbers_that_would_overflow_or_point_outside_are_refused(directory, change):
    image = io.BytesIO(index_module.encode(index_module.read_index(str(directory))))
    with h5py.File(image, "r+") as file:
        change(file)
    with pytest.raises(CorruptionError):
        index_module.decode(image.getvalue(), "path")


def test_a_subfile_of_many_tebibytes_is_no_damage(directory):
    """One process that converts a huge checkpoint writes one subfile."""
    image = io.BytesIO(index_module.encode(index_module.read_index(str(directory))))
    with h5py.File(image, "r+") as file:
        for name in ("shards/start", "objects/start", "regions/start", "subfiles/length"):
            file[name][:] += 9 << 40
    index = index_module.decode(image.getvalue(), "path")
    assert (index.shard_extents.start >= 9 << 40).all()


class _Malicious:
    def __reduce__(self):
        return (os.system, ("touch /tmp/never",))


def test_a_refused_object_is_never_answered_with_advice_to_trust_it(tmp_path):
    buffer = io.BytesIO()
    torch.save(_Malicious(), buffer)
    with pytest.raises(CheckpointError) as caught:
        objects.deserialize_object("key", buffer.getvalue())
    assert "weights_only" not in str(caught.value) and "arbitrary" not in str(caught.value)
