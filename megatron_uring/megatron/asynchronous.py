"""Megatron's asynchronous machinery, served by a native writer instead of a process.

Guarantees
----------
- No fork, no spawn, no queue of ``multiprocessing``: a request of ours is never given to Megatron's
  callers.
- ``is_current_async_call_done`` uses no CUDA and waits for no disk unless it is asked to; its
  answer is the same on all ranks at the same call. With ``no_dist`` it is this rank's own.
- A request whose save failed runs none of the functions that follow ours, so that neither
  ``metadata.json`` nor a tracker is written: on all ranks it raises, or, with
  ``on_save_error="warn"``, is logged.
- A request that nobody schedules (``execute_sync``) commits too.
- ``close(abort=True)`` calls no collective.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import async_utils

from megatron_uring.config import Config
from megatron_uring.errors import CheckpointError, CommunicationError
from megatron_uring.pending import PendingSave

_log = logging.getLogger("megatron_uring")
_KEY = "megatron_uring"

Finalize = Callable[[], None]


class NativeCaller(async_utils.AsyncCaller):  # type: ignore[misc]
    """Stands where Megatron has the process that writes.

    Parameters
    ----------
    pending
        The save that native threads write.
    """

    def __init__(self, pending: PendingSave) -> None:
        self.pending = pending

    def schedule_async_call(self, async_req: Any) -> None:
        """It is being written already."""

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Whether the finalize functions may run."""
        if blocking:  # the first of them waits, and tells other ranks that it makes progress
            return True
        return self.pending.drained() if no_dist else self.pending.poll()

    def close(self, abort: bool = False) -> None:
        """Give the save up, if asked to."""
        if abort:
            self.pending.abort()

    def __del__(self) -> None:
        """Nothing to end."""


def request(pending: PendingSave, commit_save: Finalize) -> Any:
    """A request that finalizes by `commit_save` and whatever Megatron adds to it."""
    return async_utils.AsyncRequest(
        async_fn=None,
        async_fn_args=(),
        finalize_fns=[commit_save],
        async_fn_kwargs={_KEY: pending},
    )


def schedule(installed: Any, original: Callable[..., int], queue: Any, async_request: Any) -> int:
    """``AsyncCallsQueue.schedule_async_request``, Megatron's or NVRx's."""
    pending = (async_request.async_fn_kwargs or {}).get(_KEY)
    if not isinstance(pending, PendingSave):
        return original(queue, async_request)
    queue.call_idx += 1
    finalize = _one_of(list(async_request.finalize_fns), pending, installed)
    home = _home_of(queue)
    kept = home.AsyncRequest(**{**async_request._asdict(), "finalize_fns": [finalize]}).freeze()
    queue.async_calls.append(
        home._ActiveAsyncRequest(
            queue.call_idx, NativeCaller(pending), kept._replace(call_idx=queue.call_idx)
        )
    )
    return int(queue.call_idx)


def close(
    installed: Any, original: Callable[..., None], queue: Any, *arguments: Any, **keywords: Any
) -> None:
    """``AsyncCallsQueue.close``: Megatron's own forgets all but a persistent caller."""
    if keywords.get("abort") or any(arguments):  # which 0.14 does not know
        for active in queue.async_calls:
            if isinstance(active.async_caller, NativeCaller):
                active.async_caller.close(abort=True)
    original(queue, *arguments, **keywords)


def _home_of(queue: Any) -> Any:
    """The module with the queue's own kinds of request: NVRx's are executed by methods."""
    for kind in type(queue).__mro__:
        module = sys.modules[kind.__module__]
        if hasattr(module, "_ActiveAsyncRequest"):
            return module
    return async_utils


def _one_of(finalize_fns: list[Finalize], pending: PendingSave, installed: Any) -> Finalize:
    """All of them as one, of which the later ones run only if the save was committed."""

    def finalize() -> None:
        if not finalize_fns:  # 0.19 moves them to a later request, of the logits, which ends it all
            return
        commit_save, *others = finalize_fns
        try:
            commit_save()
        except CheckpointError as error:
            installed.counts.failed_saves += 1
            installed.failed_in_a_row += 1
            _raise_or_warn(error, installed.config, installed.failed_in_a_row, pending)
            return
        installed.failed_in_a_row = 0
        with _our_metadata(installed):
            for function in others:
                function()

    return finalize


@contextlib.contextmanager
def _our_metadata(installed: Any) -> Iterator[None]:
    """Megatron's ``metadata.json`` says who wrote the tensors, also where ``disable()`` came
    between the save and its end.
    """
    if installed.active:
        yield
        return
    from megatron_uring.megatron import routes  # which imports this module

    original = serialization.save_config

    def save_config(config: Any, checkpoint_dir: Any) -> None:
        routes.save_config(installed, original, config, checkpoint_dir)

    serialization.save_config = save_config
    try:
        yield
    finally:
        serialization.save_config = original


def _raise_or_warn(
    error: CheckpointError, config: Config, failed_in_a_row: int, pending: PendingSave
) -> None:
    # ranks that cannot talk to each other do not fail alike, so that no count of theirs is the same
    broken = isinstance(error, CommunicationError)
    if broken or config.on_save_error == "raise" or failed_in_a_row > config.save_errors_maximum:
        raise error
    _log.error(
        "the save to %s failed, and training goes on (%d of at most %d in a row): %s",
        pending.directory,
        failed_in_a_row,
        config.save_errors_maximum,
        error,
    )
