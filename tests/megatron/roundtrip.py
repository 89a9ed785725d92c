"""Program for several ranks: a GPT and its optimizer through us and through torch_dist, compared.

Each load begins with spoilt tensors, so that what a load leaves out cannot look right.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from checking import folder, helpers, main, meet, megatron_alone, same, start
from megatron.core import dist_checkpointing as dc
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

import megatron_uring

Tiny, gpt = helpers.Tiny, helpers.gpt
SAVED: dict[str, dict[str, str] | None] = {}


def save_both(tiny: Tiny, name: str, strategy: Any = None) -> None:
    """The same state through Megatron alone and through us."""
    theirs, ours = folder(f"{name}/theirs"), folder(f"{name}/ours")
    options = {} if strategy is None else {"sharded_strategy": strategy}
    with megatron_alone():
        tiny.save(theirs, **options)
    before = megatron_uring.status()["saves"]
    tiny.save(ours, **options)
    assert megatron_uring.status()["saves"] == before + 1
    meet()
    SAVED[name] = tiny.digests()


def loaded(tiny: Tiny, directory: Any, **options: Any) -> dict[str, Any]:
    """A copy of all that a load gives, with every tensor spoilt before."""
    tiny.spoil()
    return copy.deepcopy(dc.load(tiny.request(), str(directory), **options))


def load_both(tiny: Tiny, name: str, wrapped: bool = False) -> None:
    """What both loads give is the same, and the model then holds what was saved."""
    theirs, ours = folder(f"{name}/theirs"), folder(f"{name}/ours")

    def options(directory: Any) -> dict[str, Any]:
        if not wrapped:
            return {}
        strategy = get_default_load_sharded_strategy(str(directory))
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return {"sharded_strategy": FullyParallelLoadStrategyWrapper(strategy, group)}

    with megatron_alone():
        expected = loaded(tiny, theirs, **options(theirs))
    before = megatron_uring.status()["loads"]
    same(expected, loaded(tiny, ours, **options(ours)))
    assert megatron_uring.status()["loads"] > before
    tiny.spoil()
    tiny.load(ours, **options(ours))
    assert tiny.digests() == SAVED[name], name


@contextmanager
def optimizer_not_distributed() -> Iterator[None]:
    """`gpt.build_training` builds Megatron's optimizer without sharding over data parallelism."""
    config, wrapper = gpt.OptimizerConfig, gpt.DistributedDataParallelConfig

    def plain(make: Any) -> Any:
        return lambda **options: make(**{**options, "use_distributed_optimizer": False})

    with (
        mock.patch.object(gpt, "OptimizerConfig", plain(config)),
        mock.patch.object(gpt, "DistributedDataParallelConfig", plain(wrapper)),
    ):
        yield


def check_dense() -> None:
    tiny = Tiny(tensor_parallel=2)
    save_both(tiny, "dense")
    load_both(tiny, "dense")
    losses = tiny.train(1)  # it goes on as if nothing had happened
    tiny.load(folder("dense/ours"))
    assert tiny.train(1) == losses


def check_swiglu_with_fully_parallel_wrappers() -> None:
    tiny = Tiny(swiglu=True)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelSaveStrategyWrapper(
        dc.serialization.get_default_save_sharded_strategy(), group, False
    )
    save_both(tiny, "swiglu", strategy)
    load_both(tiny, "swiglu", wrapped=True)
    load_both(tiny, "swiglu")


def check_experts() -> None:
    tiny = Tiny(experts=4, expert_parallel=2, swiglu=True)
    save_both(tiny, "experts")
    load_both(tiny, "experts")


def check_optimizer_that_is_not_distributed() -> None:
    with optimizer_not_distributed():
        tiny = Tiny(tensor_parallel=2, swiglu=True)
    assert not hasattr(tiny.training.optimizer, "shard_fp32_from_float16_groups")
    theirs, ours = folder("plain/theirs"), folder("plain/ours")
    with megatron_alone():
        tiny.save(theirs)
    tiny.save(ours)
    with megatron_alone():
        expected = loaded(tiny, theirs)
    same(expected, loaded(tiny, ours))


def check_float32() -> None:
    tiny = Tiny(precision="fp32", tensor_parallel=2)
    save_both(tiny, "fp32")
    load_both(tiny, "fp32")


def check_other_layouts() -> None:
    layouts = {"tp1": (1, 1), "tp2": (2, 1), "tp4": (4, 1), "pp2": (1, 2)}
    pairs = {
        "tp4": ("tp2",),
        "tp2": ("tp1", "tp4"),
        "pp2": ("tp1",),
        "tp1": ("tp2", "pp2"),
    }
    for name, (tensor, pipeline) in layouts.items():
        save_both(Tiny(tensor_parallel=tensor, pipeline_parallel=pipeline), name)
    for target, sources in pairs.items():
        tensor, pipeline = layouts[target]
        tiny = Tiny(tensor_parallel=tensor, pipeline_parallel=pipeline)
        for source in sources:
            load_both(tiny, source)


def begin() -> None:
    start()
    megatron_uring.enable()
    torch.set_num_threads(1)


if __name__ == "__main__":
    main(globals(), begin)
