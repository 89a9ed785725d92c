"""`megatron-uring run`: a program as ``__main__``, and the adapter once it imports Megatron.

Guarantees
----------
- The program sees what ``python SCRIPT ARGS`` or ``python -m MODULE ARGS`` would have given it:
  ``sys.argv``, ``sys.path[0]``, ``__main__`` with ``__file__`` and ``__spec__``, so that children
  that `multiprocessing` spawns import it again as they always do.
- Neither torch nor Megatron is imported before it imports them: environment variables that it sets
  first have their effect. The adapter is enabled at the end of the first import of
  ``megatron.core``, before the program can use anything of it; a version that is not supported is
  raised there.
- Its exit status, ``SystemExit`` and death by a signal are its own, and a traceback shows its own
  frames alone.
- Under ``mpirun`` and ``srun`` the variables that ``torchrun`` sets are set where all are missing.

Children get the adapter only if they enable it themselves.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import logging
import os
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from megatron_uring.megatron.imports import after_import

_log = logging.getLogger("megatron_uring")
# Prefix, names of rank, size, local rank and local size, and what names the job. Of srun only what
# it sets itself: a batch script has SLURM_PROCID too.
_LAUNCHERS = (
    (
        "OMPI_COMM_WORLD_",
        ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    (
        "SLURM_",
        ("PROCID", "STEP_NUM_TASKS", "LOCALID", "STEP_TASKS_PER_NODE"),
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
)
_PORTS = range(20_000, 32_000)  # Linux hands out those from 32768 on to outgoing connections


@dataclass(frozen=True)
class Program:
    """What is to be run.

    Attributes
    ----------
    name
        Path of a script, or a dotted module or package name.
    as_module
        Which of them.
    arguments
        Its own.
    options
        Fields of `Config`.
    """

    name: str
    as_module: bool = False
    arguments: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def run(program: Program) -> None:
    """Run it to its end in this process, as its main module. Call this from the main thread, with
    nothing to be done afterwards.

    Raises
    ------
    BaseException
        What the program raises and does not catch.
    """
    for name, value in launcher_variables(os.environ).items():
        os.environ[name] = value
    after_import("megatron.core", lambda _: _enable(program.options))
    try:
        module, code = _load_module(program) if program.as_module else _load_script(program)
        exec(code, vars(module))
    except SystemExit:
        raise
    except BaseException as error:
        _show_own_frames_only(error)
        raise
    if "megatron.core" not in sys.modules:
        _log.warning("%s never imported megatron.core: no save was ours", program.name)


def _enable(options: Mapping[str, Any]) -> None:
    import megatron_uring

    if not megatron_uring.status()["enabled"]:  # else the program has done it, in its own way
        megatron_uring.enable(**options)


def _load_script(program: Program) -> tuple[ModuleType, CodeType]:
    path = os.path.join(os.getcwd(), program.name)  # as python does: nothing is shortened
    with io.open_code(path) as file:
        source = file.read()
    module = ModuleType("__main__")
    module.__file__, module.__loader__ = path, SourceFileLoader("__main__", path)
    _become_main(module, program.name, program.arguments, os.path.dirname(os.path.realpath(path)))
    return module, compile(source, path, "exec", dont_inherit=True)


def _load_module(program: Program) -> tuple[ModuleType, CodeType]:
    # the search imports parent packages, which see what they see under python -m
    _become_main(ModuleType("__main__"), "-m", program.arguments, os.getcwd())
    spec = _find(program.name)
    code = getattr(spec.loader, "get_code", lambda name: None)(spec.name)
    if code is None:
        raise SystemExit(f"megatron-uring: {program.name} is no Python code that could be run")
    module = importlib.util.module_from_spec(spec)
    module.__name__ = "__main__"
    _become_main(module, str(spec.origin), program.arguments, os.getcwd())
    return module, code


def _find(name: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # something that a parent package imports
        spec = None
    if spec is None:
        raise SystemExit(f"megatron-uring: no module named {name}, or no __main__ in it")
    return spec


def _become_main(module: ModuleType, name: str, arguments: Sequence[str], folder: str) -> None:
    vars(module)["__builtins__"] = builtins
    sys.modules["__main__"] = module
    sys.argv = [name, *arguments]
    if not getattr(sys.flags, "safe_path", False):  # from Python 3.11 on; else it is always there
        sys.path[0] = folder


def _show_own_frames_only(error: BaseException) -> None:
    """Let the interpreter report `error` without the frames that lead to the program."""
    hook = sys.excepthook

    def report(kind: type[BaseException], value: BaseException, frames: Any) -> None:
        while frames is not None and frames.tb_frame.f_code is not run.__code__:
            frames = frames.tb_next
        own = frames and frames.tb_next
        if own is not None and own.tb_frame.f_globals is globals():
            own = None  # it did not come so far: a syntax error
        hook(kind, value.with_traceback(own), own)

    sys.excepthook = report


def launcher_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would have set, told by Open MPI's variables or srun's; nothing where one of
    them is there, or none of these.

    ``MASTER_ADDR`` and ``MASTER_PORT`` are found out for one node alone.
    """
    if any(name in environment for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return {}
    for prefix, names, job in _LAUNCHERS:
        told = [environment.get(prefix + name) for name in names]
        if None in told:
            continue
        rank, size, local_rank, local_size = map(str, told)
        found = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank}
        if local_size == size and "MASTER_ADDR" not in environment:
            # two jobs on a node need two ports, and ranks have only the job's name to agree by
            name = "/".join(environment.get(part, "") for part in job)
            port = _PORTS[zlib.crc32(name.encode()) % len(_PORTS)]
            found["MASTER_ADDR"] = "127.0.0.1"
            found["MASTER_PORT"] = environment.get("MASTER_PORT", str(port))
        return found
    return {}
