"""``scripts/bench async``: what an asynchronous save takes from the training loop; under mpirun.

Guarantees
----------
- Blocking is measured beside one plain copy of the same bytes into memory that was touched before,
  in turn, after a warm-up; medians and spread, of the slowest rank.
- The loops stand beside each other in one run, in turn: no save, ours, Megatron's own, DCP's.
  Computation is real work on the CPU (matrix products, one thread a rank), so that whatever a way
  to save takes of the processor is in its figure.
- What cannot be measured here (a GPU, a library that is missing) is a row that says so.
- Saves are restored and compared: the one of the warm-up, to the last byte.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import click
import numpy as np
import torch

from megatron_uring import checkpoint, comm
from megatron_uring.bench import measure, report
from megatron_uring.bench.sections import FOLDER, removed_in_the_end
from megatron_uring.bench.speed import choose, join_torch
from megatron_uring.bench.training import SAVERS, LoopTimes, OurSaver, Training, run_loop
from megatron_uring.comm import Communicator
from megatron_uring.config import Config
from megatron_uring.fencing import fence

SECTIONS = ("blocking", "loops", "slowdown")
LOOPS = tuple(SAVERS)
_UNIT_S = 0.2
_UNITS = 10
_LIMITED_BYTES_PER_S = 250_000_000
_NO_GPU = "not run: no GPU here; scripts/gpu_check measures it where there is one"


@dataclass(frozen=True)
class Options:
    """What the command line says; see ``--help``."""

    directory: str
    gigabytes_per_rank: float
    trials: int
    loop_trials: int
    iterations: int
    compute_factor: float
    loops: Sequence[str]
    sections: Sequence[str]


@dataclass
class Bench:
    """One run.

    Attributes
    ----------
    samples
        Seconds of the slowest rank, trial by trial, by name.
    notes
        Why a name has none.
    """

    world: Communicator
    folder: str
    options: Options
    no_group: str
    training: Training
    config: Config
    samples: dict[str, list[float]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    children: int = 0
    shm_left: int = 0
    drain_s: float = 0.0

    def keep(self, name: str, seconds: float, *, counts: bool) -> float:
        """The slowest rank's; a warm-up does not count."""
        own = np.array([round(seconds * 1e6)], np.int64)
        slowest = int(self.world.allreduce(own, "max")[0]) / 1e6
        if counts:
            self.samples.setdefault(name, []).append(slowest)
        return slowest

    def median(self, name: str) -> float | None:
        """Of its trials."""
        return statistics.median(self.samples[name]) if self.samples.get(name) else None

    def tell(self, text: str) -> None:
        """Progress, on rank 0."""
        if self.world.rank == 0:
            print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)

    # ---------------------------------------------------------------------------------------------
    # how long a save blocks

    def blocking(self) -> None:
        """A plain copy, a save with a pool for all, and one with a small pool, in turn."""
        copies = [torch.zeros_like(one) for one in self.training.parameters]
        small = replace(self.config, staging_bytes=self.config.slab_bytes * self.config.slab_count)
        for trial in range(self.options.trials + 1):
            counts = trial > 0
            self.world.barrier()
            began = time.perf_counter()
            for target, source in zip(copies, self.training.parameters, strict=True):
                target.copy_(source.detach())
            self.keep("memcpy", time.perf_counter() - began, counts=counts)
            self._one_save("pool for all", self.config, counts=counts, checked=not trial)
            self._one_save("small pool", small, counts=counts, checked=False)
            self.tell(f"blocking: {f'trial {trial}' if trial else 'warm-up'} done")

    def _one_save(self, name: str, config: Config, *, counts: bool, checked: bool) -> None:
        saver = OurSaver(self.training, config)
        path = os.path.join(self.folder, "blocking")
        self.world.barrier()
        began = time.perf_counter()
        saver.begin(path)
        returned = time.perf_counter()
        fence()
        fenced = time.perf_counter()
        self.training.optimizer.step()  # it holds the time of one fence more, which waits for none
        stepped = time.perf_counter()
        saver.finish()
        self.keep(f"{name}: save", returned - began, counts=counts)
        self.keep(f"{name}: fence", fenced - returned, counts=counts)
        self.keep(f"{name}: save and fence", fenced - began, counts=counts)
        self.drain_s = self.keep(f"{name}: durable", saver.reports[-1].slowest_s, counts=counts)
        self.keep(f"{name}: step", stepped - fenced, counts=counts)
        if checked:
            self._check(path)

    def _check(self, path: str) -> None:
        """What was saved is what the parameters were before the step."""
        found = checkpoint.restore(path, keys=list(self.training.state()))
        for key, parameter in self.training.state().items():
            if not torch.equal(found[key].mul_(1.0001), parameter.detach()):
                raise measure.DifferentError(f"{key} came back different")

    # ---------------------------------------------------------------------------------------------
    # loops

    def loops(self) -> None:
        """Each way in turn, round after round."""
        factor = self.options.compute_factor
        measured_s = self.keep("drain", self._drain_once(), counts=False)
        compute_s = max(factor * measured_s, _UNIT_S)
        self.tell(f"loops: a drain takes {measured_s:.1f} s, an iteration computes {compute_s:.1f}")
        shared = set(os.listdir("/dev/shm"))
        for trial in range(self.options.loop_trials + 1):
            for name in self.options.loops:
                if name not in self.notes:
                    self._one_loop(name, compute_s, counts=trial > 0)
            self.tell(f"loops: {f'trial {trial}' if trial else 'warm-up'} done")
        left = set(os.listdir("/dev/shm")) - shared
        self.shm_left = len([name for name in left if "megatron_uring" in name])

    def _drain_once(self) -> float:
        saver = OurSaver(self.training, self.config)
        saver.begin(os.path.join(self.folder, "drain"))
        saver.finish()
        return saver.reports[-1].slowest_s

    def _one_loop(self, name: str, compute_s: float, *, counts: bool) -> None:
        folder = os.path.join(self.folder, name)
        iterations = self.options.iterations if counts else 1
        times = LoopTimes(0.0, 0.0, 0.0)
        before = _children()

        def run() -> None:
            nonlocal times
            saver = SAVERS[name](self.training, self.config, self.no_group)
            times = run_loop(self.training, saver, folder, iterations, compute_s)

        reason = measure.attempt(self.world, run)
        if name == "ours":
            made = np.array([len(set(_children()) - set(before))], np.int64)
            self.children += int(self.world.allreduce(made, "sum")[0])
        if reason:
            self.notes[name] = reason
        else:
            self.keep(f"loop, {name}", times.loop_s, counts=counts)
            self.keep(f"loop until durable, {name}", times.durable_s, counts=counts)
            self.keep(f"loop blocked, {name}", times.blocked_s, counts=counts)
        self.world.barrier()
        if self.world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        self.world.barrier()

    # ---------------------------------------------------------------------------------------------
    # a step beside a drain

    def slowdown(self) -> None:
        """Units of computation with nothing beside them, beside a drain, and beside a slow one."""
        limited = replace(
            self.config, drain_bytes_per_s=_LIMITED_BYTES_PER_S, drain_priority="idle"
        )
        for trial in range(self.options.loop_trials + 1):
            counts = trial > 0
            self.keep("unit alone", self._unit_s(), counts=counts)
            for name, config in (("unlimited", self.config), ("limited", limited)):
                saver = OurSaver(self.training, config)
                saver.begin(os.path.join(self.folder, "slowdown"))
                fence()
                self.keep(f"unit beside, {name}", self._unit_s(saver), counts=counts)
                saver.finish()
            self.tell(f"slowdown: {f'trial {trial}' if trial else 'warm-up'} done")

    def _unit_s(self, beside: OurSaver | None = None) -> float:
        """Median seconds of a unit, of those that a drain stood beside."""
        units: list[float] = []
        while len(units) < _UNITS:
            began = time.perf_counter()
            self.training.compute(_UNIT_S)
            if beside is not None and units and beside.is_drained():
                break
            units.append(time.perf_counter() - began)
        return statistics.median(units)


