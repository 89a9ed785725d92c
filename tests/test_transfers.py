"""Patterns and transfers: every byte in one submission, and back as it was."""

import dataclasses
import mmap
import os

import numpy as np
import pytest

from megatron_uring import _engine
from megatron_uring.bench.measure import DifferentError
from megatron_uring.bench.suite import transfers
from megatron_uring.bench.suite.patterns import (
    ALIGNMENTS,
    BLOCK,
    NONE,
    PACKED,
    PATTERNS,
    STRIPE,
    Place,
    Rules,
    extent_bytes,
    region_bytes,
    tensor_starts,
)
from megatron_uring.bench.suite.transfers import Arena, Options, Transfer
from megatron_uring.comm import connect

MIB = 1 << 20
SIZES = np.array([5, 4096, 100_000, 3 * MIB + 77, MIB, 12_288], np.int64)
WITH_RING = pytest.mark.skipif(not _engine.has_io_uring(), reason="built without liburing")


def layout_of(pattern, rules, rank=0, ranks=1, sizes=SIZES):
    extent = extent_bytes(sizes, rules)
    place = Place(rank, ranks, 0, rank, ranks, region_bytes(extent, rules))
    return PATTERNS[pattern](sizes, place, rules)


# -------------------------------------------------------------------------------------------------
# patterns


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("submission_bytes", [0, 4096, 65536, MIB, 1 << 30])
def test_every_byte_of_every_tensor_is_in_one_submission(pattern, alignment, submission_bytes):
    rules = Rules(submission_bytes, alignment, MIB, chunk_bytes=2 * MIB)
    layout = layout_of(pattern, rules, rank=1, ranks=2)
    seen = np.zeros(extent_bytes(SIZES, rules) + 1, np.int64)
    for memory, length in zip(layout.memory.tolist(), layout.length.tolist(), strict=True):
        seen[memory : memory + length] += 1
    for start, size in zip(tensor_starts(SIZES, rules).tolist(), SIZES.tolist(), strict=True):
        assert (seen[start : start + size] == 1).all()
    assert seen.max() == 1
    if submission_bytes:
        assert layout.length.max() <= submission_bytes
    assert (layout.start + layout.length <= layout.file_bytes[layout.file_number]).all()


def test_files_and_regions_are_those_of_the_pattern():
    rules = Rules(MIB, BLOCK, MIB, chunk_bytes=2 * MIB)
    assert len(layout_of("file per tensor", rules).files) == len(SIZES)
    assert len(layout_of("chunk per file", rules).files) == -(
        -extent_bytes(SIZES, rules) // (2 * MIB)
    )
    assert layout_of("file per rank", rules, rank=3, ranks=4).files == ("rank3.data0",)
    region = region_bytes(extent_bytes(SIZES, rules), rules)
    first, last = (layout_of("one shared file", rules, rank, 4) for rank in (0, 3))
    assert (first.start.min(), last.start.min()) == (0, 3 * region)
    assert first.created[0] and not last.created[0]
    assert first.file_bytes[0] == last.file_bytes[0] == 4 * region


def test_alignment_is_what_its_name_says():
    for alignment, unit in ((BLOCK, 4096), (STRIPE, MIB)):
        starts = tensor_starts(SIZES, Rules(0, alignment, MIB))
        assert (starts % unit == 0).all()
    assert (tensor_starts(SIZES, Rules(0, NONE)) % 2 == 1).all()
    packed = tensor_starts(SIZES, Rules(0, PACKED))
    assert packed.tolist() == [0, *np.cumsum(SIZES)[:-1]]


def test_no_chunk_file_holds_more_than_a_chunk():
    layout = layout_of("chunk per file", Rules(0, PACKED, MIB, chunk_bytes=MIB))
    assert layout.file_bytes.max() == MIB
    assert (layout.start + layout.length <= MIB).all()


# -------------------------------------------------------------------------------------------------
# transfers


