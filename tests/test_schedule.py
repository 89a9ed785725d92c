"""The order in which chunks are read: files in turn, and a late reader where the others are."""

import numpy as np
import pytest

from megatron_uring import _engine

MIB = _engine.BLOCK_BYTES
SLAB_BYTES = 2 * MIB
WAIT_S = 30.0


@pytest.fixture
def files(tmp_path):
    """Ten files of 4 MiB, open for reading."""
    opened = []
    for number in range(10):
        path = tmp_path / f"file{number}"
        np.full(4 * MIB, number, np.uint8).tofile(path)
        opened.append(_engine.File.open(str(path), writable=False, direct=False))
    yield opened
    for file in opened:
        file.close()


def no_pieces():
    none = np.zeros((0, 0), np.int64)
    zero = np.zeros(0, np.int64)
    return _engine.Pieces(np.zeros(0, np.int32), zero, zero.view(np.uint64), zero, none, none, none)


def sums_of(ranges):
    """Checksums of the blocks of (file number, start, length), as the files were filled."""
    return np.array(
        [_engine.crc32c(bytes([n]) * MIB) for n, _, length in ranges for _ in range(length // MIB)],
        np.uint32,
    )


def order_of(kind, files, ranges, cache=None, keys=()):
    """(file number, MiB) of each read, in the order of reading: there is one slab."""
    engine = _engine.Engine(kind, _engine.SlabPool(SLAB_BYTES, 1), queue_depth=1)
    numbers, starts, lengths = zip(*ranges, strict=True)
    _engine.trace_start()
    job = engine.read(
        files,
        np.array(numbers, np.int32),
        np.array(starts, np.int64),
        np.array(lengths, np.int64),
        no_pieces(),
        sums_of(ranges),
        cache,
        keys,
    )
    assert job.wait(WAIT_S)
    assert len(engine.bad_blocks(job)) == 0
    trace = _engine.trace_stop()
    engine.close()
    number = {file.path: number for number, file in enumerate(files)}
    return [(number[row[1]], row[2] // MIB) for row in trace if row[0] == "read"]


def whole(numbers):
    return [(number, 0, 4 * MIB) for number in numbers]


def test_eight_files_are_read_in_turn(config, files):
    found = order_of(config.engine, files, whole(range(10)))
    first, rest = list(range(8)), [8, 9]
    expected = [(n, at) for group in (first, rest) for at in (0, 2) for n in group]
    assert found == expected


def test_ranges_of_one_file_ascend(config, files):
    ranges = [(0, 0, MIB), (0, 2 * MIB, 2 * MIB), (1, MIB, 3 * MIB)]
    assert order_of(config.engine, files, ranges) == [(0, 0), (1, 1), (0, 2), (1, 3)]


def test_a_late_reader_begins_where_the_others_are(config, files, shared_path):
    cache = _engine.NodeCache(shared_path, SLAB_BYTES, 4)
    keys = list(range(10, 20))
    # the last chunk that this one looks for is the second of file 0
    order_of(config.engine, files, whole([0]), cache, keys)
    late = order_of(config.engine, files, whole([0, 1, 2]), cache, keys)
    assert late == [(0, 2), (1, 2), (2, 2), (0, 0), (1, 0), (2, 0)]


def test_a_reader_of_other_files_than_the_others_is_not_led_astray(config, files, shared_path):
    cache = _engine.NodeCache(shared_path, SLAB_BYTES, 4)
    order_of(config.engine, files, whole([5]), cache, list(range(10)))
    found = order_of(config.engine, files, whole([8, 9]), cache, list(range(10)))
    assert found == [(8, 0), (9, 0), (8, 2), (9, 2)]
    found = order_of(config.engine, files, whole([1]), cache, list(range(10)))  # all behind
    assert found == [(1, 0), (1, 2)]


def test_chunks_end_alike_wherever_ranges_begin(config, files, shared_path):
    cache = _engine.NodeCache(shared_path, SLAB_BYTES, 4)
    found = order_of(config.engine, files, [(3, MIB, 3 * MIB)], cache, list(range(10)))
    assert found == [(3, 1), (3, 2)]