def _children() -> list[str]:
    found: list[str] = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as file:
            found += file.read().split()
    return found


# -------------------------------------------------------------------------------------------------
# figures


def figures(bench: Bench) -> dict[str, float | int | None]:
    """What the project is judged by; None where it was not measured."""

    def ratio(name: str, other: str) -> float | None:
        left, right = bench.median(name), bench.median(other)
        return None if left is None or not right else left / right

    measured = "loop, ours" in bench.samples
    return {
        "blocking_to_memcpy": ratio("pool for all: save", "memcpy"),
        "blocking_and_fence_to_memcpy": ratio("pool for all: save and fence", "memcpy"),
        "loop_to_none": ratio("loop, ours", "loop, none"),
        "loop_megatron_to_none": ratio("loop, megatron", "loop, none"),
        "loop_dcp_to_none": ratio("loop, dcp", "loop, none"),
        "children": bench.children if measured else None,
        "shm_left": bench.shm_left if measured else None,
        "step_slowdown": ratio("unit beside, unlimited", "unit alone"),
        "step_slowdown_limited": ratio("unit beside, limited", "unit alone"),
    }


def _show(bench: Bench) -> None:
    rows = [
        [
            name,
            f"{statistics.median(values):.4f}",
            f"{min(values):.4f}",
            f"{max(values):.4f}",
            str(len(values)),
        ]
        for name, values in bench.samples.items()
    ]
    report.print_table("seconds, slowest rank", ["", "median", "least", "most", "trials"], rows, 34)
    report.print_figures(figures(bench))
    gpu = {} if torch.cuda.is_available() else {"GPU": _NO_GPU}
    print("\n".join(f"{name}: {reason}" for name, reason in {**bench.notes, **gpu}.items()))
    print(
        f"memcpy: one copy of the same {bench.training.total_bytes / 1e9:.2f} GB a rank; "
        f"pool for all: {bench.config.staging_bytes / 1e9:.2f} GB a rank; "
        "unit: of computation, once with nothing beside it, once beside a save that is written, "
        f"once beside one of {_LIMITED_BYTES_PER_S / 1e6:.0f} MB/s a rank with idle priority",
        flush=True,
    )


