"""Nested state dicts as flat keys, and back.

Guarantees
----------
- `unflatten` is the inverse of `flatten` for nested dicts with string and integer keys, lists and
  tuples, whatever the keys contain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


def flatten(state: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Leaves of nested dicts, lists and tuples with a key that `unflatten` can turn back.

    Segments are joined by ``/``. In a string ``~`` is written ``~0`` and ``/`` ``~1`` (RFC 6901); a
    list item is ``~[i]``, a tuple item ``~(i)``, an integer dict key ``~{i}``, an empty string
    ``~``. An empty container, or a dict with other keys, is a leaf.
    """
    if _is_branch(state):
        yield from _flatten_branch(state, f"{prefix}/" if prefix else "")
    else:
        yield prefix, state


def _is_branch(value: object) -> bool:
    if isinstance(value, dict):
        return bool(value) and set(map(type, value)) <= {str, int}
    return type(value) in (list, tuple) and bool(value)


def _flatten_branch(branch: Any, prefix: str) -> Iterator[tuple[str, object]]:
    """Leaves below a container; one generator for each container, none for each leaf."""
    segments: Iterable[str]
    if isinstance(branch, dict):
        segments, values = map(_escape, branch), branch.values()
    else:
        form = "~[{}]" if isinstance(branch, list) else "~({})"
        segments, values = map(form.format, range(len(branch))), branch
    for segment, value in zip(segments, values, strict=True):
        key = prefix + segment
        if _is_branch(value):
            yield from _flatten_branch(value, f"{key}/")
        else:
            yield key, value


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
    if "~" in key or "/" in key:
        return key.replace("~", "~0").replace("/", "~1")
    return key or "~"


def _unescape(segment: str) -> str | int:
    if segment.startswith("~{"):
        return int(segment[2:-1])
    if segment == "~":
        return ""
    return segment.replace("~1", "/").replace("~0", "~")
