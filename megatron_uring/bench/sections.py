"""The sections of `speed`: which variants stand beside each other, on which bytes.

Guarantees
----------
- All variants of a section move the same bytes in one run, in turns. What is written is removed,
  and the disk is quiet, before the next one begins.
- Ours is verified in every trial, the peers in the warm-up; destinations are wiped before.
- Restores are cold, into memory that was touched before. So was that of the page cache, for what
  goes through it; for what does not, memory has come to rest (`cache`). The state that is saved has
  just been read.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_uring import _engine, checkpoint
from megatron_uring.bench import cache, peers
from megatron_uring.bench.formats import (
    Action,
    Format,
    our_loads,
    our_options,
    our_saves,
    our_sharing_loads,
)
from megatron_uring.bench.limit import Fio
from megatron_uring.bench.measure import (
    OURS,
    Row,
    UnavailableError,
    Variant,
    attempt,
    interleave,
)
from megatron_uring.bench.state import State, tiny_and_large_state
from megatron_uring.comm import Communicator
from megatron_uring.config import Config
from megatron_uring.megatron.switch import disable, enable
from megatron_uring.progress import step

FOLDER = "megatron_uring_bench"  # made in the directory that is measured
LARGE, SMALL, RESTORE, TINY = "large", "small", "restore", "tiny"
SHARING = "sharing"
OPTIONS_SAVE, OPTIONS_RESTORE = "options, save", "options, restore"
TINY_FIRST, TINY_SECOND = "tiny, first save", "tiny, second save"
BIG_FIRST, BIG_SECOND = "large, first save", "large, second save"
_LOADS_OF = {"torch.save + fsync": "torch.load"}
# once more for those who had a file open: fio, other ranks
_REMOVE_AT_END = 'cat >/dev/null; rm -rf -- "$1"; sleep 1; rm -rf -- "$1"'
TINY_MEGATRON = "tiny through Megatron, second"


@dataclass
class Bench:
    """Where and against what is measured.

    Attributes
    ----------
    folder
        Made for the benchmark, removed after it.
    peers
        Formats of the peers that were asked for.
    tell
        Is told how far a section has come; on rank 0.
    cold
        How caches were dropped, once they were.
    """

    world: Communicator
    folder: str
    trials: int
    peers: Sequence[Format]
    tell: Callable[[str], None] = lambda _: None
    cold: str = ""

    def save_section(self, section: str, state: State, *, with_limit: bool = True) -> list[Row]:
        """Save `state` with everything; rows."""
        folder, target = os.path.join(self.folder, "save"), state.empty()
        fio = Fio(self.world, folder, state.total_bytes)
        limits = (
            fio.variants("write", lambda cached: self._empty(folder, state, cached))
            if with_limit
            else []
        )
        formats = [*our_saves(self.world), *self.peers]
        variants = [self._save_variant(one, state, target, folder) for one in formats]
        rows = self._interleave(section, [*limits, *variants], state)
        self._remove(folder)
        return rows

    def options_section(self, state: State) -> list[Row]:
        """Save `state` with other sizes than the default ones, and restore it, cold; rows."""
        folder, target = os.path.join(self.folder, "save"), state.empty()
        formats = our_options(self.world)
        saves = [self._save_variant(one, state, target, folder) for one in formats]
        rows = self._interleave(OPTIONS_SAVE, saves, state)
        self._write_once(formats[0], state, folder)
        loads = [self._load_variant(one, state, target, folder, "") for one in formats]
        rows += self._interleave(OPTIONS_RESTORE, loads, state)
        self._remove(folder)
        return rows

    def restore_section(self, state: State) -> list[Row]:
        """Write `state` once in each format, then load it with everything, cold; rows."""
        target = state.empty()
        sources: list[tuple[Format, str]] = [(one, "ours") for one in our_loads(self.world)]
        sources += [(one, one.what) for one in self.peers]
        if any(one.what.startswith("torch.save") for one in self.peers):
            mapped = peers.torch_load_mapped(self.world)
            sources.append((mapped, "torch.save + fsync"))
        writers = {"ours": our_saves(self.world)[0], **{one.what: one for one in self.peers}}
        failures = {
            name: self._write_once(writer, state, self._format_folder(name))
            for name, writer in writers.items()
        }
        fio = Fio(self.world, self._format_folder("fio"), state.total_bytes)
        empty_folder(self.world, fio.folder)
        fio.lay_out()
        limits = fio.variants("read", lambda cached: self._cool(fio.folder, state, cached))
        variants = [
            self._load_variant(one, state, target, self._format_folder(name), failures[name])
            for one, name in sources
        ]
        rows = self._interleave(RESTORE, [*limits, *variants], state)
        for name in [*writers, "fio"]:
            self._remove(self._format_folder(name))
        return rows

    def sharing_section(self, state: State) -> list[Row]:
        """Restore, cold, the same tensors on every rank: read once for a node, or by each; rows."""
        folder, target = self._format_folder("sharing"), state.empty()
        empty_folder(self.world, folder)
        checkpoint.save(state.shards(owner=self.world.rank == 0), folder, communicator=self.world)
        loads = our_sharing_loads(self.world)
        variants = [self._load_variant(one, state, target, folder, "") for one in loads]
        rows = self._interleave(SHARING, variants, state)
        self._remove(folder)
        return rows

    def tiny_section(self, count: int, large_count: int) -> list[Row]:
        """Many tiny tensors beside the same bytes in few: first saves, and saves that find their
        structure in the cache; rows.
        """
        states = tiny_and_large_state(self.world.rank, count, large_count)
        targets = tiny_and_large_state(self.world.rank, count, large_count)
        folder = os.path.join(self.folder, "save")
        saves = _FreshSaves(
            self.world, folder, lambda state: self._ready_to_save(folder, state, page_cache=False)
        )
        variants = []
        for state, target, first, second in zip(
            states, targets, (TINY_FIRST, BIG_FIRST), (TINY_SECOND, BIG_SECOND), strict=True
        ):
            check = functools.partial(saves.check, state, target)
            for what, prepare in ((first, saves.prepare_first), (second, saves.prepare_second)):
                ready = functools.partial(prepare, state)
                variants.append(Variant(what, OURS, saves.run, ready, check, check_always=True))
        tiny, target = states[0], targets[0]
        variants.append(
            Variant(
                TINY_MEGATRON,
                OURS,
                saves.run_megatron,
                lambda: saves.prepare_megatron(tiny),
                lambda: saves.check_megatron(tiny, target),
            )
        )
        rows = self._interleave(TINY, variants, tiny)
        self._remove(folder)
        return rows

    def _interleave(self, section: str, variants: list[Variant], state: State) -> list[Row]:
        total = self.world.allreduce(np.array([state.total_bytes], np.int64), "sum")
        return interleave(
            self.world,
            section,
            variants,
            trials=self.trials,
            gigabytes=int(total[0]) / 1e9,
            tell=self.tell,
        )

    def _save_variant(self, one: Format, state: State, target: State, folder: str) -> Variant:
        save = _Once(lambda: one.saver(state))
        load = _Once(lambda: one.loader(target))

        def prepare() -> None:
            save.build()
            self._ready_to_save(folder, state, one.page_cache)

        def check() -> None:
            target.wipe()
            load.build()(folder)
            state.check_equal(target)

        return Variant(
            one.what, one.kind, lambda: save.build()(folder), prepare, check, one.kind == OURS
        )

    def _load_variant(
        self, one: Format, state: State, target: State, folder: str, failure: str
    ) -> Variant:
        load = _Once(lambda: one.loader(target))

        def prepare() -> None:
            if failure:
                raise UnavailableError(failure)
            load.build()
            target.wipe()
            self._cool(folder, state, one.page_cache)

        return Variant(
            _LOADS_OF.get(one.what, one.what),
            one.kind,
            lambda: load.build()(folder),
            prepare,
            lambda: state.check_equal(target),
            check_always=True,
        )

    def _write_once(self, one: Format, state: State, folder: str) -> str:
        empty_folder(self.world, folder)
        return attempt(self.world, lambda: one.saver(state)(folder))

    def _format_folder(self, name: str) -> str:
        return os.path.join(self.folder, "format " + name.replace("/", " "))

    def _cool(self, folder: str, state: State, page_cache: bool) -> None:
        self.cold = cache.drop_caches(self.world, folder)
        self._ready_memory(state, page_cache)

    def _ready_to_save(self, folder: str, state: State, page_cache: bool) -> None:
        self._empty(folder, state, page_cache)
        state.read()

    def _empty(self, folder: str, state: State, page_cache: bool) -> None:
        empty_folder(self.world, folder)
        self._ready_memory(state, page_cache)

    def _ready_memory(self, state: State, page_cache: bool) -> None:
        if page_cache or not self._direct_works:
            cache.touch(self.world, self.folder, state.total_bytes)
        else:
            cache.settle(self.world, state.total_bytes)

    @functools.cached_property
    def _direct_works(self) -> bool:
        """Whether files here can be direct: the same on all ranks, asked once."""
        works = False
        if self.world.rank == 0:
            path = os.path.join(self.folder, "direct")
            file = _engine.File.create(path, direct=True)
            works = file.direct
            file.close()
            os.unlink(path)
        said = self.world.broadcast(str(works).encode() if self.world.rank == 0 else None)
        return said == b"True"

    def _remove(self, folder: str) -> None:
        self.world.barrier()
        if self.world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.sync()
        self.world.barrier()


@contextlib.contextmanager
def removed_in_the_end(world: Communicator, folder: str) -> Iterator[None]:
    """`folder` is removed, also if this process is killed: mpirun, when it is interrupted, gives
    its ranks less time than that takes.

    A shell waits for this process to end, outside of its process group.
    """
    if world.rank != 0:
        yield
        return
    watcher = subprocess.Popen(
        ["sh", "-c", _REMOVE_AT_END, "sh", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        watcher.communicate()


def empty_folder(world: Communicator, folder: str) -> None:
    """An empty folder, and nothing left to write back; collective."""
    world.barrier()
    with step(world, "empty folder"):
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.makedirs(folder, exist_ok=True)
    cache.write_back(world)


class _Once:
    """What is built when it is first asked for."""

    def __init__(self, make: Callable[[], Action]) -> None:
        self._make, self._made = make, list[Action]()

    def build(self) -> Action:
        """The same thing each time."""
        if not self._made:
            self._made.append(self._make())
        return self._made[0]


class _FreshSaves:
    """Saves of a structure that was never seen, or was seen in the save before.

    `ready` empties the folder and brings memory into the state that every timed save finds.
    """

    def __init__(self, world: Communicator, folder: str, ready: Callable[[State], None]) -> None:
        self.world, self.folder, self._ready = world, folder, ready
        self._config = Config(aggregation="rank", engine="io_uring")
        self._number = 0
        self._shards: dict[str, object] = {}
        self._save: Callable[[], None] = lambda: None

    def prepare_first(self, state: State) -> None:
        """Keys that no save has had."""
        self._rename(state)
        self._ready(state)

    def prepare_second(self, state: State) -> None:
        """The same keys once more, after a save that is not timed."""
        self._rename(state)
        empty_folder(self.world, self.folder)
        self.run()
        self._ready(state)

    def _rename(self, state: State) -> None:
        self._number += 1
        self._shards = dict(state.shards(f"run{self._number}/"))

    def run(self) -> None:
        """The timed save."""
        checkpoint.save(self._shards, self.folder, config=self._config, communicator=self.world)

    def check(self, state: State, target: State) -> None:
        """What was saved last comes back into `target` equal to `state`."""
        target.wipe()
        checkpoint.restore(self.folder, target.shards(f"run{self._number}/"), config=self._config)
        state.check_equal(target)

    def prepare_megatron(self, state: State) -> None:
        """Through Megatron's own call, with this package enabled; saved once before."""
        with peers.megatron_on_host() as megatron:
            self._number += 1
            sharded = peers.megatron_state(megatron, state, f"run{self._number}/")

        def save() -> None:
            with peers.megatron_on_host(), self._enabled():
                megatron.save(sharded, self.folder, validate_access_integrity=False)

        self._save = save
        empty_folder(self.world, self.folder)
        save()
        self._ready(state)

    def run_megatron(self) -> None:
        """The timed save through Megatron."""
        self._save()

    def check_megatron(self, state: State, target: State) -> None:
        """As `check`, through Megatron's own call."""
        target.wipe()
        with peers.megatron_on_host() as megatron, self._enabled():
            wanted = peers.megatron_state(megatron, target, f"run{self._number}/")
            megatron.load(wanted, self.folder, validate_access_integrity=False)
        state.check_equal(target)

    @contextlib.contextmanager
    def _enabled(self) -> Iterator[None]:
        enable(aggregation="rank", engine=self._config.engine)
        try:
            yield
        finally:
            disable()
