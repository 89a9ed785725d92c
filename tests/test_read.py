"""Subfiles on their way in: lengths, checksums, errors."""

import os

import numpy as np
import pytest

from megatron_uring import _engine, read, stage
from megatron_uring.errors import CorruptionError, StorageError
from megatron_uring.layout import BLOCK_BYTES, Superblock, subfile_name
from megatron_uring.tables import Ranges

SAVE_ID = "0123456789abcdef"
BLOCKS = 3


@pytest.fixture
def engine(config):
    return stage.open_engine(config)


@pytest.fixture
def subfile(tmp_path):
    """Three blocks of random bytes as subfile 4 of a save."""
    data = np.random.default_rng(0).integers(0, 256, BLOCKS * BLOCK_BYTES, np.uint8).tobytes()
    head = Superblock(SAVE_ID, 4).pack()
    data = head + data[len(head) :]
    (tmp_path / subfile_name(SAVE_ID, 4)).write_bytes(data)
    return data


def opened(directory, numbers=(4,), length=BLOCKS * BLOCK_BYTES, direct="off"):
    return read.open_subfiles(
        str(directory),
        SAVE_ID,
        np.array(numbers, np.int32),
        np.full(len(numbers), length, np.int64),
        direct=direct,
        read_bytes=0,
    )


def checksums(data):
    return np.array(
        [_engine.crc32c(data[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES]) for i in range(BLOCKS)],
        np.uint32,
    )


def read_all(engine, files, expected):
    length = np.array([BLOCKS * BLOCK_BYTES], np.int64)
    ranges = Ranges(np.zeros(1, np.int32), np.zeros(1, np.int64), length, expected)
    bad, _ = read.read_ranges(engine, files, ranges, stage.stage_nothing(), timeout_s=10.0)
    return bad


@pytest.mark.parametrize("direct", ["on", "off", "auto"])
def test_intact_blocks_are_found_intact(engine, tmp_path, subfile, direct):
    with opened(tmp_path, direct=direct) as files:
        assert files[0].direct == (direct == "on")
        assert len(read_all(engine, files, checksums(subfile))) == 0


def test_every_bad_block_is_listed_with_offset_expected_and_found(engine, tmp_path, subfile):
    expected = checksums(subfile)
    damaged = expected.copy()
    damaged[[0, 2]] ^= 5
    with opened(tmp_path) as files:
        bad = read_all(engine, files, damaged)
    assert sorted(bad.tolist()) == [
        [0, 0, int(damaged[0]), int(expected[0])],
        [0, 2 * BLOCK_BYTES, int(damaged[2]), int(expected[2])],
    ]


@pytest.mark.parametrize(("length", "offset"), [(BLOCK_BYTES, BLOCK_BYTES), (0, 0)])
def test_a_shorter_file_is_refused_before_it_is_read(tmp_path, subfile, length, offset):
    os.truncate(tmp_path / subfile_name(SAVE_ID, 4), length)
    with (
        pytest.raises(CorruptionError, match=f"00004.bin: offset {offset}: expected 3145728 bytes"),
        opened(tmp_path),
    ):
        pass


def test_a_longer_file_is_refused(tmp_path, subfile):
    with open(tmp_path / subfile_name(SAVE_ID, 4), "ab") as file:
        file.write(b"x")
    with pytest.raises(CorruptionError, match="found 3145729 bytes"), opened(tmp_path):
        pass


def test_a_missing_file_is_refused_by_name_and_closes_the_others(tmp_path, subfile):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CorruptionError, match=r"00005.bin.*no such file"), opened(tmp_path, (4, 5)):
        pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_are_closed_after_an_error_inside(tmp_path, subfile):
    with pytest.raises(ZeroDivisionError), opened(tmp_path) as files:
        raise ZeroDivisionError
    assert files[0].closed


@pytest.mark.fault
def test_a_failed_read_is_a_storage_error_with_errno_text(engine, tmp_path, subfile):
    _engine.inject_fault("read", "eio", path_contains=str(tmp_path))
    with (
        opened(tmp_path) as files,
        pytest.raises(StorageError, match=r"00004.bin.*Input/output error"),
    ):
        read_all(engine, files, checksums(subfile))


@pytest.mark.fault
@pytest.mark.parametrize("fault", ["short", "eintr", "eagain"])
def test_short_and_interrupted_reads_are_resumed(engine, tmp_path, subfile, fault):
    _engine.inject_fault("read", fault, count=3, path_contains=str(tmp_path))
    with opened(tmp_path) as files:
        assert len(read_all(engine, files, checksums(subfile))) == 0


def test_the_error_of_a_bad_block_names_what_lies_in_it(tmp_path, subfile):
    bad = np.array([[0, BLOCK_BYTES, 0xAB, 0xCD]], np.int64)
    asked = []

    def names(number, start, end):
        asked.append((number, start, end))
        return [f"t{i}" for i in range(6)]

    with opened(tmp_path) as files:
        error = read.bad_block_error(
            files, np.zeros(1, np.int32), np.array([4], np.int32), bad[0], names
        )
    assert asked == [(4, BLOCK_BYTES, 2 * BLOCK_BYTES)]
    assert str(error).startswith("verify block of 't0', 't1', 't2', 't3' and 2 more: ")
    assert "00004.bin: offset 1048576: expected crc32c 0x000000ab, found 0x000000cd" in str(error)


@pytest.mark.parametrize("half_written", [True, False])
def test_only_an_error_after_the_scatter_speaks_of_half_written_destinations(
    tmp_path, subfile, half_written
):
    bad = np.array([[0, 0, 1, 2]], np.int64)
    one = np.zeros(1, np.int32)
    with opened(tmp_path) as files, pytest.raises(CorruptionError) as caught:
        read.raise_bad_block(files, one, one, bad, lambda *_: [], half_written=half_written)
    assert ("half written" in str(caught.value)) == half_written
    assert "no tensor" in str(caught.value)


def test_no_bad_block_raises_nothing():
    none = np.zeros(0, np.int32)
    read.raise_bad_block([], none, none, np.zeros((0, 4), np.int64), list, half_written=True)


def test_file_numbers_become_dense():
    numbers, place = read.dense_file_numbers(np.array([7, 3, 7, 9], np.int32))
    assert numbers.tolist() == [3, 7, 9] and place.tolist() == [1, 0, 1, 2]
    assert numbers.dtype == place.dtype == np.int32