def run(options: Options) -> dict[str, Any] | None:
    """Measure; collective. Returns everything on rank 0, None elsewhere."""
    config = Config.from_environment()
    world = comm.connect(config.timeout_s, config.communicator)
    no_group = measure.attempt(world, lambda: join_torch(world))
    folder = os.path.join(os.path.abspath(options.directory), FOLDER)
    training = Training(world, options.gigabytes_per_rank)
    room = training.total_bytes + 4 * config.slab_bytes
    bench = Bench(
        world, folder, options, no_group, training, replace(config, staging_bytes=room, probe="off")
    )
    sections: dict[str, Callable[[], None]] = {
        "blocking": bench.blocking,
        "loops": bench.loops,
        "slowdown": bench.slowdown,
    }
    with removed_in_the_end(world, folder):
        training.calibrate()
        first = OurSaver(training, bench.config)
        first.begin(os.path.join(folder, "first"))
        training.optimizer.step()  # from now on the fence knows the optimizer
        first.finish()
        for name in options.sections:
            sections[name]()
    if world.rank != 0:
        return None
    _show(bench)
    machine = report.machine(options.directory)
    machine.update(ranks=world.size, communicator=world.reason)
    return {
        "machine": machine,
        "options": asdict(options),
        "samples_s": bench.samples,
        "notes": {**bench.notes, **({} if torch.cuda.is_available() else {"gpu": _NO_GPU})},
        "figures": figures(bench),
    }


_AT_LEAST_ONE = click.IntRange(min=1)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--directory", default=".", show_default=True, help="file system to measure")
@click.option(
    "--gigabytes-per-rank",
    default=2.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="of parameters in tensors of 64 MiB",
)
@click.option(
    "--trials",
    default=7,
    show_default=True,
    type=_AT_LEAST_ONE,
    help="of blocking, after a warm-up",
)
@click.option(
    "--loop-trials",
    default=3,
    show_default=True,
    type=_AT_LEAST_ONE,
    help="of each loop and of the slowdown, after a warm-up",
)
@click.option(
    "--iterations",
    default=3,
    show_default=True,
    type=_AT_LEAST_ONE,
    help="of a loop, a save in each",
)
@click.option(
    "--compute-factor",
    default=4.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="computation of an iteration, in times that writing a checkpoint takes",
)
@click.option(
    "--loops", default="all", show_default=True, help=f"all, or some of {','.join(LOOPS)}"
)
@click.option(
    "--sections", default="all", show_default=True, help=f"all, or some of {','.join(SECTIONS)}"
)
@click.option(
    "--json",
    "json_path",
    default=None,
    type=click.Path(dir_okay=False, writable=True),
    help="write samples and figures to this file",
)
def main(loops: str, sections: str, json_path: str | None, **rest: Any) -> None:
    """What an asynchronous save takes from the training loop, beside other libraries."""
    warnings.simplefilter("ignore")  # what peers warn of is not about this measurement
    options = Options(
        loops=choose(loops, list(LOOPS), "--loops"),
        sections=choose(sections, list(SECTIONS), "--sections"),
        **rest,
    )
    found = run(options)
    if found is None:
        return
    if json_path:
        report.write_json(json_path, found)
    if "ours" in found["notes"]:
        print(f"bench: failed: {found['notes']['ours']}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
