"""Program for several ranks: checkpoints that were converted, loaded by Megatron itself and by us.

What Megatron loads with the adapter off is compared with what it loads of its own checkpoint.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from checking import folder, helpers, main, meet, megatron_alone, one_rank_only, rank, same, start
from megatron.core import dist_checkpointing as dc
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

import megatron_uring
from megatron_uring.convert import convert

Tiny = helpers.Tiny
# Up to 0.14 the optimizer's state is in ranges of flattened shards, and Megatron wants it so back.
FLATTENED = "fully_reshardable" not in getattr(
    DistributedOptimizer, "checkpoint_fully_reshardable_formats", ()
)


def loaded(tiny: Tiny, directory: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """A copy of all that a load gives, with every tensor spoilt before."""
    tiny.spoil()
    request = {key: value for key, value in tiny.request().items() if key not in without}
    return copy.deepcopy(dc.load(request, str(directory)))


def converted(name: str) -> dict[str, Any]:
    """What was saved by both, and all that becomes of it."""
    made = {"theirs": folder(f"{name}/theirs"), "ours": folder(f"{name}/ours")}
    for source, to, target in (
        ("ours", "torch_dist", "ours as torch_dist"),
        ("theirs", "ours", "theirs as ours"),
        ("ours as torch_dist", "ours", "ours again"),
    ):
        made[target] = made[source].parent / target
        convert(made[source], made[target], to)
    return made


def check_a_gpt_is_loaded_by_megatron_and_by_us() -> None:
    tiny = Tiny(tensor_parallel=2, swiglu=True)
    theirs, ours = folder("gpt/theirs"), folder("gpt/ours")
    with megatron_alone():
        tiny.save(theirs)
    tiny.save(ours)
    digests = tiny.digests()
    meet()
    made = converted("gpt")
    without = ("optimizer",) if FLATTENED else ()
    with megatron_alone():
        expected = loaded(tiny, theirs)
        less = loaded(tiny, theirs, without)
        same(less, loaded(tiny, made["ours as torch_dist"], without))
        if not FLATTENED:
            tiny.spoil()
            tiny.load(made["ours as torch_dist"])
            assert tiny.digests() == digests
    for name in ("theirs as ours", "ours again"):
        before = megatron_uring.status()["loads"]
        same(expected, loaded(tiny, made[name]))
        assert megatron_uring.status()["loads"] > before
        tiny.spoil()
        tiny.load(made[name])
        assert tiny.digests() == digests
    other = Tiny(tensor_parallel=1, swiglu=True)
    with megatron_alone():
        expected = loaded(other, theirs, without)
        same(expected, loaded(other, made["ours as torch_dist"], without))


def check_objects_and_common_state() -> None:
    def state() -> dict[str, Any]:
        tensor = torch.arange(6.0).reshape(2, 3) + 10 * rank()
        return {
            "rows": ShardedTensor.from_rank_offsets("rows", tensor, (0, rank(), 2)),
            "layer": ShardedTensor.from_rank_offsets(
                "layers", torch.full((3,), float(rank())), (0, rank(), 2), prepend_axis_num=1
            ),
            "rng": ShardedObject("rng", {"seed": rank()}, (2,), (rank(),)),
            "step": 3,
            "args": {"lr": 0.5, "names": ["a", "b"]},
        }

    theirs, ours = folder("small/theirs"), folder("small/ours")
    with megatron_alone():
        dc.save(state(), str(theirs), content_metadata={"kind": "x"})
    dc.save(state(), str(ours), content_metadata={"kind": "x"})
    meet()
    made = converted("small")

    def load(path: Any) -> Any:
        request = state()
        for key in ("rows", "layer"):
            request[key].data.fill_(-1)
        request["rng"].data = None
        del request["step"], request["args"]
        return copy.deepcopy(dc.load(request, str(path)))

    def check(path: Any) -> None:
        found = load(path)
        same(expected, found)
        assert found["rng"] == {"seed": rank()} and found["step"] == 3
        assert dc.load_content_metadata(str(path)) == {"kind": "x"}
        assert set(dc.load_tensors_metadata(str(path))) == {"rows", "layers"}

    with megatron_alone():
        expected = load(theirs)
        check(made["ours as torch_dist"])
    for name in ("ours", "theirs as ours", "ours again"):
        check(made[name])
    convert(ours, ours.parent / "safe", "safetensors")
    convert(ours.parent / "safe", ours.parent / "safe as torch_dist", "torch_dist")
    with one_rank_only():
        assert rank() or len(list(ours.parent.iterdir())) == 7
    with megatron_alone():
        request = {key: value for key, value in state().items() if key in ("rows", "layer")}
        request["rows"].data.fill_(-1)
        found = dc.load(request, str(ours.parent / "safe as torch_dist"))
    same(expected["rows"], found["rows"])


def begin() -> None:
    start()
    megatron_uring.enable()
    torch.set_num_threads(1)


if __name__ == "__main__":
    main(globals(), begin)
