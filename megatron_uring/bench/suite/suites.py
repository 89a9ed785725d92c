"""Suites: which cases are measured beside each other, in groups that each answer one question.

Guarantees
----------
- Within a group the cases differ in what the group is about, and in nothing else.
- `quick` fits into 24 GiB of memory and some minutes; `full` has more sizes, patterns and
  workloads. Sizes that the disk has no room for are left out, and named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_uring.bench import summary
from megatron_uring.bench.suite import workloads
from megatron_uring.bench.suite.pattern_case import Spec
from megatron_uring.bench.suite.patterns import BLOCK, NONE, PACKED, PATTERNS, STRIPE, Rules
from megatron_uring.bench.suite.results import READ, WRITE
from megatron_uring.bench.suite.transfers import NEW, SLABS, Options
from megatron_uring.bench.suite.workloads import Workload
from megatron_uring.config import KIBIBYTE, MEBIBYTE

_TENSOR_BYTES = 4 * MEBIBYTE
_LARGE = 16 * MEBIBYTE
_SMALL = 64 * KIBIBYTE
_MODES = {True: "direct", False: "buffered"}
_DATA = "file per rank"
_POOL_BYTES = 256 * MEBIBYTE


@dataclass(frozen=True)
class Suite:
    """What a suite measures.

    Attributes
    ----------
    bytes_per_rank
        Of the synthetic workload, and of what the realistic ones are scaled down to.
    sizes_per_rank
        Of the group `size`.
    chunk_bytes
        Of a file, in the pattern with a chunk for each.
    submissions
        Sizes of the group `coalescing`.
    inventories
        Realistic workloads; the first also in the group `inventory`.
    thorough
        Whether reads of the groups `submission` and `pool`, realistic workloads through the page
        cache, and all of our own ways to save are measured too.
    """

    name: str
    bytes_per_rank: int
    sizes_per_rank: Sequence[int]
    chunk_bytes: int
    submissions: Sequence[int]
    depths: Sequence[int]
    slabs: Sequence[int]
    inventories: Sequence[str]
    trials: int
    thorough: bool = False


QUICK = Suite(
    "quick",
    bytes_per_rank=128 * MEBIBYTE,
    sizes_per_rank=[16 * MEBIBYTE, 64 * MEBIBYTE, 512 * MEBIBYTE],
    chunk_bytes=32 * MEBIBYTE,
    submissions=[_SMALL, MEBIBYTE, _LARGE],
    depths=[1, 2, 4, 16],
    slabs=[1 * MEBIBYTE, 4 * MEBIBYTE, 64 * MEBIBYTE],
    inventories=["3b"],
    trials=3,
)
FULL = Suite(
    "full",
    bytes_per_rank=1024 * MEBIBYTE,
    sizes_per_rank=[size * MEBIBYTE for size in (16, 64, 128, 512, 1024, 2048, 4096, 11264)],
    chunk_bytes=128 * MEBIBYTE,
    submissions=[4 * KIBIBYTE, 16 * KIBIBYTE, _SMALL, 256 * KIBIBYTE, MEBIBYTE, _LARGE],
    depths=[1, 2, 4, 16, 32],
    slabs=[1 * MEBIBYTE, 4 * MEBIBYTE, 16 * MEBIBYTE, 64 * MEBIBYTE],
    inventories=["3b", "7b", "13b"],
    trials=5,
    thorough=True,
)
SUITES = {suite.name: suite for suite in (QUICK, FULL)}


@dataclass(frozen=True)
class Ground:
    """Where the cases are built for.

    Attributes
    ----------
    stripe_bytes
        Of the file system.
    direct
        Whether files there can be direct.
    extra
        More workloads, of this rank.
    """

    rank: int
    ranks: int
    stripe_bytes: int
    direct: bool
    extra: Sequence[Workload] = ()


def specs(suite: Suite, ground: Ground, groups: Iterable[str]) -> list[Spec]:
    """The patterns of these groups, alike on all ranks but for the sizes of realistic workloads."""
    return [
        spec
        for group in groups
        if group in _BUILDERS
        for spec in _BUILDERS[group](suite, ground)
        if ground.direct or not spec.options.direct
    ]


def with_room(
    found: Sequence[Spec], extent_bytes: Sequence[int], room_bytes: int
) -> tuple[list[Spec], list[str]]:
    """Those that the disk has room for, and the others in words; `extent_bytes` are those of the
    largest rank.
    """
    kept, left_out = [], []
    for spec, extent in zip(found, extent_bytes, strict=True):
        if extent <= room_bytes:
            kept.append(spec)
        else:
            left_out.append(f"{spec.group}: {spec.case}: no room for {extent / 1e9:.1f} GB a rank")
    return kept, left_out


def realistic(suite: Suite, ground: Ground) -> list[Workload]:
    """Realistic workloads of this rank, scaled down by layers; ranks beyond those of an inventory
    have the same as its first.
    """
    found = []
    for name in suite.inventories:
        ranks = min(ground.ranks, workloads.inventory_ranks(name))
        found.append(workloads.scale_to(name, ground.rank % ranks, ranks, suite.bytes_per_rank))
    return [*found, *ground.extra]


# -------------------------------------------------------------------------------------------------
# groups


def _both(
    group: str,
    case: str,
    workload: Workload,
    *,
    pattern: str = _DATA,
    rules: Rules,
    operations: Sequence[str] = (WRITE, READ),
    **options: Any,
) -> list[Spec]:
    """A write and the read of what it wrote."""
    return [
        Spec(group, f"{case}, {operation}", operation, workload, pattern, rules, Options(**options))
        for operation in operations
    ]


def _synthetic(suite: Suite) -> Workload:
    return workloads.synthetic(suite.bytes_per_rank, _TENSOR_BYTES)


def _patterns(suite: Suite, ground: Ground) -> list[Spec]:
    """Where the same bytes go; tensors begin at pages, and submissions are no larger than one."""
    found = []
    for pattern in PATTERNS:
        rules = Rules(_TENSOR_BYTES, BLOCK, ground.stripe_bytes, suite.chunk_bytes)
        if pattern != "file per tensor":
            rules = replace(rules, alignment=PACKED)
        found += _both(
            "patterns",
            pattern,
            _synthetic(suite),
            pattern=pattern,
            rules=rules,
            direct=ground.direct,
        )
    return found


def _coalescing(suite: Suite, ground: Ground) -> list[Spec]:
    """The same bytes in small submissions or large ones; realistic tensors alone, or together."""
    found = []
    for direct, mode in _MODES.items():
        for size in suite.submissions:
            found += _both(
                "coalescing",
                f"{summary.size(size)}, {mode}",
                _synthetic(suite),
                rules=Rules(size, PACKED, ground.stripe_bytes),
                direct=direct,
                queue_depth=max(8, min(64, _LARGE * 8 // size)),
            )
        for workload in realistic(suite, ground) if suite.thorough or direct else ():
            found += _realistic(workload, ground, direct, mode)
    return found


def _realistic(workload: Workload, ground: Ground, direct: bool, mode: str) -> list[Spec]:
    alone = Rules(0, BLOCK, ground.stripe_bytes)
    ways = {
        "a submission for each tensor": (alone, {}),
        "16 MiB": (Rules(_LARGE, PACKED, ground.stripe_bytes), {}),
        "slabs": (Rules(0, PACKED, ground.stripe_bytes), {"staging": SLABS}),
    }
    found = []
    for way, (rules, options) in ways.items():
        found += _both(
            "coalescing", f"{workload.name}: {way}, {mode}", workload, rules=rules, direct=direct,
            **options,
        )  # fmt: skip
    # a file for each tensor is what many frameworks do
    return found + _both(
        "coalescing",
        f"{workload.name}: a file for each tensor, {mode}",
        workload,
        pattern="file per tensor",
        rules=Rules(_LARGE, BLOCK, ground.stripe_bytes),
        direct=direct,
    )


def _alignment(suite: Suite, ground: Ground) -> list[Spec]:
    """Where tensors of an odd size begin; a submission for each."""
    odd = workloads.synthetic(suite.bytes_per_rank, MEBIBYTE + 300 * KIBIBYTE + 77)
    found = []
    for direct, mode in _MODES.items():
        for alignment in (BLOCK, STRIPE) if direct else (NONE, PACKED, BLOCK, STRIPE):
            found += _both(
                "alignment",
                f"{alignment}, {mode}",
                odd,
                rules=Rules(0, alignment, ground.stripe_bytes),
                direct=direct,
                queue_depth=64,
            )
    return found


def _size(suite: Suite, ground: Ground) -> list[Spec]:
    """Direct and buffered, by size."""
    return [
        spec
        for size in suite.sizes_per_rank
        for direct, mode in _MODES.items()
        for spec in _both(
            "size",
            f"{summary.size(size)} a rank, {mode}",
            workloads.synthetic(size, _TENSOR_BYTES),
            rules=Rules(_LARGE, PACKED, ground.stripe_bytes),
            direct=direct,
        )
    ]


def _engine(suite: Suite, ground: Ground) -> list[Spec]:
    """io_uring and POSIX."""
    return [
        spec
        for direct, mode in _MODES.items()
        for engine in ("io_uring", "posix")
        for spec in _both(
            "engine",
            f"{engine}, {mode}",
            _synthetic(suite),
            rules=Rules(_LARGE, PACKED, ground.stripe_bytes),
            direct=direct,
            engine=engine,
        )
    ]


def _submission(suite: Suite, ground: Ground) -> list[Spec]:
    """What io_uring offers to make submitting cheaper, where there is much of it."""
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "SQPOLL": {"polled_submission": True},
        "registered memory": {"registered_memory": True},
        "registered files": {"registered_files": True},
        "SQPOLL, all registered": {
            "polled_submission": True,
            "registered_memory": True,
            "registered_files": True,
        },
        "batches of 1": {"submission_batch": 1},
        "batches of 8": {"submission_batch": 8},
    }
    return [
        spec
        for way, options in ways.items()
        for spec in _both(
            "submission",
            way,
            _synthetic(suite),
            rules=Rules(_SMALL, PACKED, ground.stripe_bytes),
            operations=(WRITE, READ) if suite.thorough else (WRITE,),
            direct=ground.direct,
            queue_depth=64,
            **options,
        )
    ]


def _pool(suite: Suite, ground: Ground) -> list[Spec]:
    """Queue depth and slab size, one at a time; there are more submissions than are in flight."""
    sizes = [(_LARGE, depth) for depth in suite.depths]
    sizes += [(slab, 8) for slab in suite.slabs]
    workload = workloads.synthetic(max(suite.bytes_per_rank, _POOL_BYTES), _TENSOR_BYTES)
    return [
        spec
        for size, depth in dict.fromkeys([(_LARGE, 8), *sizes])
        for spec in _both(
            "pool",
            f"{summary.size(size)}, depth {depth}",
            workload,
            rules=Rules(size, PACKED, ground.stripe_bytes),
            operations=(WRITE, READ) if suite.thorough else (WRITE,),
            direct=ground.direct,
            queue_depth=depth,
        )
    ]


def _restore(suite: Suite, ground: Ground) -> list[Spec]:
    """Into memory that is there or has to be had; straight, or verified and scattered."""
    ways: dict[str, dict[str, Any]] = {
        "memory reused": {},
        "memory new": {"memory": NEW},
        "verified and scattered, memory reused": {"staging": SLABS},
        "verified and scattered, memory new": {"staging": SLABS, "memory": NEW},
    }
    return [
        spec
        for way, options in ways.items()
        for spec in _both(
            "restore",
            way,
            _synthetic(suite),
            rules=Rules(0 if "staging" in options else _LARGE, PACKED, ground.stripe_bytes),
            operations=(READ,),
            direct=ground.direct,
            **options,
        )
    ]


_BUILDERS: dict[str, Callable[[Suite, Ground], list[Spec]]] = {
    "patterns": _patterns,
    "coalescing": _coalescing,
    "alignment": _alignment,
    "size": _size,
    "engine": _engine,
    "submission": _submission,
    "pool": _pool,
    "restore": _restore,
}
