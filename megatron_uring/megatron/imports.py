"""What is to be done with a module as soon as it is imported, by whomever.

Guarantees
----------
- Importing this file imports neither torch nor Megatron, and `after_import` imports nothing.
- The function is called once, when the module's own code has run and before anybody gets the
  module; at once where it has been imported already.
- What it raises is raised by the ``import`` statement that caused it.
- A module whose own code is just running when `after_import` is called is not seen.
- The module keeps the loader that it would have had. Without functions that wait there is no
  finder of ours on ``sys.meta_path``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Function = Callable[[ModuleType], None]


def after_import(name: str, function: Function) -> Callable[[], None]:
    """Call `function` with the module `name` once that is imported.

    Returns
    -------
    callable
        Takes it back, if it has not been called.
    """
    module = sys.modules.get(name)
    if module is not None and not _is_initializing(module):
        function(module)
        return lambda: None
    waiting = _finder.waiting.setdefault(name, [])
    waiting.append(function)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)

    def undo() -> None:
        if function in waiting:
            waiting.remove(function)
        _finder.leave_if_idle()

    return undo


def _is_initializing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _Finder(MetaPathFinder):
    """First of ``sys.meta_path``; lets the others find, and looks over the loader's shoulder."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Function]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self.waiting.get(fullname):
            return None
        for finder in [one for one in sys.meta_path if one is not self]:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find is not None else None
            if spec is not None:
                self._watch(fullname, spec)
                return spec
        return None

    def _watch(self, name: str, spec: ModuleSpec) -> None:
        loader = spec.loader
        execute = getattr(loader, "exec_module", None)
        if loader is None or execute is None:
            return

        def exec_module(module: ModuleType) -> None:
            if module.__name__ != name:  # some loaders serve several modules
                execute(module)
                return
            vars(loader).pop("exec_module", None)  # uncovers the loader's own
            execute(module)
            functions = self.waiting.pop(name, [])
            self.leave_if_idle()
            while functions:
                functions.pop(0)(module)

        vars(loader)["exec_module"] = exec_module

    def leave_if_idle(self) -> None:
        """Go, where nobody waits for anything."""
        if not any(self.waiting.values()) and self in sys.meta_path:
            sys.meta_path.remove(self)


_finder = _Finder()
