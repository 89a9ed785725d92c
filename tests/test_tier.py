"""Local copies on the disk of a node: locks, markers, leftovers, what is kept."""

import dataclasses
import fcntl
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_uring import _engine, stage, tier
from megatron_uring.errors import StorageError
from megatron_uring.layout import BLOCK_BYTES

SAVE_ID = "0123456789abcdef"
REGIONS = [(0, BLOCK_BYTES), (4 * BLOCK_BYTES, 4096)]


@pytest.fixture
def tiered(posix, staging):
    return dataclasses.replace(posix, staging_directory=str(staging))


@pytest.fixture
def reserve(tiered, tmp_path):
    """A local copy of a rank; discarded afterwards."""
    engine = stage.open_engine(tiered)
    made = []

    def run(save_id=SAVE_ID, rank=0, directory=tmp_path / "run" / "iter_0000001", regions=REGIONS):
        place = tier.Place(str(directory), save_id, 0, rank)
        made.append(tier.reserve(engine, tiered, place, regions))
        return made[-1]

    yield run
    for copy in made:
        copy.discard()


def files(staging):
    names = (path.relative_to(staging) for path in staging.rglob("*") if path.is_file())
    return sorted(name.name for name in names if name.name != "lock")


def test_a_copy_has_space_for_its_regions_and_for_nothing_between_them(reserve):
    copy = reserve(regions=[(0, BLOCK_BYTES), (1 << 30, BLOCK_BYTES)])
    found = os.stat(copy.path)
    assert found.st_size == (1 << 30) + BLOCK_BYTES
    assert found.st_blocks * 512 < 4 * BLOCK_BYTES


def test_what_is_marked_is_found_under_its_save_id_alone(reserve, staging, tmp_path):
    directory = str(tmp_path / "run" / "iter_0000001")
    copy = reserve()
    assert tier.copies(str(staging), directory, SAVE_ID) == []
    checksums = [torch.zeros(1, dtype=torch.uint32).numpy()] * 2
    copy.mark(checksums)
    ((marker, path),) = tier.copies(str(staging), directory, SAVE_ID)
    assert path == copy.path and marker.regions == tuple(REGIONS)
    assert (marker.save_id, marker.directory, marker.rank) == (SAVE_ID, directory, 0)
    assert marker.crc32c == tier.digest(checksums)
    assert tier.copies(str(staging), directory, SAVE_ID[::-1]) == []
    assert tier.copies(str(staging), str(tmp_path / "other" / "iter_0000001"), SAVE_ID) == []


NUMBERS = {"subfile": 0, "rank": 0, "regions": [[0, 4096]], "crc32c": 0}
UNREADABLE = ["", "{", "[]", '{"save_id": 1}', '{"regions": [[1]]}', "\xff"]
UNREADABLE += [json.dumps({**NUMBERS, "save_id": SAVE_ID, "directory": 7})]
UNREADABLE += [json.dumps({**NUMBERS, "save_id": SAVE_ID, "directory": "/", "rank": "0"})]


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_marker_that_cannot_be_read_marks_nothing(reserve, staging, tmp_path, text):
    copy = reserve()
    Path(copy.path + ".json").write_bytes(text.encode("latin-1"))
    assert tier.copies(str(staging), str(tmp_path / "run" / "x"), SAVE_ID) == []
    copy.keep()
    assert files(staging) == []


def test_a_marker_of_another_save_marks_nothing(reserve, staging, tmp_path):
    copy = reserve()
    copy.mark([])
    marker = Path(copy.path + ".json")
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "save_id": "f" * 16}))
    assert tier.copies(str(staging), str(tmp_path / "run" / "x"), SAVE_ID) == []


def test_leftovers_are_removed_and_what_is_held_is_not(reserve, staging, tmp_path):
    held, left = reserve(rank=0), reserve("f" * 16, rank=1)
    left.keep()  # lets go, as the end of a process does; nothing was committed
    assert files(staging) == [os.path.basename(held.path)]
    tier.sweep(str(staging), str(tmp_path / "run" / "iter_0000009"))
    assert files(staging) == [os.path.basename(held.path)]
    held.discard()
    assert files(staging) == []


def test_a_copy_of_another_root_is_not_touched(reserve, staging, tmp_path):
    other = reserve(directory=tmp_path / "other" / "iter_0000001")
    tier.sweep(str(staging), str(tmp_path / "run" / "iter_0000001"), keep=0)
    assert files(staging) == [os.path.basename(other.path)]


def test_a_copy_is_held_by_a_living_process_until_it_is_killed(staging, tmp_path, tiered):
    program = (
        "import sys; from megatron_uring import Config, stage, tier;"
        "config = Config(engine='posix', slab_bytes=1 << 20, slab_count=2,"
        " staging_directory=sys.argv[1]);"
        f"place = tier.Place(sys.argv[2], {SAVE_ID!r}, 0, 0);"
        f"copy = tier.reserve(stage.open_engine(config), config, place, {REGIONS});"
        "print('held', flush=True); sys.stdin.read()"
    )
    directory = str(tmp_path / "run" / "iter_0000001")
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(staging), directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout.readline() == b"held\n"
        tier.sweep(str(staging), directory)
        assert len(files(staging)) == 1
    finally:
        child.kill()
        child.communicate()
    tier.sweep(str(staging), directory)
    assert files(staging) == []


