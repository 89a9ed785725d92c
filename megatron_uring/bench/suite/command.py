"""``megatron-uring bench``: the microbenchmark suite, its report, and the probe.

Guarantees
----------
- The results file is written trial by trial; Ctrl-C leaves it valid and removes all else.
- Under ``mpirun`` all ranks measure, and rank 0 alone speaks, draws and writes.
- Exit code 0 if the run came to its end; a case that cannot run, or fails, is a row with its
  reason. 1 with a message if it did not, or if bytes came back different; 130 after Ctrl-C.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import click

from megatron_uring.bench.suite import GROUPS
from megatron_uring.errors import CheckpointError

_HELP = {"help_option_names": ["-h", "--help"]}
_QUICK_BUDGET_S = 270.0
_RESULTS = "results.jsonl"


@click.group(context_settings=_HELP)
def bench() -> None:
    """Measure I/O patterns of checkpoints on a file system of yours, and report.

    Run it under mpirun for more than one rank: scripts/bench quick does.
    """


def _measuring(function: Any) -> Any:
    """Options of all commands that measure."""
    for option in reversed(
        [
            click.option(
                "--directory",
                default=".",
                show_default=True,
                type=click.Path(exists=True, file_okay=False, writable=True),
                help="on the file system to measure; a folder is made in it and removed",
            ),
            click.option(
                "--output",
                default="bench-results",
                show_default=True,
                type=click.Path(file_okay=False),
                help="folder for results.jsonl and the report; made if need be",
            ),
            click.option(
                "--groups",
                default="all",
                show_default=True,
                help=f"of cases: all, or some of {','.join(GROUPS)}",
            ),
            click.option(
                "--peers",
                default="all",
                show_default=True,
                help="in the group inventory: all, none, or some of torch_save,dcp,megatron,"
                "torchsnapshot,torch_checkpointing",
            ),
            click.option(
                "--trials", type=click.IntRange(min=1), help="of each case, after a warm-up"
            ),
            click.option(
                "--mebibytes-per-rank",
                type=click.IntRange(min=1),
                help="of the synthetic workload; realistic ones and --model keep within it by "
                "fewer layers, at least one",
            ),
            click.option(
                "--minutes",
                type=click.FloatRange(min=0),
                help="begin no round of trials that would end later, beyond the warm-up and the "
                "first trial, which are always measured; 0: no limit",
            ),
            click.option(
                "--resume",
                is_flag=True,
                help="go on with the newest run in the results file",
            ),
            click.option(
                "--progress",
                default="auto",
                show_default=True,
                type=click.Choice(["auto", "bar", "lines", "off"]),
                help="auto: a bar on a terminal, else lines",
            ),
        ]
    ):
        function = option(function)
    return function


@bench.command(context_settings=_HELP)
@_measuring
def quick(**options: Any) -> None:
    """The whole suite at a small size: about four minutes, with the report."""
    sys.exit(_measure("quick", options))


@bench.command(context_settings=_HELP)
@click.option(
    "--suite",
    default="full",
    show_default=True,
    type=click.Choice(["quick", "full"]),
    help="sizes, patterns and workloads",
)
@click.option(
    "--sizes-mebibytes",
    help="of the group size, one or more numbers with commas between them, for each rank",
)
@click.option(
    "--model",
    help="one more workload in the groups coalescing and inventory, a GPT of Megatron-Core: "
    "layers=32,hidden=4096,heads=32,vocabulary=32000 and so on, tensor_parallel=4,"
    "pipeline_parallel=1,data_parallel=2,optimizer=distributed",
)
@_measuring
def run(suite: str, **options: Any) -> None:
    """The suite at full size, or a part of it."""
    sys.exit(_measure(suite, options))


@bench.command(context_settings=_HELP)
@click.argument("results", type=click.Path(exists=True))
@click.option("--output", type=click.Path(file_okay=False), help="default: beside the results")
def report(results: str, output: str | None) -> None:
    """Write RESULTS (a file, or the folder of one) as a page, pictures and findings.md."""
    path = Path(results)
    path = path / _RESULTS if path.is_dir() else path
    sys.exit(_guarded(lambda: _report(str(path), output or str(path.parent))))


@bench.command(context_settings=_HELP)
@click.argument("directory", type=click.Path(exists=True, file_okay=False, writable=True))
@click.option("--json", "as_json", is_flag=True, help="print the findings as JSON")
def probe(directory: str, as_json: bool) -> None:
    """Measure DIRECTORY's file system for half a minute at most, and remember what is best.

    Writes direct and buffered, slab sizes, depth and engine, the size from which reads are direct;
    under mpirun also whether ranks had better share a file. Saves and restores of this user, on
    this machine and kernel, use the answer where an option is left at its default;
    megatron-uring status shows it, and megatron-uring probe is the short form, of two seconds.
    """
    sys.exit(_guarded(lambda: _probe(directory, as_json)))


# -------------------------------------------------------------------------------------------------
# measuring


def _measure(suite: str, options: dict[str, Any]) -> int:
    from megatron_uring import comm
    from megatron_uring.bench import measure
    from megatron_uring.bench.speed import join_torch
    from megatron_uring.config import Config

    warnings.simplefilter("ignore")  # what peers warn of is not about this measurement
    config = Config.from_environment()
    world = comm.connect(config.timeout_s, config.communicator)
    no_group = measure.attempt(world, lambda: join_torch(world))

    different: list[str] = []
    code = _guarded(
        lambda: _build_and_execute(suite, world, no_group, options, different),
        speaks=world.rank == 0,
    )
    if code or world.rank != 0:
        return code
    path = os.path.join(options["output"], _RESULTS)
    code = _guarded(lambda: _report(path, options["output"]))
    for text in different:
        click.echo(f"bench: failed: {text}", err=True)
    return 1 if different else code


def _build_and_execute(
    suite: str, world: Any, no_group: str, options: dict[str, Any], different: list[str]
) -> int:
    from megatron_uring.bench import peers
    from megatron_uring.bench.speed import choose
    from megatron_uring.bench.suite.run import Run
    from megatron_uring.bench.suite.watching import watching
    from megatron_uring.progress import step

    chosen = _suite(suite, options)
    path = os.path.join(options["output"], _RESULTS)
    minutes = options["minutes"]
    default_s = _QUICK_BUDGET_S if suite == "quick" and not options["mebibytes_per_rank"] else 0.0
    groups = choose(options["groups"], list(GROUPS), "--groups")
    chosen_peers = choose(options["peers"], list(peers.NAMES), "--peers")
    extra = _model_workloads(options.get("model"), world.rank, chosen.bytes_per_rank)
    number = ""
    with step(world, "open the results"):
        if world.rank == 0:
            os.makedirs(options["output"], exist_ok=True)
            number = _newest_run(path) if options["resume"] else ""
    with watching(options["progress"], world.rank) as watcher:
        Run(
            world,
            options["directory"],
            path,
            chosen,
            groups,
            chosen_peers,
            options["trials"] or chosen.trials,
            budget_s=default_s if minutes is None else minutes * 60,
            extra=extra,
            no_group=no_group,
            watcher=watcher,
            number=number,
            different=different,
        ).execute()
    return 0


def _suite(name: str, options: dict[str, Any]) -> Any:
    import dataclasses

    from megatron_uring.bench.suite.suites import SUITES
    from megatron_uring.config import MEBIBYTE

    changes: dict[str, Any] = {}
    if options["mebibytes_per_rank"]:
        size = options["mebibytes_per_rank"] * MEBIBYTE
        sizes = [one for one in SUITES[name].sizes_per_rank if one <= size]
        changes.update(bytes_per_rank=size, sizes_per_rank=sizes or [size])
    if options.get("sizes_mebibytes"):
        try:
            numbers = [int(text) for text in options["sizes_mebibytes"].split(",")]
        except ValueError as error:
            raise click.BadParameter(f"--sizes-mebibytes: {error}") from error
        changes["sizes_per_rank"] = [number * MEBIBYTE for number in numbers]
    return dataclasses.replace(SUITES[name], **changes)


def _model_workloads(text: str | None, rank: int, bytes_per_rank: int) -> list[Any]:
    """The workload of --model for this rank, within its size; further ranks have what the first
    have.
    """
    import dataclasses

    from megatron_uring.bench.suite import megatron_model, model_workload

    if not text:
        return []
    fields: dict[str, dict[str, Any]] = {"Model": {}, "Layout": {}}
    types = {
        field.name: (kind, str(field.type))
        for kind in fields
        for field in dataclasses.fields(getattr(megatron_model, kind))
    }
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in types:
            raise click.BadParameter(f"--model: {name!r} is none of {', '.join(types)}")
        kind, of_type = types[name]
        fields[kind][name] = _parsed(name, value, of_type)
    try:
        model = megatron_model.Model(**fields["Model"])
        layout = megatron_model.Layout(**fields["Layout"])
        return [model_workload.scale_to(model, layout, rank % layout.ranks, bytes_per_rank)]
    except (TypeError, ValueError) as error:
        raise click.BadParameter(f"--model: {error}") from error


def _parsed(name: str, value: str, of_type: str) -> Any:
    words = {"true": True, "false": False}
    try:
        if of_type == "bool":
            return words[value.lower()]
        return int(value) if of_type.startswith("int") else value
    except (KeyError, ValueError) as error:
        raise click.BadParameter(f"--model: {name}={value!r} is no {of_type}") from error


def _newest_run(path: str) -> str:
    from megatron_uring.bench.suite.results import ResultsError, read_results

    try:
        records = read_results(path).records
    except OSError as error:
        raise ResultsError(f"{path}: nothing to resume: {error.strerror}") from error
    if not records:
        raise ResultsError(f"{path}: nothing to resume: no record")
    return max(records, key=lambda one: one.time).run


def _report(path: str, directory: str) -> int:
    from megatron_uring.bench.pages.page import write_report

    for written in write_report(path, directory):
        if not written.endswith(".png"):
            click.echo(f"wrote {written}")
    return 0


def _probe(directory: str, as_json: bool) -> int:
    from megatron_uring import comm
    from megatron_uring.bench import report
    from megatron_uring.bench.suite import probe as prober
    from megatron_uring.config import Config

    config = Config.from_environment()
    world = comm.current(config.timeout_s, config.communicator)
    try:
        found = prober.probe(directory, world, config)
    except CheckpointError:
        if world.rank == 0:
            raise
        return 1
    if found is not None:
        report.print_profile(found, as_json=as_json)
    world.barrier()
    return 0


def _guarded(command: Any, *, speaks: bool = True) -> int:
    from megatron_uring.bench.suite.results import ResultsError

    try:
        return int(command())
    except (CheckpointError, ResultsError, OSError) as error:
        if speaks:
            click.echo(f"bench: {error}", err=True)
        return 1
    except KeyboardInterrupt:
        if speaks:
            click.echo("bench: interrupted: what was measured is in the results file", err=True)
        return 130
