"""verify and restore against every kind of damage that a checkpoint can suffer."""

import os
import shutil

import pytest
import torch

import megatron_uring
from megatron_uring import Config, verify
from megatron_uring import index as index_module
from megatron_uring.errors import CheckpointError, CorruptionError, NotACheckpointError
from megatron_uring.layout import BLOCK_BYTES, Trailer, subfile_name

STATE = {"big": torch.arange(400_000), "odd": torch.arange(25), "rng": {(1,): "state"}}
COMMON = b"common state"


class Damaged:
    """A checkpoint, where its parts lie, and ways to hurt it."""

    def __init__(self, directory):
        self.directory = directory
        self.index = index = index_module.read_index(str(directory))
        self.subfile = directory / subfile_name(index.save_id, 0)
        self.common = directory / f"common-{index.save_id}.pt"
        self.index_file = directory / "index.h5"
        start = dict(
            zip(
                [index.shards.keys[n] for n in index.shards.tensor],
                index.shard_extents.start.tolist(),
                strict=True,
            )
        )
        regions = sorted(zip(index.regions.start.tolist(), index.regions.length.tolist()))  # noqa: B905
        (_, tensor_bytes), (objects, object_bytes), (footer, _) = regions
        size = self.subfile.stat().st_size
        self.offsets = {
            "superblock": (self.subfile, 20, "'big'"),
            "superblock padding": (self.subfile, 100, "'big'"),
            "first shard": (self.subfile, start["big"], "'big'"),
            "second block of a shard": (self.subfile, BLOCK_BYTES + 77, "'big'"),
            "small shard": (self.subfile, start["odd"] + 199, "'odd'"),
            "padding between extents": (self.subfile, start["odd"] + 201, "'odd'"),
            "gap behind the tensors": (self.subfile, tensor_bytes + 5, ""),
            "last byte of the gap": (self.subfile, objects - 1, ""),
            "object": (self.subfile, objects + 3, "'rng'"),
            "object padding": (self.subfile, objects + object_bytes - 1, "'rng'"),
            "gap behind the objects": (self.subfile, objects + object_bytes, ""),
            "footer image": (self.subfile, footer + 50, "no tensor"),
            "footer padding": (self.subfile, size - 65, "no tensor"),
            "footer trailer": (self.subfile, size - 30, "no tensor"),
            "index image": (self.index_file, 100, ""),
            "index trailer": (self.index_file, self.index_file.stat().st_size - 20, ""),
            "common state": (self.common, 3, ""),
        }

    def flip(self, path, offset):
        with open(path, "r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 0x10]))


PARTS = [
    "superblock", "superblock padding", "first shard", "second block of a shard", "small shard",
    "padding between extents", "gap behind the tensors", "last byte of the gap", "object",
    "object padding", "gap behind the objects", "footer image", "footer padding",
    "footer trailer", "index image", "index trailer", "common state",
]  # fmt: skip


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    from megatron_uring.comm import SingleCommunicator

    directory = tmp_path_factory.mktemp("pristine")
    megatron_uring.save(
        STATE,
        directory,
        config=Config(engine="posix", slab_bytes=1 << 20, slab_count=2),
        communicator=SingleCommunicator(30.0, "test", "host"),
        common=COMMON,
    )
    return directory


@pytest.fixture
def checkpoint(pristine, tmp_path):
    return Damaged(shutil.copytree(pristine, tmp_path / "copy"))


def test_the_parts_are_those_of_the_list(checkpoint):
    assert list(checkpoint.offsets) == PARTS


def test_an_intact_checkpoint_is_good_and_everything_was_counted(checkpoint, world, config):
    findings = verify.verify(str(checkpoint.directory), world, config)
    assert findings.good and findings.problems == ()
    assert (findings.tensors, findings.shards, findings.objects, findings.subfiles) == (2, 2, 1, 1)
    assert findings.blocks == len(checkpoint.index.regions.crc32c)
    assert findings.bytes_read == checkpoint.index.regions.length.sum()
    assert findings.save_id == checkpoint.index.save_id


@pytest.mark.parametrize("part", PARTS)
def test_one_flipped_bit_anywhere_is_found_with_file_offset_and_tensor(
    checkpoint, world, posix, part
):
    path, offset, name = checkpoint.offsets[part]
    checkpoint.flip(path, offset)
    try:
        problems = verify.verify(str(checkpoint.directory), world, posix).problems
    except CorruptionError as error:
        problems = (str(error),)
        assert path == checkpoint.index_file
    assert problems
    assert all(str(path) in problem for problem in problems)
    if path == checkpoint.common:
        return
    blocks = (offset, offset // BLOCK_BYTES * BLOCK_BYTES, 0)
    named = [p for p in problems if name in p and any(f"offset {o}:" in p for o in blocks)]
    assert named or path == checkpoint.index_file, problems
    assert all("offset" in problem for problem in problems)


@pytest.mark.parametrize("verify_first", [False, True])
@pytest.mark.parametrize(
    "part",
    ["superblock", "superblock padding", "first shard", "second block of a shard", "small shard",
     "padding between extents", "object", "object padding", "index image", "index trailer"],
)  # fmt: skip
def test_restore_refuses_damage_in_what_it_reads(checkpoint, config, part, verify_first):
    path, offset, name = checkpoint.offsets[part]
    checkpoint.flip(path, offset)
    options = Config(**{**vars(config), "verify_first": verify_first})
    destinations = {"big": torch.full((400_000,), -1), "odd": torch.full((25,), -1), "rng": None}
    with pytest.raises(CorruptionError) as caught:
        megatron_uring.restore(checkpoint.directory, destinations, config=options)
    before_reading = part == "superblock" or path == checkpoint.index_file
    assert str(path) in str(caught.value)
    assert ("superblock" if part == "superblock" else name) in str(caught.value)
    assert "offset" in str(caught.value)
    touched = any(torch.any(tensor != -1) for tensor in destinations.values() if tensor is not None)
    if verify_first or before_reading:
        assert not touched
    else:
        assert "half written" in str(caught.value)


def test_damaged_bytes_never_reach_a_destination(checkpoint, config):
    path, offset, _ = checkpoint.offsets["second block of a shard"]
    checkpoint.flip(path, offset)
    big = torch.full((400_000,), -1)
    with pytest.raises(CorruptionError):
        megatron_uring.restore(checkpoint.directory, {"big": big}, config=config)
    assert torch.all((big == -1) | (big == STATE["big"]))


def test_restore_ignores_damage_in_what_it_does_not_read(checkpoint, posix):
    path, offset, _ = checkpoint.offsets["first shard"]
    checkpoint.flip(path, offset)
    restored = megatron_uring.restore(checkpoint.directory, keys=["rng"], config=posix)
    assert restored["rng"] == STATE["rng"]


@pytest.mark.parametrize(
    ("length", "text"),
    [(-1, "offset"), (-4096, "offset"), (1, "offset"), (4096, "offset"), (None, "no such file")],
    ids=["a byte short", "a page short", "a byte long", "a page long", "missing"],
)
def test_a_cut_extended_or_missing_subfile_is_found(checkpoint, world, posix, length, text):
    path = checkpoint.subfile
    size = path.stat().st_size
    if length is None:
        path.unlink()
    else:
        os.truncate(path, size + length)
    problems = verify.verify(str(checkpoint.directory), world, posix).problems
    assert problems and all(str(path) in problem for problem in problems)
    assert any(text in problem and f"expected {size} bytes" in problem for problem in problems)
    with pytest.raises(CorruptionError, match=path.name):
        megatron_uring.restore(checkpoint.directory, config=posix)


def test_an_empty_subfile_is_found(checkpoint, world, posix):
    os.truncate(checkpoint.subfile, 0)
    assert not verify.verify(str(checkpoint.directory), world, posix).good


@pytest.mark.parametrize("changed", [0, 1])
def test_swapped_subfiles_of_two_saves_are_found(checkpoint, save, world, posix, tmp_path, changed):
    state = {**STATE, "odd": STATE["odd"] + changed}
    save(state, tmp_path / "other", common=COMMON)
    other = Damaged(tmp_path / "other")
    assert other.subfile.stat().st_size == checkpoint.subfile.stat().st_size
    aside = tmp_path / "aside"
    checkpoint.subfile.rename(aside)
    other.subfile.rename(checkpoint.subfile)
    aside.rename(other.subfile)
    for victim, stranger in ((checkpoint, other), (other, checkpoint)):
        problems = verify.verify(str(victim.directory), world, posix).problems
        assert any(f"found save {stranger.index.save_id}" in problem for problem in problems)
        # The first block's checksum says nothing of the superblock: a record that ends with its
        # own CRC leaves any CRC in the same state. The superblock itself is compared.
        with pytest.raises(CorruptionError, match="superblock"):
            megatron_uring.restore(victim.directory, config=posix)


@pytest.mark.parametrize("part", ["index_file", "common"])
def test_a_missing_index_is_no_checkpoint_and_missing_common_state_is_found(
    checkpoint, world, posix, part
):
    getattr(checkpoint, part).unlink()
    if part == "index_file":
        with pytest.raises(NotACheckpointError):
            verify.verify(str(checkpoint.directory), world, posix)
    else:
        (problem,) = verify.verify(str(checkpoint.directory), world, posix).problems
        assert str(checkpoint.common) in problem


def test_all_findings_are_listed_not_only_the_first(checkpoint, world, posix):
    for part in ("second block of a shard", "object", "common state", "gap behind the tensors"):
        checkpoint.flip(*checkpoint.offsets[part][:2])
    problems = verify.verify(str(checkpoint.directory), world, posix).problems
    assert len(problems) == 4


def test_an_index_that_does_not_cover_its_tensors_is_found(checkpoint, world, posix):
    import dataclasses

    index = checkpoint.index
    shape = index.shards.global_shape.copy()
    shape[0, 0] += 1
    shards = dataclasses.replace(index.shards, global_shape=shape)
    sealed = index_module.sealed(dataclasses.replace(index, shards=shards))
    checkpoint.index_file.write_bytes(sealed)
    (problem,) = verify.verify(str(checkpoint.directory), world, posix).problems
    assert "check coverage: tensor 'big'" in problem and "none for 1 elements" in problem


def test_a_save_root_is_verified_at_its_newest_checkpoint(checkpoint, world, posix, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    checkpoint.directory.rename(root / "iter_0000005")
    findings = verify.verify(str(root), world, posix)
    assert findings.good and findings.directory == str(root / "iter_0000005")


def test_verifying_only_reads(checkpoint, world, posix):
    def snapshot():
        return {
            entry.name: (entry.stat().st_mtime_ns, entry.stat().st_size)
            for entry in os.scandir(checkpoint.directory)
        }

    before = snapshot()
    verify.verify(str(checkpoint.directory), world, posix)
    assert snapshot() == before


def test_a_lost_index_can_be_read_again_from_the_footer(checkpoint):
    length = checkpoint.subfile.stat().st_size
    with open(checkpoint.subfile, "rb") as file:
        footer = index_module.read_footer(file, str(checkpoint.subfile), length)
    assert footer.shards.keys == checkpoint.index.shards.keys
    assert footer.shard_extents.start.tolist() == checkpoint.index.shard_extents.start.tolist()
    assert footer.object_keys == ("rng",)
    data = checkpoint.index_file.read_bytes()
    trailer = Trailer.unpack(data[-64:], "index.h5", 0)
    assert trailer.save_id == footer.save_id == checkpoint.index.save_id


def test_errors_of_the_file_system_are_findings_not_crashes(checkpoint, world, posix):
    checkpoint.subfile.unlink()
    checkpoint.subfile.mkdir()
    try:
        assert not verify.verify(str(checkpoint.directory), world, posix).good
    except CheckpointError as error:
        assert str(checkpoint.subfile) in str(error)
