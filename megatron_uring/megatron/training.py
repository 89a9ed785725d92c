"""``megatron.training``: what its training loop does around a save, made to fit a native writer.

Guarantees
----------
- Nothing of ``megatron.training`` is imported: each of its modules is patched when the program has
  imported it, before or after `enable`. A name that a version lacks is left out.
- The tracker is replaced, not written: at any moment it names the previous checkpoint or the new
  one. Megatron writes it after the save has returned, or as a finalize function after ours.
- Nothing that Megatron deletes by itself (``--save-retain-interval``, old non-persistent
  checkpoints) is the newest committed checkpoint, one that is being saved, or one that might be
  about to be. A checkpoint of ours stops to exist before its first file goes. No process is forked.
- No helper process is started for saves that are ours, with either ``--async-strategy`` and
  without NVRx; where something else needs one (see `_needs_worker`) Megatron starts it as ever.
- ``--async-save`` stays on without ``--use-persistent-ckpt-worker``.
- A save that our writer did not see is counted on every rank and logged on rank 0.
"""

from __future__ import annotations

import functools
import io
import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from megatron_uring import commit, pending, roots
from megatron_uring.layout import BACKEND, INDEX_NAME, TRACKER_NAME
from megatron_uring.megatron.imports import after_import
from megatron_uring.megatron.patches import passing_through, put

_log = logging.getLogger("megatron_uring")
_PACKAGE = "megatron.training"
_OTHER_FORMATS = ("mp_rank_", ".metadata")  # torch; torch_dcp and fsdp_dtensor
_ITERATION = re.compile(r"^iter_(\d+)$")

Original = Callable[..., Any]


def install(installed: Any) -> None:
    """Patch ``megatron.training``, as far as it has been imported, and the rest when it is."""
    for name, patch in _PATCHES.items():
        undo = after_import(f"{_PACKAGE}.{name}", functools.partial(patch, installed))
        installed.undo_later(undo)


def _patch_checkpointing(installed: Any, module: ModuleType) -> None:
    _replace(installed, module, "save_checkpoint", save_checkpoint)
    _replace(installed, module, "_async_delete_checkpoint_impl", delete_checkpoint)
    _overlay(installed, module, "maybe_msc", open=open_tracker)  # from 0.19 on
    _replace(installed, module, "open_file", open_tracker)  # up to 0.18
    _overlay(installed, module, "shutil", rmtree=remove_checkpoint)
    _overlay(installed, module, "multiprocessing", get_context=threads_only)


def _patch_async_utils(installed: Any, module: ModuleType) -> None:
    _replace(installed, module, "init_persistent_async_worker", init_worker)
    _replace(installed, module, "_get_async_calls_queue", get_queue)


def _patch_arguments(installed: Any, module: ModuleType) -> None:
    _replace(installed, module, "validate_args", validate_args)


_PATCHES = {
    "checkpointing": _patch_checkpointing,
    "async_utils": _patch_async_utils,
    "arguments": _patch_arguments,
}


# -------------------------------------------------------------------------------------------------
# what takes the place of Megatron's


def save_checkpoint(installed: Any, original: Original, *arguments: Any, **keywords: Any) -> Any:
    """``checkpointing.save_checkpoint``: other formats and local checkpoints never reach us."""
    counts = installed.counts
    before = counts.begun_saves, counts.bypassed_saves
    result = original(*arguments, **keywords)
    if (counts.begun_saves, counts.bypassed_saves) == before:
        counts.bypassed_saves += 1
        if _rank() == 0:
            options = _arguments()
            _log.warning(
                "iteration %s was not written by megatron_uring: its checkpoint has format %s",
                arguments[0] if arguments else keywords.get("iteration"),
                _format(options, non_persistent=bool(keywords.get("non_persistent_ckpt"))),
            )
    return result


def _format(options: Any, *, non_persistent: bool) -> str:
    local = non_persistent and options.non_persistent_ckpt_type == "local"
    return "local" if local else str(options.ckpt_format)


def open_tracker(
    installed: Any, original: Original, path: Any, mode: str = "r", *arguments: Any, **keywords: Any
) -> Any:
    """``open`` of the module: what is written to the tracker replaces it when it is closed."""
    name = str(path)
    if mode != "w" or os.path.basename(name) != TRACKER_NAME or name.startswith("msc:/"):
        return original(path, mode, *arguments, **keywords)
    return _Tracker(name)


def remove_checkpoint(
    installed: Any, original: Original, path: Any, *arguments: Any, **keywords: Any
) -> None:
    """``shutil.rmtree`` of the module. What must stay is logged: an error would end training."""
    directory = str(path)
    reason = _must_stay(directory)
    if reason is not None:
        _log.warning("%s stays: %s", directory, reason)
        return
    if os.path.exists(os.path.join(directory, INDEX_NAME)):
        commit.retire(directory)  # first of all, or half of it could be taken for a checkpoint
    original(path, *arguments, **keywords)


def delete_checkpoint(
    installed: Any,
    original: Original,
    save_path: Any,
    iteration: int,
    log_progress: bool = False,
    *priority: Any,
    **priorities: Any,
) -> None:
    """``checkpointing._async_delete_checkpoint_impl``, from 0.17 on: in a thread of training there
    is no process whose priority may be lowered.
    """
    original(save_path, iteration, log_progress)


class _Deletion(threading.Thread):
    """Has what Megatron uses of the process that it would fork."""

    @property
    def pid(self) -> int | None:
        return self.native_id


