"""Ranges of flattened arrays as boxes: against numpy, which flattens for real."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_uring import flattened


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes_are_the_range_in_its_order(shape, data):
    elements = math.prod(shape)
    start = data.draw(st.integers(0, elements))
    stop = data.draw(st.integers(start, elements))
    array = np.arange(elements).reshape(shape)
    found = list(flattened.boxes(tuple(shape), start, stop))
    pieces = [
        array[tuple(slice(at, at + size) for at, size in zip(offset, box, strict=True))].reshape(-1)
        for offset, box in found
    ]
    assert np.concatenate([np.arange(0), *pieces]).tolist() == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
