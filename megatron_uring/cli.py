"""`megatron-uring`: thin commands, each a call into one module below.

Guarantees
----------
- Exit code 0 only if what was asked for holds; 1 for a `CheckpointError`, whose message goes to
  standard error.
- Under ``mpirun`` all ranks take part and rank 0 alone speaks.
- Colour goes to a terminal alone, and to none of a launcher's ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json as json_module
import os
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_uring import launching
from megatron_uring.bench.suite.command import bench
from megatron_uring.errors import CheckpointError

_HELP = {"help_option_names": ["-h", "--help"]}
_DISTRIBUTIONS = ("megatron-uring", "megatron-core", "torch", "numpy", "h5py", "mpi4py")
# One of these is set in each rank of mpirun (Open MPI, MPICH), srun and torchrun.
_RANK_VARIABLES = (
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PMIX_RANK",
    "SLURM_PROCID",
    "RANK",
)


class _Chosen(BaseException):
    """A program that is to be run: leaves click, which would take its errors for its own."""

    def __init__(self, program: launching.Program) -> None:
        super().__init__()
        self.program = program


class _Commands(click.Group):
    def main(self, *arguments: Any, **keywords: Any) -> Any:
        try:
            return super().main(*arguments, **keywords)
        except _Chosen as chosen:
            program = chosen.program
        return launching.run(program)  # out here its errors have no other error before them


@click.group(context_settings=_HELP, cls=_Commands)
@click.version_option(package_name="megatron-uring")
def main() -> None:
    """Checkpoints of Megatron-Core, written and read by native io_uring writers."""


@main.command(context_settings=_HELP)
@click.argument("directory", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="print the findings as JSON")
def verify(directory: str, as_json: bool) -> None:
    """Prove that the checkpoint in DIRECTORY (or the newest one under it) can be restored.

    Under mpirun the ranks share the reading.
    """
    sys.exit(_guarded(lambda: _verify(directory, as_json)))


@main.command(context_settings=_HELP)
@click.option("--json", "as_json", is_flag=True, help="print it as JSON")
def status(as_json: bool) -> None:
    """Say which engine and which versions would run here, and why."""
    sys.exit(_guarded(lambda: _status(as_json)))


@main.command(context_settings=_HELP)
@click.argument("directory", type=click.Path(exists=True, file_okay=False, writable=True))
@click.option("--json", "as_json", is_flag=True, help="print the findings as JSON")
def probe(directory: str, as_json: bool) -> None:
    """Measure which slab size writes fastest to DIRECTORY's file system, and remember it.

    Takes a second or two. Saves of this user to that file system, from this machine and kernel, use
    the answer from then on, unless a size is set to something else than its default. It is kept in
    megatron_uring/probe.json below ~/.cache or XDG_CACHE_HOME; without that file it is forgotten.
    """
    sys.exit(_guarded(lambda: _probe(directory, as_json)))


@main.command(context_settings=_HELP)
@click.argument("directory", type=click.Path())
@click.option("--output", type=click.Path(dir_okay=False), help="write to this file instead")
def trace(directory: str, output: str | None) -> None:
    """Show where the time of the save in DIRECTORY (or of the newest one under it) went.

    Prints a trace of what each rank did when, for https://ui.perfetto.dev and chrome://tracing.
    """
    sys.exit(_guarded(lambda: _trace(directory, output)))


@main.command(context_settings=_HELP)
@click.argument("source", type=click.Path())
@click.argument("destination", type=click.Path())
@click.option("--to", required=True, type=click.Choice(["ours", "torch_dist", "safetensors"]))
@click.option("--keys", multiple=True, metavar="PATTERN", help="only keys that match; repeatable")
@click.option("--max-file-bytes", type=click.IntRange(1), help="of a safetensors file; 5000000000")
@click.option("--json", "as_json", is_flag=True, help="print the result as JSON")
def convert(
    source: str,
    destination: str,
    to: str,
    keys: tuple[str, ...],
    max_file_bytes: int | None,
    as_json: bool,
) -> None:
    """Write the checkpoint SOURCE to DESTINATION in another format.

    Its own format is found out: ours, Megatron's torch_dist or torch.distributed.checkpoint's, or
    safetensors. DESTINATION appears when it is whole and was read back. Under mpirun the ranks
    share the work.
    """
    options = {} if max_file_bytes is None else {"max_file_bytes": max_file_bytes}
    sys.exit(_guarded(lambda: _convert(source, destination, to, as_json, keys=keys, **options)))


@main.command(context_settings=_HELP)
@click.argument("directory", type=click.Path())
@click.option("--output", type=click.Path(dir_okay=False), help="default: view.h5 in DIRECTORY")
@click.option("--relative", is_flag=True, help="name files relative to the view; see the docs")
def view(directory: str, output: str | None, relative: bool) -> None:
    """Write an HDF5 file that shows the checkpoint in DIRECTORY (or the newest one under it).

    Its datasets lie in the checkpoint's own files: nothing is copied, and any HDF5 tool reads them.
    """
    sys.exit(_guarded(lambda: _view(directory, output, relative)))


@main.command(context_settings={**_HELP, "allow_interspersed_args": False})
@click.option("-m", "as_module", is_flag=True, help="SCRIPT is the name of a module or package")
@click.option(
    "--option", "options", multiple=True, metavar="NAME=VALUE", help="an option of enable()"
)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(script: str, arguments: tuple[str, ...], as_module: bool, options: tuple[str, ...]) -> None:
    """Run SCRIPT with ARGUMENTS as python does, unchanged, with its checkpoints in our hands.

    Stands between the launcher and the script: mpirun ... megatron-uring run pretrain_gpt.py,
    torchrun ... -m megatron_uring run pretrain_gpt.py. The script imports Megatron when it likes.
    """
    sys.exit(_guarded(lambda: _run(script, arguments, as_module, options)))


main.add_command(bench)


def open_console(*, soft_wrap: bool = False) -> Console:
    """Standard output, coloured where it is a terminal that no launcher stands before.

    ``mpirun`` gives its ranks a terminal of its own, whatever its output goes to.
    """
    if any(name in os.environ for name in _RANK_VARIABLES):
        return Console(
            highlight=False,
            emoji=False,
            soft_wrap=soft_wrap,
            no_color=True,
            force_terminal=False,
        )
    return Console(highlight=False, emoji=False, soft_wrap=soft_wrap)


def _run(script: str, arguments: tuple[str, ...], as_module: bool, options: tuple[str, ...]) -> int:
    from megatron_uring.config import Config, parse_options, switched_off

    if not as_module and not os.path.isfile(script):
        raise click.UsageError(f"no such script: {script}")
    parsed = parse_options(options)
    Config.from_environment(None, **parsed)
    switched_off()  # refuses what is neither on nor off
    raise _Chosen(launching.Program(script, as_module, arguments, parsed))


def _verify(directory: str, as_json: bool) -> int:
    from megatron_uring import comm
    from megatron_uring import verify as verify_module
    from megatron_uring.config import Config

    config = Config.from_environment()
    world = comm.current(config.timeout_s, config.communicator)
    with _told_by_rank_0(world):
        findings = verify_module.verify(directory, world, config)
    if world.rank == 0:
        if as_json:
            fields = {**dataclasses.asdict(findings), "good": findings.good}
            click.echo(json_module.dumps(fields, indent=1))
        else:
            _print_findings(findings, world.size)
    world.barrier()
    return 0 if findings.good else 1


def _print_findings(findings: Any, ranks: int) -> None:
    console = open_console(soft_wrap=True)
    for problem in findings.problems:
        console.print(Text.assemble(("bad", "red"), "  ", problem))
    for note in findings.notes:
        console.print(Text.assemble(("note", "yellow"), "  ", note))
    gigabytes, seconds = findings.bytes_read / 1e9, findings.seconds
    console.print(
        f"read {gigabytes:.3f} GB of {findings.blocks} blocks in {findings.subfiles} subfile(s) "
        f"with {ranks} rank(s) in {seconds:.2f} s; {findings.tensors} tensors in "
        f"{findings.shards} shards, {findings.objects} objects"
    )
    count = len(findings.problems)
    verdict = ("good", "green") if findings.good else (f"{count} bad", "red")
    console.print(Text.assemble(verdict, f"  {findings.directory}  save {findings.save_id}"))


def _convert(source: str, destination: str, to: str, as_json: bool, **options: Any) -> int:
    from megatron_uring import comm
    from megatron_uring.config import Config
    from megatron_uring.convert import convert as convert_checkpoint
    from megatron_uring.report import amount

    config = Config.from_environment()
    world = comm.current(config.timeout_s, config.communicator)
    with _told_by_rank_0(world):
        done = convert_checkpoint(
            source, destination, to, config=config, communicator=world, **options
        )
    if world.rank == 0 and as_json:
        fields = {**dataclasses.asdict(done), "gigabytes_per_s": done.gigabytes_per_s}
        click.echo(json_module.dumps(fields, indent=1))
    elif world.rank == 0:
        for note in done.notes:
            click.echo(f"note: {note}")
        click.echo(
            f"{done.source_format} to {done.destination_format}: {amount(done.nbytes)} in "
            f"{done.seconds:.2f} s, {amount(done.gigabytes_per_s * 1e9)}/s, read back and equal; "
            f"{done.tensors} tensors, {done.objects} objects, {done.files} files, "
            f"{world.size} rank(s): {done.destination}"
        )
    world.barrier()
    return 0


def _view(directory: str, output: str | None, relative: bool) -> int:
    from megatron_uring import view as view_module

    done = view_module.write_view(directory, output, relative=relative)
    if done.as_bytes:
        keys = ", ".join(done.as_bytes[:5]) + (", ..." if len(done.as_bytes) > 5 else "")
        click.echo(f"note: HDF5 has no such dtype, shown as bytes: {keys}")
    click.echo(
        f"{done.tensors} tensors in {done.shards} shards, {done.objects} objects: {done.path}"
    )
    return 0


def _probe(directory: str, as_json: bool) -> int:
    from megatron_uring import probing
    from megatron_uring.bench import report
    from megatron_uring.config import Config

    report.print_profile(probing.probe(directory, Config.from_environment()), as_json=as_json)
    return 0


def _status(as_json: bool) -> int:
    import megatron_uring
    from megatron_uring import profiles, stage
    from megatron_uring.config import Config

    stage.open_engine(Config.from_environment(slab_count=1))
    found = {**megatron_uring.status(), "versions": _versions()}
    if as_json:
        click.echo(json_module.dumps(found, indent=1, default=str))
        return 0
    table = Table("what", "is", box=None)
    table.add_row("engine", ", ".join(found["engines"]))
    for key, profile in found["profiles"].items():
        table.add_row("probed", f"{key}: {profiles.describe(profile)}")
    for name, version in found["versions"].items():
        table.add_row(name, version)
    open_console().print(table)
    return 0


def _trace(directory: str, output: str | None) -> int:
    from megatron_uring import timeline

    if output is None:
        click.echo(json_module.dumps(timeline.trace(timeline.read(directory))))
        return 0
    events = timeline.write_trace(directory, output)
    click.echo(
        f"{events} events in {output}: open it in https://ui.perfetto.dev or chrome://tracing"
    )
    return 0


def _versions() -> dict[str, str]:
    """What is installed, imported or not."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


@contextlib.contextmanager
def _told_by_rank_0(world: Any) -> Iterator[None]:
    """An error that all ranks meet is told by one of them; the others end with its exit code."""
    try:
        yield
    except CheckpointError:
        if world.rank == 0:
            raise
        sys.exit(1)


def _guarded(command: Callable[[], int]) -> int:
    try:
        return command()
    except CheckpointError as error:
        click.echo(f"megatron-uring: {error}", err=True)
        return 1
