"""From rows to tables and figures; pure.

Guarantees
----------
- Every ratio says how much faster the first named is: 1 is equal, above 1 is faster. Ratios are of
  medians; `drift_*` are medians of the ratios of each trial, which differ from them where the
  machine changed during the run. Peak memory is that of the worst trial, the warm-up included.
- The limit is the limit variant with the better median, the best peer the peer with the best.
- What was not measured is None, and is never guessed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_uring.bench.formats import DEFAULT, RANK_IO_URING, RANK_POSIX, SHARING_OFF, SHARING_ON
from megatron_uring.bench.measure import LIMIT, PEER, Row
from megatron_uring.config import GIBIBYTE, KIBIBYTE, MEBIBYTE

MEGABYTE, GIGABYTE = 1e6, 1e9
_TINY, _LARGE = "tiny", "large"


@dataclass(frozen=True)
class Summary:
    """All trials of one variant; None where there is nothing to compare with. With a `reason`
    there are no figures.

    Attributes
    ----------
    to_limit, to_best_peer
        Bandwidth as a part of the limit's, and of the best peer's.
    drift_limit, drift_peer
        The same, as the median over the trials.
    """

    what: str
    kind: str
    trials: int = 0
    median_s: float = 0.0
    fastest_s: float = 0.0
    slowest_s: float = 0.0
    gb_per_s: float = 0.0
    process_cpu_s_per_gb: float = 0.0
    machine_cpu_s_per_gb: float = 0.0
    peak_mb: float = 0.0
    to_limit: float | None = None
    to_best_peer: float | None = None
    drift_limit: float | None = None
    drift_peer: float | None = None
    reason: str = ""


def summarize(rows: Sequence[Row]) -> dict[str, Summary]:
    """The rows of one section, by variant, in order of appearance within limits, ours and peers."""
    order = {LIMIT: 0, PEER: 2}
    names = dict.fromkeys(row.what for row in sorted(rows, key=lambda r: order.get(r.kind, 1)))
    trials = {name: [row for row in rows if row.what == name] for name in names}
    # limits that the warm-up sorted out have no other row
    trials = {name: own for name, own in trials.items() if _failed(own) or _good(own)}
    limit = _best(trials.values(), LIMIT)
    peer = _best(trials.values(), PEER)
    return {name: _summarize(own, limit, peer) for name, own in trials.items()}


def _good(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.trial and not row.reason]


def _median_s(rows: Iterable[Row]) -> float:
    return statistics.median(row.seconds for row in rows)


def _best(variants: Iterable[list[Row]], kind: str) -> list[Row]:
    candidates = [_good(rows) for rows in variants if rows[0].kind == kind and not _failed(rows)]
    return min((rows for rows in candidates if rows), key=_median_s, default=[])


def _failed(rows: Sequence[Row]) -> str:
    return next((row.reason for row in rows if row.reason), "")


def _summarize(rows: list[Row], limit: list[Row], peer: list[Row]) -> Summary:
    reason, good = _failed(rows), _good(rows)
    if reason or not good:
        return Summary(rows[0].what, rows[0].kind, reason=reason or "no trial")
    seconds, gigabytes = [row.seconds for row in good], good[0].gigabytes
    median_s = statistics.median(seconds)
    return Summary(
        good[0].what,
        good[0].kind,
        len(good),
        median_s,
        min(seconds),
        max(seconds),
        gigabytes / median_s,
        statistics.median(row.process_cpu_s for row in good) / gigabytes,
        statistics.median(row.machine_cpu_s for row in good) / gigabytes,
        max(row.peak_bytes for row in rows) / MEGABYTE,
        _median_s(limit) / median_s if limit else None,
        _median_s(peer) / median_s if peer else None,
        _drift(good, limit),
        _drift(good, peer),
    )


def _drift(rows: list[Row], others: list[Row]) -> float | None:
    seconds = {row.trial: row.seconds for row in others}
    ratios = [seconds[row.trial] / row.seconds for row in rows if row.trial in seconds]
    return statistics.median(ratios) if ratios else None


# -------------------------------------------------------------------------------------------------
# figures


def figures(
    tables: dict[str, dict[str, Summary]], scale: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The numbers that the project is held to; None where not measured.

    Parameters
    ----------
    tables
        `summarize` of each section.
    scale
        Points of `scale.measure`.
    """
    large, small = tables.get("large", {}), tables.get("small", {})
    restore, tiny = tables.get("restore", {}), tables.get("tiny", {})
    ours = _get(large, DEFAULT)
    cheapest = _least(large, PEER, lambda row: row.process_cpu_s_per_gb)
    return {
        "save_large_to_limit": _field(large, "to_limit"),
        "save_large_to_best_peer": _field(large, "to_best_peer"),
        "save_small_to_best_peer": _field(small, "to_best_peer"),
        "save_cpu_s_per_gb": ours.process_cpu_s_per_gb if ours else None,
        "save_cpu_to_best_peer": _ratio(ours.process_cpu_s_per_gb, cheapest) if ours else None,
        "save_peak_mb": ours.peak_mb if ours else None,
        "restore_to_limit": _field(restore, "to_limit"),
        "restore_to_best_peer": _field(restore, "to_best_peer"),
        "posix_to_uring": _speed_ratio(large, RANK_POSIX, RANK_IO_URING),
        "limit_to_best_peer_large": _limit_to_peer(large),
        "limit_to_best_peer_small": _limit_to_peer(small),
        "limit_to_best_peer_restore": _limit_to_peer(restore),
        "sharing_to_alone": _speed_ratio(tables.get("sharing", {}), SHARING_ON, SHARING_OFF),
        "tiny_to_large_first": _speed_ratio(tiny, "tiny, first save", "large, first save"),
        "tiny_to_large_second": _speed_ratio(tiny, "tiny, second save", "large, second save"),
        **_scale_figures(scale),
    }


