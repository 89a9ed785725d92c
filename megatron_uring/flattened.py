"""A range of a flattened shard as boxes of the shard, each a piece of the range's memory.

Guarantees
----------
- The boxes cover the range once, in its order, and are not more than twice the dimensions.
- Nothing is copied.

Megatron-Core up to 0.15 cuts optimizer state that way (``ShardedTensor.flattened_range``). As boxes
it is saved like any other tensor, and restored at any other layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator


def boxes(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offset and shape of each box that elements [`start`, `stop`) of a row-major array fill.

    Parameters
    ----------
    shape
        Of the array.
    start, stop
        Elements; what is empty gives no box.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # of the whole rows
    if first > last:  # all inside of one row
        yield from _of_one_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _of_one_row(shape, first - 1, start - (first - 1) * row, row) if start % row else ()
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _of_one_row(shape, last, 0, stop - last * row)


def _of_one_row(
    shape: tuple[int, ...], number: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offset, box in boxes(shape[1:], start, stop):
        yield (number, *offset), (1, *box)
