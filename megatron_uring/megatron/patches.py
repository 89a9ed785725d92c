"""The patch points: which names of Megatron-Core are replaced, and how they are put back.

Guarantees
----------
- A method that a class only inherits is patched on that class alone, and deleted from it again.
- A replacement that is no longer active calls what it replaced.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_uring import lazy
from megatron_uring.config import Config
from megatron_uring.errors import UnsupportedError
from megatron_uring.layout import BACKEND, BACKEND_VERSION

_PACKAGE = "megatron.core.dist_checkpointing"
_OLDEST, _FIRST_UNSUPPORTED = (0, 16), (0, 17)

# (module, class or None, name, the function of `routes` that takes its place, needed for saving)
_POINTS: tuple[tuple[str, str | None, str, str, bool], ...] = (
    ("strategies.torch", "TorchDistSaveShardedStrategy", "save", "save", True),
    ("strategies.torch", "TorchDistSaveShardedStrategy", "async_save", "async_save", True),
    ("strategies.common", "TorchCommonSaveStrategy", "save_common", "save_common", True),
    ("strategies.async_utils", "AsyncCallsQueue", "schedule_async_request", "schedule", True),
    ("strategies.async_utils", "AsyncCallsQueue", "close", "close", True),
    ("serialization", None, "save_config", "save_config", False),
    ("strategies.torch", "TorchDistLoadShardedStrategy", "load", "load", False),
    (
        "strategies.torch",
        "TorchDistLoadShardedStrategy",
        "load_tensors_metadata",
        "load_tensors_metadata",
        False,
    ),
    (
        "strategies.torch",
        "TorchDistLoadShardedStrategy",
        "load_sharded_metadata",
        "load_sharded_metadata",
        False,
    ),
    (
        "strategies.torch",
        "TorchDistLoadShardedStrategy",
        "remove_sharded_tensors",
        "remove_sharded_tensors",
        False,
    ),
    ("strategies.common", "TorchCommonLoadStrategy", "load_common", "load_common", False),
)


@dataclass(frozen=True)
class Point:
    """One name to replace."""

    owner: Any
    name: str
    route: str

    @property
    def path(self) -> str:
        """Dotted name, for `status`."""
        module = getattr(self.owner, "__module__", None)
        own = self.owner.__qualname__ if module else self.owner.__name__
        return ".".join(part for part in (module, own, self.name) if part)


@dataclass
class Counts:
    """What our routes served since `enable`."""

    begun_saves: int = 0
    saves: int = 0
    failed_saves: int = 0
    loads: int = 0
    bypassed_saves: int = 0


@dataclass
class Installed:
    """The adapter in force."""

    config: Config
    counts: Counts
    saving: bool
    active: bool = True
    failed_in_a_row: int = 0
    _undo: list[Callable[[], None]] = field(default_factory=list)
    _names: list[str] = field(default_factory=list)

    def names(self) -> list[str]:
        """Dotted names that are patched."""
        return list(self._names)

    def undo_later(self, undo: Callable[[], None], name: str | None = None) -> None:
        """Let `remove` call `undo`, of something done to what has this dotted name."""
        self._undo.append(undo)
        if name is not None:
            self._names.append(name)

    def remove(self) -> None:
        """Put everything back."""
        from megatron_uring.megatron import routes

        self.active = False
        routes.forget()
        while self._undo:
            self._undo.pop()()
        self._names.clear()


def resolve(*, save: bool) -> list[Point]:
    """Find every patch point.

    Raises
    ------
    UnsupportedError
        Naming the version, or the name that is not there.
    """
    try:
        core = importlib.import_module("megatron.core")
    except ImportError as error:
        raise UnsupportedError(
            "enable megatron_uring", expected="megatron-core", cause=f"cannot import it: {error}"
        ) from error
    version = str(core.__version__)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not _OLDEST <= numbers < _FIRST_UNSUPPORTED:
        raise UnsupportedError(
            "enable megatron_uring",
            expected="megatron-core {}.{} to {}.{} (exclusive)".format(
                *_OLDEST, *_FIRST_UNSUPPORTED
            ),
            found=version,
        )
    points = []
    for module, class_name, name, route, for_saving in _POINTS:
        if save or not for_saving:
            points.append(Point(_owner(module, class_name, name, version), name, route))
    _owner("strategies.base", None, "register_default_strategy", version)
    return points


def _owner(module_name: str, class_name: str | None, name: str, version: str) -> Any:
    path = ".".join(part for part in (_PACKAGE, module_name, class_name) if part)
    try:
        owner: Any = importlib.import_module(f"{_PACKAGE}.{module_name}")
        if class_name is not None:
            owner = getattr(owner, class_name)
        if callable(getattr(owner, name)):
            return owner
        reason = f"{path}.{name} is not callable"
    except (ImportError, AttributeError) as error:
        reason = str(error)
    raise UnsupportedError(
        "enable megatron_uring",
        expected=f"the patch point {path}.{name}",
        found=f"megatron-core {version} without it",
        cause=reason,
    )


def install(points: Sequence[Point], config: Config, *, save: bool) -> Installed:
    """Replace what `resolve` found."""
    from megatron_uring.megatron import asynchronous, fences, routes, training

    installed = Installed(config, Counts(), save)
    for point in points:
        place = asynchronous if point.route in ("schedule", "close") else routes
        installed._undo.append(_replace(point, getattr(place, point.route), installed))
        installed._names.append(point.path)
    installed._undo.append(_register(save=save))
    if save:
        installed._undo.append(lazy.watch())
        installed._undo += [lazy.fence_before(*where) for where in fences.places()]
        training.install(installed)
    return installed


def _replace(point: Point, route: Callable[..., Any], installed: Installed) -> Callable[[], None]:
    own = point.name in vars(point.owner)
    original = getattr(point.owner, point.name)

    @functools.wraps(original)
    def replacement(*arguments: Any, **keywords: Any) -> Any:
        if not installed.active:
            return original(*arguments, **keywords)
        return route(installed, original, *arguments, **keywords)

    setattr(point.owner, point.name, replacement)

    def undo() -> None:
        if vars(point.owner).get(point.name) is not replacement:
            return  # somebody wrapped ours: it stays, and passes through
        if own:
            setattr(point.owner, point.name, original)
        else:
            delattr(point.owner, point.name)

    return undo


def _register(*, save: bool) -> Callable[[], None]:
    """Make our backend name known where Megatron looks strategies up by the name in
    ``metadata.json``.
    """
    base = importlib.import_module(f"{_PACKAGE}.strategies.base")
    torch_strategies = importlib.import_module(f"{_PACKAGE}.strategies.torch")
    key = (BACKEND, BACKEND_VERSION)
    wanted = {base.StrategyAction.LOAD_SHARDED: torch_strategies.TorchDistLoadShardedStrategy()}
    if save:
        wanted[base.StrategyAction.SAVE_SHARDED] = torch_strategies.TorchDistSaveShardedStrategy(
            *key
        )
    for action, strategy in wanted.items():
        base.register_default_strategy(action, *key, strategy)

    def undo() -> None:
        for action, strategy in wanted.items():
            registered = base.default_strategies[action.value]
            if registered.get(key) is strategy:
                del registered[key]
            if not registered:  # Megatron fills the table at the first look-up
                del base.default_strategies[action.value]

    return undo
