"""enable(), disable() and status(): the adapter's switch.

Guarantees
----------
- `enable` only patches: it makes no communicator, opens no file and may be called before
  ``init_process_group``.
- All patch points are looked up before the first is patched; one that is missing is an error that
  names it and the Megatron version, and leaves Megatron as it was.
- Calling `enable` or `disable` twice is the same as calling it once. `disable` undoes exactly what
  `enable` did; where somebody else has since wrapped a patched method, our part of it passes
  everything through.
- ``MEGATRON_URING=off`` makes `enable` do nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from megatron_uring import checkpoint, fencing, pending, profiles, stage
from megatron_uring.config import Config, switched_off
from megatron_uring.errors import UnsupportedError
from megatron_uring.report import Report, loaded_versions

_log = logging.getLogger(__name__)


@dataclass
class _Switch:
    installed: Any = None
    reason: str = "enable() was not called"


_switch = _Switch()


def enable(*, save: bool = True, required: bool = True, **options: object) -> bool:
    """Route ``megatron.core.dist_checkpointing`` through this package.

    Parameters
    ----------
    save
        False: read our checkpoints, but let Megatron write its own.
    required
        False: where Megatron is missing or its version is not supported, log a warning and leave it
        alone.
    options
        Fields of `Config`; ``MEGATRON_URING_*`` variables win over them.

    Returns
    -------
    bool
        Whether the adapter is on.

    Raises
    ------
    UnsupportedError
        For a Megatron version, patch point or option that is not supported; nothing was patched
        then.
    """
    if switched_off():
        disable()
        _switch.reason = "MEGATRON_URING=off"
        return False
    config = Config.from_environment(None, **options)
    try:
        from megatron_uring.megatron import patches, versions

        points = versions.points(save=save)  # imports Megatron
    except UnsupportedError as error:
        if required:
            raise
        _log.warning("megatron_uring stays off: %s", error)
        _switch.reason = str(error)
        return False
    disable()
    _switch.installed = patches.install(points, config, save=save)
    _switch.reason = "enabled" if save else "enabled, reading only: enable(save=False)"
    return True


def disable() -> None:
    """Undo `enable`; does nothing if it is not in force."""
    if _switch.installed is not None:
        _switch.installed.remove()
        _switch.installed = None
        _switch.reason = "disable() was called"


def status() -> dict[str, Any]:
    """What runs and why: switch, engine, communicator, aggregation, versions, and what our writer
    did.

    Returns
    -------
    dict
        ``enabled``, ``reason``, ``options``, ``saves``, ``loads`` (calls that our code served),
        ``failed_saves`` (asynchronous ones), ``bypassed_saves`` (saves that Megatron or another
        strategy wrote), ``in_flight`` (directories of asynchronous saves that are not finished),
        ``fences`` (how often and how long they waited), ``patched`` (names),
        ``engines``, ``last_save``, ``last_restore`` (`Report` fields or None; of a save also
        ``blocked_ms``, ``gigabytes_per_s`` and ``durable_s``), ``profiles`` (what probes found, by
        machine and file system) and ``versions``.
    """
    installed = _switch.installed
    counts = installed.counts if installed is not None else None
    reports = checkpoint.last_reports()
    return {
        "enabled": installed is not None,
        "reason": _switch.reason,
        "options": vars(installed.config) if installed is not None else None,
        "patched": installed.names() if installed is not None else [],
        "saves": counts.saves if counts is not None else 0,
        "loads": counts.loads if counts is not None else 0,
        "failed_saves": counts.failed_saves if counts is not None else 0,
        "in_flight": [one.directory for one in pending.in_flight()],
        "fences": dict(vars(fencing.passed())),
        "bypassed_saves": counts.bypassed_saves if counts is not None else 0,
        "engines": stage.running_engines(),
        "last_save": _saved(reports.get("save")),
        "last_restore": _fields(reports.get("restore")),
        "profiles": profiles.known(),
        "versions": loaded_versions(),
    }


def _saved(report: Report | None) -> dict[str, Any] | None:
    return None if report is None else {**vars(report), **report.summary()}


def _fields(report: Report | None) -> dict[str, Any] | None:
    return None if report is None else dict(vars(report))
