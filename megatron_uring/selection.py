"""Selection: the box of a tensor that an index means.

Guarantees
----------
- An index means the elements that it means for a torch tensor, or is refused: integers (which drop
  their dimension), slices with positive steps, one ellipsis, and tuples of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import EllipsisType
from typing import SupportsIndex, TypeAlias

import numpy as np

from megatron_uring.errors import StateMismatchError

Item: TypeAlias = SupportsIndex | slice | EllipsisType
_EVERYTHING = slice(None)


@dataclass(frozen=True)
class Selection:
    """The box that an index means: `offset`, `step` and number of elements (`counts`) of each
    dimension of the tensor; dimensions that are `dropped` from the result.
    """

    offset: tuple[int, ...]
    step: tuple[int, ...]
    counts: tuple[int, ...]
    dropped: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result."""
        return tuple(n for d, n in enumerate(self.counts) if d not in self.dropped)


def select(key: str, index: Item | tuple[Item, ...], shape: tuple[int, ...]) -> Selection:
    """What `index` means for the tensor `key` of this shape; raises `StateMismatchError` if that is
    nothing.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    ellipses = [place for place, item in enumerate(items) if item is ...]
    given = len(items) - len(ellipses)
    if len(ellipses) > 1 or given > len(shape):
        raise _refused(key, index, f"at most {len(shape)} items, and one ellipsis")
    place = ellipses[0] if ellipses else len(items)
    items[place : place + 1] = [_EVERYTHING] * (len(shape) - given)
    chosen = [_range_of(key, item, size) for item, size in zip(items, shape, strict=True)]
    return Selection(
        tuple(each.start for each in chosen),
        tuple(each.step for each in chosen),
        tuple(len(each) for each in chosen),
        tuple(d for d, item in enumerate(items) if not isinstance(item, slice)),
    )


def _range_of(key: str, item: Item, size: int) -> range:
    """The numbers, in a dimension of `size` elements, that an integer or a slice means."""
    if isinstance(item, slice):
        try:
            chosen = range(*item.indices(size))
        except (TypeError, ValueError) as error:
            raise _refused(key, item, "a slice of integers", error) from error
        if chosen.step < 0:
            raise _refused(key, item, "a positive step", "as torch; flip() turns the result round")
        return chosen
    if isinstance(item, bool | np.bool_) or not isinstance(item, int | np.integer):
        raise _refused(
            key, item, "integers, slices and an ellipsis", "index the tensor that a slice gives"
        )
    number = int(item)
    if not -size <= number < size:
        raise _refused(key, item, f"an index from {-size} to {size - 1}")
    return range(number % size, number % size + 1)


def _refused(key: str, item: object, expected: str, cause: object = None) -> StateMismatchError:
    found = repr(item) if len(repr(item)) < 80 else type(item).__name__
    return StateMismatchError(f"index tensor {key!r}", expected=expected, found=found, cause=cause)