@pytest.fixture
def transfer(tmp_path):
    """A transfer of `SIZES`, made with rules and options."""
    made = []

    def make(pattern="file per rank", rules=None, lap_bytes=64 * MIB, room=4 * MIB, **options):
        rules = rules or Rules(65536, BLOCK)
        one = Transfer(
            connect(30.0, "auto"),
            str(tmp_path),
            layout_of(pattern, rules),
            Options(**{"direct": False, "engine": "auto", **options}),
            Arena(lap_bytes, room, 0),
            Arena(lap_bytes, room, None),
        )
        made.append(one)
        return one

    yield make
    for one in made:
        one.release()


def there_and_back(one):
    one.prepare()
    one.write()
    written = one.outcome
    one.prepare()
    one.read()
    one.check()
    return written, one.outcome


RING_WAYS = [
    {"polled_submission": True},
    {"registered_memory": True},
    {"registered_files": True},
    {"submission_batch": 1},
    {"submission_batch": 3},
    {"polled_submission": True, "registered_memory": True, "registered_files": True},
]


@WITH_RING
@pytest.mark.parametrize("options", RING_WAYS, ids="+".join)
@pytest.mark.parametrize("pattern", ["file per rank", "file per tensor"])
@pytest.mark.parametrize("direct", [True, False])
def test_what_a_ring_offers_changes_no_byte(transfer, pattern, options, direct):
    written, arrived = there_and_back(
        transfer(pattern, engine="io_uring", direct=direct, queue_depth=8, **options)
    )
    assert set(written.phases_s) == {"open", "transfer", "sync", "close"}
    assert set(arrived.phases_s) == {"open", "transfer", "close"}


