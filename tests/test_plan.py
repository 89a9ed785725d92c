"""Plans as pure functions: placement, ownership, resharding, coalescing."""

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_uring import ownership, plan
from megatron_uring.errors import StateMismatchError
from megatron_uring.index_rules import check_objects
from megatron_uring.layout import BLOCK_BYTES, DTYPE_BYTES, DTYPE_NAMES, PAGE_BYTES
from megatron_uring.ownership import check_ownership
from megatron_uring.shards import ShardTable
from megatron_uring.tables import Contents, Extents, Regions

lengths = st.lists(
    st.one_of(
        st.integers(0, 300),
        st.integers(BLOCK_BYTES - 2, BLOCK_BYTES + 2),
        st.integers(0, 5 * BLOCK_BYTES),
    ),
    max_size=12,
).map(lambda values: np.array(values, np.int64))


def assert_disjoint(start, length, begin, end):
    spans = sorted((s, s + n) for s, n in zip(start, length, strict=True) if n)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    assert not spans or (begin <= spans[0][0] and max(stop for _, stop in spans) <= end)


@given(lengths, lengths, st.booleans())
def test_extents_are_disjoint_aligned_and_inside_their_region(shards, objects, head):
    region = plan.plan_region(shards, objects, head=head)
    assert_disjoint(region.shard_start, shards, PAGE_BYTES if head else 0, region.tensor_bytes)
    assert_disjoint(region.object_start, objects, 0, region.object_bytes)
    large = shards >= BLOCK_BYTES
    assert not (region.shard_start[large] % PAGE_BYTES).any()
    assert not (region.shard_start % 64).any()
    assert not (region.object_start % 64).any()
    assert region.tensor_bytes % PAGE_BYTES == region.object_bytes % PAGE_BYTES == 0


@given(lengths)
def test_padding_is_bounded_by_the_alignment(shards):
    region = plan.plan_region(shards, shards[:0], head=False)
    large = int((shards >= BLOCK_BYTES).sum())
    slack = large * PAGE_BYTES + (len(shards) - large) * 64 + PAGE_BYTES
    assert region.tensor_bytes < int(shards.sum()) + slack


def test_the_first_region_of_a_subfile_always_has_room_for_the_superblock():
    nothing = np.zeros(0, np.int64)
    assert plan.plan_region(nothing, nothing, head=True).tensor_bytes == PAGE_BYTES
    assert plan.plan_region(nothing, nothing, head=False).tensor_bytes == 0


pages = st.lists(st.integers(0, 2000).map(lambda n: n * PAGE_BYTES), min_size=1, max_size=8)


