"""Emulations: I/O patterns of other systems, rebuilt; never the systems themselves.

They stand apart from the peers, which are the systems in their best fair use. What they are for: to
see what a pattern costs on this file system, and what a comparison made with such a harness shows.

Guarantees
----------
- Durable when the call returns, as all that they stand beside.
- Loading reads every byte and compares nothing, as the systems do.
- A header is JSON: loading runs no code.
"""

from __future__ import annotations

import json
import os

import numpy as np
import torch

from megatron_uring import _engine, stage
from megatron_uring.bench.formats import Action, Format
from megatron_uring.bench.peers import load_module, require_group, sync_folder
from megatron_uring.bench.state import State
from megatron_uring.bench.suite.results import EMULATION
from megatron_uring.columns import Int64Array
from megatron_uring.comm import Communicator
from megatron_uring.config import Config
from megatron_uring.progress import run_job

DATASTATES = "DataStates-style (emulation)"
TORCHSNAPSHOT_CALLS = "TorchSnapshot, a call per tensor (emulation)"
_TAIL_BYTES = 8  # the length of the header, little-endian, at the very end
_QUEUE_DEPTH = 32


def emulations(world: Communicator, no_group: str) -> list[Format]:
    """All of them; `no_group` says why torch.distributed is not initialised, if it is not."""
    return [_datastates(world), _torchsnapshot_calls(world, no_group)]


# -------------------------------------------------------------------------------------------------
# DataStates-LLM (arXiv 2601.16956): a region of the rank's file and a submission for each tensor,
# buffered, from where the tensor lies; a JSON header behind them


def _datastates(world: Communicator) -> Format:
    name = f"rank{world.rank}.data"

    def saver(state: State) -> Action:
        tensors = [tensor.reshape(-1).view(torch.uint8) for tensor in state.tensors.values()]
        length = np.array([len(tensor) for tensor in tensors], np.int64)
        start = np.cumsum(length) - length
        regions = {key: [int(at), int(size)] for key, at, size in zip(
            state.tensors, start, length, strict=True
        )}  # fmt: skip
        header = json.dumps(regions).encode()
        tail = header + len(header).to_bytes(_TAIL_BYTES, "little")

        def save(folder: str) -> None:
            file = _engine.File.create(os.path.join(folder, name), direct=False)
            try:
                _transfer("write", file, start, length, tensors)
                view = torch.frombuffer(bytearray(tail), dtype=torch.uint8)
                end = np.array([length.sum()], np.int64)
                _transfer("write", file, end, np.array([len(tail)], np.int64), [view])
                run_job(lambda: _engine_here().sync(file), "sync", file.path, Config.timeout_s)
            finally:
                file.close()

        return save

    def loader(into: State) -> Action:
        def load(folder: str) -> None:
            path = os.path.join(folder, name)
            regions = _read_header(path)
            tensors = [tensor.reshape(-1).view(torch.uint8) for tensor in into.tensors.values()]
            found = np.array([regions[key] for key in into.tensors], np.int64)
            file = _engine.File.open(path, writable=False, direct=False)
            try:
                _transfer("read", file, found[:, 0], found[:, 1], tensors)
            finally:
                file.close()

        return load

    return Format(DATASTATES, EMULATION, saver, loader, native=True)


def _engine_here() -> _engine.Engine:
    """For transfers, which need no slabs beyond the one that a pool has at least."""
    return stage.open_engine(Config(queue_depth=_QUEUE_DEPTH, slab_count=1))


def _read_header(path: str) -> dict[str, list[int]]:
    with open(path, "rb") as file:
        file.seek(-_TAIL_BYTES, os.SEEK_END)
        length = int.from_bytes(file.read(_TAIL_BYTES), "little")
        file.seek(-_TAIL_BYTES - length, os.SEEK_END)
        regions: dict[str, list[int]] = json.loads(file.read(length))
        return regions


def _transfer(
    operation: str,
    file: _engine.File,
    start: Int64Array,
    length: Int64Array,
    tensors: list[torch.Tensor],
) -> None:
    address = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
    number = np.zeros(len(tensors), np.int32)
    run_job(
        lambda: _engine_here().transfer(
            operation,
            [file],
            number,
            np.ascontiguousarray(start),
            np.ascontiguousarray(length),
            address,
        ),
        operation,
        file.path,
        Config.timeout_s,
        alive=(tensors, file),
    )


# -------------------------------------------------------------------------------------------------
# the harness of arXiv 2512.24511: TorchSnapshot called for each tensor


def _torchsnapshot_calls(world: Communicator, no_group: str) -> Format:
    def saver(state: State) -> Action:
        require_group(no_group)
        module = load_module("torchsnapshot")
        parts = [{"part": module.StateDict(**dict([one]))} for one in state.tensors.items()]

        def save(folder: str) -> None:
            count = _most(world, len(parts))
            for number in range(count):  # each call is collective
                part = parts[number] if number < len(parts) else {"part": module.StateDict()}
                module.Snapshot.take(os.path.join(folder, str(number)), part)
            sync_folder(folder, world)

        return save

    def loader(into: State) -> Action:
        module = load_module("torchsnapshot")
        parts = [{"part": module.StateDict(**dict([one]))} for one in into.tensors.items()]

        def load(folder: str) -> None:
            count = _most(world, len(parts))
            for number in range(count):
                part = parts[number] if number < len(parts) else {"part": module.StateDict()}
                module.Snapshot(os.path.join(folder, str(number))).restore(part)

        return load

    return Format(TORCHSNAPSHOT_CALLS, EMULATION, saver, loader)


def _most(world: Communicator, count: int) -> int:
    return int(world.allreduce(np.array([count], np.int64), "max")[0])
