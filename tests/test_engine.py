"""The native engine: every byte, every errno, every slab (see `_engine.pyi`)."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_uring import _engine as engine_module

MIB = engine_module.BLOCK_BYTES
WAIT_S = 60.0

needs_io_uring = pytest.mark.skipif(
    not engine_module.has_io_uring(), reason="built without liburing"
)
KINDS = [pytest.param("io_uring", marks=needs_io_uring), "posix"]


@pytest.fixture(autouse=True)
def no_faults_left():
    engine_module.clear_faults()
    yield
    engine_module.clear_faults()


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def direct(request):
    return request.param


@pytest.fixture
def make(kind):
    """Engines of one kind, closed afterwards, whose slabs must all have come back."""
    made = []

    def build(slab_bytes=2 * MIB, slab_count=3, **options):
        pool = engine_module.SlabPool(slab_bytes, slab_count)
        options.setdefault("queue_depth", 4)
        engine = engine_module.Engine(kind, pool, **options)
        made.append((engine, pool))
        return engine, pool

    yield build
    for engine, pool in made:
        engine.close()
        assert pool.free_count == pool.slab_count


def make_pieces(rows, dimensions=0):
    """Pieces from rows (file_number, file_start, address, run_bytes, [(count, file, memory)])."""
    table = np.zeros((3, len(rows), dimensions), np.int64)
    table[0] = 1
    for i, row in enumerate(rows):
        for d, dim in enumerate(row[4] if len(row) > 4 else ()):
            table[:, i, d] = dim
    column = lambda k, dtype: np.array([row[k] for row in rows], dtype)  # noqa: E731
    return engine_module.Pieces(
        column(0, np.int32), column(1, np.int64), column(2, np.uint64), column(3, np.int64), *table
    )


def address_of(array):
    return array.__array_interface__["data"][0]


def box(array, file_start, file_strides=None, file_number=0):
    """One piece for a numpy view; file order is C order, dense unless strides are given."""
    shape, strides = array.shape, array.strides
    if file_strides is None:
        file_strides = np.zeros(array.shape, np.uint8).strides
        file_strides = tuple(s * array.itemsize for s in file_strides)
    dims = list(zip(shape, file_strides, strides, strict=True))
    return (file_number, file_start, address_of(array), array.itemsize, dims)


def random_bytes(length, seed=0):
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


def write(engine, path, length, pieces, *, direct=False, start=0):
    file = engine_module.File.create(str(path), direct=direct)
    job = engine.write(file, start, length, pieces)
    try:
        assert job.wait(WAIT_S)
    finally:
        file.close()
    return job


def read(engine, path, ranges, pieces, expected=None, *, direct=False, keep_open=None):
    paths = [path] if not isinstance(path, list) else path
    files = [engine_module.File.open(str(p), writable=False, direct=direct) for p in paths]
    numbers, starts, lengths = zip(*ranges, strict=True) if ranges else ((), (), ())
    job = engine.read(
        files,
        np.array(numbers, np.int32),
        np.array(starts, np.int64),
        np.array(lengths, np.int64),
        pieces,
        expected,
    )
    for file in files:
        file.close()  # takes effect when the job has ended
    return job


def block_checksums(content):
    return [
        engine_module.crc32c(content[at : at + MIB].tobytes()) for at in range(0, len(content), MIB)
    ]


# ---- checksums ----


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_crc32c_gives_the_values_of_rfc_3720(data, value):
    assert engine_module.crc32c(data) == value


def test_crc32c_chains_and_takes_any_buffer():
    data = random_bytes(100_003)
    whole = engine_module.crc32c(data)
    assert engine_module.crc32c(data[777:], engine_module.crc32c(data[:777])) == whole
    assert engine_module.crc32c(memoryview(data.tobytes())) == whole
    assert whole != zlib.crc32(data)
    with pytest.raises((BufferError, ValueError)):
        engine_module.crc32c(data[::2])


# ---- round trips ----


def test_contiguous_pieces_round_trip(make, direct, tmp_path):
    engine, _ = make()
    source = random_bytes(9 * MIB + 4096 * 3)
    pieces = make_pieces([(0, 0, address_of(source), len(source))])
    job = write(engine, tmp_path / "f", len(source), pieces, direct=direct)
    on_disk = np.fromfile(tmp_path / "f", np.uint8)
    assert np.array_equal(on_disk, source)
    assert job.checksums().tolist() == block_checksums(source)
    assert job.bytes_total == job.bytes_done == len(source)
    assert job.copy_s > 0 and job.checksum_s > 0

    target = np.zeros_like(source)
    job = read(
        engine,
        tmp_path / "f",
        [(0, 0, len(source))],
        make_pieces([(0, 0, address_of(target), len(target))]),
        job.checksums(),
        direct=direct,
    )
    assert job.wait(WAIT_S)
    assert np.array_equal(target, source)
    assert job.checksums().tolist() == block_checksums(source)
    assert engine.bad_blocks(job).shape == (0, 4)
    assert job.bytes_done == len(source)


def test_gaps_become_zeros_and_the_start_offset_holds(make, direct, tmp_path):
    engine, _ = make(slab_bytes=MIB)
    a, b = random_bytes(1000, 1), random_bytes(MIB + 13, 2)
    length = 3 * MIB + 8192
    start = 2 * MIB
    starts = (start + 64, start + MIB - 5)
    pieces = make_pieces(
        [(0, starts[0], address_of(a), len(a)), (0, starts[1], address_of(b), len(b))]
    )
    # Dirty the slabs first, so that a gap that is not zeroed shows.
    dirt = np.full(4 * MIB, 0xAB, np.uint8)
    write(engine, tmp_path / "dirt", 4 * MIB, make_pieces([(0, 0, address_of(dirt), len(dirt))]))
    job = write(engine, tmp_path / "f", length, pieces, direct=direct, start=start)
    want = np.zeros(start + length, np.uint8)
    want[starts[0] : starts[0] + len(a)] = a
    want[starts[1] : starts[1] + len(b)] = b
    assert np.array_equal(np.fromfile(tmp_path / "f", np.uint8), want)
    assert job.checksums().tolist() == block_checksums(want[start:])


VIEWS = {
    "transposed": lambda x: x.transpose(2, 0, 1),
    "sliced": lambda x: x[1:-1, ::2, 3:-1],
    "reversed": lambda x: x[::-1, :, ::-1],
    "broadcast": lambda x: np.broadcast_to(x[:1, :, :1], x.shape),
    "one run": lambda x: x,
    "rows": lambda x: x[:, :5],
}


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8", "c16"])
@pytest.mark.parametrize("view", VIEWS)
def test_strided_sources_are_packed_as_numpy_packs_them(make, tmp_path, view, dtype):
    engine, _ = make(slab_bytes=MIB, slab_count=2)
    whole = random_bytes(40 * 60 * 70 * np.dtype(dtype).itemsize).view(dtype).reshape(40, 60, 70)
    source = VIEWS[view](whole)
    want = np.ascontiguousarray(source).tobytes()
    length = -(-len(want) // 4096) * 4096
    write(engine, tmp_path / "f", length, make_pieces([box(source, 0)], source.ndim))
    assert (tmp_path / "f").read_bytes() == want.ljust(length, b"\0")


@pytest.mark.parametrize("dtype", ["u1", "u4", "c16"])
@pytest.mark.parametrize("view", ["transposed", "sliced", "reversed", "rows"])
def test_strided_targets_receive_their_box_and_nothing_else(make, direct, tmp_path, view, dtype):
    engine, _ = make(slab_bytes=MIB, slab_count=2)
    saved = random_bytes(50 * 61 * 70 * np.dtype(dtype).itemsize).view(dtype).reshape(50, 61, 70)
    target = np.zeros((40, 60, 70), dtype)
    reference = target.copy()
    destination, wanted = VIEWS[view](target), VIEWS[view](reference)
    # The box of the saved tensor that starts at (1, 1, 0), seen in the destination's shape.
    if view == "transposed":
        saved = np.ascontiguousarray(np.resize(saved, (71, 41, 61)))
    cut = tuple(slice(o, o + n) for o, n in zip((1, 1, 0), destination.shape, strict=True))
    wanted[...] = saved[cut]
    offset = 4096 + sum(o * s for o, s in zip((1, 1, 0), saved.strides, strict=True))
    (tmp_path / "f").write_bytes(bytes(4096) + saved.tobytes() + b"tail")
    piece = box(destination, offset, saved.strides)
    size = (tmp_path / "f").stat().st_size
    job = read(engine, tmp_path / "f", [(0, 0, size)], make_pieces([piece], 3), direct=direct)
    assert job.wait(WAIT_S)
    assert target.tobytes() == reference.tobytes()  # random complex numbers hold NaNs


def test_fifty_thousand_tiny_pieces(make, direct, tmp_path):
    engine, _ = make(slab_bytes=MIB, slab_count=4)
    rng = np.random.default_rng(5)
    count = 50_000
    sizes = rng.integers(0, 200, count)
    starts = np.concatenate([[0], np.cumsum(-(-sizes // 64) * 64)[:-1]])
    source = random_bytes(int(sizes.sum()), 6)
    offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    length = -(-int(starts[-1] + sizes[-1]) // 4096) * 4096

    def pieces_of(memory):
        return engine_module.Pieces(
            np.zeros(count, np.int32),
            starts.astype(np.int64),
            address_of(memory) + offsets.astype(np.uint64),
            sizes.astype(np.int64),
            *np.zeros((3, count, 0), np.int64),
        )

    begin = time.perf_counter()
    assert len(pieces_of(source)) == count
    job = write(engine, tmp_path / "f", length, pieces_of(source), direct=direct)
    want = np.zeros(length, np.uint8)
    for start, offset, size in zip(starts, offsets, sizes, strict=True):
        want[start : start + size] = source[offset : offset + size]
    assert np.array_equal(np.fromfile(tmp_path / "f", np.uint8), want)
    target = np.zeros_like(source)
    job = read(
        engine, tmp_path / "f", [(0, 0, length)], pieces_of(target), job.checksums(), direct=direct
    )
    assert job.wait(WAIT_S)
    assert np.array_equal(target, source)
    assert time.perf_counter() - begin < 20


@st.composite
def layouts(draw):
    """Pieces with unaligned ends around slab and block boundaries."""
    position, rows = 0, []
    near = st.sampled_from([0, 1, 63, 4095, MIB - 1, MIB, MIB + 1, 2 * MIB - 7])
    for _ in range(draw(st.integers(0, 7))):
        position += draw(st.one_of(st.integers(0, 300), near))
        run = draw(st.one_of(st.integers(0, 16), st.integers(0, MIB)))
        count = draw(st.integers(1, 400)) if run <= 16 else draw(st.integers(1, 3))
        gap = draw(st.one_of(st.just(0), st.integers(0, 4000)))
        rows.append((position, run, count, run + gap))
        if count and run:
            position += (count - 1) * (run + gap) + run
    return rows, -(-position // 4096) * 4096 + draw(st.sampled_from([0, 4096]))


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(layout=layouts(), copy_threads=st.integers(1, 3), direct_file=st.booleans())
def test_any_layout_is_written_and_read_like_numpy_does(
    kind, tmp_path, layout, copy_threads, direct_file
):
    rows, length = layout
    pool = engine_module.SlabPool(MIB, 2)
    engine = engine_module.Engine(kind, pool, queue_depth=2, copy_threads=copy_threads)
    want = np.zeros(length, np.uint8)
    sources = [random_bytes(run * count, i) for i, (_, run, count, _) in enumerate(rows)]
    pieces = []
    for source, (start, run, count, stride) in zip(sources, rows, strict=True):
        pieces.append((0, start, address_of(source), run, [(count, stride, run)]))
        for i in range(count):
            want[start + i * stride : start + i * stride + run] = source[i * run : (i + 1) * run]
    path = tmp_path / "f"
    path.unlink(missing_ok=True)
    job = write(engine, path, length, make_pieces(pieces, 1), direct=direct_file)
    assert np.array_equal(np.fromfile(path, np.uint8), want)
    assert job.checksums().tolist() == block_checksums(want)

    # Read twice into different memory at once: one file byte may go to several pieces.
    targets = [[np.zeros_like(source) for source in sources] for _ in range(2)]
    pieces = sorted(
        (0, start, address_of(target), run, [(count, stride, run)])
        for copy in targets
        for target, (start, run, count, stride) in zip(copy, rows, strict=True)
    )
    ranges = [(0, at, min(2 * MIB, length - at)) for at in range(0, length, 2 * MIB)]
    job = read(engine, path, ranges, make_pieces(pieces, 1), job.checksums(), direct=direct_file)
    assert job.wait(WAIT_S)
    for copy in targets:
        assert all(np.array_equal(t, s) for t, s in zip(copy, sources, strict=True))
    engine.close()
    assert pool.free_count == 2


def test_overlapping_pieces_behind_a_long_one_are_found(make, tmp_path):
    engine, _ = make(slab_bytes=MIB)
    content = random_bytes(6 * MIB)
    content.tofile(tmp_path / "f")
    long, short = np.zeros(5 * MIB, np.uint8), np.zeros(10, np.uint8)
    end = np.zeros(100, np.uint8)
    rows = [
        (0, 7, address_of(long), len(long)),
        (0, 20, address_of(short), len(short)),
        (0, 5 * MIB, address_of(end), len(end)),
    ]
    job = read(engine, tmp_path / "f", [(0, 0, 6 * MIB)], make_pieces(rows))
    assert job.wait(WAIT_S)
    assert np.array_equal(long, content[7 : 7 + len(long)])
    assert np.array_equal(short, content[20:30])
    assert np.array_equal(end, content[5 * MIB : 5 * MIB + 100])


def test_reads_over_several_files_and_unaligned_tails(make, direct, tmp_path):
    engine, _ = make(slab_bytes=MIB, slab_count=4)
    contents = [random_bytes(2 * MIB + 777 * i + 1, i) for i in range(5)]
    targets = [np.zeros_like(content) for content in contents]
    for i, content in enumerate(contents):
        content.tofile(tmp_path / str(i))
    rows = [(i, 0, address_of(t), len(t)) for i, t in enumerate(targets)]
    ranges = [(i, 0, len(t)) for i, t in enumerate(targets)][::-1]
    expected = np.array([c for i, _, _ in ranges for c in block_checksums(contents[i])], np.uint32)
    paths = [tmp_path / str(i) for i in range(5)]
    job = read(engine, paths, ranges, make_pieces(rows), expected, direct=direct)
    assert job.wait(WAIT_S)
    assert all(np.array_equal(t, c) for t, c in zip(targets, contents, strict=True))


def test_nothing_to_do_is_done(make, tmp_path):
    engine, _ = make()
    job = write(engine, tmp_path / "f", 0, make_pieces([]))
    assert job.checksums().shape == (0,)
    job = read(engine, tmp_path / "f", [], make_pieces([]))
    assert job.wait(WAIT_S)
    nothing = np.zeros(1, np.uint8)
    rows = [(0, 5, address_of(nothing), 0), (0, 5, address_of(nothing), 1, [(0, 9, 9)])]
    job = read(engine, tmp_path / "f", [(0, 0, 0), (0, MIB, 0)], make_pieces(rows, 1))
    assert job.wait(WAIT_S)


# ---- slabs ----


def test_one_slab_is_enough(make, direct, tmp_path):
    engine, pool = make(slab_bytes=MIB, slab_count=1, queue_depth=8, copy_threads=3)
    source = random_bytes(12 * MIB)
    rows = [(0, 0, address_of(source), len(source))]
    job = write(engine, tmp_path / "f", len(source), make_pieces(rows), direct=direct)
    target = np.zeros_like(source)
    rows = [(0, 0, address_of(target), len(target))]
    job = read(engine, tmp_path / "f", [(0, 0, len(source))], make_pieces(rows), direct=direct)
    assert job.wait(WAIT_S)
    assert np.array_equal(target, source)
    assert pool.free_count == 1


def test_staging_waits_when_no_slab_is_free(make, tmp_path):
    engine, pool = make(slab_bytes=MIB, slab_count=2)
    source = random_bytes(8 * MIB)
    engine_module.inject_fault("write", "delay", delay_s=0.5, count=1)
    file = engine_module.File.create(str(tmp_path / "f"), direct=False)
    job = engine.write(file, 0, len(source), make_pieces([(0, 0, address_of(source), len(source))]))
    time.sleep(0.2)
    assert pool.free_count == 0 or job.bytes_done > 0
    assert job.wait(0.0) is False
    assert not job.done()
    with pytest.raises(ValueError, match="not done"):
        job.checksums()
    assert job.wait(WAIT_S) is True
    assert np.array_equal(np.fromfile(tmp_path / "f", np.uint8), source)
    file.close()


def test_two_engines_share_a_pool(tmp_path, kind):
    pool = engine_module.SlabPool(MIB, 1)
    engines = [engine_module.Engine(kind, pool, queue_depth=2) for _ in range(2)]
    source = random_bytes(6 * MIB)
    pieces = make_pieces([(0, 0, address_of(source), len(source))])
    files = [engine_module.File.create(str(tmp_path / str(i)), direct=True) for i in range(2)]
    jobs = [e.write(f, 0, len(source), pieces) for e, f in zip(engines, files, strict=True)]
    assert all(job.wait(WAIT_S) for job in jobs)
    for i in range(2):
        assert np.array_equal(np.fromfile(tmp_path / str(i), np.uint8), source)
        engines[i].close()
    assert pool.free_count == 1


def test_memory_that_is_not_there_is_an_error_with_the_size():
    with pytest.raises(OSError, match=r"mmap of \d{10,} bytes") as caught:
        engine_module.SlabPool(1 << 46, 1)
    assert caught.value.errno == errno.ENOMEM


def test_several_jobs_at_once(make, direct, tmp_path):
    engine, _ = make(slab_bytes=MIB, slab_count=4, copy_threads=2)
    sources = [random_bytes(5 * MIB, i) for i in range(6)]
    files = [engine_module.File.create(str(tmp_path / str(i)), direct=direct) for i in range(6)]
    jobs = [
        engine.write(f, 0, len(s), make_pieces([(0, 0, address_of(s), len(s))]))
        for f, s in zip(files, sources, strict=True)
    ]
    assert all(job.wait(WAIT_S) for job in jobs)
    syncs = [engine.sync(file) for file in files]
    assert all(job.wait(WAIT_S) for job in syncs)
    for i, source in enumerate(sources):
        assert np.array_equal(np.fromfile(tmp_path / str(i), np.uint8), source)


# ---- faults ----


def start_write(engine, path, source, direct):
    file = engine_module.File.create(str(path), direct=direct)
    job = engine.write(file, 0, len(source), make_pieces([(0, 0, address_of(source), len(source))]))
    file.close()
    return job


@pytest.mark.parametrize("operation", ["write", "read"])
@pytest.mark.parametrize("fault", ["short", "eintr", "eagain"])
@pytest.mark.parametrize("count", [1, 25])
def test_interrupted_transfers_resume_bit_exactly(make, direct, tmp_path, operation, fault, count):
    engine, _ = make(slab_bytes=MIB, slab_count=2)
    source = random_bytes(4 * MIB + 4096)
    engine_module.trace_start()
    engine_module.inject_fault(operation, fault, skip=1, count=count, path_contains="f")
    job = start_write(engine, tmp_path / "f", source, direct)
    assert job.wait(WAIT_S)
    target = np.zeros_like(source)
    job = read(
        engine,
        tmp_path / "f",
        [(0, 0, len(source))],
        make_pieces([(0, 0, address_of(target), len(target))]),
        job.checksums(),
        direct=direct,
    )
    assert job.wait(WAIT_S)
    trace = engine_module.trace_stop()
    assert np.array_equal(target, source)
    assert engine.bad_blocks(job).shape == (0, 4)
    calls = [row for row in trace if row[0] == operation]
    assert len(calls) >= 5 + min(count, 4)
    result = {"eintr": -errno.EINTR, "eagain": -errno.EAGAIN}.get(fault)
    if result is None:
        assert any(0 < row[4] < row[3] for row in calls)
    else:
        assert [row[4] for row in calls].count(result) == count


@pytest.mark.parametrize("fault", ["eintr", "eagain"])
def test_retries_are_bounded(make, tmp_path, fault):
    engine, _ = make()
    engine_module.inject_fault("write", fault, count=-1)
    source = random_bytes(4096)
    job = start_write(engine, tmp_path / "f", source, False)
    with pytest.raises(OSError) as caught:
        job.wait(WAIT_S)
    assert caught.value.errno == getattr(errno, fault.upper())


@pytest.mark.parametrize("fault", ["eio", "enospc", "edquot", "einval"])
@pytest.mark.parametrize("skip", [0, 2])
def test_a_failed_write_names_everything_and_returns_its_slabs(make, direct, tmp_path, fault, skip):
    engine, pool = make(slab_bytes=MIB, slab_count=2)
    engine_module.inject_fault("write", fault, skip=skip, count=-1)
    source = random_bytes(6 * MIB)
    job = start_write(engine, tmp_path / "f", source, direct)
    for _ in range(2):  # every time it is asked
        with pytest.raises(OSError) as caught:
            job.wait(WAIT_S)
        assert caught.value.errno == getattr(errno, fault.upper())
        assert caught.value.filename == str(tmp_path / "f")
        assert f"write of {MIB} bytes at offset " in caught.value.strerror
    assert job.done()
    assert pool.free_count == 2
    with pytest.raises(OSError):
        job.checksums()
    engine_module.clear_faults()
    job = start_write(engine, tmp_path / "g", source, direct)  # the engine lives on
    assert job.wait(WAIT_S)


def test_a_failed_read_names_everything_and_returns_its_slabs(make, direct, tmp_path):
    engine, pool = make(slab_bytes=MIB, slab_count=2)
    content = random_bytes(6 * MIB)
    content.tofile(tmp_path / "f")
    engine_module.inject_fault("read", "eio", skip=3)
    target = np.zeros_like(content)
    pieces = make_pieces([(0, 0, address_of(target), len(target))])
    job = read(engine, tmp_path / "f", [(0, 0, len(content))], pieces, direct=direct)
    with pytest.raises(OSError) as caught:
        job.wait(WAIT_S)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(tmp_path / "f"))
    assert f"read of {MIB} bytes at offset {3 * MIB}" in caught.value.strerror
    assert pool.free_count == 2


def test_einval_on_a_direct_read_falls_back_to_buffered(make, tmp_path):
    engine, _ = make(slab_bytes=MIB)
    content = random_bytes(3 * MIB)
    content.tofile(tmp_path / "f")
    engine_module.inject_fault("read", "einval")
    file = engine_module.File.open(str(tmp_path / "f"), writable=False, direct=True)
    was_direct = file.direct
    target = np.zeros_like(content)
    one = np.zeros(1, np.int64)
    pieces = make_pieces([(0, 0, address_of(target), len(target))])
    job = engine.read([file], one.astype(np.int32), one, one + len(content), pieces, None)
    if not was_direct:
        pytest.skip("no O_DIRECT here")
    assert job.wait(WAIT_S)
    assert np.array_equal(target, content)
    assert file.direct is False
    file.close()


def test_a_failed_sync_is_not_retried(make, tmp_path):
    engine, _ = make()
    file = engine_module.File.create(str(tmp_path / "f"), direct=False)
    engine_module.inject_fault("sync", "eintr")
    engine_module.trace_start()
    with pytest.raises(InterruptedError) as caught:
        engine.sync(file).wait(WAIT_S)
    assert caught.value.filename == str(tmp_path / "f")
    assert [row[0] for row in engine_module.trace_stop()] == ["sync"]
    assert engine.sync(file).wait(WAIT_S)
    file.close()


def test_kill_ends_the_process_before_the_operation(kind, tmp_path):
    script = f"""
        import numpy as np
        from megatron_uring import _engine as e
        pool = e.SlabPool(1 << 20, 2)
        engine = e.Engine({kind!r}, pool, queue_depth=1, posix_threads=1)
        file = e.File.create({str(tmp_path / "f")!r}, direct=False)
        empty = np.zeros((1, 0), np.int64)
        source = np.ones(4 << 20, np.uint8)
        pieces = e.Pieces(np.zeros(1, np.int32), np.zeros(1, np.int64),
            np.array([source.ctypes.data], np.uint64), np.array([len(source)]), empty, empty, empty)
        e.inject_fault("write", "kill", skip=2)
        engine.write(file, 0, len(source), pieces).wait(60.0)
    """
    done = run_python(script)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "f").stat().st_size == 2 * MIB


def run_python(script, **options):
    plugin = "import isolate\n" if "isolate" in sys.modules else ""
    return subprocess.run(
        [sys.executable, "-c", plugin + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


ALLOCATION_SHIM = """
#include <atomic>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <sys/syscall.h>
#include <unistd.h>
static std::atomic<long> left{0};
static std::atomic<bool> odd{false};
// From the number-th allocation in a native thread on (0: none), all fail; if odd, with something
// that is no bad_alloc.
extern "C" void fail_from(long number, int is_odd) { odd = is_odd; left = number; }
extern "C" long allocations_left() { return left; }
static void* allocate(std::size_t size) {
    if (getpid() != syscall(SYS_gettid) && left > 0 && (left == 1 || --left == 0)) {
        if (odd.exchange(false)) { left = 0; throw std::runtime_error("something odd"); }
        throw std::bad_alloc();
    }
    if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
    throw std::bad_alloc();
}
void* operator new(std::size_t size) { return allocate(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
"""


@pytest.fixture(scope="session")
def allocation_shim(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.cpp").write_text(ALLOCATION_SHIM)
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "shim.cpp", "-o", "shim.so"]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no g++ here")
    return folder / "shim.so"


@pytest.mark.fault
@pytest.mark.parametrize("odd", [False, True], ids=["no memory", "odd exception"])
@pytest.mark.parametrize("scene", ["plain", "bad block", "failing"])
def test_exceptions_in_native_threads_fail_the_job(kind, tmp_path, allocation_shim, scene, odd):
    script = f"""
        import ctypes, errno
        import numpy as np
        from megatron_uring import _engine as e
        shim = ctypes.CDLL(None)
        scene, odd, path = {scene!r}, {odd!r}, {str(tmp_path / "a-name-that-needs-memory")!r}
        memory = np.ones(6 << 20, np.uint8)
        one = np.zeros(1, np.int64)
        address = np.array([memory.__array_interface__["data"][0]], np.uint64)
        table = np.zeros((3, 1, 0), np.int64)
        pieces = e.Pieces(one.astype(np.int32), one, address, one + memory.size, *table)
        pool = e.SlabPool(1 << 20, 2)
        engine = e.Engine({kind!r}, pool, queue_depth=2)
        e.File.create(path, direct=False).close()
        file = e.File.open(path, writable=True, direct=False)
        expected = np.zeros(6, np.uint32) if scene == "bad block" else None

        def start(operation):
            if operation == "write":
                return engine.write(file, 0, memory.size, pieces)
            if operation == "sync":
                return engine.sync(file)
            ranges = (one.astype(np.int32), one, one + memory.size)
            return engine.read([file], *ranges, pieces, expected)

        def outcome(job):
            try:
                assert job.wait(60.0)
            except OSError as error:
                if error.errno == errno.EIO:
                    assert odd and "something odd" in error.strerror or scene == "failing", error
                assert error.filename == path
                return error.errno
            return 0

        assert outcome(start("write")) == 0
        for operation in ("write", "read", "sync"):
            seen = []
            for number in range(1, 100):
                e.trace_start()
                if scene == "failing":
                    e.inject_fault(operation, "eio", skip=2 if operation != "sync" else 0)
                shim.fail_from(ctypes.c_long(number), odd)
                job = start(operation)
                seen.append(outcome(job))
                exhausted = shim.allocations_left() <= (0 if odd else 1)
                shim.fail_from(ctypes.c_long(0), 0)
                e.clear_faults()
                e.trace_stop()
                assert pool.free_count == 2
                if not exhausted:
                    break
            usual = errno.EIO if scene == "failing" else 0
            assert seen[-1] == usual, (operation, seen)
            bad = errno.EIO if odd else errno.ENOMEM
            assert len(seen) > 1 and bad in seen and set(seen) <= {{bad, usual}}, (operation, seen)
        engine.close()
        print("alive")
    """
    done = run_python(script, env={**os.environ, "LD_PRELOAD": str(allocation_shim)})
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_a_delayed_operation_does_not_hold_up_other_jobs(make, tmp_path):
    engine, _ = make(slab_bytes=MIB, slab_count=3)
    source = random_bytes(2 * MIB)
    engine_module.inject_fault("write", "delay", delay_s=2.0, count=-1, path_contains="slow")
    slow = start_write(engine, tmp_path / "slow", source[:MIB], False)
    quick = start_write(engine, tmp_path / "quick", source, False)
    assert quick.wait(WAIT_S)
    assert not slow.done()
    assert slow.wait(WAIT_S)
    assert np.array_equal(np.fromfile(tmp_path / "slow", np.uint8), source[:MIB])


def test_only_what_lies_in_one_run_is_taken_from_there(make, tmp_path):
    engine, _ = make(slab_bytes=2 * MIB)
    memory = random_bytes(5 * MIB)
    rows = [  # long runs that start and end within a step, overlap, touch, and are strided
        (0, 100, address_of(memory) + 1, MIB),
        (0, 100 + MIB, address_of(memory) + MIB, 70_000),
        (0, 40_000 + MIB, address_of(memory) + 7, 64),
        (0, 2 * MIB, address_of(memory) + 3, 65_536, [(8, 98_304, 131_072)]),
    ]
    job = write(engine, tmp_path / "f", 3 * MIB, make_pieces(rows, 1), direct=True)
    wanted = np.zeros(3 * MIB, np.uint8)
    for _, start, address, length, *dims in rows:
        for i in range(dims[0][0][0] if dims else 1):
            file_step, memory_step = dims[0][0][1:] if dims else (0, 0)
            at = address - address_of(memory) + i * memory_step
            begin = start + i * file_step
            wanted[begin : begin + length] = memory[at : at + length]
    content = np.fromfile(tmp_path / "f", np.uint8)
    assert np.array_equal(content, wanted)
    assert job.checksums().tolist() == block_checksums(wanted)


@pytest.mark.parametrize("seed", range(4))
def test_long_and_short_runs_share_a_step(make, direct, tmp_path, seed):
    engine, _ = make(slab_bytes=2 * MIB)
    memory = random_bytes(12 * MIB)
    random = np.random.default_rng(seed)
    rows, wanted, at, used = [], np.zeros(5 * MIB, np.uint8), 0, 0
    while True:  # none, a few bytes, around the shortest run that is streamed, more than a step
        length = int(random.choice([0, 7, 16_383, 16_384, 16_385, 40_000, 65_536, 300_000]))
        at += int(random.choice([0, 0, 0, 1, 64, 20_000]))
        used += int(random.integers(64))
        twice = length > 0 and bool(random.integers(5) == 0)  # strided: two runs, 10 bytes between
        end = at + (2 * length + 10 if twice else length)
        if end > len(wanted):
            break
        dimensions = [[(2, length + 10, length + 3)]] if twice else []
        rows.append((0, at, address_of(memory) + used, length, *dimensions))
        wanted[at : at + length] = memory[used : used + length]
        if twice:
            wanted[at + length + 10 : end] = memory[used + length + 3 : used + 2 * length + 3]
        at, used = end, used + 2 * length + 3
    job = write(engine, tmp_path / "f", len(wanted), make_pieces(rows, 1), direct=direct)
    assert np.array_equal(np.fromfile(tmp_path / "f", np.uint8), wanted)
    assert job.checksums().tolist() == block_checksums(wanted)


def test_file_size_limit_is_efbig_and_not_a_signal(kind, tmp_path):
    script = f"""
        import errno, resource, signal
        import numpy as np
        from megatron_uring import _engine as e
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
        pool = e.SlabPool(1 << 20, 2)
        engine = e.Engine({kind!r}, pool, queue_depth=2)
        file = e.File.create({str(tmp_path / "f")!r}, direct=True)
        empty = np.zeros((0, 0), np.int64)
        pieces = e.Pieces(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.uint64),
            np.zeros(0, np.int64), empty, empty, empty)
        try:
            engine.write(file, 0, 5 << 20, pieces).wait(60.0)
        except OSError as error:
            assert error.errno == errno.EFBIG, error
            assert "offset 3145728" in error.strerror or "offset 4194304" in error.strerror, error
            assert pool.free_count == 2
            print("limited")
    """
    done = run_python(script)
    assert (done.returncode, done.stdout) == (0, "limited\n"), done.stderr


# ---- reads that find something wrong ----


def test_bad_blocks_are_reported_and_never_scattered(make, direct, tmp_path):
    engine, _ = make(slab_bytes=2 * MIB, copy_threads=2)
    content = random_bytes(5 * MIB + 100)
    expected = np.array(block_checksums(content), np.uint32)
    damaged = content.copy()
    damaged[MIB + 5] ^= 1
    damaged[5 * MIB + 99] ^= 128
    damaged.tofile(tmp_path / "f")
    target = np.zeros_like(content)
    job = read(
        engine,
        tmp_path / "f",
        [(0, 0, 2 * MIB), (0, 2 * MIB, len(content) - 2 * MIB)],
        make_pieces([(0, 0, address_of(target), len(target))]),
        expected,
        direct=direct,
    )
    assert job.wait(WAIT_S)
    found = block_checksums(damaged)
    assert engine.bad_blocks(job).tolist() == [
        [0, MIB, int(expected[1]), found[1]],
        [1, 5 * MIB, int(expected[5]), found[5]],
    ]
    want = content.copy()
    want[MIB : 2 * MIB] = 0
    want[5 * MIB :] = 0
    assert np.array_equal(target, want)
    assert job.checksums().tolist() == found


@pytest.mark.parametrize("missing", [1, 512, 5000, MIB, 3 * MIB])
def test_a_truncated_file_is_enodata(make, direct, tmp_path, missing):
    engine, pool = make(slab_bytes=MIB)
    content = random_bytes(3 * MIB)
    content[: len(content) - missing].tofile(tmp_path / "f")
    target = np.zeros_like(content)
    pieces = make_pieces([(0, 0, address_of(target), len(target))])
    job = read(engine, tmp_path / "f", [(0, 0, len(content))], pieces, direct=direct)
    with pytest.raises(OSError) as caught:
        job.wait(WAIT_S)
    assert (caught.value.errno, caught.value.filename) == (errno.ENODATA, str(tmp_path / "f"))
    assert "at offset " in caught.value.strerror
    assert pool.free_count == pool.slab_count


def test_ranges_that_do_not_cover_the_pieces_fail(make, tmp_path):
    engine, _ = make()
    random_bytes(3 * MIB).tofile(tmp_path / "f")
    target = np.zeros(2 * MIB, np.uint8)
    pieces = make_pieces([(0, 10, address_of(target), len(target))])
    job = read(engine, tmp_path / "f", [(0, 0, 2 * MIB)], pieces)
    with pytest.raises(OSError, match="only 2097142 of the 2097152 bytes") as caught:
        job.wait(WAIT_S)
    assert caught.value.errno == errno.EINVAL


# ---- life ----


@pytest.mark.parametrize("operation", ["write", "read"])
def test_cancel_ends_a_job_and_returns_its_slabs(make, tmp_path, operation):
    engine, pool = make(slab_bytes=MIB, slab_count=2, posix_threads=1)
    memory = random_bytes(64 * MIB)
    memory.tofile(tmp_path / "f")
    engine_module.inject_fault(operation, "delay", delay_s=0.05, count=-1)
    pieces = make_pieces([(0, 0, address_of(memory), len(memory))])
    if operation == "write":
        job = start_write(engine, tmp_path / "g", memory, False)
    else:
        job = read(engine, tmp_path / "f", [(0, 0, len(memory))], pieces)
    second = read(engine, tmp_path / "f", [(0, 0, len(memory))], pieces)
    second.cancel()  # has not started yet, and must not wait for the first
    with pytest.raises(OSError) as caught:
        second.wait(1.0)
    assert caught.value.errno == errno.ECANCELED
    assert not job.done()
    job.cancel()
    with pytest.raises(OSError) as caught:
        job.wait(WAIT_S)
    assert (caught.value.errno, job.done()) == (errno.ECANCELED, True)
    assert job.bytes_done < job.bytes_total
    assert pool.free_count == 2
    job.cancel()


def test_closing_waits_for_jobs_and_is_idempotent(make, tmp_path):
    engine, _ = make(slab_bytes=MIB)
    source = random_bytes(20 * MIB)
    job = start_write(engine, tmp_path / "f", source, True)
    engine.close()
    engine.close()
    assert job.done()
    assert np.array_equal(np.fromfile(tmp_path / "f", np.uint8), source)
    file = engine_module.File.open(str(tmp_path / "f"), writable=True, direct=False)
    for call in (lambda: engine.sync(file), lambda: engine.write(file, 0, 0, make_pieces([]))):
        with pytest.raises(ValueError, match="closed"):
            call()
    file.close()


def test_an_engine_that_is_dropped_finishes_its_jobs(kind, tmp_path):
    pool = engine_module.SlabPool(MIB, 2)
    source = random_bytes(10 * MIB)
    engine = engine_module.Engine(kind, pool, queue_depth=2)
    job = start_write(engine, tmp_path / "f", source, True)
    del engine
    assert job.wait(WAIT_S)
    del job
    assert pool.free_count == 2


def test_close_does_not_wait_for_ever(kind, tmp_path):
    script = f"""
        import time
        from megatron_uring import _engine as e
        pool = e.SlabPool(1 << 20, 2)
        engine = e.Engine({kind!r}, pool, queue_depth=2)
        file = e.File.create({str(tmp_path / "f")!r}, direct=False)
        e.inject_fault("sync", "delay", delay_s=600.0)
        job = engine.sync(file)
        begin = time.monotonic()
        engine.close()
        assert 4.0 < time.monotonic() - begin < 10.0
        assert not job.done()
        print("abandoned")
    """
    done = run_python(script)
    assert (done.returncode, done.stdout) == (0, "abandoned\n"), done.stderr


def test_a_forked_child_cannot_use_the_engine_and_does_no_harm(make, tmp_path):
    engine, pool = make(slab_bytes=MIB)
    source = random_bytes(8 * MIB)
    file = engine_module.File.create(str(tmp_path / "f"), direct=True)
    pieces = make_pieces([(0, 0, address_of(source), len(source))])
    engine_module.inject_fault("write", "delay", delay_s=0.2)
    job = engine.write(file, 0, len(source), pieces)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            refused = 0
            calls = (
                lambda: engine.write(file, 0, len(source), pieces),
                lambda: engine.sync(file),
                lambda: job.wait(1.0),
                lambda: pool.free_count,
            )
            for call in calls:
                try:
                    call()
                except OSError as error:
                    refused += error.errno == errno.EOWNERDEAD
            engine.close()
            del job, engine, pool
            engine_module.write_file(str(tmp_path / "child"), b"alive")
            status = 0 if refused == len(calls) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert job.wait(WAIT_S)
    assert np.array_equal(np.fromfile(tmp_path / "f", np.uint8), source)
    assert (tmp_path / "child").read_bytes() == b"alive"
    file.close()


def test_slabs_are_not_in_a_forked_child(tmp_path):
    pool = engine_module.SlabPool(MIB, 4)
    flags = Path("/proc/self/smaps").read_text().split("VmFlags:")
    assert any(" dc " in flag.split("\n")[0] + " " for flag in flags)
    assert pool.free_count == 4


# ---- which engine ----


def test_posix_is_taken_when_asked_for():
    engine = engine_module.Engine("posix", engine_module.SlabPool(MIB, 1), queue_depth=1)
    assert (engine.kind, engine.reason) == ("posix", "posix: asked for")


@needs_io_uring
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.ENOMEM, errno.EOPNOTSUPP])
def test_auto_takes_posix_and_says_why_where_io_uring_is_refused(number):
    """A seccomp filter answers io_uring_setup as containers and old kernels do."""
    script = f"""
        import ctypes, struct
        from megatron_uring import _engine as e
        libc = ctypes.CDLL(None, use_errno=True)
        code = b"".join(struct.pack("HBBI", *row) for row in [
            (0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | {number}),
            (0x06, 0, 0, 0x7FFF0000)])
        memory = ctypes.create_string_buffer(code)
        program = struct.pack("HxxxxxxP", 4, ctypes.addressof(memory))
        assert libc.prctl(38, 1, 0, 0, 0) == 0
        assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()
        pool = e.SlabPool(1 << 20, 1)
        engine = e.Engine("auto", pool, queue_depth=1)
        print(engine.kind, "|", engine.reason)
        try:
            e.Engine("io_uring", pool, queue_depth=1)
        except OSError as error:
            print(error.errno)
    """
    done = run_python(script)
    want = f"posix | posix: io_uring_queue_init: {os.strerror(number)}\n{number}\n"
    assert (done.returncode, done.stdout) == (0, want), done.stderr


# ---- files and the commit's operations ----


def test_files_are_created_exclusively_under_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        file = engine_module.File.create(str(tmp_path / "f"), direct=False)
    finally:
        os.umask(before)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o640
    with pytest.raises(FileExistsError) as caught:
        engine_module.File.create(str(tmp_path / "f"), direct=False)
    assert caught.value.filename == str(tmp_path / "f")
    assert file.preallocate(10 * MIB) in (True, False)
    file.truncate(12345)
    assert file.size() == 12345
    file.close()
    file.close()
    assert file.closed
    with pytest.raises(ValueError, match="closed"):
        file.size()
    with pytest.raises(FileNotFoundError):
        engine_module.File.open(str(tmp_path / "g"), writable=False, direct=False)


def test_direct_is_what_is_in_force(tmp_path):
    file = engine_module.File.create(str(tmp_path / "f"), direct=True)
    for want in (file.direct, False, file.direct):
        file.set_direct(want)
        assert file.direct is want
    assert file.offset_alignment & (file.offset_alignment - 1) == 0
    assert file.memory_alignment & (file.memory_alignment - 1) == 0
    file.close()
    engine_module.inject_fault("open", "einval")
    file = engine_module.File.create(str(tmp_path / "g"), direct=True)
    assert file.direct is False
    file.close()


@pytest.mark.parametrize(
    ("fault", "falls_back"), [("einval", True), ("enospc", False), ("edquot", False)]
)
def test_preallocate_says_no_or_fails(tmp_path, fault, falls_back):
    file = engine_module.File.create(str(tmp_path / "f"), direct=False)
    engine_module.inject_fault("preallocate", fault)
    if falls_back:
        assert file.preallocate(MIB) is False
    else:
        with pytest.raises(OSError, match=f"preallocate of {MIB} bytes") as caught:
            file.preallocate(MIB)
        assert caught.value.errno == getattr(errno, fault.upper())
    file.close()


def test_preallocate_reserves_from_where_it_is_told(tmp_path):
    file = engine_module.File.create(str(tmp_path / "f"), direct=False)
    if file.preallocate(MIB, 64 * MIB):
        found = os.stat(tmp_path / "f")
        assert found.st_size == 65 * MIB and MIB <= found.st_blocks * 512 < 2 * MIB
    engine_module.inject_fault("preallocate", "enospc")
    with pytest.raises(OSError, match=f"preallocate of {MIB} bytes at offset {64 * MIB}"):
        file.preallocate(MIB, 64 * MIB)
    with pytest.raises(ValueError, match="negative"):
        file.preallocate(MIB, -1)
    file.close()


def test_undecodable_and_unicode_names(tmp_path):
    for name in ("ключ|…", os.fsdecode(b"\xff\xfe")):
        path = str(tmp_path / name)
        engine_module.write_file(path, b"x")
        assert engine_module.read_file(path) == b"x"
        with pytest.raises(FileExistsError) as caught:
            engine_module.write_file(path, b"y")
        assert caught.value.filename == path
        file = engine_module.File.open(path, writable=False, direct=False)
        assert file.path == path
        file.close()
    with pytest.raises(ValueError):
        engine_module.read_file("a\0b")


@pytest.mark.parametrize("fault", ["short", "eintr", "eagain"])
def test_write_file_survives_interruptions(tmp_path, fault):
    engine_module.inject_fault("write", fault, count=3)
    engine_module.inject_fault("read", fault, count=3)
    data = random_bytes(100_001).tobytes()
    engine_module.write_file(str(tmp_path / "f"), data)
    assert engine_module.read_file(str(tmp_path / "f")) == data


@pytest.mark.parametrize("operation", ["open", "write", "sync", "close"])
def test_write_file_leaves_a_whole_file_or_none(tmp_path, operation):
    engine_module.inject_fault(operation, "eio")
    with pytest.raises(OSError) as caught:
        engine_module.write_file(str(tmp_path / "f"), b"data")
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(tmp_path / "f"))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "g").write_bytes(b"of somebody else")
    with pytest.raises(FileExistsError):
        engine_module.write_file(str(tmp_path / "g"), b"data")
    assert (tmp_path / "g").read_bytes() == b"of somebody else"


def test_rename_remove_and_sync_directory(tmp_path):
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    engine_module.trace_start()
    engine_module.write_file(a, b"1")
    engine_module.rename(a, b)
    engine_module.sync_directory(str(tmp_path))
    engine_module.remove(b)
    engine_module.remove(b)
    trace = engine_module.trace_stop()
    assert [(row[0], row[1]) for row in trace] == [
        ("open", a),
        ("write", a),
        ("sync", a),
        ("close", a),
        ("rename", f"{a} -> {b}"),
        ("open", str(tmp_path)),
        ("sync_directory", str(tmp_path)),
        ("close", str(tmp_path)),
        ("remove", b),
        ("remove", b),
    ]
    assert trace[-1][4] == -errno.ENOENT
    with pytest.raises(FileNotFoundError):
        engine_module.rename(a, b)
    engine_module.inject_fault("sync_directory", "einval")
    engine_module.sync_directory(str(tmp_path))
    for operation, call in (
        ("sync_directory", lambda: engine_module.sync_directory(str(tmp_path))),
        ("remove", lambda: engine_module.remove(b)),
        ("rename", lambda: engine_module.rename(a, b)),
    ):
        engine_module.inject_fault(operation, "eio")
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.EIO


def test_faults_choose_by_path_and_count(tmp_path):
    engine_module.inject_fault("write", "eio", path_contains="target", skip=1, count=1)
    engine_module.write_file(str(tmp_path / "other"), b"x")
    engine_module.write_file(str(tmp_path / "target0"), b"x")
    with pytest.raises(OSError):
        engine_module.write_file(str(tmp_path / "target1"), b"x")
    engine_module.write_file(str(tmp_path / "target2"), b"x")
    for arguments in (("fly", "eio"), ("write", "gremlin"), ("rename", "short")):
        with pytest.raises(ValueError):
            engine_module.inject_fault(*arguments)
    for options in ({"skip": -1}, {"count": -2}, {"delay_s": -1.0}, {"delay_s": float("nan")}):
        with pytest.raises(ValueError):
            engine_module.inject_fault("write", "eio", **options)


# ---- wrong arguments ----


def columns(count=1, dimensions=1):
    return {
        "file_number": np.zeros(count, np.int32),
        "file_start": np.zeros(count, np.int64),
        "address": np.zeros(count, np.uint64),
        "run_bytes": np.ones(count, np.int64),
        "counts": np.ones((count, dimensions), np.int64),
        "file_strides": np.ones((count, dimensions), np.int64),
        "memory_strides": np.ones((count, dimensions), np.int64),
    }


big = np.array([[1 << 40]])
WRONG_PIECES = {
    "dtype": {"file_start": np.zeros(1, np.int32)},
    "no array": {"address": [0]},
    "lengths": {"run_bytes": np.zeros(2, np.int64)},
    "axes": {"counts": np.ones(1, np.int64)},
    "dimensions": {"file_strides": np.ones((1, 2), np.int64)},
    "too many dimensions": {
        name: np.ones((1, 17), np.int64) for name in ("counts", "file_strides", "memory_strides")
    },
    "negative file_number": {"file_number": np.array([-1], np.int32)},
    "negative file_start": {"file_start": np.array([-1])},
    "negative run_bytes": {"run_bytes": np.array([-1])},
    "negative count": {"counts": np.array([[-1]])},
    "overlapping runs": {"run_bytes": np.array([8]), "counts": np.array([[2]])},
    "bytes overflow": {"counts": big, "run_bytes": big[0]},
    "reach overflow": {"counts": big, "file_strides": big},
    "end overflow": {"file_start": np.array([(1 << 63) - 1])},
}


@pytest.mark.parametrize("wrong", WRONG_PIECES)
def test_wrong_pieces_are_value_errors(wrong):
    engine_module.Pieces(**columns())
    with pytest.raises(ValueError):
        engine_module.Pieces(**(columns() | WRONG_PIECES[wrong]))


def test_unsorted_pieces_are_value_errors():
    for wrong in (
        {"file_start": np.array([1, 0])},
        {"file_number": np.array([1, 0], np.int32)},
    ):
        with pytest.raises(ValueError, match=r"piece 1: .*sorted"):
            engine_module.Pieces(**(columns(2) | wrong))


def test_wrong_arguments_are_value_errors(make, tmp_path):
    engine, pool = make()
    file = engine_module.File.create(str(tmp_path / "f"), direct=False)
    none = make_pieces([])
    memory = np.zeros(4096, np.uint8)
    outside = make_pieces([(0, 1, address_of(memory), 4096)])
    second = make_pieces([(1, 0, address_of(memory), 4096)])
    one = np.ones(1, np.int64)
    first = np.zeros(1, np.int32)
    calls = [
        lambda: engine_module.SlabPool(MIB - 1, 1),
        lambda: engine_module.SlabPool(0, 1),
        lambda: engine_module.SlabPool(MIB, 0),
        lambda: engine_module.SlabPool(1 << 60, 60000),
        lambda: engine_module.Engine("magic", pool, queue_depth=1),
        lambda: engine_module.Engine("posix", pool, queue_depth=0),
        lambda: engine_module.Engine("posix", pool, queue_depth=1 << 20),
        lambda: engine_module.Engine("posix", pool, queue_depth=1, copy_threads=0),
        lambda: engine_module.Engine("posix", pool, queue_depth=1, posix_threads=0),
        lambda: engine.write(file, 1, 4096, none),
        lambda: engine.write(file, -MIB, 4096, none),
        lambda: engine.write(file, 0, 4095, none),
        lambda: engine.write(file, 0, -4096, none),
        lambda: engine.write(file, 0, 4096, outside),
        lambda: engine.write(file, 0, 4096, second),
        lambda: engine.read([file], first, one, one, none, None),
        lambda: engine.read([file], first, 0 * one, -one, none, None),
        lambda: engine.read([file], first + 1, 0 * one, one, none, None),
        lambda: engine.read([file], first - 1, 0 * one, one, none, None),
        lambda: engine.read([file], first, 0 * one, one, second, None),
        lambda: engine.read([file], first, 0 * one, np.ones(2, np.int64), none, None),
        lambda: engine.read([file], first, 0 * one, one, none, np.zeros(2, np.uint32)),
        lambda: engine.read([file], first, 0 * one, one, none, np.zeros(1, np.int64)),
        lambda: engine.read([file], first, 0 * one, one + (1 << 62) + (1 << 62) - 2, none, None),
        lambda: engine.sync(file).wait(-1.0),
        lambda: engine.sync(file).wait(float("nan")),
        lambda: file.truncate(-1),
        lambda: file.preallocate(-1),
    ]
    for number, call in enumerate(calls):
        with pytest.raises(ValueError):
            call()
            pytest.fail(f"call {number} was accepted")
    sync = engine.sync(file)
    assert sync.wait(WAIT_S)
    with pytest.raises(ValueError, match="not a read"):
        engine.bad_blocks(sync)
    file.close()
    with pytest.raises(ValueError, match="closed"):
        engine.write(file, 0, 4096, none)
