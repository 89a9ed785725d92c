"""Durable saves of large tensors beside ``torch.save`` + fsync, interleaved; run under ``mpirun``.

Guarantees
----------
- Both write the same tensors to the same directory; each trial is timed from the call until the
  data is durable, of the slowest rank, with opening, allocation and sync inside. What is written is
  verified outside the clock.
- CPU seconds are those of the processes (their kernel workers included) and, apart, of the whole
  machine, which also counts the kernel's writeback of buffered peers.
- It is the short form of `speed`, and needs nothing but this package.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from megatron_uring import comm
from megatron_uring.bench import peers, report, state, summary
from megatron_uring.bench.sections import FOLDER, LARGE, Bench, removed_in_the_end
from megatron_uring.config import Config


def run(
    directory: str, *, gigabytes_per_rank: float, trials: int, tensor_bytes: int
) -> dict[str, Any] | None:
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
    folder = os.path.join(os.path.abspath(directory), FOLDER)
    bench = Bench(world, folder, trials, peers.peers(["torch_save"], world, ""))
    large = state.large_state(world.rank, gigabytes_per_rank, tensor_bytes)
    with removed_in_the_end(world, folder):
        rows = bench.save_section(LARGE, large, with_limit=False)
    if world.rank != 0:
        return None
    table = summary.summarize(rows)
    return {
        "total_gb": rows[0].gigabytes,
        "table": {what: asdict(row) for what, row in table.items()},
        "rows": [asdict(row) for row in rows],
    }


def main(arguments: list[str] | None = None) -> None:
    """Command line, started by ``scripts/bench durable`` under mpirun."""
    import click

    @click.command(context_settings={"help_option_names": ["-h", "--help"]})
    @click.option("--directory", default=".", show_default=True, help="file system to measure")
    @click.option("--gigabytes-per-rank", default=2.0, show_default=True, help="of state")
    @click.option(
        "--trials",
        default=5,
        show_default=True,
        type=click.IntRange(min=1),
        help="timed, of each variant, after a warm-up",
    )
    @click.option("--tensor-mebibytes", default=64, show_default=True, help="size of each tensor")
    @click.option("--json", "json_path", default=None, help="write all rows to this file")
    def command(
        directory: str,
        gigabytes_per_rank: float,
        trials: int,
        tensor_mebibytes: int,
        json_path: str | None,
    ) -> None:
        """Saves beside torch.save + fsync, interleaved: a short form of speed."""
        found = run(
            directory,
            gigabytes_per_rank=gigabytes_per_rank,
            trials=trials,
            tensor_bytes=tensor_mebibytes << 20,
        )
        if found is None:
            return
        table = {what: summary.Summary(**row) for what, row in found["table"].items()}
        report.print_section("durable save", table, found["total_gb"], trials)
        print(report.LEGEND, flush=True)
        if json_path:
            report.write_json(json_path, found)

    command(arguments)


if __name__ == "__main__":
    main()
