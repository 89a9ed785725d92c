"""Restores from the nearest whole copy, and what happens where it is not whole."""

import dataclasses
import json
import logging
import os

import pytest
import torch

import megatron_uring
from megatron_uring import CorruptionError, _engine, checkpoint

MIB = 1 << 20


@pytest.fixture
def state():
    return {"a": torch.arange(700_000) * 0.25, "b": torch.ones(3, 5), "n": {"step": 7}}


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger="megatron_uring")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture
def saved(save_tiered, state, tmp_path):
    directory = tmp_path / "run" / "iter_0000001"
    save_tiered(state, directory).wait()
    return directory


@pytest.fixture
def copy(saved, staging):
    (found,) = staging.rglob("data-*.bin.0")
    return found


def assert_equal(found, state):
    assert torch.equal(found["a"], state["a"]) and torch.equal(found["b"], state["b"])
    assert found["n"] == state["n"]


def files_read(restore, *arguments, **options):
    _engine.trace_start()
    try:
        result = restore(*arguments, **options)
    finally:
        trace = _engine.trace_stop()
    return result, {path for operation, path, *_ in trace if operation == "read"}


@pytest.mark.parametrize("verify_first", [False, True])
def test_all_of_it_is_read_from_the_local_copy(
    saved, copy, state, restore_near, config, verify_first
):
    (found, report), read = files_read(restore_near, saved, config, verify_first=verify_first)
    assert_equal(found, state)
    assert read == {str(copy), str(saved / "index.h5")}
    assert report.local_bytes == report.file_bytes > 2 * MIB


def test_without_the_option_the_checkpoint_directory_is_read(saved, copy, state, restore_near):
    (found, report), read = files_read(restore_near, saved, staging_directory="")
    assert_equal(found, state)
    assert str(copy) not in read and report.local_bytes == 0


def test_a_part_is_read_from_the_copy_too(saved, posix, staging, state, copy):
    config = dataclasses.replace(posix, staging_directory=str(staging))
    found, read = files_read(megatron_uring.restore, saved, keys=["b"], config=config)
    assert torch.equal(found["b"], state["b"])
    assert 0 < checkpoint.last_reports()["restore"].local_bytes < MIB
    assert read == {str(copy), str(saved / "index.h5")}


def damage(path, offset=MIB):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


DAMAGES = {
    "a bit": damage,
    "cut": lambda path: os.truncate(path, MIB + 4096),
    "empty": lambda path: os.truncate(path, 0),
    "gone": os.unlink,
    "no file": lambda path: (os.unlink(path), os.mkdir(path)),
}


@pytest.mark.parametrize("verify_first", [False, True])
@pytest.mark.parametrize("how", DAMAGES)
def test_a_copy_that_is_not_whole_is_left_out_with_one_warning(
    saved, copy, state, restore_near, warnings, how, verify_first
):
    DAMAGES[how](copy)
    (found, report), read = files_read(restore_near, saved, verify_first=verify_first)
    assert_equal(found, state)
    assert report.local_bytes == 0 and report.file_bytes > 2 * MIB
    assert any(path.startswith(f"{saved}/data-") for path in read)
    assert len(warnings()) == 1 and str(copy) in warnings()[0]


def test_a_read_of_the_copy_that_fails_is_made_good(saved, copy, state, restore_near, warnings):
    _engine.inject_fault("read", "eio", count=-1, path_contains=str(copy))
    found, report = restore_near(saved)
    assert_equal(found, state)
    assert report.local_bytes == 0 and len(warnings()) == 1


def change_marker(copy, **fields):
    path = copy.with_name(copy.name + ".json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    "fields",
    [
        {"save_id": "f" * 16},
        {"crc32c": 1},
        {"rank": 1},
        {"subfile": 1},
        {"regions": [[0, 4096]]},
        {"regions": [[0, 4096], [MIB, MIB]]},
    ],
)
def test_a_marker_that_does_not_fit_the_index_is_not_believed(
    saved, copy, state, restore_near, warnings, fields
):
    change_marker(copy, **fields)
    damage(copy)
    (found, report), read = files_read(restore_near, saved)
    assert_equal(found, state)
    assert report.local_bytes == 0 and warnings() == [] and str(copy) not in read


def test_a_copy_of_another_save_is_not_read(saved, save, state, restore_near, warnings):
    newer = {**state, "a": state["a"] + 1}
    save(newer, saved)  # straight, over the one that the copy is of
    found, report = restore_near(saved)
    assert_equal(found, newer)
    assert report.local_bytes == 0 and warnings() == []


def test_a_copy_of_another_save_under_the_name_of_this_one_is_not_read(
    saved, save_tiered, save, staging, state, restore_near, tmp_path
):
    newer = {**state, "a": state["a"] + 1}
    report = save(newer, saved)
    (folder,) = [path.parent for path in staging.rglob("data-*.bin.0")]
    for path in list(folder.iterdir()):
        path.rename(path.with_name(path.name.replace(folder.name, report.save_id)))
    folder.rename(folder.with_name(report.save_id))
    (copy,) = staging.rglob("data-*.bin.0")
    change_marker(copy, save_id=report.save_id)
    found, near = restore_near(saved)
    assert_equal(found, newer)
    assert near.local_bytes == 0


def test_a_copy_whose_checkpoint_is_gone_is_removed(saved, copy, save, state, restore_near):
    for path in saved.iterdir():
        path.unlink()
    save(state, saved.parent / "iter_0000002")
    restore_near(saved.parent / "iter_0000002")
    assert not copy.exists()


def test_what_is_lost_in_the_checkpoint_directory_is_there_on_the_node(
    saved, copy, state, restore_near, warnings
):
    (subfile,) = saved.glob("data-*.bin")
    damage(subfile)
    assert_equal(restore_near(saved)[0], state)
    subfile.unlink()
    assert_equal(restore_near(saved)[0], state)
    assert warnings() == []


@pytest.mark.parametrize("verify_first", [False, True])
def test_two_damaged_copies_are_an_error(saved, copy, restore_near, verify_first):
    (subfile,) = saved.glob("data-*.bin")
    damage(subfile)
    damage(copy)
    with pytest.raises(CorruptionError, match="verify block of 'a'") as caught:
        restore_near(saved, verify_first=verify_first)
    assert str(subfile) in str(caught.value)
    assert ("half written" in str(caught.value)) != verify_first


def test_a_copy_that_fails_after_it_was_checked_leaves_destinations_half_written(
    saved, copy, state, restore_near, warnings
):
    _engine.trace_start()
    restore_near(saved, verify_first=True)
    reads = [path for operation, path, *_ in _engine.trace_stop() if operation == "read"]
    checks = reads.count(str(copy)) // 2
    for damaged in (False, True):
        _engine.inject_fault("read", "eio", skip=checks, count=-1, path_contains=str(copy))
        if not damaged:
            found, report = restore_near(saved, verify_first=True)
            assert_equal(found, state)
            assert report.local_bytes == 0 and len(warnings()) == 1
        else:
            (subfile,) = saved.glob("data-*.bin")
            damage(subfile)
            with pytest.raises(CorruptionError, match="half written"):
                restore_near(saved, verify_first=True)
        _engine.clear_faults()


def test_large_restores_read_the_copy_directly(save_tiered, restore_near, tmp_path):
    state = {"w": torch.arange(17 * MIB, dtype=torch.float32)}
    save_tiered(state, tmp_path / "run" / "a").wait()
    found, report = restore_near(tmp_path / "run" / "a")
    assert torch.equal(found["w"], state["w"]) and report.local_bytes >= 68 * MIB
