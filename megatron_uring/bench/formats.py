"""Formats: how a state is saved to a folder and loaded from it, ours and that of every peer alike.

Guarantees
----------
- What is built once for many saves (the state in a library's own classes, a strategy) is built by
  `saver` and `loader`, outside the clock; what they return is what is timed.
- `load` fills tensors that exist already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_uring import checkpoint, stage
from megatron_uring.bench.measure import OURS
from megatron_uring.bench.state import State
from megatron_uring.comm import Communicator
from megatron_uring.config import MEBIBYTE, Config
from megatron_uring.nesting import flatten
from megatron_uring.providers import Shard

Action = Callable[[str], None]
DEFAULT = "ours, default"
RANK_IO_URING = "ours, rank io_uring"
RANK_POSIX = "ours, rank posix"
SHARED_IO_URING = "ours, shared io_uring"
NEW_TENSORS = "ours, new tensors"
SHARING_ON, SHARING_OFF = "ours, sharing on", "ours, sharing off"


@dataclass(frozen=True)
class Format:
    """One way to save and load.

    Attributes
    ----------
    what, kind
        As in `measure.Row`.
    page_cache
        Whether its bytes go through the page cache, if direct I/O can be had at all.
    saver, loader
        Take a state, and return what writes it to, or fills it from, a folder; collective. The
        folder exists and is empty when it is written to.
    native
        Whether its files are opened, written and read by our engine.
    """

    what: str
    kind: str
    saver: Callable[[State], Action]
    loader: Callable[[State], Action]
    page_cache: bool = True
    native: bool = False


def our_format(what: str, config: Config, world: Communicator) -> Format:
    """This package, with a configuration."""

    def saver(state: State) -> Action:
        shards = _fresh_shards(state)

        def save(folder: str) -> None:
            checkpoint.save(shards, folder, config=config, communicator=world)

        return save

    def loader(into: State) -> Action:
        shards = _fresh_shards(into)

        def load(folder: str) -> None:
            checkpoint.restore(folder, shards, config=config)

        return load

    return Format(what, OURS, saver, loader, page_cache=config.direct == "off", native=True)


def our_new_loads(world: Communicator) -> Format:
    """The default configuration, into tensors that the restore has to allocate."""
    one = our_format(NEW_TENSORS, Config(probe="off"), world)

    def loader(into: State) -> Action:
        stage.close_engines()
        keys = [key for key, _ in flatten(dict(into.tensors))]

        def load(folder: str) -> None:
            into.tensors.update(checkpoint.restore(folder, keys=keys, config=Config(probe="off")))

        return load

    return replace(one, loader=loader)


def _fresh_shards(state: State) -> dict[str, Shard]:
    # so that what an engine holds in memory is seen by the first call that is measured
    stage.close_engines()
    return state.shards()


def our_saves(world: Communicator, *, probe: str = Config.probe) -> list[Format]:
    """The default configuration, and each choice in it made by hand; `probe` as in `Config`."""
    choices = {
        DEFAULT: Config(),
        RANK_IO_URING: Config(aggregation="rank", engine="io_uring"),
        SHARED_IO_URING: Config(aggregation="shared", engine="io_uring"),
        RANK_POSIX: Config(aggregation="rank", engine="posix"),
        "ours, rank buffered": Config(aggregation="rank", direct="off"),
    }
    return [
        our_format(what, replace(config, probe=probe), world) for what, config in choices.items()
    ]


def our_options(world: Communicator) -> list[Format]:
    """The default configuration beside other sizes of pool, queue and threads, one at a time."""
    choices = {
        DEFAULT: Config(),
        "slabs of 4 MiB": Config(slab_bytes=4 * MEBIBYTE, slab_count=32, queue_depth=32),
        "slabs of 64 MiB": Config(slab_bytes=64 * MEBIBYTE, slab_count=2, queue_depth=2),
        "depth 1": Config(queue_depth=1),
        "depth 4": Config(queue_depth=4),
        "pool of 256 MiB, depth 16": Config(slab_count=16, queue_depth=16),
        "2 copy threads": Config(copy_threads=2),
        "4 copy threads": Config(copy_threads=4),
        "posix, 1 thread": Config(engine="posix", posix_threads=1),
        "posix, 4 threads": Config(engine="posix", posix_threads=4),
        "posix, 8 threads": Config(engine="posix", posix_threads=8),
    }
    # sizes that differ from the default are never replaced by a probe's; the default's could be
    return [
        our_format(what, replace(config, probe="off"), world) for what, config in choices.items()
    ]


def our_sharing_loads(world: Communicator) -> list[Format]:
    """With and without what the ranks of a node read once for all."""
    choices = {SHARING_ON: Config(node_sharing="on"), SHARING_OFF: Config(node_sharing="off")}
    return [our_format(what, config, world) for what, config in choices.items()]


def our_loads(world: Communicator, *, probe: str = Config.probe) -> list[Format]:
    """The default configuration, buffered reads, and the other engine; `probe` as in `Config`."""
    choices = {
        DEFAULT: Config(),
        "ours, direct": Config(direct="on"),
        "ours, buffered": Config(direct="off"),
        "ours, posix": Config(engine="posix"),
    }
    return [
        our_format(what, replace(config, probe=probe), world) for what, config in choices.items()
    ]
