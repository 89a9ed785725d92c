"""Saves and loads a `gpt.Training` the way Megatron-LM's training loop does.

Guarantees:

- The state dict, the metadata, the strategies and the order of calls are those of
  `megatron.training.checkpointing`, so that what works here works there.
- ROOT/iter_0000010/ holds a checkpoint; ROOT/latest_checkpointed_iteration.txt (the tracker) names
  the newest. The tracker is replaced atomically and durably, only after the save has returned on
  every rank.
- A restored run continues with the same weights, optimizer state, schedule and random generators.
  The generators are skipped, as Megatron does, where tensor or pipeline parallelism has changed.

`megatron_on_cpu.install()` must have run before this module is imported.
"""

import argparse
import copy
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from gpt import Training
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

TRACKER = "latest_checkpointed_iteration.txt"
CHECKPOINT_VERSION = 3.0


@dataclass(frozen=True)
class SaveFacts:
    """What one save did; times are those of the slowest rank.

    Attributes
    ----------
    iteration : int
    state_bytes : int
        Bytes of all tensors, each global tensor counted once.
    directory_bytes : int
        Bytes of all files of the checkpoint's directory (0 on other ranks than 0).
    state_dict_seconds : float
        Time to build the state dict, the optimizer's gathers included.
    call_seconds : float
        Time of `dist_checkpointing.save`.
    """

    iteration: int
    state_bytes: int
    directory_bytes: int
    state_dict_seconds: float
    call_seconds: float

    @property
    def seconds(self) -> float:
        """The whole save, as the training loop waits for it."""
        return self.state_dict_seconds + self.call_seconds


def checkpoint_directory(root: str, iteration: int) -> Path:
    """Return the directory of one iteration's checkpoint, named as Megatron names it."""
    return Path(root) / f"iter_{iteration:07d}"


def read_tracker(root: str) -> int | None:
    """Return the newest checkpointed iteration, the same on every rank; None without a tracker."""
    answer = [None]
    if torch.distributed.get_rank() == 0:
        path = Path(root) / TRACKER
        # One rank reads: on a network file system, ranks may see different versions.
        answer[0] = int(path.read_text().strip()) if path.exists() else None
    torch.distributed.broadcast_object_list(answer, src=0)
    return answer[0]


