"""Overlap: every pair of boxes that meet is found, and hardly any other is looked at."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_uring.overlap import candidate_pairs, in_terms_of
from megatron_uring.shards import ShardTable


def table(rows, global_shapes):
    """Rows (tensor, offset, shape) of tensors with these global shapes."""
    width = len(global_shapes[0])
    tensor = np.array([row[0] for row in rows], np.int32)
    return ShardTable(
        tuple(f"key{number}" for number in range(len(global_shapes))),
        tensor,
        np.zeros(len(rows), np.uint8),
        np.full(len(rows), width, np.uint8),
        np.array([global_shapes[number] for number in tensor], np.int64).reshape(len(rows), width),
        np.array([row[1] for row in rows], np.int64).reshape(len(rows), width),
        np.array([row[2] for row in rows], np.int64).reshape(len(rows), width),
    )


def meet(saved, wanted):
    """All pairs that share an element, looked for one by one."""
    found = set()
    for w in range(len(wanted)):
        for s in range(len(saved)):
            if saved.tensor[s] != wanted.tensor[w]:
                continue
            low = np.maximum(saved.offset[s], wanted.offset[w])
            high = np.minimum(saved.offset[s] + saved.shape[s], wanted.offset[w] + wanted.shape[w])
            if (low < high).all():
                found.add((w, s))
    return found


@st.composite
def two_tables(draw):
    width = draw(st.integers(0, 3))
    sizes = st.lists(st.integers(0, 9), min_size=width, max_size=width)
    global_shapes = draw(st.lists(sizes, min_size=1, max_size=4))
    box = st.tuples(st.integers(0, len(global_shapes) - 1), sizes, sizes)

    def rows(beyond):
        drawn = draw(st.lists(box, max_size=12))
        cut = [
            (
                tensor,
                [o - beyond for o in offset],
                [
                    min(s, max(g - o, 0)) + 2 * beyond
                    for s, o, g in zip(shape, offset, global_shapes[tensor], strict=True)
                ],
            )
            for tensor, offset, shape in drawn
        ]
        return cut

    # every tensor has a saved row
    saved = [(n, [0] * width, shape) for n, shape in enumerate(global_shapes)] + rows(0)
    saved = draw(st.permutations(saved))
    return table(saved, global_shapes), table(rows(draw(st.integers(0, 1))), global_shapes)


@settings(max_examples=300, deadline=None)
@given(two_tables())
def test_every_pair_that_meets_is_a_candidate(tables):
    saved, wanted = tables
    request, row = candidate_pairs(saved, wanted)
    pairs = list(zip(request.tolist(), row.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    assert meet(saved, wanted) <= set(pairs)
    assert (saved.tensor[row] == wanted.tensor[request]).all()
    assert (np.diff(request) >= 0).all()


def test_a_tensor_in_many_parts_is_not_compared_all_with_all():
    parts = 1000
    rows = [(0, [0, part * 8], [16, 8]) for part in range(parts)]
    tables = table(rows, [[16, parts * 8]])
    request, row = candidate_pairs(tables, tables)
    assert request.tolist() == row.tolist() == list(range(parts))


def test_tensors_too_long_for_one_axis_are_compared_all_with_all():
    huge = 1 << 61
    rows = [(0, [0], [huge]), (1, [0], [huge // 2]), (1, [huge // 2], [huge // 2])]
    tables = table(rows, [[huge], [huge]])
    request, row = candidate_pairs(tables, tables)
    assert {(0, 0), (1, 1), (2, 2)} <= set(zip(request.tolist(), row.tolist(), strict=True))


def test_keys_in_another_order_keep_their_numbers():
    saved = table([(0, [0], [4]), (1, [0], [4])], [[4], [4]])
    wanted = ShardTable(
        saved.keys[::-1],
        *(
            getattr(saved, name)
            for name in ("tensor", "dtype", "ndim", "global_shape", "offset", "shape")
        ),
    )
    renumbered = in_terms_of(saved, wanted)
    assert renumbered.keys == saved.keys
    assert renumbered.tensor.tolist() == [1, 0]


@pytest.mark.parametrize("wanted", ["abcde", "cde", "a", "ce", "ed", "ba", ""])
def test_keys_are_found_in_whatever_order_and_number(wanted):
    keys = tuple("abcde")
    saved = replace(table([(n, [0], [4]) for n in range(5)], [[4]] * 5), keys=keys)
    rows = [(n, [0], [4]) for n in range(len(wanted))]
    asked = replace(table(rows, [[4]] * max(len(wanted), 1)), keys=tuple(wanted))
    found = in_terms_of(saved, asked)
    assert [found.keys[n] for n in found.tensor] == list(wanted)
