"""What the programs of this folder share: their start, their ranks, comparing two loads.

Guarantees
----------
- Importing this module imports Megatron (through `helpers`), with torch.distributed not yet there.
- A warning that our own code causes is an error; those of Megatron and torch are silent.
- `same` compares bytes: NaN equals NaN, 0.0 differs from -0.0, and dtype, shape and type count.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")  # Megatron and torch warn about each other while they load
warnings.filterwarnings("error", module=r"megatron_uring(\.|$)")

import helpers  # noqa: E402 - first of Megatron: it lets it be imported without CUDA
import numpy as np  # noqa: E402
import torch  # noqa: E402
from megatron.core import dist_checkpointing as dc  # noqa: E402
from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.core import CheckpointingException  # noqa: E402

import megatron_uring  # noqa: E402
from megatron_uring.errors import CheckpointError  # noqa: E402

__all__ = ["helpers"]
FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()


class MegatronCannotError(Exception):
    """Raised by a check that has seen this version of Megatron refuse the same without us.

    On all ranks, or the check fails.
    """


def start() -> None:
    """torch.distributed on gloo, with the launcher's ranks."""
    for name, mpi_name in (("RANK", "RANK"), ("WORLD_SIZE", "SIZE")):
        if f"OMPI_COMM_WORLD_{mpi_name}" in os.environ:
            os.environ.setdefault(name, os.environ[f"OMPI_COMM_WORLD_{mpi_name}"])
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))


def main(checks: dict[str, Any], begin: Callable[[], None] = start) -> None:
    """Run the checks that the command line names; the first that fails ends the program."""
    begin()
    for name in sys.argv[2:]:
        try:
            checks[f"check_{name}"]()
        except MegatronCannotError as reason:
            sys.stdout.write(f"cannot {name}: {reason}\n")
            meet()
            continue
        except BaseException:
            sys.stdout.write(f"failed {name} on rank {rank()}\n{traceback.format_exc()}\n")
            sys.stdout.flush()
            os._exit(1)
        sys.stdout.write(f"passed {name}\n")
        sys.stdout.flush()
        meet()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def rank() -> int:
    """This rank, 0 without torch.distributed."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def size() -> int:
    """Number of ranks."""
    return torch.distributed.get_world_size()


def meet() -> None:
    """Return when all ranks are here."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def folder(name: str) -> Path:
    """A folder of that name, the same on all ranks, made if it is missing."""
    path = FOLDER / name
    if rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
    meet()
    return path


@contextmanager
def megatron_alone() -> Iterator[None]:
    """Megatron as it is without us."""
    was_on = megatron_uring.status()["enabled"]
    megatron_uring.disable()
    try:
        yield
    finally:
        if was_on:
            megatron_uring.enable()


@contextmanager
def one_rank_only() -> Iterator[None]:
    """What only rank 0 does inside, through ``if rank() == 0``, the others see afterwards."""
    meet()
    yield
    meet()


def save_both(name: str, make_state: Callable[[], Any], **options: Any) -> tuple[str, str]:
    """The same state as Megatron saves it and as we do; returns both directories."""
    theirs, ours = folder(f"{name}/theirs"), folder(f"{name}/ours")
    with megatron_alone():
        dc.save(make_state(), str(theirs), **options)
    saves = megatron_uring.status()["saves"]
    dc.save(make_state(), str(ours), **options)
    assert megatron_uring.status()["saves"] == saves + 1
    assert (ours / "index.h5").exists() and not (theirs / "index.h5").exists()
    return str(theirs), str(ours)


def load_all(theirs: str, ours: str, load: Callable[[str], Any]) -> Any:
    """What `load` gives, the same from both directories, as Megatron loads it and as we do.

    Returns
    -------
    object
        A copy of the result, or the error that it raised.
    """
    with megatron_alone():
        expected = outcome(load, theirs)
    loads = megatron_uring.status()["loads"]
    passed_through = outcome(load, theirs)
    assert megatron_uring.status()["loads"] == loads  # Megatron's own code read it
    found = outcome(load, ours)
    for each in (passed_through, found):
        assert isinstance(each, BaseException) == isinstance(expected, BaseException), (
            expected,
            each,
        )
    if isinstance(found, BaseException):
        assert isinstance(found, CheckpointingException), repr(found)
    else:
        same(expected, passed_through)
        same(expected, found)
    return found


def outcome(load: Callable[[str], Any], directory: str) -> Any:
    """A copy of what `load` returns, or the error that it raises."""
    try:
        return copy.deepcopy(load(directory))
    except (Exception, torch.distributed.checkpoint.CheckpointException) as error:
        return error


def agree(
    name: str, make_state: Callable[[], Any], make_request: Callable[[], Any], **load_options: Any
) -> Any:
    """Save with both, load with both; the results must be the same. Returns ours."""
    theirs, ours = save_both(name, make_state)
    return load_all(theirs, ours, lambda path: dc.load(make_request(), path, **load_options))


def same(left: Any, right: Any, where: str = "state") -> None:
    """Raise AssertionError, naming the place, unless both are the same to the last bit."""
    assert type(left) is type(right), f"{where}: {type(left)} and {type(right)}"
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and left.shape == right.shape, f"{where}: {left} {right}"
        assert bytes_of(left) == bytes_of(right), f"{where}: {left} {right}"
    elif isinstance(left, dict):
        assert list(left) == list(right) or set(left) == set(right), f"{where}: {left} {right}"
        for key in left:
            same(left[key], right[key], f"{where}[{key!r}]")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), f"{where}: {left} {right}"
        for number, (one, other) in enumerate(zip(left, right, strict=True)):
            same(one, other, f"{where}[{number}]")
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype and left.tobytes() == right.tobytes(), where
    elif isinstance(left, argparse.Namespace):
        same(vars(left), vars(right), where)
    elif isinstance(left, ShardedTensor):
        assert (left.key, left.global_shape, left.dtype) == (
            right.key,
            right.global_shape,
            right.dtype,
        ), where
    else:
        assert left == right or left is right, f"{where}: {left!r} and {right!r}"


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements in C order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def raised(action: Callable[[], Any], *fragments: str, kind: type = CheckpointError) -> Any:
    """The error of `action`, which must be ours and Megatron's at once and hold all fragments."""
    try:
        action()
    except Exception as error:
        assert isinstance(error, kind), repr(error)
        assert isinstance(error, CheckpointingException), repr(error)
        for fragment in fragments:
            assert fragment in str(error), f"{fragment!r} is not in {error}"
        return error
    raise AssertionError(f"no {kind.__name__} on rank {rank()}")
