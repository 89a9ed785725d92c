"""The patch points: which names of Megatron-Core are replaced, and how they are put back.

Guarantees
----------
- A method that a class only inherits is patched on that class alone, and deleted from it again.
- A replacement that is no longer active calls what it replaced.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_uring import lazy
from megatron_uring.config import Config
from megatron_uring.layout import BACKEND, BACKEND_VERSION
from megatron_uring.megatron import versions
from megatron_uring.megatron.versions import Point


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


def install(points: Sequence[Point], config: Config, *, save: bool) -> Installed:
    """Replace what `versions.points` found."""
    from megatron_uring.megatron import fences, training

    installed = Installed(config, Counts(), save)
    for point in points:
        module, name = point.route
        route = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        original = getattr(point.owner, point.name)
        ours = functools.wraps(original)(passing_through(installed, original, route))
        put(installed, point.owner, point.name, ours, point.path)
    _register(installed)
    if save:
        installed.undo_later(lazy.watch())
        for where in fences.places():
            installed.undo_later(lazy.fence_before(*where))
        training.install(installed)
    return installed


def passing_through(
    installed: Installed, original: Callable[..., Any], route: Callable[..., Any]
) -> Callable[..., Any]:
    """`route` while the adapter is in force, and `original` afterwards."""

    def replacement(*arguments: Any, **keywords: Any) -> Any:
        if not installed.active:
            return original(*arguments, **keywords)
        return route(installed, original, *arguments, **keywords)

    return replacement


def put(installed: Installed, owner: Any, name: str, ours: Any, path: str) -> None:
    """Replace a name of a module or class until `Installed.remove`."""
    own = name in vars(owner)
    theirs = getattr(owner, name)
    setattr(owner, name, ours)

    def undo() -> None:
        if vars(owner).get(name) is not ours:
            return  # somebody wrapped ours: it stays, and passes through
        if own:
            setattr(owner, name, theirs)
        else:
            delattr(owner, name)

    installed.undo_later(undo, path)


def _register(installed: Installed) -> None:
    """Make our backend name known where Megatron looks strategies up by the name in
    ``metadata.json``.
    """
    base = versions.registry()
    if base is None:
        return
    key = (BACKEND, BACKEND_VERSION)
    wanted = {base.StrategyAction.LOAD_SHARDED: versions.load_strategy()()}
    if installed.saving:
        wanted[base.StrategyAction.SAVE_SHARDED] = versions.save_strategy()(*key)
    for action, strategy in wanted.items():
        base.register_default_strategy(action, *key, strategy)

    def undo() -> None:
        for action, strategy in wanted.items():
            registered = base.default_strategies[action.value]
            if registered.get(key) is strategy:
                del registered[key]
            if not registered:  # Megatron fills the table at the first look-up
                del base.default_strategies[action.value]

    installed.undo_later(undo)
