"""Program for several ranks: saves checkpoints, or loads those of other worlds, cell by cell.

``FOLDER save SOURCE...`` or ``FOLDER load CELL...``, of names in `matrix`. Each load begins with
spoilt tensors, and ends in comparing both what torch_dist and we return and the memory of model
and optimizer. A cell that fails does not keep the next from running.
"""

from __future__ import annotations

import copy
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checking
import matrix
import torch
from checking import helpers, megatron_alone, same, start
from matrix import Cell, Layout, Refusal, Source
from megatron.core import __version__, parallel_state
from megatron.core import dist_checkpointing as dc
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from placed import Placed, without_padding

import megatron_uring
from megatron_uring.errors import CheckpointError

VERSION = matrix.numbers(__version__)

_built: dict[tuple[Any, ...], Placed] = {}


class RefusedError(Exception):
    """Megatron does not support it; holds at which stage, and the error."""

    def __init__(self, stage: str, error: BaseException) -> None:
        super().__init__(stage, repr(error))
        self.stage, self.error = stage, error


@dataclass
class Outcome:
    """What a load gave: a copy of what it returned, of memory afterwards, or where it ended."""

    loaded: Any = None
    memory: Any = None
    refused: RefusedError | None = None


def load(cell: Cell) -> None:
    """The cell's load gives what it must through both, or is refused by both as it must be."""
    expected = matrix.refusal(cell, VERSION)
    theirs, ours = _directories(cell.source)
    note = theirs / "refused"
    if note.exists():  # nothing was saved, and the one who saved said why
        stage, error, message = note.read_text().split(maxsplit=2)
        assert expected is not None, (stage, error, message)
        assert (stage, error) == expected[:2], (expected, stage, error, message)
        assert expected.words in message, (expected, message)
        return
    state = _placed(cell.source, cell.model, cell.layout)
    with megatron_alone():
        reference = _load(state, cell, theirs)
    loads = megatron_uring.status()["loads"]
    found = _load(state, cell, ours)
    _require(reference.refused, expected)
    _require(found.refused, expected, ours=True)
    unset = matrix.left_unset(cell)
    if not unset:
        same(reference.loaded, found.loaded)
    if expected is None:
        set_by_both = [name for name in state.expected if not any(part in name for part in unset)]
        assert set_by_both
        for name in set_by_both:
            same(state.expected[name], reference.memory[name], f"memory after torch_dist: {name}")
        same(state.expected, found.memory, "memory after ours")
        assert megatron_uring.status()["loads"] > loads


def save(source: Source) -> None:
    """The same state through Megatron alone and through us; or a note that it cannot be."""
    theirs, ours = _directories(source)
    state = _placed(source, source.model, source.layout)
    try:
        whole = _at("state", state.state)
    except RefusedError as refused:
        if checking.rank() == 0:
            kind, message = type(refused.error).__name__, str(refused.error)
            (theirs / "refused").write_text(f"{refused.stage} {kind} {message}")
        return
    with megatron_alone():
        _save(whole, source, theirs)
    before = megatron_uring.status()["saves"]
    _save(state.state(), source, ours)
    assert megatron_uring.status()["saves"] == before + 1
    same(state.expected, {name: value.clone() for name, value in state.memory()}, "after a save")


def _save(whole: Any, source: Source, directory: Path) -> None:
    strategy = get_default_save_sharded_strategy()
    if source.wrapped:
        strategy = FullyParallelSaveStrategyWrapper(strategy, _data_group(), False)
    dc.save(
        whole,
        str(directory),
        strategy,
        preprocess_common_before_consistancy_check=helpers.checkpointing.comparable_common_state,
        content_metadata=Placed.metadata_of(source.format),
    )


def _load(state: Placed, cell: Cell, directory: Path) -> Outcome:
    """As ``megatron.training`` does it: the metadata in the checkpoint say what is asked for."""
    state.spoil()
    outcome = Outcome()
    metadata = dc.load_content_metadata(
        preloaded_state_dict=dc.load_common_state_dict(str(directory))
    )
    try:
        request = _at("request", lambda: state.request(metadata))
        strategy = get_default_load_sharded_strategy(str(directory))
        if cell.source.wrapped:
            strategy = FullyParallelLoadStrategyWrapper(strategy, _data_group())
        loaded = _at("load", lambda: dc.load(request, str(directory), strategy))
        outcome.loaded = copy.deepcopy(without_padding(loaded))
        _at("apply", lambda: state.apply(loaded))
    except RefusedError as refused:
        outcome.refused = refused
        return outcome
    outcome.memory = {name: value.clone() for name, value in state.memory()}
    return outcome


def _require(found: RefusedError | None, expected: Refusal | None, *, ours: bool = False) -> None:
    """Raise unless it was refused as expected, or not at all."""
    if expected is None:
        if found is not None:
            raise found
        return
    assert found is not None, f"not refused, though it should be: {expected}"
    told = (expected, found.stage, repr(found.error))
    assert found.stage == expected.stage, told
    if found.stage == "load" and not ours:
        return  # torch_dist's own error, which says something else on each rank
    assert type(found.error).__name__ == expected.error, told
    assert expected.words in str(found.error), told
    if found.stage == "load":
        assert isinstance(found.error, CheckpointError), told
        assert isinstance(found.error, CheckpointingException), told


def _at(stage: str, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except (Exception, torch.distributed.checkpoint.CheckpointException) as error:
        raise RefusedError(stage, error) from error


def _placed(source: Source, model: str, layout: Layout) -> Placed:
    """The last one again if it is the same: building takes longer than loading."""
    key = (model, source.format, source.precision, layout)
    if key not in _built:
        _built.clear()
        _built[key] = Placed(*key)
    return _built[key]


def _data_group() -> Any:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _directories(source: Source) -> tuple[Path, Path]:
    return checking.folder(f"{source.name}/theirs"), checking.folder(f"{source.name}/ours")


def _run(action: Callable[[Any], None], name: str, item: Any) -> None:
    """Do it, and say so on every rank, or on every rank why not."""
    started, failure = time.perf_counter(), None
    try:
        action(item)
    except BaseException:
        failure = traceback.format_exc()
    failures = [failure] * checking.size()
    torch.distributed.all_gather_object(failures, failure)
    seconds = time.perf_counter() - started
    if not any(failures):
        sys.stdout.write(f"passed {name}\n")
    elif failure is not None:
        sys.stdout.write(f"failed {name} on rank {checking.rank()}\n{failure}\n")
    if checking.rank() == 0:
        sys.stdout.write(f"seconds {seconds:.2f} {name}\n")
    sys.stdout.flush()


def _main() -> None:
    start()
    megatron_uring.enable()
    torch.set_num_threads(1)
    what, names = sys.argv[2], sys.argv[3:]
    for name in names:
        if what == "save":
            _run(save, name, matrix.SOURCES[name])
        else:
            _run(load, name, matrix.BY_NAME[name])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _main()
