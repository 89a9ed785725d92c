"""Nested state dicts as flat keys, and back.

Guarantees
----------
- `unflatten` is the inverse of `flatten` for nested dicts with string and integer keys, lists and
  tuples, whatever the keys contain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


def flatten(state: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Leaves of nested dicts, lists and tuples with a key that `unflatten` can turn back.

    Segments are joined by ``/``. In a string ``~`` is written ``~0`` and ``/`` ``~1`` (RFC 6901); a
    list item is ``~[i]``, a tuple item ``~(i)``, an integer dict key ``~{i}``, an empty string
    ``~``. An empty container, or a dict with other keys, is a leaf.
    """
    items: list[tuple[str, object]] = []
    if isinstance(state, dict) and state and all(type(key) in (str, int) for key in state):
        items = [(_escape(key), value) for key, value in state.items()]
    elif type(state) in (list, tuple) and state:
        opening, closing = "[]" if isinstance(state, list) else "()"
        assert isinstance(state, list | tuple)
        items = [(f"~{opening}{index}{closing}", value) for index, value in enumerate(state)]
    if not items:
        yield prefix, state
        return
    for segment, value in items:
        yield from flatten(value, f"{prefix}/{segment}" if prefix else segment)


def unflatten(leaves: Mapping[str, object]) -> object:
    """Inverse of `flatten`.

    Keys that `flatten` cannot have made, because one is a parent of another, stay as they are: a
    flat dict.
    """
    if list(leaves) == [""]:
        return leaves[""]
    root: dict[str, Any] = {}
    for key, value in leaves.items():
        *parents, last = key.split("/")
        node = root
        for segment in parents:
            node = node.setdefault(segment, {})
            if isinstance(node, _Leaf):
                return dict(leaves)
        if last in node:
            return dict(leaves)
        node[last] = _Leaf(value)
    return _build(root)


@dataclass(frozen=True)
class _Leaf:
    value: object


def _build(node: object) -> object:
    if isinstance(node, _Leaf):
        return node.value
    assert isinstance(node, dict)
    kind = next(iter(node), "")[:2]
    if kind in ("~[", "~("):
        values = [_build(node[key]) for key in sorted(node, key=lambda key: int(key[2:-1]))]
        return values if kind == "~[" else tuple(values)
    return {_unescape(key): _build(value) for key, value in node.items()}


def _escape(key: str | int) -> str:
    if isinstance(key, int):
        return f"~{{{key}}}"
    return key.replace("~", "~0").replace("/", "~1") or "~"


def _unescape(segment: str) -> str | int:
    if segment.startswith("~{"):
        return int(segment[2:-1])
    if segment == "~":
        return ""
    return segment.replace("~1", "/").replace("~0", "~")
