"""Durable saves of large tensors beside ``torch.save`` + fsync, interleaved; run under ``mpirun``.

Guarantees
----------
- Both write the same tensors to the same directory; each trial is timed from the call until the
  data is durable, of the slowest rank, with opening, allocation and sync inside. What is written is
  verified once, outside the clock.
- CPU seconds are those of the processes (their kernel workers included) and, apart, of the whole
  machine, which also counts the kernel's writeback of buffered peers.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch

from megatron_uring import checkpoint, comm
from megatron_uring.config import Config
from megatron_uring.providers import Shard

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# of the printed table, which fits 80 columns
_HEADINGS = {
    "median_s": "median",
    "fastest_s": "min",
    "slowest_s": "max",
    "gb_per_s": "GB/s",
    "process_cpu_s_per_gb": "CPU",
    "machine_cpu_s_per_gb": "machine",
}


@dataclass(frozen=True)
class Row:
    """One trial, of all ranks: seconds of the slowest, CPU seconds of all processes and of the
    machine.
    """

    what: str
    seconds: float
    process_cpu_s: float
    machine_cpu_s: float


def run(
    directory: str, *, gigabytes_per_rank: float, trials: int, tensor_bytes: int
) -> dict[str, object] | None:
    """Measure; collective. Returns rows and figures on rank 0, None elsewhere.

    Parameters
    ----------
    directory
        On the file system to measure; a folder is made in it and removed.
    gigabytes_per_rank
        10^9 bytes.
    trials
        Of each variant, after one that is not counted (first touch of memory is slow).
    tensor_bytes
        Size of each tensor.
    """
    config = Config.from_environment()
    world = comm.current(config.timeout_s, config.communicator)
    folder = os.path.join(directory, "megatron_uring_bench")
    count = max(1, round(gigabytes_per_rank * 1e9 / tensor_bytes))
    generator = torch.Generator().manual_seed(world.rank)
    tensors = {
        f"rank{world.rank}/tensor{number}": torch.randint(
            0, 256, (tensor_bytes,), dtype=torch.uint8, generator=generator
        )
        for number in range(count)
    }
    state = {key: Shard(tensor, tuple(tensor.shape), (0,)) for key, tensor in tensors.items()}
    variants: dict[str, Callable[[str], None]] = {
        "torch.save + fsync": lambda path: _torch_save(tensors, path, world.rank),
        **{
            f"megatron_uring {mode}": _our_save(
                state, Config(aggregation=mode, engine=engine), world
            )
            for mode, engine in (("rank", "auto"), ("shared", "auto"))
        },
        "megatron_uring rank posix": _our_save(
            state, Config(aggregation="rank", engine="posix"), world
        ),
    }
    rows: list[Row] = []
    for trial in range(trials + 1):
        for what, write in variants.items():
            row = _timed(world, what, folder, write)
            if trial:
                rows.append(row)
    _check(world, folder, tensors, state)
    total_gb = world.size * count * tensor_bytes / 1e9
    return _summary(rows, total_gb) if world.rank == 0 else None


def _our_save(
    state: dict[str, Shard], config: Config, world: comm.Communicator
) -> Callable[[str], None]:
    def write(path: str) -> None:
        checkpoint.save(state, path, config=config, communicator=world)

    return write


def _torch_save(tensors: dict[str, torch.Tensor], path: str, rank: int) -> None:
    with open(os.path.join(path, f"rank{rank}.pt"), "wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def _timed(world: comm.Communicator, what: str, folder: str, write: Callable[[str], None]) -> Row:
    if world.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        os.sync()
    world.barrier()
    machine, cpu, began = _machine_cpu_s(), _process_cpu_s(), time.perf_counter()
    write(folder)
    own = [time.perf_counter() - began, _process_cpu_s() - cpu]
    slowest = world.allreduce(np.array([own[0] * 1e6], np.int64), "max")
    all_cpu = world.allreduce(np.array([own[1] * 1e6], np.int64), "sum")
    return Row(what, slowest[0] / 1e6, all_cpu[0] / 1e6, _machine_cpu_s() - machine)


def _process_cpu_s() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _machine_cpu_s() -> float:
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, irq, softirq, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + softirq) / _TICKS_PER_S


def _check(
    world: comm.Communicator,
    folder: str,
    tensors: dict[str, torch.Tensor],
    state: dict[str, Shard],
) -> None:
    """The last variant's checkpoint gives back the same bytes."""
    target = {
        key: Shard(torch.empty_like(shard.tensor), shard.global_shape, shard.offset)
        for key, shard in state.items()
    }
    checkpoint.restore(folder, target)
    for key, tensor in tensors.items():
        if not torch.equal(target[key].tensor, tensor):
            raise AssertionError(f"{key} came back different")
    world.barrier()
    if world.rank == 0:
        shutil.rmtree(folder)


def _summary(rows: list[Row], total_gb: float) -> dict[str, object]:
    names = list(dict.fromkeys(row.what for row in rows))
    table = {}
    for name in names:
        own = [row for row in rows if row.what == name]
        seconds = [row.seconds for row in own]
        table[name] = {
            "median_s": statistics.median(seconds),
            "fastest_s": min(seconds),
            "slowest_s": max(seconds),
            "gb_per_s": total_gb / statistics.median(seconds),
            "process_cpu_s_per_gb": statistics.median(r.process_cpu_s for r in own) / total_gb,
            "machine_cpu_s_per_gb": statistics.median(r.machine_cpu_s for r in own) / total_gb,
        }
    return {"total_gb": total_gb, "table": table, "rows": [asdict(row) for row in rows]}


def main(arguments: list[str] | None = None) -> None:
    """Command line, started by ``scripts/bench durable`` under mpirun."""
    import click
    from rich.console import Console
    from rich.table import Table

    @click.command(context_settings={"help_option_names": ["-h", "--help"]})
    @click.option("--directory", default=".", show_default=True, help="file system to measure")
    @click.option("--gigabytes-per-rank", default=2.0, show_default=True)
    @click.option("--trials", default=5, show_default=True)
    @click.option("--tensor-mebibytes", default=64, show_default=True)
    @click.option("--json", "json_path", default=None, help="write all rows to this file")
    def command(
        directory: str,
        gigabytes_per_rank: float,
        trials: int,
        tensor_mebibytes: int,
        json_path: str | None,
    ) -> None:
        found = run(
            directory,
            gigabytes_per_rank=gigabytes_per_rank,
            trials=trials,
            tensor_bytes=tensor_mebibytes << 20,
        )
        if found is None:
            return
        if json_path:
            with open(json_path, "w", encoding="utf-8") as file:
                json.dump(found, file, indent=1)
        title = f"{found['total_gb']:.2f} GB, {trials} trials; CPU seconds for each GB"
        table = Table("durable save", *_HEADINGS.values(), title=title)
        for name, row in found["table"].items():  # type: ignore[attr-defined]
            table.add_row(name, *(f"{row[column]:.3f}" for column in _HEADINGS))
        # mpirun gives its ranks a terminal, whatever its output goes to: no colour ever
        Console(no_color=True, force_terminal=False).print(table)

    command(arguments)


if __name__ == "__main__":
    main()