@pytest.mark.parametrize("engine", ["auto", "posix"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_all_patterns_come_back_with_both_engines(transfer, engine, pattern):
    there_and_back(transfer(pattern, engine=engine))


@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_unaligned_data_goes_through_the_page_cache(transfer, alignment):
    there_and_back(transfer(rules=Rules(0, alignment, MIB)))


def test_more_files_than_may_be_open_at_once(transfer, monkeypatch):
    monkeypatch.setattr(transfers, "FILES_OPEN", 2)
    one = transfer("file per tensor")
    there_and_back(one)
    assert len(os.listdir(one.folder)) == len(SIZES)


def test_data_beyond_a_lap_of_memory_lies_there_again(transfer):
    there_and_back(transfer(rules=Rules(300_000, BLOCK), lap_bytes=MIB, room=4 * MIB))


@pytest.mark.parametrize("memory", ["reused", "new"])
@pytest.mark.parametrize("direct", [True, False])
def test_slabs_verify_and_scatter(transfer, memory, direct):
    one = transfer(rules=Rules(0, PACKED), staging="slabs", memory=memory, direct=direct)
    one.prepare()
    one.write()
    one.prepare()
    one.read()
    one.check()
    assert {"copy", "checksum"} <= set(one.outcome.phases_s)
    assert ("allocate" in one.outcome.phases_s) == (memory == "new")


@pytest.mark.parametrize("staging", ["none", "slabs"])
def test_a_changed_byte_is_found(transfer, staging):
    one = transfer(rules=Rules(0, PACKED), staging=staging)
    one.prepare()
    one.write()
    with open(os.path.join(one.folder, one.layout.files[0]), "r+b") as file:
        file.seek(200_000)
        byte = file.read(1)
        file.seek(200_000)
        file.write(bytes([byte[0] ^ 1]))
    one.prepare()
    with pytest.raises(DifferentError):
        one.read()
        one.check()


def test_a_submission_that_went_astray_is_found(transfer):
    one = transfer()
    one.prepare()
    one.write()
    # as if two submissions of the same length had been swapped
    start = one.layout.start.copy()
    (same,) = np.nonzero(one.layout.length == one.layout.length[4])
    start[same[:2]] = start[same[:2]][::-1]
    one.layout = dataclasses.replace(one.layout, start=start)
    one.prepare()
    one.read()
    with pytest.raises(DifferentError):
        one.check()


def test_calls_that_submit_are_counted(transfer):
    written, _ = there_and_back(transfer(engine="posix"))
    submissions = len(transfer().layout.start)
    assert written.submit_calls == submissions + 1  # and the sync


@WITH_RING
def test_batches_of_one_submit_each_by_itself(transfer):
    alone, _ = there_and_back(transfer(engine="io_uring", submission_batch=1))
    assert alone.submit_calls > len(transfer().layout.start)


def test_a_full_disk_fails_the_write_and_the_next_one_works(transfer):
    one = transfer()
    one.prepare()
    _engine.inject_fault("write", "enospc", skip=3)
    try:
        with pytest.raises(Exception, match="No space left"):
            one.write()
    finally:
        _engine.clear_faults()
    for name in os.listdir(one.folder):
        os.unlink(os.path.join(one.folder, name))
    there_and_back(one)


# -------------------------------------------------------------------------------------------------
# the engine's own door


def memory_of(length):
    return np.frombuffer(mmap.mmap(-1, length), np.uint8)


@pytest.fixture
def engine():
    made = _engine.Engine("auto", _engine.SlabPool(MIB, 1), queue_depth=4)
    yield made
    made.close()


def arguments(file, memory, start, length, offset=0):
    return (
        [file],
        np.zeros(1, np.int32),
        np.array([start], np.int64),
        np.array([length], np.int64),
        np.array([memory.ctypes.data + offset], np.uint64),
    )


def test_a_direct_transfer_that_is_not_aligned_is_refused_and_touches_nothing(engine, tmp_path):
    file = _engine.File.create(str(tmp_path / "a"), direct=True)
    if not file.direct:
        pytest.skip("no direct I/O here")
    memory = memory_of(MIB)
    engine.transfer("write", *arguments(file, memory, 0, MIB)).wait(30)
    memory[:] = 7
    with pytest.raises(OSError, match="Invalid argument"):
        engine.transfer("read", *arguments(file, memory, 3, 4096)).wait(30)
    assert (memory == 7).all()
    file.close()


def test_a_read_takes_exactly_the_bytes_that_were_asked_for(engine, tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"x" * 8192)
    file = _engine.File.open(str(path), writable=False, direct=False)
    memory = memory_of(8192)
    engine.transfer("read", *arguments(file, memory, 1000, 1001, offset=50)).wait(30)
    assert bytes(memory[50:1051]) == b"x" * 1001
    assert not memory[:50].any() and not memory[1051:].any()
    with pytest.raises(OSError, match="No data available"):
        engine.transfer("read", *arguments(file, memory, 8000, 1001)).wait(30)
    file.close()


@pytest.mark.parametrize("fault", ["short", "eintr", "eagain"])
def test_short_and_interrupted_transfers_go_on(engine, tmp_path, fault):
    file = _engine.File.create(str(tmp_path / "a"), direct=False)
    memory = memory_of(MIB)
    memory[:] = np.random.default_rng(0).integers(0, 256, MIB, np.uint8)
    _engine.inject_fault("write", fault, count=3)
    try:
        engine.transfer("write", *arguments(file, memory, 0, MIB)).wait(30)
    finally:
        _engine.clear_faults()
    assert (tmp_path / "a").read_bytes() == memory.tobytes()
    file.close()


def test_arguments_are_checked(engine, tmp_path):
    file = _engine.File.create(str(tmp_path / "a"), direct=False)
    good = arguments(file, memory_of(4096), 0, 4096)
    with pytest.raises(ValueError, match="write or read"):
        engine.transfer("sync", *good)
    with pytest.raises(ValueError, match="differ in length"):
        engine.transfer("write", *good[:4], np.zeros(2, np.uint64))
    with pytest.raises(ValueError, match="no such file_number"):
        engine.transfer("write", [file], np.ones(1, np.int32), *good[2:])
    with pytest.raises(ValueError, match="start is not a multiple of 1"):
        engine.transfer("write", *good[:2], np.array([-1], np.int64), *good[3:])
    with pytest.raises(ValueError, match="submission_batch is not between 0"):
        _engine.Engine("auto", _engine.SlabPool(MIB, 1), queue_depth=1, submission_batch=-1)
    file.close()


def test_a_long_list_of_transfers_is_under_way_a_few_at_a_time(engine, tmp_path):
    count = 20_000
    file = _engine.File.create(str(tmp_path / "a"), direct=False)
    memory = memory_of(count * 16)
    memory[:] = np.random.default_rng(0).integers(0, 256, len(memory), np.uint8)
    start = np.arange(count, dtype=np.int64) * 16
    job = engine.transfer(
        "write",
        [file],
        np.zeros(count, np.int32),
        start,
        np.full(count, 16, np.int64),
        (start + memory.ctypes.data).astype(np.uint64),
    )
    assert job.wait(60) and job.bytes_done == job.bytes_total == len(memory)
    assert (tmp_path / "a").read_bytes() == memory.tobytes()
    file.close()


def test_a_cancelled_transfer_ends(engine, tmp_path):
    file = _engine.File.create(str(tmp_path / "a"), direct=False)
    memory = memory_of(MIB)
    _engine.inject_fault("write", "delay", count=-1, delay_s=0.2)
    try:
        many = np.arange(256, dtype=np.int64) * 4096
        job = engine.transfer(
            "write",
            [file],
            np.zeros(256, np.int32),
            many,
            np.full(256, 4096, np.int64),
            (many + memory.ctypes.data).astype(np.uint64),
        )
        job.cancel()
        with pytest.raises(OSError, match="canceled"):
            job.wait(10)
    finally:
        _engine.clear_faults()
    file.close()


@WITH_RING
def test_more_files_than_slots_are_all_written_to_their_own(engine, tmp_path):
    count = 200  # of which 64 have a slot at a time, some of them twice in what is queued
    made = _engine.Engine(
        "io_uring", _engine.SlabPool(MIB, 1), queue_depth=128, registered_files=True
    )
    files = [_engine.File.create(str(tmp_path / str(n)), direct=False) for n in range(count)]
    memory = memory_of(count * 4096)
    memory[:] = np.repeat(np.arange(count, dtype=np.uint8), 4096)
    number = np.concatenate([np.arange(count), np.arange(count)[::-1]]).astype(np.int32)
    half = np.repeat(np.array([0, 2048], np.int64), count)
    job = made.transfer(
        "write",
        files,
        number,
        half,
        np.full(2 * count, 2048, np.int64),
        (memory.ctypes.data + number.astype(np.int64) * 4096 + half).astype(np.uint64),
    )
    assert job.wait(30)
    made.close()
    for n, file in enumerate(files):
        file.close()
        assert (tmp_path / str(n)).read_bytes() == bytes([n]) * 4096, n


def test_a_rank_that_owns_nothing_takes_part(transfer):
    none = np.zeros(0, np.int64)
    for pattern in PATTERNS:
        for staging, rules in (("none", Rules(MIB, PACKED)), ("slabs", Rules(0, PACKED))):
            one = transfer(pattern, rules=rules, staging=staging)
            one.layout = layout_of(pattern, rules, sizes=none)
            there_and_back(one)
            for name in os.listdir(one.folder):
                os.unlink(os.path.join(one.folder, name))


@pytest.mark.parametrize("most_bytes", [1, 3 * MIB + 12_345, 5 * MIB, 1 << 30])
@pytest.mark.parametrize("submission_bytes", [0, 65536, 16 * MIB])
@pytest.mark.parametrize("alignment", [PACKED, BLOCK])
def test_little_memory_is_enough_and_keeps_what_is_aligned(
    tmp_path, most_bytes, submission_bytes, alignment
):
    from megatron_uring.bench.suite.pattern_case import Memory, Spec
    from megatron_uring.bench.suite.workloads import synthetic

    workload = synthetic(40 * MIB, 4 * MIB)
    rules = Rules(submission_bytes, alignment)
    spec = Spec("g", "c", "write", workload, "file per rank", rules, Options())
    memory = Memory.of([spec], 0, most_bytes)
    layout = layout_of("file per rank", rules, sizes=workload.tensor_bytes)
    offset = layout.memory % memory.source.lap_bytes
    assert (offset % 4096 == 0).all()
    assert (offset + layout.length <= memory.source.bytes).all()
    one = Transfer(
        connect(30.0, "auto"), str(tmp_path), layout, Options(engine="auto", direct=False),
        memory.source, memory.target,
    )  # fmt: skip
    there_and_back(one)
    one.release()
