"""Subfiles on their way out: creation, mode, errors of the file system."""

import os

import numpy as np
import pytest

from megatron_uring import _engine, progress, stage, write
from megatron_uring.errors import StorageError
from megatron_uring.layout import BLOCK_BYTES, PAGE_BYTES


@pytest.fixture
def engine(config):
    return stage.open_engine(config)


def create(engine, path, direct="auto", length=BLOCK_BYTES):
    return write.create_subfile(engine, str(path), length, direct=direct, timeout_s=10.0)


def write_region(engine, file, data=b"data", length=PAGE_BYTES):
    staged = stage.stage_objects([data], np.array([0], np.int64))
    return write.write_region(
        engine, file, 0, length, staged, timeout_s=10.0, report=lambda done: None
    )


@pytest.mark.parametrize("direct", ["on", "off", "auto"])
def test_what_is_written_is_padded_with_zeros_and_checksummed_as_on_disk(engine, tmp_path, direct):
    file = create(engine, tmp_path / "f", direct)
    checksums = write_region(engine, file, b"x" * 5000, BLOCK_BYTES + PAGE_BYTES).checksums()
    write.sync_subfile(engine, file, 10.0)
    file.close()
    data = (tmp_path / "f").read_bytes()
    assert data[:5000] == b"x" * 5000
    assert data[5000 : BLOCK_BYTES + PAGE_BYTES] == bytes(BLOCK_BYTES + PAGE_BYTES - 5000)
    assert checksums.tolist() == [
        _engine.crc32c(data[:BLOCK_BYTES]),
        _engine.crc32c(data[BLOCK_BYTES : BLOCK_BYTES + PAGE_BYTES]),
    ]
    if direct != "auto":
        assert file.direct == (direct == "on")


def test_an_existing_file_is_never_opened_for_writing(engine, tmp_path):
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(StorageError, match="File exists"):
        create(engine, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == b"old"


def test_a_missing_directory_is_a_storage_error_with_path(engine, tmp_path):
    with pytest.raises(StorageError, match=r"no/f.*No such file or directory"):
        create(engine, tmp_path / "no" / "f")


@pytest.mark.fault
def test_einval_on_the_first_direct_page_falls_back_to_buffered(engine, tmp_path):
    _engine.inject_fault("write", "einval", count=1, path_contains=str(tmp_path))
    file = create(engine, tmp_path / "f")
    assert not file.direct
    write_region(engine, file)
    file.close()
    assert (tmp_path / "f").read_bytes()[:5] == b"data\0"


@pytest.mark.fault
def test_direct_on_does_not_fall_back_and_leaves_no_file(engine, tmp_path):
    _engine.inject_fault("write", "einval", count=1, path_contains=str(tmp_path))
    with pytest.raises(StorageError, match="MEGATRON_URING_DIRECT=auto"):
        create(engine, tmp_path / "f", "on")
    assert os.listdir(tmp_path) == []


@pytest.mark.fault
@pytest.mark.parametrize(
    ("operation", "fault", "text"),
    [
        ("open", "enospc", "No space left on device"),
        ("preallocate", "enospc", "No space left on device"),
        ("preallocate", "edquot", "Disk quota exceeded"),
        ("write", "eio", "Input/output error"),
    ],
)
def test_creation_that_fails_names_the_cause_and_leaves_no_file(
    engine, tmp_path, operation, fault, text
):
    _engine.inject_fault(operation, fault, path_contains=str(tmp_path))
    with pytest.raises(StorageError, match=text) as caught:
        create(engine, tmp_path / "f", "on")
    assert str(tmp_path / "f") in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.fault
@pytest.mark.parametrize("direct", ["on", "off"])
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("eio", "Input/output error"),
        ("enospc", "No space left on device"),
        ("edquot", "Disk quota exceeded"),
    ],
)
def test_a_failed_write_is_a_storage_error_with_errno_text_and_path(
    engine, tmp_path, fault, text, direct
):
    file = create(engine, tmp_path / "f", direct)
    _engine.inject_fault("write", fault, path_contains=str(tmp_path))
    with pytest.raises(StorageError, match=text) as caught:
        write_region(engine, file)
    file.close()
    assert str(tmp_path / "f") in str(caught.value)


@pytest.mark.fault
@pytest.mark.parametrize("fault", ["short", "eintr", "eagain"])
def test_short_and_interrupted_writes_are_resumed(engine, tmp_path, fault):
    file = create(engine, tmp_path / "f", "off")
    _engine.inject_fault("write", fault, count=3, path_contains=str(tmp_path))
    write_region(engine, file, b"y" * 100_000, 25 * PAGE_BYTES)
    file.close()
    assert (tmp_path / "f").read_bytes()[:102400] == (b"y" * 100_000).ljust(102400, b"\0")


@pytest.mark.fault
def test_a_failed_sync_is_reported_and_not_retried(engine, tmp_path):
    file = create(engine, tmp_path / "f", "off")
    write_region(engine, file)
    _engine.inject_fault("sync", "eio", count=1, path_contains=str(tmp_path))
    _engine.trace_start()
    with pytest.raises(StorageError, match=r"sync subfile.*Input/output error"):
        write.sync_subfile(engine, file, 10.0)
    trace = _engine.trace_stop()
    file.close()
    assert [row[0] for row in trace].count("sync") == 1


@pytest.mark.fault
def test_a_write_that_does_not_progress_is_given_up_after_the_timeout(engine, tmp_path):
    file = create(engine, tmp_path / "f", "off")
    _engine.inject_fault("write", "delay", delay_s=1.0, path_contains=str(tmp_path))
    staged = stage.stage_objects([b"data"], np.array([0], np.int64))
    with pytest.raises(StorageError, match="without progress"):
        write.write_region(
            engine, file, 0, PAGE_BYTES, staged, timeout_s=0.2, report=lambda done: None
        )
    file.close()


def test_opening_a_subfile_takes_the_mode_of_the_aggregator(engine, tmp_path):
    create(engine, tmp_path / "f", "on").close()
    for direct in (True, False):
        file = write.open_subfile(str(tmp_path / "f"), direct=direct)
        assert file.direct == direct
        file.close()
    with pytest.raises(StorageError, match="open subfile"):
        write.open_subfile(str(tmp_path / "missing"), direct=False)


def test_storage_is_described_and_a_wished_stripe_wins(tmp_path):
    found = write.describe_storage(str(tmp_path))
    assert found.file_system != "unknown"
    assert found.stripe_bytes >= BLOCK_BYTES
    assert write.describe_storage(str(tmp_path), 5 << 20).stripe_bytes == 5 << 20
    assert write.describe_storage("/proc").file_system == "proc"


@pytest.mark.fault
def test_work_beside_a_write_is_done_while_it_goes_on_and_its_error_ends_it(engine, tmp_path):
    file = create(engine, tmp_path / "f")
    _engine.inject_fault("write", "delay", count=-1, delay_s=0.3, path_contains=str(tmp_path))
    staged = stage.stage_objects([b"data"], np.array([0], np.int64))
    seen = []

    def region(meanwhile):
        return write.write_region(
            engine,
            file,
            0,
            PAGE_BYTES,
            staged,
            timeout_s=10.0,
            report=seen.append,
            meanwhile=meanwhile,
        )

    region(lambda: seen.append("beside"))
    assert seen[0] == "beside" and len(seen) > 1  # reports came after it: the write went on

    def fail():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        region(fail)
    file.close()
    assert not progress._held  # the job has ended, and nothing keeps its memory