def write_tracker(root: str, iteration: int) -> None:
    """Name `iteration` as the newest checkpoint. A crash leaves the old name or the new one."""
    temporary = Path(root) / f".{TRACKER}.{os.getpid()}"
    with temporary.open("w") as file:
        file.write(str(iteration))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(Path(root) / TRACKER)
    directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def content_metadata() -> dict:
    """Return what Megatron calls content metadata: how the optimizer's state is cut."""
    # Before 0.15 no format of the distributed optimizer was called fully_reshardable, but this
    # one could be restored at any layout as well.
    sharding = "fully_sharded_model_space"
    metadata = {}
    formats = getattr(DistributedOptimizer, "checkpoint_fully_reshardable_formats", ())
    if "fully_reshardable" in formats:
        sharding = "fully_reshardable"
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    return {
        **metadata,
        "distrib_optim_sharding_type": sharding,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def sharded_state(training: Training, metadata: dict, is_loading: bool = False) -> dict:
    """Build the sharded state dict of model and optimizer: the part that is not the same anywhere.

    Parameters
    ----------
    training : Training
    metadata : dict
        As returned by `content_metadata`, or as loaded from a checkpoint.
    is_loading : bool
        Whether the state dict describes what to load, rather than what to save.
    """
    metadata = {**metadata, "dp_cp_group": _data_parallel_group()}
    state = {"model": training.model.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = training.optimizer.sharded_state_dict(
        state, is_loading=is_loading, metadata=metadata
    )
    return state


def whole_state(training: Training, iteration: int, args: argparse.Namespace) -> dict:
    """Build all that a checkpoint holds, as `dist_checkpointing.save` takes it.

    Parameters
    ----------
    training, iteration, args
        As in `save`.
    """
    state = {"args": args, "checkpoint_version": CHECKPOINT_VERSION, "iteration": iteration}
    state.update(sharded_state(training, content_metadata()))
    state["opt_param_scheduler"] = training.scheduler.state_dict()
    state["rng_state"] = _random_state()
    return state


def apply_state(training: Training, state: dict) -> None:
    """Put what `dist_checkpointing.load` returned into the model, the optimizer and so on."""
    training.model.load_state_dict(state["model"])
    # In float32 the optimizer copies into views of parameters, which autograd would refuse.
    with torch.no_grad():
        training.optimizer.load_state_dict(state["optimizer"])
    training.scheduler.load_state_dict(state["opt_param_scheduler"])
    if "rng_state" in state:
        _restore_random_state(state["rng_state"])


def shards_of(state: dict) -> Iterator[ShardedTensor]:
    """Yield every sharded tensor of a state dict; what a factory would build is built."""
    for value in nested_values(state):
        if isinstance(value, ShardedTensor):
            yield value
        elif isinstance(value, ShardedTensorFactory):
            yield from shards_of({"built": value.build()})


def save(
    training: Training, root: str, iteration: int, args: argparse.Namespace, fully_parallel: bool
) -> SaveFacts:
    """Save one checkpoint, and name it in the tracker once it is there. Collective.

    Parameters
    ----------
    training : Training
    root : str
        The directory that holds all checkpoints of the run.
    iteration : int
        The number of iterations trained so far.
    args : argparse.Namespace
        The run's options, stored with the checkpoint; see `megatron_args`.
    fully_parallel : bool
        Spread what data-parallel ranks hold in common over them.
    """
    directory = checkpoint_directory(root, iteration)
    directory.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()

    started = time.perf_counter()
    state = whole_state(training, iteration, args)
    state_dict_seconds = _slowest(time.perf_counter() - started)
    state_bytes = _state_bytes(state)

    torch.distributed.barrier()
    started = time.perf_counter()
    strategy = get_default_save_sharded_strategy("torch_dist")
    if fully_parallel:
        strategy = FullyParallelSaveStrategyWrapper(strategy, _data_parallel_group(), False)
    dist_checkpointing.save(
        state,
        str(directory),
        strategy,
        preprocess_common_before_consistancy_check=comparable_common_state,
        content_metadata=content_metadata(),
    )
    call_seconds = _slowest(time.perf_counter() - started)

    directory_bytes = 0
    if torch.distributed.get_rank() == 0:
        write_tracker(root, iteration)
        files = [path for path in directory.rglob("*") if path.is_file()]
        directory_bytes = sum(path.stat().st_size for path in files)
    torch.distributed.barrier()
    return SaveFacts(iteration, state_bytes, directory_bytes, state_dict_seconds, call_seconds)


def load(
    training: Training, root: str, iteration: int, args: argparse.Namespace, fully_parallel: bool
) -> float:
    """Restore one checkpoint into `training` and into the random generators. Collective.

    Parameters
    ----------
    training, root, iteration, args, fully_parallel
        As in `save`; the layout may differ from that of the save.

    Returns
    -------
    float
        Seconds that it took on the slowest rank.
    """
    directory = str(checkpoint_directory(root, iteration))
    torch.distributed.barrier()
    started = time.perf_counter()
    common = dist_checkpointing.load_common_state_dict(directory)
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    request = sharded_state(training, metadata, is_loading=True)
    same_layout = _model_parallel_sizes(common["args"]) == _model_parallel_sizes(args)
    if same_layout:
        request["rng_state"] = _random_state()
    elif torch.distributed.get_rank() == 0:
        print("other TP or PP than in the checkpoint: random state not restored", flush=True)
    strategy = get_default_load_sharded_strategy(directory)
    if fully_parallel:
        strategy = FullyParallelLoadStrategyWrapper(strategy, _data_parallel_group())
    state = dist_checkpointing.load(request, directory, strategy)

    if state["iteration"] != iteration:
        raise RuntimeError(f"{directory}: holds iteration {state['iteration']}, not {iteration}")
    apply_state(training, state)
    return _slowest(time.perf_counter() - started)


def megatron_args(options: argparse.Namespace) -> argparse.Namespace:
    """Add to a run's options those of Megatron's that loading a checkpoint asks for."""
    return argparse.Namespace(
        **vars(options),
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        world_size=torch.distributed.get_world_size(),
        rank=torch.distributed.get_rank(),
        use_distributed_optimizer=True,
        ckpt_format="torch_dist",
        async_strategy="mcore",  # since 0.17 a load asks; its default needs NVIDIA's NVRx
    )


def comparable_common_state(common: dict) -> dict:
    """Drop from the common state what may differ between ranks, as Megatron does."""
    common = copy.deepcopy(common)
    common["args"] = {
        name: value
        for name, value in vars(common["args"]).items()
        if name not in {"rank", "local_rank"}
    }
    return common


def _data_parallel_group():
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _model_parallel_sizes(args: argparse.Namespace) -> tuple[int, int]:
    return args.tensor_model_parallel_size, args.pipeline_model_parallel_size


def _random_state() -> ShardedObject:
    state = {
        "random_rng_state": random.getstate(),
        "np_rng_state": numpy.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject(
        "rng_state",
        [state],
        (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_world_size(),
        ),
        (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
        ),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def _restore_random_state(states: list[dict]) -> None:
    state = states[0]
    random.setstate(state["random_rng_state"])
    numpy.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])


def _state_bytes(state: dict) -> int:
    """Sum the bytes of all global tensors: each main replica is on exactly one rank."""
    total = torch.zeros((), dtype=torch.int64)
    for shard in shards_of(state):
        if is_main_replica(shard.replica_id):
            total += shard.data.numel() * shard.data.element_size()
    torch.distributed.all_reduce(total)
    return int(total)


def _slowest(seconds: float) -> float:
    answer = torch.tensor(seconds, dtype=torch.float64)
    torch.distributed.all_reduce(answer, op=torch.distributed.ReduceOp.MAX)
    return answer.item()
