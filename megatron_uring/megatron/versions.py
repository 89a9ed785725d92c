"""What differs between the versions of Megatron-Core: this file is the one place that knows.

Guarantees
----------
- What is patched is chosen by what is there. The version's number only says whether the version was
  tested; one that was not is refused.
- A name that has to be there and is not is an error that names it, before anything is patched.

Where the common state goes, which is the largest difference: up to 0.16 through methods of a
strategy; in 0.17 and 0.18 through two functions; from 0.19 on it comes as a ShardedObject beside
the tensors (`COMMON_OBJECT`), and a function loads it from either place. Up to 0.18 strategies are
looked up in a registry by the name in ``metadata.json`` (from 0.17 on it knows one name alone). Up
to 0.15 a ShardedTensor may be a range of a flattened shard. From 0.17 on the queue of asynchronous
saves may be that of ``nvidia_resiliency_ext``.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_uring.errors import UnsupportedError

OLDEST, FIRST_UNSUPPORTED = (0, 14), (0, 20)
# The ShardedObject, of each rank, that holds the common state from 0.19 on.
COMMON_OBJECT = "common_state"

_PACKAGE = "megatron.core.dist_checkpointing"
_SERIALIZATION = f"{_PACKAGE}.serialization"
_TORCH = f"{_PACKAGE}.strategies.torch"
_COMMON = f"{_PACKAGE}.strategies.common"
_QUEUE = f"{_PACKAGE}.strategies.async_utils"
_NVRX_QUEUE = "nvidia_resiliency_ext.checkpointing.async_ckpt.core"
_BASE = f"{_PACKAGE}.strategies.base"
_LOADER = "TorchDistLoadShardedStrategy"
_SAVER = "TorchDistSaveShardedStrategy"


@dataclass(frozen=True)
class Point:
    """One name to replace.

    Attributes
    ----------
    owner
        Module or class that has it.
    name
    route
        Module and function of this folder that take its place.
    """

    owner: Any
    name: str
    route: tuple[str, str]

    @property
    def path(self) -> str:
        """Dotted name, for `status`."""
        module = getattr(self.owner, "__module__", None)
        own = self.owner.__qualname__ if module else self.owner.__name__
        return ".".join(part for part in (module, own, self.name) if part)


def points(*, save: bool) -> list[Point]:
    """Every name that has to be replaced in the version that is installed.

    Raises
    ------
    UnsupportedError
        Naming the version, or the name that is not there.
    """
    version = _version()
    found = [*_loading(version)]
    if save:
        found += _saving(version)
    # both ways: a save by another strategy brings our common state to its place
    found.append(_needed(version, _SERIALIZATION, None, "save_config"))
    if _optional(_BASE, "default_strategies", "get"):
        _needed(version, _BASE, None, "register_default_strategy")
    return found


def _version() -> str:
    try:
        core = importlib.import_module("megatron.core")
    except ImportError as error:
        raise UnsupportedError(
            "enable megatron_uring", expected="megatron-core", cause=f"cannot import it: {error}"
        ) from error
    version = str(core.__version__)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not OLDEST <= numbers < FIRST_UNSUPPORTED:
        raise UnsupportedError(
            "enable megatron_uring",
            expected="megatron-core {}.{} to {}.{} (exclusive)".format(*OLDEST, *FIRST_UNSUPPORTED),
            found=version,
        )
    return version


def _saving(version: str) -> Iterator[Point]:
    yield _needed(version, _TORCH, _SAVER, "save")
    yield _needed(version, _TORCH, _SAVER, "async_save")
    scheduling = ("AsyncCallsQueue", "schedule_async_request")
    for queue in (_needed(version, _QUEUE, *scheduling), _optional(_NVRX_QUEUE, *scheduling)):
        if queue is not None:
            yield Point(queue.owner, queue.name, ("asynchronous", "schedule"))
            yield Point(queue.owner, "close", ("asynchronous", "close"))
    common = _common_saver()
    if common is not None:
        yield common


def _loading(version: str) -> Iterator[Point]:
    for name in ("load", "load_tensors_metadata", "load_sharded_metadata"):
        yield _needed(version, _TORCH, _LOADER, name)
    yield _needed(version, _TORCH, _LOADER, "remove_sharded_tensors")
    function = _optional(_SERIALIZATION, None, "load_common")
    yield function or _needed(version, _COMMON, "TorchCommonLoadStrategy", "load_common")
    if has_common_object():
        for module in (_SERIALIZATION, _PACKAGE):  # by name in both
            point = _needed(version, module, None, "load_common_state_dict")
            yield Point(point.owner, point.name, ("routes", "load_common"))
        # it may have been imported by name before this: then it asks here, and takes `load_common`
        question = _optional(_SERIALIZATION, None, "_legacy_common_state_exists")
        if question is not None:
            yield Point(question.owner, question.name, ("routes", "has_common_file"))


def has_common_object() -> bool:
    """Whether the common state comes as a ShardedObject beside the tensors."""
    return _common_saver() is None


def _common_saver() -> Point | None:
    """What saves the common state, up to 0.18."""
    method = _optional(_COMMON, "TorchCommonSaveStrategy", "save_common")
    return method or _optional(_SERIALIZATION, None, "save_common")


def load_strategy() -> Any:
    """The class that loads tensors."""
    return getattr(importlib.import_module(_TORCH), _LOADER)


def save_strategy() -> Any:
    """The class that saves tensors."""
    return getattr(importlib.import_module(_TORCH), _SAVER)


def registry() -> Any | None:
    """The module that strategies are looked up in by the name in ``metadata.json``, if there is
    one that others can add to.
    """
    point = _optional(_BASE, None, "register_default_strategy")
    return None if point is None else point.owner


def _optional(module: str, owner: str | None, name: str) -> Point | None:
    try:
        place: Any = importlib.import_module(module)
        if owner is not None:
            place = getattr(place, owner)
        return Point(place, name, ("routes", name)) if callable(getattr(place, name)) else None
    except (ImportError, AttributeError):
        return None


def _needed(version: str, module: str, owner: str | None, name: str) -> Point:
    point = _optional(module, owner, name)
    if point is None:
        path = ".".join(part for part in (module, owner, name) if part)
        raise UnsupportedError(
            "enable megatron_uring",
            expected=f"the patch point {path}",
            found=f"megatron-core {version} without it",
        )
    return point