class _Context:
    Process = _Deletion


def threads_only(installed: Any, original: Original, method: str | None = None) -> Any:
    """``multiprocessing.get_context`` of the module, which it wants for deleting alone."""
    return _Context


def init_worker(installed: Any, original: Original, *arguments: Any, **keywords: Any) -> None:
    """``async_utils.init_persistent_async_worker``."""
    if _needs_worker(_arguments()):
        original(*arguments, **keywords)


def get_queue(installed: Any, original: Original) -> Any:
    """``async_utils._get_async_calls_queue``, from 0.17 on: it wants NVRx for some strategies."""
    module: Any = sys.modules[f"{_PACKAGE}.async_utils"]
    if module._async_calls_queue is None and not _needs_worker(_arguments()):
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        module._async_calls_queue = AsyncCallsQueue()
    return original()


def validate_args(
    installed: Any, original: Original, options: Any, *arguments: Any, **keywords: Any
) -> Any:
    """``arguments.validate_args``, which from 0.16 on turns ``--async-save`` off where no helper
    process is asked for.
    """
    alone = (
        getattr(options, "async_save", False)
        and not getattr(options, "use_persistent_ckpt_worker", True)
        and not _needs_worker(options)
    )
    if not alone:
        return original(options, *arguments, **keywords)
    options.use_persistent_ckpt_worker = True
    try:
        return original(options, *arguments, **keywords)
    finally:
        options.use_persistent_ckpt_worker = False


def _needs_worker(options: Any) -> bool:
    """Whether asynchronous requests will come that are not ours."""
    return bool(
        getattr(options, "ckpt_format", "torch_dist") != "torch_dist"
        or getattr(options, "non_persistent_ckpt_type", None) == "local"
        or getattr(options, "logits_save_dir", None) is not None
    )


# -------------------------------------------------------------------------------------------------
# what must not be deleted


def _must_stay(directory: str) -> str | None:
    """Why `directory` may not be deleted now; None if it may, or is no checkpoint's."""
    matched = _ITERATION.match(os.path.basename(directory))
    if matched is None:
        return None
    own = os.path.realpath(directory)
    if any(os.path.realpath(one.directory) == own for one in pending.in_flight()):
        return "it is being saved"
    root = os.path.dirname(own)
    newest = _newest(root)
    if newest is None:
        return None
    if newest == int(matched.group(1)):
        return "it is the newest committed checkpoint"
    if newest < int(matched.group(1)) and not _is_committed(own):
        return "it is newer than the newest committed checkpoint, and may be about to be saved"
    return None


def _newest(root: str) -> int | None:
    """The iteration that the tracker names, if it is committed, or the highest that is."""
    found = {}
    for name in os.listdir(root):
        matched = _ITERATION.match(name)
        if matched is not None and _is_committed(os.path.join(root, name)):
            found[int(matched.group(1))] = name
    named = roots.tracked_iteration(root)
    return named if named in found else max(found, default=None)


def _is_committed(directory: str) -> bool:
    """Whether it holds a checkpoint, as far as its names tell of formats other than ours."""
    if os.path.exists(os.path.join(directory, INDEX_NAME)):
        return True
    backend = commit.megatron_backend(directory)
    if backend is None:
        return any(name.startswith(_OTHER_FORMATS) for name in os.listdir(directory))
    return backend != BACKEND


# -------------------------------------------------------------------------------------------------
# how names are replaced


class _Tracker(io.StringIO):
    """Text that becomes the tracker when it is closed, unless its ``with`` block failed."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path: str | None = path

    def __exit__(self, kind: Any, *error: Any) -> None:
        if kind is not None:
            self._path = None
        self.close()

    def close(self) -> None:
        path, self._path = self._path, None
        if path is not None:
            folder, name = os.path.split(os.path.realpath(path))
            commit.replace_file(folder, name, self.getvalue().encode(), commit.new_save_id())
        super().close()


class _Overlay:
    """What another object is, with some names of ours."""

    def __init__(self, below: Any, names: dict[str, Any]) -> None:
        self._below = below
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)


def _replace(installed: Any, module: ModuleType, name: str, route: Callable[..., Any]) -> None:
    """Put `route` in the place of a function of `module`; of one that is its own also where others
    of ``megatron.training`` have it by name.
    """
    original = getattr(module, name, None)
    if original is None:
        return
    ours = functools.wraps(original)(passing_through(installed, original, route))
    owners = [module]
    if original.__module__ == module.__name__:
        owners += [one for key, one in list(sys.modules.items()) if key.startswith(_PACKAGE)]
    for owner in owners:
        if vars(owner).get(name) is original:
            put(installed, owner, name, ours, f"{owner.__name__}.{name}")


def _overlay(installed: Any, module: ModuleType, name: str, **routes: Callable[..., Any]) -> None:
    """Replace names of what `module` knows as `name`, for this module alone."""
    below = getattr(module, name, None)
    if below is None:
        return
    names = {}
    for inner, route in routes.items():
        late = functools.partial(_call, below, inner)  # what it is now may not be what it stays
        names[inner] = passing_through(installed, late, route)
    put(installed, module, name, _Overlay(below, names), f"{module.__name__}.{name}")


def _call(below: Any, name: str, *arguments: Any, **keywords: Any) -> Any:
    return getattr(below, name)(*arguments, **keywords)


def _arguments() -> Any:
    return sys.modules[f"{_PACKAGE}.global_vars"].get_args()


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
