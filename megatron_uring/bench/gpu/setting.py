"""What all checks on a GPU share: the device, a folder, the time that is left, and their rows.

Guarantees
----------
- A check has a folder of its own, and what it leaves there is removed when it is over.
- States fit in what device, host and disk have free; where the size asked for does not, the rows
  say which was used.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from megatron_uring import checkpoint, devices, fencing, stage
from megatron_uring.comm import SingleCommunicator
from megatron_uring.config import Config
from megatron_uring.pending import PendingSave
from megatron_uring.report import Report

PASSED, FAILED, MISSED, MEASURED, NOT_RUN = "passed", "failed", "missed", "measured", "not run"


class NotRunError(Exception):
    """A check that cannot be made here; the message is why."""


@dataclass(frozen=True)
class Row:
    """One finding.

    Attributes
    ----------
    what
        Was looked at.
    outcome
        ``"passed"`` or ``"failed"`` of a fact, ``"missed"`` of a target, ``"measured"`` where there
        is none, ``"not run"``.
    found
        In words and figures.
    target
        What was hoped for.
    seconds
        Trials, where something was timed.
    """

    what: str
    outcome: str
    found: str
    target: str = ""
    seconds: tuple[float, ...] = ()


@dataclass
class Setting:
    """Where the checks run.

    Attributes
    ----------
    device
        The GPU; tests give a CPU, for the checks that need nothing of CUDA.
    folder
        Of the caller; on the file system to which saves go.
    state_bytes
        Of the large state.
    trials
        Timed, after the warm-up.
    deadline
        `time.monotonic` at which nothing more is begun.
    """

    device: torch.device
    folder: str
    state_bytes: int
    trials: int
    deadline: float
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def on_gpu(self) -> bool:
        """Whether the device is one."""
        return self.device.type == "cuda"

    def require_gpu(self) -> None:
        """Raise `NotRunError` without one."""
        if not self.on_gpu:
            raise NotRunError("no GPU here")

    def require_time(self, seconds: float) -> None:
        """Raise `NotRunError` if so much is not left."""
        left_s = self.deadline - time.monotonic()
        if left_s < seconds:
            raise NotRunError(f"{max(left_s, 0):.0f} s of the limit are left, {seconds:.0f} needed")

    def synchronize(self) -> None:
        """Wait for all that is queued on the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def config(self, **options: object) -> Config:
        """Options under the variables of the environment; without a probe of the disk."""
        return Config.from_environment(None, **{"probe": "off", "timeout_s": 120.0, **options})

    @contextmanager
    def directories(self, count: int) -> Iterator[list[str]]:
        """New names for checkpoints, removed afterwards."""
        paths = [os.path.join(self.folder, f"check{next(self._numbers)}") for _ in range(count)]
        try:
            yield paths
        finally:
            for path in paths:
                shutil.rmtree(path, ignore_errors=True)


def world() -> SingleCommunicator:
    """This process alone."""
    return SingleCommunicator(120.0, "gpu check", os.uname().nodename)


def save(state: Mapping[str, object], directory: str, config: Config) -> Report:
    """Synchronously."""
    return checkpoint.save(state, directory, config=config, communicator=world())


def save_async(state: Mapping[str, object], directory: str, config: Config) -> PendingSave:
    """Asynchronously."""
    return checkpoint.save_async(state, directory, config=config, communicator=world())


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements in C order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def digest(state: Mapping[str, torch.Tensor]) -> str:
    """Of keys and elements."""
    total = hashlib.sha256()
    for key in sorted(state):
        total.update(key.encode())
        total.update(bytes_of(state[key]))
    return total.hexdigest()


def run(what: str, check: Callable[[Setting], list[Row]], setting: Setting) -> list[Row]:
    """Rows of a check, or one that says why there are none."""
    try:
        return check(setting)
    except NotRunError as error:
        return [Row(what, NOT_RUN, str(error))]
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(where.filename)}:{where.lineno}"
        return [Row(what, FAILED, f"{type(error).__name__} at {place}: {error}")]
    finally:
        fencing.fence()
        stage.close_engines()  # each check begins with a pool of its own


def library(setting: Setting) -> str:
    """Path of the CUDA runtime that native code found."""
    setting.require_gpu()
    found = devices.cuda_runtime()
    if found is None:
        raise NotRunError("native code found no CUDA runtime: see the warning")
    return found.path