@given(pages, st.data(), st.sampled_from([0, 1, 4096, BLOCK_BYTES, 3 * BLOCK_BYTES, 5_000_000]))
def test_regions_share_no_block_and_tensor_regions_no_stripe(tensor_bytes, data, stripe):
    count = len(tensor_bytes)
    object_bytes = data.draw(
        st.lists(st.sampled_from([0, PAGE_BYTES, 2 << 20]), min_size=count, max_size=count)
    )
    group = plan.plan_group(
        np.array(tensor_bytes, np.int64), np.array(object_bytes, np.int64), stripe_bytes=stripe
    )
    unit = math.lcm(max(stripe, 1), BLOCK_BYTES)

    def units(start, length, size):
        return [set(range(s // size, -(-(s + n) // size))) for s, n in zip(start, length) if n]  # noqa: B905

    regions = units(group.tensor_start, tensor_bytes, BLOCK_BYTES)
    regions += units(group.object_start, object_bytes, BLOCK_BYTES)
    assert sum(map(len, regions)) == len(set().union(*regions))
    stripes = units(group.tensor_start, tensor_bytes, unit)
    assert sum(map(len, stripes)) == len(set().union(*stripes))
    assert not (group.tensor_start % unit).any()
    assert not (group.object_start % BLOCK_BYTES).any()
    tensors_end = max(s + n for s, n in zip(group.tensor_start, tensor_bytes, strict=True))
    objects_end = max(s + n for s, n in zip(group.object_start, object_bytes, strict=True))
    assert all(start >= tensors_end for start in group.object_start)
    assert group.footer_start % BLOCK_BYTES == 0
    assert group.footer_start >= max(tensors_end, objects_end)


# -------------------------------------------------------------------------------------------------
# boxes


def runs(boxes, row):
    """(file offset, memory offset) of each run of a box, in order."""
    for index in np.ndindex(*boxes.counts[row].tolist()):
        yield int(index @ boxes.file_strides[row]), int(index @ boxes.memory_strides[row])


shapes = st.lists(st.integers(1, 5), max_size=4)


@given(shapes, st.data())
def test_boxes_gather_any_strided_tensor_into_c_order(shape, data):
    axes = data.draw(st.permutations(range(len(shape))))
    steps = [data.draw(st.integers(1, 3)) for _ in shape]
    expand = [data.draw(st.booleans()) for _ in shape]
    base = np.arange(math.prod(n * s for n, s in zip(shape, steps, strict=True)), dtype=np.int32)
    base = base.reshape([shape[a] * steps[a] for a in axes])
    view = base.transpose(np.argsort(axes)) if shape else base.reshape(())
    view = view[tuple(slice(None, None, step) for step in steps)]
    strides = [0 if wide else s for wide, s in zip(expand, view.strides, strict=True)]
    view = np.lib.stride_tricks.as_strided(view, shape, strides)
    width = len(shape)
    table = one_row(shape)
    boxes = plan.plan_boxes(table, np.array(strides, np.int64).reshape(1, width))
    memory, out = base.reshape(-1).view(np.uint8), np.zeros(view.size * 4, np.uint8)
    size = int(boxes.run_bytes[0])
    for target, source in runs(boxes, 0):
        out[target : target + size] = memory[source : source + size]
    assert out.tobytes() == view.tobytes()


def one_row(shape):
    column = np.array(shape, np.int64).reshape(1, len(shape))
    code = DTYPE_NAMES.index("int32")
    return ShardTable(
        ("x",),
        np.zeros(1, np.int32),
        np.full(1, code, np.uint8),
        np.full(1, len(shape), np.uint8),
        column,
        np.zeros_like(column),
        column,
    )


def test_a_contiguous_tensor_is_one_run_and_a_row_slice_one_run_a_row():
    contiguous = plan.plan_boxes(one_row([3, 4, 5]), np.array([[80, 20, 4]], np.int64))
    assert contiguous.run_bytes.tolist() == [240] and contiguous.counts.shape == (1, 0)
    sliced = plan.plan_boxes(one_row([3, 4, 5]), np.array([[160, 20, 4]], np.int64))
    assert sliced.run_bytes.tolist() == [80] and sliced.counts.tolist() == [[3]]


# -------------------------------------------------------------------------------------------------
# ownership


def table_of(rows):
    """Columns from (key, dtype, global shape, offset, shape)."""
    keys = tuple(dict.fromkeys(row[0] for row in rows))
    width = max((len(row[2]) for row in rows), default=0)

    def padded(place, fill):
        filled = [[*row[place], *[fill] * (width - len(row[place]))] for row in rows]
        return np.array(filled, np.int64).reshape(len(rows), width)

    return ShardTable(
        keys,
        np.array([keys.index(row[0]) for row in rows], np.int32),
        np.array([DTYPE_NAMES.index(row[1]) for row in rows], np.uint8),
        np.array([len(row[2]) for row in rows], np.uint8),
        padded(2, 1),
        padded(3, 0),
        padded(4, 1),
    )


def check(rows, owner=None):
    table = table_of(rows)
    owned = np.ones(len(rows), bool) if owner is None else np.array(owner, bool)
    check_ownership(table, np.arange(len(rows), dtype=np.int32), owned)


@pytest.fixture(params=["painting", "sweeping"])
def path(request, monkeypatch):
    if request.param == "sweeping":
        monkeypatch.setattr(ownership, "_PAINT_CELLS_MAXIMUM", 0)
    return request.param


def boxes_of(key, shape, *boxes, dtype="float32"):
    return [(key, dtype, shape, offset, size) for offset, size in boxes]


GOOD = boxes_of("good", (4,), ((0,), (2,)), ((2,), (2,)))


@pytest.mark.parametrize(
    ("rows", "owner"),
    [
        ([], None),
        (boxes_of("a", (), ((), ())), None),
        (boxes_of("a", (0, 3), ((0, 0), (0, 3))), None),
        (boxes_of("a", (4, 4), ((0, 0), (4, 4)), ((0, 0), (4, 4))), [True, False]),
        (boxes_of("a", (5,), ((0,), (2,)), ((2,), (2,)), ((4,), (1,)), ((5,), (0,))), None),
        (boxes_of("a", (3, 3), ((0, 0), (1, 3)), ((1, 0), (2, 1)), ((1, 1), (2, 2))), None),
        (boxes_of("a", (6,), ((0,), (2,)), ((2,), (2,)), ((4,), (2,)), ((6,), (0,))), None),
    ],
    ids=["nothing", "0-d", "zero-size", "replica", "uneven", "irregular", "empty shard"],
)
def test_exact_cover_is_accepted(path, rows, owner):
    check([*rows, *GOOD], None if owner is None else [*owner, True, True])


BROKEN = {
    "no owner": (boxes_of("k/1", (4,), ((0,), (4,))), [False], "none for 4 elements"),
    "no owner of a 0-d tensor": (boxes_of("k/1", (), ((), ())), [False], "none for 1 elements"),
    "no owner of a zero-size tensor": (boxes_of("k/1", (0,), ((0,), (0,))), [False], "none"),
    "two owners": (boxes_of("k/1", (4,), ((0,), (4,)), ((0,), (4,))), None, "two: shard"),
    "two owners of a 0-d tensor": (boxes_of("k/1", (), ((), ()), ((), ())), None, "two: shard"),
    "two owners and a hole": (
        boxes_of("k/1", (4,), ((0,), (2,)), ((0,), (2,))),
        None,
        "two: shard [2] at [0] on rank 0 and shard [2] at [0] on rank 1",
    ),
    "partial overlap": (
        boxes_of("k/1", (4, 4), ((0, 0), (3, 4)), ((2, 0), (2, 2))),
        None,
        "two: shard [3, 4] at [0, 0] on rank 0 and shard [2, 2] at [2, 0] on rank 1",
    ),
    "hole": (
        boxes_of("k/1", (3, 3), ((0, 0), (1, 3)), ((1, 0), (2, 1)), ((1, 2), (2, 1))),
        None,
        "none for 2 elements",
    ),
    "outside": (
        boxes_of("k/1", (4,), ((2,), (3,))),
        None,
        "expected a shard inside [4], found shard [3] at [2] on rank 0",
    ),
    "before the beginning": (boxes_of("k/1", (4,), ((-1,), (4,))), None, "inside [4]"),
    "two dtypes": (
        boxes_of("k/1", (4,), ((0,), (2,))) + boxes_of("k/1", (4,), ((2,), (2,)), dtype="bfloat16"),
        None,
        "expected float32 [4] as on rank 0, found bfloat16 [4] on rank 1",
    ),
    "two global shapes": (
        boxes_of("k/1", (4,), ((0,), (2,))) + boxes_of("k/1", (5,), ((2,), (3,))),
        None,
        "expected float32 [4] as on rank 0, found float32 [5] on rank 1",
    ),
    "two numbers of dimensions": (
        boxes_of("k/1", (4,), ((0,), (4,))) + boxes_of("k/1", (4, 1), ((0, 0), (4, 1))),
        [True, False],
        "found float32 [4, 1] on rank 1",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_not_covered_exactly_once_is_refused_naming_the_key(path, case):
    rows, owner, text = BROKEN[case]
    owner = [*(owner or [True] * len(rows)), True, True]
    with pytest.raises(StateMismatchError) as caught:
        check([*rows, *GOOD], owner)
    assert "plan save: tensor 'k/1'" in str(caught.value)
    assert text in str(caught.value)
    if text.startswith(("two: ", "none")):  # who uses this package alone knows no replica_id
        assert re.search(r"\(.*Shard.*owner.*Megatron's replica_id", str(caught.value))


@pytest.mark.parametrize(
    ("given", "replicas", "text"),
    [
        (("o", "o"), (), "found two (put the rank into the key, or give it on one rank only)"),
        (("o",), ("o", "p"), "'p'.*(what differs .* into an ObjectProvider, with the rank in its"),
        (("w",), (), "'w'.*found a tensor of that key too (perhaps on another rank)"),
    ],
)
def test_an_object_without_one_owner_is_refused_with_what_to_change(given, replicas, text):
    none = np.zeros(0, np.int64)
    where = Extents(none.astype(np.int32), none, none)
    regions = Regions(none, none, none, none, none)
    pattern = ".*".join(map(re.escape, text.split(".*")))
    with pytest.raises(StateMismatchError, match=pattern):
        check_objects(Contents(given, where, regions, replicas), ("w",))


def test_two_owners_are_found_where_every_tensor_is_0_d(path):
    with pytest.raises(StateMismatchError, match=r"'k'.*two: shard"):
        check(boxes_of("k", (), ((), ()), ((), ())))


def cut(generator, shape, pieces):
    """An irregular partition of a box into at least `pieces` boxes (guillotine cuts)."""
    boxes = [((0,) * len(shape), tuple(shape))]
    while len(boxes) < pieces:
        offset, size = boxes.pop(generator.integers(len(boxes)))
        axis = int(generator.integers(len(shape)))
        if size[axis] < 2:
            boxes.append((offset, size))
            continue
        at = int(generator.integers(1, size[axis]))
        low, high = list(size), list(size)
        low[axis], high[axis] = at, size[axis] - at
        moved = list(offset)
        moved[axis] += at
        boxes += [(offset, tuple(low)), (tuple(moved), tuple(high))]
    return boxes


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 15), st.booleans())
def test_any_irregular_partition_is_accepted_and_any_flaw_in_it_is_found(
    seed, width, pieces, paint
):
    generator = np.random.default_rng(seed)
    shape = tuple(int(n) for n in generator.integers(4, 9, width))
    boxes = cut(generator, shape, min(pieces, math.prod(shape)))
    victim = int(generator.integers(len(boxes)))
    maximum = ownership._PAINT_CELLS_MAXIMUM
    try:
        ownership._PAINT_CELLS_MAXIMUM = maximum if paint else 0
        check(boxes_of("t", shape, *boxes))
        with pytest.raises(StateMismatchError, match="two: shard"):
            check(boxes_of("t", shape, *boxes, boxes[victim]))
        with pytest.raises(StateMismatchError, match="none for"):
            check(
                boxes_of("t", shape, *boxes, ((0,) * width, (0,) * width)),
                [number != victim for number in range(len(boxes))] + [True],
            )
        # one box moved onto another of the same volume: the sum of volumes says nothing
        if len(boxes) > 1:
            other = (victim + 1) % len(boxes)
            moved = [boxes[other] if n == victim else box for n, box in enumerate(boxes)]
            with pytest.raises(StateMismatchError, match="'t'"):
                check(boxes_of("t", shape, *moved))
    finally:
        ownership._PAINT_CELLS_MAXIMUM = maximum


def test_large_irregular_partitions_are_checked_on_both_paths(path):
    boxes = cut(np.random.default_rng(5), (5000, 700), 600)
    check(boxes_of("t", (5000, 700), *boxes))
    offset, size = boxes[77]
    grown = tuple(max(o - 1, 0) for o in offset)
    boxes[77] = (grown, tuple(s + o - g for s, o, g in zip(size, offset, grown, strict=True)))
    with pytest.raises(StateMismatchError, match="two: shard"):
        check(boxes_of("t", (5000, 700), *boxes))


# -------------------------------------------------------------------------------------------------
# restore


def place(table, generator, subfiles=2):
    """Extents of all rows, far apart in regions of several blocks; and those regions."""
    count = len(table)
    size = table.lengths()
    subfile = np.sort(generator.integers(0, subfiles, count)).astype(np.int32)
    start = np.zeros(count, np.int64)
    regions, row = [], 0
    for number in range(subfiles):
        base = 0
        rows = np.flatnonzero(subfile == number)
        for part in np.array_split(rows, 2):
            position = base
            for row in part.tolist():
                position += int(generator.integers(0, 2 * BLOCK_BYTES)) // 64 * 64
                start[row], position = position, position + int(size[row])
            length = -(-(position - base) // PAGE_BYTES) * PAGE_BYTES
            if length:
                regions.append((number, base, length))
                base += -(-length // BLOCK_BYTES) * BLOCK_BYTES
    generator.shuffle(regions)
    columns = np.array(regions, np.int64).reshape(-1, 3).T
    blocks = int((-(-columns[2] // BLOCK_BYTES)).sum())
    return Extents(subfile, start, size), Regions(
        np.zeros(len(regions), np.int32),
        columns[0].astype(np.int32),
        columns[1],
        columns[2],
        np.arange(100, 100 + blocks, dtype=np.uint32),
    )


def byte_columns(shape, item):
    strides, step = [], item
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return strides


def restore_with(restoring, files, destinations):
    """Carry a plan out with numpy."""
    for row in range(len(restoring.piece_start)):
        size, data = int(restoring.boxes.run_bytes[row]), files[restoring.piece_subfile[row]]
        out = destinations[restoring.request[row]].reshape(-1).view(np.uint8)
        for source, target in runs(restoring.boxes, row):
            begin = int(restoring.piece_start[row]) + source
            into = int(restoring.memory_offset[row]) + target
            out[into : into + size] = data[begin : begin + size]


def assert_ranges_are_whole_blocks(restoring, regions, gap_bytes):
    first, checksum = regions.first_block(), 0
    before = None
    for subfile, start, length in zip(
        restoring.range_subfile.tolist(),
        restoring.range_start.tolist(),
        restoring.range_length.tolist(),
        strict=True,
    ):
        (owner,) = np.flatnonzero(
            (regions.subfile == subfile)
            & (regions.start <= start)
            & (start < regions.start + regions.length)
        )
        base, end = regions.start[owner], regions.start[owner] + regions.length[owner]
        assert (start - base) % BLOCK_BYTES == 0
        assert start + length <= end
        assert length % BLOCK_BYTES == 0 or start + length == end
        blocks = -(-length // BLOCK_BYTES)
        row = first[owner] + (start - base) // BLOCK_BYTES
        assert restoring.crc32c[checksum : checksum + blocks].tolist() == (
            regions.crc32c[row : row + blocks].tolist()
        )
        checksum += blocks
        if before is not None:
            assert before[:2] < (subfile, start)
            if before[0] == subfile:
                assert before[2] <= start
            if before[3] == owner:
                assert start - before[2] > gap_bytes
        before = (subfile, start, start + length, owner)
    assert checksum == len(restoring.crc32c)
    for row in range(len(restoring.piece_start)):
        boxes = restoring.boxes
        stop = restoring.piece_start[row] + boxes.run_bytes[row]
        stop += ((boxes.counts[row] - 1) * boxes.file_strides[row]).sum()
        assert np.any(
            (restoring.range_subfile == restoring.piece_subfile[row])
            & (restoring.range_start <= restoring.piece_start[row])
            & (stop <= restoring.range_start + restoring.range_length)
        )


def grid(generator, shape):
    """A cut of each axis into random parts, and all cells of it."""
    edges = [
        sorted({0, n, *generator.integers(0, n + 1, generator.integers(0, 3)).tolist()})
        for n in shape
    ]
    for cell in itertools.product(*(itertools.pairwise(axis) for axis in edges)):
        yield tuple(low for low, _ in cell), tuple(high - low for low, high in cell)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**32),
    st.lists(st.integers(1, 6), max_size=3),
    st.sampled_from([0, 4096, BLOCK_BYTES, 64 * BLOCK_BYTES]),
    st.sampled_from(["uint8", "int32", "complex128"]),
    st.booleans(),
)
def test_resharding_from_any_grid_to_any_boxes_gives_the_same_array(
    seed, shape, gap, dtype, stepped
):
    generator = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    arrays = {
        key: generator.integers(0, 256, math.prod(s) * kind.itemsize, np.uint8).view(kind)
        for key, s in (("a", shape), ("b", [*shape, 2]))
    }
    arrays = {"a": arrays["a"].reshape(shape), "b": arrays["b"].reshape([*shape, 2])}
    rows = [
        (key, dtype, array.shape, offset, size)
        for key, array in arrays.items()
        for offset, size in grid(generator, array.shape)
    ]
    rows = [rows[place] for place in generator.permutation(len(rows))]
    saved = table_of(rows)
    extents, regions = place(saved, generator)
    ends = extents.start + extents.length
    files = [np.zeros(int(ends.max(initial=0)), np.uint8) for _ in range(2)]
    for row, (key, _, _, offset, size) in enumerate(rows):
        part = arrays[key][tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))]
        data = np.frombuffer(part.tobytes(), np.uint8)
        begin = extents.start[row]
        files[extents.subfile[row]][begin : begin + len(data)] = data
    wanted, indices = [], []
    for key in ("b", "a", "b"):
        whole = arrays[key].shape
        low = [int(generator.integers(0, n)) for n in whole]
        high = [int(generator.integers(b, n + 1)) for b, n in zip(low, whole, strict=True)]
        step = [int(generator.integers(1, 4)) if stepped else 1 for _ in whole]
        indices.append(tuple(map(slice, low, high, step)))
        wanted.append((key, dtype, whole, tuple(low), arrays[key][indices[-1]].shape))
    table = table_of(wanted)
    steps = np.ones_like(table.shape)
    for row, index in enumerate(indices):
        steps[row, : len(index)] = [part.step for part in index]
    strides = np.zeros_like(table.shape)
    for row, box in enumerate(wanted):
        strides[row, : len(box[4])] = byte_columns(box[4], kind.itemsize)
    restoring = plan.plan_restore(
        saved,
        extents,
        regions,
        table,
        strides,
        gap_bytes=gap,
        steps=steps if stepped else None,
    )
    destinations = [np.zeros(box[4], kind) for box in wanted]
    restore_with(restoring, files, destinations)
    for (key, *_), index, found in zip(wanted, indices, destinations, strict=True):
        assert found.tobytes() == arrays[key][index].tobytes()
    assert_ranges_are_whole_blocks(restoring, regions, gap)


def two_far_shards(gap_blocks):
    """Two one-block tensors of one region, `gap_blocks` blocks apart."""
    rows = [
        *boxes_of("a", (BLOCK_BYTES,), ((0,), (BLOCK_BYTES,)), dtype="uint8"),
        *boxes_of("b", (BLOCK_BYTES,), ((0,), (BLOCK_BYTES,)), dtype="uint8"),
    ]
    table = table_of(rows)
    start = np.array([0, (1 + gap_blocks) * BLOCK_BYTES], np.int64)
    extents = Extents(np.zeros(2, np.int32), start, table.lengths())
    total = int(start[1]) + BLOCK_BYTES
    regions = Regions(
        np.zeros(1, np.int32),
        np.zeros(1, np.int32),
        np.zeros(1, np.int64),
        np.array([total], np.int64),
        np.arange(total // BLOCK_BYTES, dtype=np.uint32),
    )
    return table, extents, regions


@pytest.mark.parametrize(("gap_blocks", "ranges"), [(0, 1), (3, 1), (4, 2)])
def test_a_gap_up_to_gap_bytes_is_read_over_and_a_wider_one_is_not(gap_blocks, ranges):
    table, extents, regions = two_far_shards(gap_blocks)
    strides = np.ones((2, 1), np.int64)
    found = plan.plan_restore(table, extents, regions, table, strides, gap_bytes=3 * BLOCK_BYTES)
    assert len(found.range_start) == ranges


@pytest.mark.parametrize(
    ("box", "row_step", "gap_blocks", "pieces", "blocks"),
    [
        # 2 layers of 3 rows of 4 blocks
        ((2, 3, 10), 1, 2, 6, 6),
        ((2, 3, 10), 1, 4, 1, 21),
        ((2, 1, 10), 1, 4, 2, 2),
        ((2, 3, 2 * BLOCK_BYTES), 1, 1, 6, 12),
        ((2, 1, 4 * BLOCK_BYTES), 1, 7, 2, 8),
        ((2, 3, 4 * BLOCK_BYTES), 1, 0, 1, 24),
        ((2, 2, 10), 2, 5, 4, 7),  # wide gaps between rows alone
    ],
)
def test_a_piece_is_cut_where_it_would_be_read_over_a_wide_gap(
    box, row_step, gap_blocks, pieces, blocks
):
    whole = (2, 3, 4 * BLOCK_BYTES)
    table = table_of(boxes_of("w", whole, ((0, 0, 0), whole), dtype="uint8"))
    extents = Extents(np.zeros(1, np.int32), np.zeros(1, np.int64), table.lengths())
    regions = Regions(
        *(np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int64)),
        table.lengths(),
        np.arange(24, dtype=np.uint32),
    )
    wanted = table_of(boxes_of("w", whole, ((0, 0, 0), box), dtype="uint8"))
    strides = np.array([byte_columns(box, 1)], np.int64)
    found = plan.plan_restore(
        *(table, extents, regions, wanted, strides),
        gap_bytes=gap_blocks * BLOCK_BYTES,
        steps=np.array([[1, row_step, 1]], np.int64),
    )
    assert (len(found.piece_start), len(found.crc32c)) == (pieces, blocks)
    assert_ranges_are_whole_blocks(found, regions, gap_blocks * BLOCK_BYTES)
    if pieces == 6:
        assert found.memory_offset.tolist() == [number * box[2] for number in range(6)]
        assert (found.piece_start // BLOCK_BYTES).tolist() == [0, 4, 8, 12, 16, 20]


def test_nothing_wanted_reads_nothing():
    table, extents, regions = two_far_shards(1)
    none = np.zeros(0, np.intp)
    found = plan.plan_restore(
        table, extents, regions, table.take(none), np.zeros((0, 1), np.int64), gap_bytes=0
    )
    assert len(found.range_start) == len(found.piece_start) == len(found.crc32c) == 0


def test_a_request_that_the_checkpoint_does_not_cover_is_refused_unless_partial():
    table, extents, regions = two_far_shards(0)
    wanted = table_of(boxes_of("a", (BLOCK_BYTES + 5,), ((0,), (BLOCK_BYTES + 5,)), dtype="uint8"))
    strides = np.ones((1, 1), np.int64)
    with pytest.raises(StateMismatchError, match=r"plan restore: tensor 'a'.*1048576 of its"):
        plan.plan_restore(table, extents, regions, wanted, strides, gap_bytes=0)
    partial = np.ones(1, bool)
    found = plan.plan_restore(
        table, extents, regions, wanted, strides, gap_bytes=0, partial=partial
    )
    assert found.boxes.run_bytes.tolist() == [BLOCK_BYTES]


def test_similar_keys_come_first_and_the_number_of_others_is_told():
    keys = ["layer.0.weight", "layer.0.bias", "embedding"]
    text = plan.similar_keys("layer.0.wieght", keys)
    assert text.startswith("3 others; similar: 'layer.0.weight'")
    assert plan.similar_keys("zzz", keys) == "3 others"
    many = [f"decoder.layers.{number}.weight" for number in range(30_000)]
    text = plan.similar_keys("decoder.layer.29999.weight", many)
    assert text.startswith("30000 others; similar: 'decoder.layers.29999.weight'")
    assert DTYPE_BYTES[DTYPE_NAMES.index("int32")] == 4