def test_a_forked_child_holds_nothing_that_was_let_go(reserve, staging, tmp_path):
    copy = reserve()
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        os.read(read_end, 1)
        os._exit(0)
    try:
        copy.keep()
        tier.sweep(str(staging), str(tmp_path / "run" / "iter_0000001"))
        assert files(staging) == []
    finally:
        os.write(write_end, b"x")
        os.waitpid(child, 0)
        os.close(read_end)
        os.close(write_end)


def root_of(staging):
    (root,) = [path for path in staging.glob("megatron_uring-*/*") if path.is_dir()]
    return root


def test_who_finds_the_root_locked_sweeps_nothing_and_reserves_nothing(
    reserve, staging, tmp_path, monkeypatch
):
    left = reserve()
    left._let_go()
    lock = os.open(root_of(staging) / "lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        tier.sweep(str(staging), str(tmp_path / "run" / "iter_0000001"))
        assert len(files(staging)) == 1
        monkeypatch.setattr(tier, "_LOCK_WITHIN_S", 0.1)
        with pytest.raises(StorageError, match="reserve space in staging directory"):
            reserve("f" * 16)
    finally:
        os.close(lock)
    reserve("f" * 16)
    assert len(files(staging)) == 1


@pytest.mark.parametrize("operation", ["open", "preallocate"])
@pytest.mark.parametrize("fault", ["eio", "enospc"])
def test_a_reservation_that_fails_names_the_cause_and_leaves_nothing(
    reserve, staging, operation, fault
):
    _engine.inject_fault(operation, fault, count=-1, path_contains=str(staging))
    text = {"eio": "Input/output error", "enospc": "No space left on device"}[fault]
    with pytest.raises(StorageError, match=text):
        reserve()
    assert files(staging) == []
    _engine.clear_faults()
    reserve()


def test_a_file_system_that_cannot_reserve_is_written_to_all_the_same(reserve):
    _engine.inject_fault("preallocate", "einval", count=-1)
    assert os.path.exists(reserve().path)


def test_a_folder_that_others_may_write_to_is_not_used(reserve, staging, tmp_path):
    reserve().discard()
    (user,) = staging.glob("megatron_uring-*")
    user.chmod(0o777)
    with pytest.raises(StorageError, match="nobody else can write to"):
        reserve()
    assert tier.copies(str(staging), str(tmp_path / "run" / "x"), SAVE_ID) == []


def test_a_link_in_the_place_of_the_folder_is_not_followed(reserve, staging, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (staging / f"megatron_uring-{os.geteuid()}").symlink_to(elsewhere)
    with pytest.raises(StorageError, match="nobody else can write to"):
        reserve()
    assert os.listdir(elsewhere) == []


def test_a_staging_directory_that_cannot_be_made_is_an_error(posix, tmp_path):
    (tmp_path / "file").write_text("")
    config = dataclasses.replace(posix, staging_directory=str(tmp_path / "file" / "below"))
    place = tier.Place(str(tmp_path / "run" / "x"), SAVE_ID, 0, 0)
    with pytest.raises(StorageError, match="staging directory"):
        tier.reserve(stage.open_engine(config), config, place, REGIONS)


def test_a_staging_directory_is_made_and_its_parents_are_not(posix, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="megatron_uring")
    place = tier.Place(str(tmp_path / "run" / "x"), SAVE_ID, 0, 0)
    engine = stage.open_engine(posix)

    def reserve(path):
        config = dataclasses.replace(posix, staging_directory=f"{path}/")
        return tier.reserve(engine, config, place, REGIONS)

    (tmp_path / "mounted").mkdir()
    for _ in range(2):
        reserve(tmp_path / "mounted" / "staging").discard()
    assert caplog.messages == [f"made staging directory {tmp_path}/mounted/staging/"]
    missing = tmp_path / "not" / "mounted"
    with pytest.raises(StorageError, match=f"make staging directory: {missing}/staging/.*found no"):
        reserve(missing / "staging")
    with pytest.raises(StorageError, match=rf"found no directory {missing} \(only the last"):
        reserve(missing / "staging")
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize(
    ("name", "warned"), [("x/staging", True), ("x", True), ("xy", False), ("staging", False)]
)
def test_a_staging_directory_inside_of_the_checkpoint_is_warned_of_once(
    posix, tmp_path, caplog, name, warned
):
    directory = tmp_path / "x"
    directory.mkdir()
    config = dataclasses.replace(posix, staging_directory=str(tmp_path / name))
    engine = stage.open_engine(posix)
    for rank in (0, 1):
        place = tier.Place(str(directory), SAVE_ID, 0, rank)
        tier.reserve(engine, config, place, REGIONS).discard()
    assert ["inside" in text for text in caplog.messages] == [True] * warned
