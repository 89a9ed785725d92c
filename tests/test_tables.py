"""Columns that the steps hand to each other, and their way between ranks."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from megatron_uring.columns import pack_arrays, pack_keys, unpack_arrays, unpack_keys, widen
from megatron_uring.providers import Shard, TensorProvider
from megatron_uring.shards import ShardTable
from megatron_uring.tables import Contents, Extents, Groups, Regions, Structure, no_pieces


def table(*rows):
    """A table from (key, shape); each shard is its whole tensor."""
    provider = TensorProvider(
        (key, Shard(torch.empty(shape), shape, (0,) * len(shape))) for key, shape in rows
    )
    return provider.collect().shards


def same(left, right):
    """Whether two table-like dataclasses hold equal columns of equal dtypes."""
    for name in left.__dataclass_fields__:
        one, other = getattr(left, name), getattr(right, name)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype and one.shape == other.shape, name
            assert np.array_equal(one, other), name
        elif hasattr(one, "__dataclass_fields__"):
            same(one, other)
        else:
            assert one == other, name
    return True


def extents(count):
    column = np.arange(count, dtype=np.int64)
    return Extents(column.astype(np.int32), column * 64, column)


def structure(shards, rank=0):
    count = len(shards)
    return Structure(
        shards, np.full(count, rank, np.int32), np.arange(count) % 2 == 0, extents(count)
    )


REGIONS = Regions(
    np.array([0, 1], np.int32),
    np.array([0, 0], np.int32),
    np.array([0, 2 << 20], np.int64),
    np.array([(1 << 20) + 4096, 4096], np.int64),
    np.array([1, 2, 3], np.uint32),
)


@given(st.lists(st.text(st.characters(), max_size=20)))
def test_keys_survive_packing(keys):
    assert unpack_keys(*pack_keys(keys)) == tuple(keys)


@pytest.mark.parametrize("keys", [[], [""], ["", ""], ["\ud800"], ["k" * 4096, "ä/€/𝄞"]])
def test_odd_keys_survive_packing(keys):
    assert unpack_keys(*pack_keys(keys)) == tuple(keys)


@pytest.mark.parametrize("lengths", [[2], [4], [-1, 4], [3, 1]])
def test_key_lengths_that_do_not_add_up_are_refused(lengths):
    text, _ = pack_keys(["abc"])
    with pytest.raises(ValueError, match="add up"):
        unpack_keys(text, np.array(lengths, np.int64))


@given(
    st.lists(
        hnp.arrays(
            st.sampled_from([np.int32, np.int64, np.uint8, np.uint32, np.bool_]),
            hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4),
        ),
        max_size=5,
    )
)
def test_arrays_survive_packing_with_dtype_and_shape(arrays):
    back = unpack_arrays(pack_arrays(arrays))
    assert [(a.dtype, a.shape, a.tobytes()) for a in back] == [
        (a.dtype, a.shape, a.tobytes()) for a in arrays
    ]


def test_pickles_are_not_carried():
    with pytest.raises(ValueError, match=r"[Oo]bject"):
        pack_arrays([np.array([object()])])


def test_concatenated_tables_keep_rows_and_use_each_key_once():
    left, right = table(("a", (2, 3)), ("b", ())), table(("c", (1, 2, 3)), ("a", (2, 3)))
    joined = ShardTable.concatenate([left, right])
    assert joined.keys == ("a", "b", "c")
    assert [joined.keys[number] for number in joined.tensor] == ["a", "b", "c", "a"]
    assert joined.ndim.tolist() == [2, 0, 3, 2]
    assert joined.shape.tolist() == [[2, 3, 1], [1, 1, 1], [1, 2, 3], [2, 3, 1]]
    assert joined.offset.tolist() == [[0, 0, 0]] * 4
    assert joined.lengths().tolist() == [24, 4, 24, 24]


def test_no_tables_at_all_make_an_empty_one_that_joins_with_others():
    empty = ShardTable.concatenate([])
    assert len(empty) == 0 and empty.keys == ()
    some = table(("a", (2,)))
    assert same(ShardTable.concatenate([empty, some]), some)


def test_compact_drops_keys_without_rows_and_keeps_names():
    whole = table(("a", (1,)), ("b", (2,)), ("c", (3,)))
    part = whole.take(np.array([2, 0])).compact()
    assert [part.keys[number] for number in part.tensor] == ["c", "a"]
    assert set(part.keys) == {"a", "c"}
    assert part.shape.tolist() == [[3], [1]]


def test_lengths_of_huge_shards_do_not_overflow():
    huge = table(("a", (1,)))
    huge.shape[0, 0] = 1 << 40
    assert huge.lengths().tolist() == [4 << 40]


@pytest.mark.parametrize(
    "shards", [table(), table(("s", ())), table(("a", (0, 5)), ("é/~", (1, 2)), ("s", ()))]
)
def test_structures_survive_packing(shards):
    assert same(Structure.unpack(structure(shards).pack()), structure(shards))


def test_concatenated_structures_keep_all_rows_in_order():
    parts = [structure(table(("a", (2,)), ("b", ())), 0), structure(table(("a", (2,))), 1)]
    joined = Structure.concatenate(parts)
    assert joined.rank.tolist() == [0, 0, 1]
    assert joined.owner.tolist() == [True, False, True]
    assert [joined.shards.keys[number] for number in joined.shards.tensor] == ["a", "b", "a"]
    assert joined.extents.start.tolist() == [0, 64, 0]


def test_contents_survive_packing_and_joining():
    one = Contents(("x", "y"), extents(2), REGIONS)
    none = Contents((), extents(0), Regions.concatenate([]))
    assert same(Contents.unpack(one.pack()), one)
    assert same(Contents.unpack(none.pack()), none)
    assert same(Contents.concatenate([none, one, none]), one)
    assert Contents.concatenate([one, one]).object_keys == ("x", "y", "x", "y")


def test_first_block_counts_short_last_blocks():
    assert REGIONS.first_block().tolist() == [0, 2, 3]
    assert Regions.concatenate([]).first_block().tolist() == [0]


def test_members_are_the_ranks_of_a_group_in_order():
    groups = Groups("shared", "", np.array([1, 0, 1, 0], np.int32), np.array([1, 0], np.int32))
    assert groups.members(1).tolist() == [0, 2]


def test_widen_fills_on_the_right_only():
    assert widen(np.array([[5]], np.int64), 3, 1).tolist() == [[5, 1, 1]]
    column = np.zeros((2, 2), np.int64)
    assert widen(column, 2, 1) is column


def test_no_pieces_is_empty():
    assert len(no_pieces()) == 0