def _get(table: dict[str, Summary], what: str) -> Summary | None:
    row = table.get(what)
    return None if row is None or row.reason else row


def _field(table: dict[str, Summary], name: str) -> Any:
    row = _get(table, DEFAULT)
    return None if row is None else getattr(row, name)


def _ratio(left: float | None, right: float | None) -> float | None:
    return left / right if left is not None and right else None


def _speed_ratio(table: dict[str, Summary], what: str, other: str) -> float | None:
    row, against = _get(table, what), _get(table, other)
    return against.median_s / row.median_s if row and against else None


def _least(table: dict[str, Summary], kind: str, value: Callable[[Summary], float]) -> float | None:
    return min((value(r) for r in table.values() if r.kind == kind and not r.reason), default=None)


def _limit_to_peer(table: dict[str, Summary]) -> float | None:
    limit = _least(table, LIMIT, lambda row: row.median_s)
    return _ratio(_least(table, PEER, lambda row: row.median_s), limit)


def _scale_figures(scale: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    found = [
        point
        for point in scale
        if point["shape"] == "keys of 100 shards"
        and point["shards"] == 1_000_000
        and not point["reason"]
    ]
    point = found[0] if found else None
    return {
        "index_1m_save_s": point["save_s"] if point else None,
        "index_1m_load_s": point["load_s"] if point else None,
        "index_1m_peak_gb": point["peak_bytes"] / GIGABYTE if point else None,
        "index_1m_peak_above_import_gb": (
            (point["peak_bytes"] - point["import_bytes"]) / GIGABYTE if point else None
        ),
        "index_1m_mb": point["index_bytes"] / MEGABYTE if point else None,
    }


def size(count: float) -> str:
    """Bytes as KiB, MiB or GiB."""
    for unit, name in ((GIBIBYTE, "GiB"), (MEBIBYTE, "MiB"), (KIBIBYTE, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count:g} bytes"
