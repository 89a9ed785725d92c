"""DTensors and FSDP2 through torch.distributed.checkpoint and through our own save, on gloo.

`write` runs on four ranks and leaves checkpoints behind, `elsewhere` loads them on two. What is
loaded is compared with the tensors in memory, and with what torch's own storage gives.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
import traceback
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launch import free_rendezvous
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from world import raises, say, start_torch

import megatron_uring
from megatron_uring import checkpoint
from megatron_uring.errors import UnsupportedError

warnings.filterwarnings("ignore", category=UserWarning)  # torch's own
SHAPES = {
    "rows": (8, 6),
    "uneven": (5, 3),  # on four ranks 2, 2, 1 and 0 rows
    "one row": (1, 9),
    "columns": (3, 7),
    "grid": (6, 10),
    "one axis twice": (9, 2),
    "replicated": (4, 4),
    "hybrid": (7, 5),
    "no rows": (0, 3),
}
OBJECTS = {"step": 7, "name": "a run", "betas": (0.9, 0.95), "seen": [1, 2]}
NO_OBJECTS = {"step": 0, "name": "", "betas": (0.0, 0.0), "seen": [0, 0]}


class Custom:
    """What cannot be loaded without running code."""


def value(name, seed=0):
    """The global tensor, the same on all ranks and in all runs."""
    generator = torch.Generator().manual_seed(len(name) + seed)
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)


@functools.cache
def mesh(*sizes):
    """One mesh of each kind: each has process groups of its own."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])


def layout(name, other=False):
    """A mesh and placements for a tensor; the `other` one cuts it in another way."""
    size = dist.get_world_size()
    line, plane = mesh(size), mesh(2, size // 2)
    one, two = {
        "rows": ((line, [Shard(0)]), (line, [Shard(1)])),
        "uneven": ((line, [Shard(0)]), (plane, [Shard(0), Shard(1)])),
        "one row": ((line, [Shard(0)]), (line, [Shard(1)])),
        "columns": ((line, [Shard(1)]), (line, [Replicate()])),
        "grid": ((plane, [Shard(0), Shard(1)]), (plane, [Shard(1), Shard(0)])),
        "one axis twice": ((plane, [Shard(0), Shard(0)]), (line, [Shard(0)])),
        "replicated": ((line, [Replicate()]), (line, [Shard(0)])),
        "hybrid": ((plane, [Replicate(), Shard(0)]), (plane, [Shard(1), Replicate()])),
        "no rows": ((line, [Shard(0)]), (line, [Replicate()])),
    }[name]
    return two if other else one


def state(other=False, seed=0, empty=False):
    """A nested state; `empty`: with zeros, to be filled."""
    tensors = {}
    for name in SHAPES:
        whole = value(name, seed)
        whole = torch.zeros_like(whole) if empty else whole
        tensors[name] = distribute_tensor(whole, *layout(name, other))
    plain = {"plain": value("rows", seed + 1), "scalar": torch.tensor(2.5 + seed)}
    if empty:
        plain = {key: torch.zeros_like(tensor) for key, tensor in plain.items()}
    objects = NO_OBJECTS if empty else OBJECTS
    return {"model": tensors, "list": [plain, {"deep.er": torch.full((2,), 3 + seed)}], **objects}


def check(found, seed=0):
    """`found` holds the values of `state(seed=seed)`."""
    for name, tensor in found["model"].items():
        assert torch.equal(tensor.full_tensor(), value(name, seed)), name
    assert torch.equal(found["list"][0]["plain"], value("rows", seed + 1))
    assert torch.equal(found["list"][0]["scalar"], torch.tensor(2.5 + seed))
    assert {key: found[key] for key in OBJECTS} == OBJECTS


def chunks(metadata):
    """What metadata says of tensors and objects, comparable."""
    return {
        key: (
            (each.size, each.properties.dtype, sorted((c.offsets, c.sizes) for c in each.chunks))
            if hasattr(each, "chunks")
            else "bytes"
        )
        for key, each in metadata.state_dict_metadata.items()
    }


@contextmanager
def refused(*fragments):
    """The block fails on this rank, with all fragments in what DCP says of the ranks."""
    try:
        yield
    except CheckpointException as error:
        text = " ".join(str(failure[0]) for failure in error.failures.values())
        for fragment in fragments:
            assert fragment in text, f"{fragment!r} is not in {text}"
    else:
        raise AssertionError("nothing was raised")


# -------------------------------------------------------------------------------------------------
# four ranks


def write():
    """All that four ranks do."""
    start_torch()
    folder = Path(sys.argv[1])
    for part in (storage, plan_caching, own_save, background, refusals, subgroup, training):
        began = time.monotonic()
        part(folder)
        dist.barrier()
        if dist.get_rank() == 0:
            say(f"{part.__name__}: {time.monotonic() - began:.1f} s")


def storage(folder):
    """dcp.save and dcp.load against torch's own storage."""
    dcp.save(state(), storage_writer=megatron_uring.StorageWriter(folder / "dcp"))
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(folder / "torch"))
    ours = megatron_uring.StorageReader(folder / "dcp").read_metadata()
    theirs = dcp.FileSystemReader(folder / "torch").read_metadata()
    assert chunks(ours) == chunks(theirs)
    assert ours.planner_data == theirs.planner_data
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    for other in (False, True):
        into, expected = state(other, empty=True), state(other, empty=True)
        dcp.load(into, storage_reader=megatron_uring.StorageReader(folder / "dcp"))
        dcp.load(expected, storage_reader=dcp.FileSystemReader(folder / "torch"))
        check(into)
        check(expected)
        for name, tensor in into["model"].items():
            assert torch.equal(tensor.to_local(), expected["model"][name].to_local()), name
    half = {"model": {"rows": state(True, empty=True)["model"]["rows"]}}
    dcp.load(half, storage_reader=megatron_uring.StorageReader(folder / "dcp"))
    assert torch.equal(half["model"]["rows"].full_tensor(), value("rows"))
    narrow = {"model": {"rows": half["model"]["rows"].to(torch.float32)}}
    dcp.load(narrow, storage_reader=megatron_uring.StorageReader(folder / "dcp"))
    assert torch.equal(narrow["model"]["rows"].full_tensor(), value("rows").float())
    with refused("model.nowhere"):
        absent = {"model": {"nowhere": half["model"]["rows"]}}
        dcp.load(absent, storage_reader=megatron_uring.StorageReader(folder / "dcp"))


def plan_caching(folder):
    """Saves whose plans DCP keeps: each has its own values, and what a load needs."""
    writer = megatron_uring.StorageWriter()
    for seed in range(3):
        planner = DefaultSavePlanner(enable_plan_caching=True, dedup_save_to_lowest_rank=True)
        path = folder / f"cached{seed}"
        dcp.save(state(seed=seed), storage_writer=writer, checkpoint_id=path, planner=planner)
    for seed in range(3):
        into = state(True, empty=True)
        reader = megatron_uring.StorageReader(folder / f"cached{seed}")
        dcp.load(into, storage_reader=reader)
        check(into, seed)


def own_save(folder):
    """megatron_uring.save and restore of the same state, without DCP."""
    megatron_uring.save(state(), folder / "own")
    for other in (False, True):
        into = state(other, empty=True)
        memory = into["model"]["rows"].to_local().data_ptr()
        found = megatron_uring.restore(folder / "own", into)
        check(found)
        assert found["model"]["rows"] is into["model"]["rows"]
        assert into["model"]["rows"].to_local().data_ptr() == memory
    partial = DTensor.from_local(torch.ones(2), mesh(4), [Partial()])
    with raises(UnsupportedError, "'sum'", "Partial", "redistribute"):
        megatron_uring.save({"sum": partial}, folder / "refused")
    with raises(UnsupportedError, "'model/rows'", "Partial"):
        megatron_uring.restore(folder / "own", {"model": {"rows": partial}})
    strided = DTensor.from_local(torch.ones(2), mesh(4), [_StridedShard(0, split_factor=2)])
    with raises(UnsupportedError, "'odd'", "2 of rows", "_StridedShard"):
        megatron_uring.save({"odd": strided}, folder / "refused")
    ranks = [1, 3]
    some = dist.device_mesh.DeviceMesh("cpu", ranks)
    part = DTensor.from_local(torch.full((2,), float(dist.get_rank())), some, [Shard(0)])
    megatron_uring.save({"part": part}, folder / "part")
    whole = megatron_uring.restore(folder / "part")["part"]
    assert whole.tolist() == [1.0, 1.0, 3.0, 3.0]
    part = DTensor.from_local(torch.zeros(2), some, [Shard(0)])
    megatron_uring.restore(folder / "part", {"part": part})
    if dist.get_rank() in ranks:
        assert part.to_local().tolist() == [float(dist.get_rank())] * 2


def background(folder):
    """dcp.async_save in DCP's thread, while the main thread trains and saves by itself."""
    group = dist.new_group(backend="gloo")  # as DCP wants it: the training has its own
    saved = state(seed=5)
    writer = megatron_uring.StorageWriter(folder / "async")
    future = dcp.async_save(saved, storage_writer=writer, process_group=group)
    for tensor in saved["model"].values():
        tensor.to_local().fill_(-1)
    for seed in range(3):
        megatron_uring.save(state(seed=seed), folder / "meanwhile")
        dist.barrier()
    future.result()
    into = state(True, empty=True)
    dcp.load(into, storage_reader=megatron_uring.StorageReader(folder / "async"))
    check(into, 5)
    pending = megatron_uring.save_async(state(), folder / "async")
    future = dcp.async_save(state(), storage_writer=writer, process_group=group)
    with refused("a save_async to it is in flight"):
        future.result()
    pending.wait()
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    both = [
        dcp.async_save(
            state(seed=seed),
            storage_writer=megatron_uring.StorageWriter(
                folder / f"both{seed}", process_group=groups[seed]
            ),
            process_group=groups[seed],
        )
        for seed in range(2)
    ]
    for seed, future in enumerate(both):
        future.result()
        into = state(empty=True)
        dcp.load(into, storage_reader=megatron_uring.StorageReader(folder / f"both{seed}"))
        check(into, seed)


def refusals(folder):
    """What fails fails on all ranks, and leaves the checkpoint that was there."""
    path, rank = folder / "dcp", dist.get_rank()
    with refused("'custom 2'", f"class {Custom.__module__}.Custom is not allowed"):
        mine = {"custom 2": Custom()} if rank == 2 else {}
        dcp.save({**state(seed=1), **mine}, storage_writer=megatron_uring.StorageWriter(path))
    with refused("partial placements"):
        partial = DTensor.from_local(torch.ones(2), mesh(4), [Partial()])
        dcp.save({"sum": partial}, storage_writer=megatron_uring.StorageWriter(path))
    with refused("rank 3: resolve 'model.grid' (RuntimeError: no such tensor)"):
        writer, planner = megatron_uring.StorageWriter(path), Failing()
        dcp.save(state(seed=1), storage_writer=writer, planner=planner)
    with raises(UnsupportedError, "use_collectives=True"):
        writer = megatron_uring.StorageWriter(path)
        dcp.save(state(), storage_writer=writer, use_collectives=False)
    with raises(UnsupportedError, "a directory"):
        try:
            dcp.save(state(), storage_writer=megatron_uring.StorageWriter())
        except CheckpointException as error:
            raise error.failures[0][0] from error
    into = state(empty=True)
    dcp.load(into, storage_reader=megatron_uring.StorageReader(path))
    check(into)
    assert len(list(path.glob("data-*"))) == 4


class Failing(DefaultSavePlanner):
    """Cannot give one tensor of rank 3."""

    def resolve_data(self, write_item):
        if dist.get_rank() == 3 and write_item.index.fqn == "model.grid":
            raise RuntimeError("no such tensor")
        return super().resolve_data(write_item)


def subgroup(folder):
    """A process group of some ranks; one rank alone."""
    group = dist.new_group([1, 3], backend="gloo")
    if dist.get_rank() in (1, 3):
        with refused("plans of 4 ranks, found 2"):
            writer = megatron_uring.StorageWriter(folder / "sub")
            dcp.save({"a": torch.ones(3)}, storage_writer=writer, process_group=group)
        writer = megatron_uring.StorageWriter(folder / "sub", process_group=group)
        dcp.save({"a": torch.ones(3), "b": 2}, storage_writer=writer, process_group=group)
    own = folder / f"alone{dist.get_rank()}"
    dcp.save({"a": torch.ones(3)}, storage_writer=megatron_uring.StorageWriter(own), no_dist=True)
    assert torch.equal(megatron_uring.restore(own)["a"], torch.ones(3))
    dist.barrier()
    assert megatron_uring.restore(folder / "sub", keys=["b"]) == {"b": 2}


# -------------------------------------------------------------------------------------------------
# FSDP2


class Block(torch.nn.Module):
    """Two layers of odd sizes."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 10), torch.nn.Linear(10, 6)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def model_and_optimizer(seed, tensor_parallel):
    """A model under FSDP2, over tensor parallelism if asked, with an optimizer that has stepped."""
    torch.manual_seed(seed)
    size = dist.get_world_size()
    model = torch.nn.Sequential(Block(), Block(), torch.nn.Linear(6, 5))
    if tensor_parallel:
        plane = mesh(2, size // 2)
        for block in model[:2]:
            parallelize_module(
                block, plane["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        shards = plane["dp"]
    else:
        shards = mesh(size)
    for block in model[:2]:
        fully_shard(block, mesh=shards)
    fully_shard(model, mesh=shards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    """One step on the same data everywhere."""
    model(torch.linspace(-1, 1, 12).reshape(2, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def snapshot(model, optimizer):
    """Global values of all, as plain tensors."""
    parameters, moments = get_state_dict(model, optimizer)
    flat = dict(checkpoint.flatten({"model": parameters, "optimizer": moments}))
    return {
        key: (leaf.full_tensor() if isinstance(leaf, DTensor) else leaf.clone()).detach()
        if isinstance(leaf, torch.Tensor)
        else leaf
        for key, leaf in flat.items()
    }


def same(found, expected):
    """Two snapshots are equal, bit by bit."""
    assert found.keys() == expected.keys()
    for key, leaf in expected.items():
        if isinstance(leaf, torch.Tensor):
            assert torch.equal(found[key], leaf), key
        else:
            assert found[key] == leaf, key


def load_training(path, tensor_parallel, own=False):
    """A model and optimizer of other values, loaded from `path`; `own`: without DCP."""
    model, optimizer = model_and_optimizer(3, tensor_parallel)
    parameters, moments = get_state_dict(model, optimizer)
    into = {"model": parameters, "optimizer": moments}
    if own:
        into = megatron_uring.restore(path, into)
    else:
        dcp.load(into, storage_reader=megatron_uring.StorageReader(path))
    set_state_dict(
        model, optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"]
    )
    return model, optimizer


def training(folder):
    """FSDP2 with an optimizer: through DCP, and by an asynchronous save of ours."""
    for tensor_parallel in (False, True):
        kind = "tp" if tensor_parallel else "fsdp"
        model, optimizer = model_and_optimizer(0, tensor_parallel)
        expected = snapshot(model, optimizer)
        parameters, moments = get_state_dict(model, optimizer)
        full = {"model": parameters, "optimizer": moments}
        dcp.save(full, storage_writer=megatron_uring.StorageWriter(folder / kind))
        same(snapshot(*load_training(folder / kind, not tensor_parallel)), expected)
        torch.save(expected, folder / f"{kind}.expected.{dist.get_rank()}")
        # the first save_async begins to watch optimizers
        megatron_uring.save_async(full, folder / f"own {kind}").wait()
        step(model, optimizer)
        expected = snapshot(model, optimizer)
        parameters, moments = get_state_dict(model, optimizer)
        full = {"model": parameters, "optimizer": moments}
        pending = megatron_uring.save_async(full, folder / f"own {kind}")
        step(model, optimizer)
        report = pending.wait()
        local = sum(
            leaf.to_local().nbytes
            for _, leaf in checkpoint.flatten(full)
            if isinstance(leaf, DTensor)
        )
        assert 0 < report.lazy_bytes, "no part of the optimizer's memory was known"
        assert report.lazy_bytes <= local + 1024
        model, optimizer = load_training(folder / f"own {kind}", not tensor_parallel, own=True)
        same(snapshot(model, optimizer), expected)


# -------------------------------------------------------------------------------------------------
# two ranks


def elsewhere():
    """Load on two ranks what four ranks saved."""
    start_torch()
    folder = Path(sys.argv[1])
    for other in (False, True):
        into = state(other, empty=True)
        dcp.load(into, storage_reader=megatron_uring.StorageReader(folder / "dcp"))
        check(into)
        check(megatron_uring.restore(folder / "own", state(other, empty=True)))
    for kind in ("fsdp", "tp"):
        expected = torch.load(folder / f"{kind}.expected.0")
        same(snapshot(*load_training(folder / kind, False)), expected)


def on_ranks(size, program):
    """Run `program` in forked processes: what takes seconds to import is imported once."""
    place = {**free_rendezvous(), "WORLD_SIZE": str(size)}
    children = [os.fork() or _be(rank, program, place) for rank in range(size)]
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:  # the others would wait for it
            for other in children:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)


def _be(rank, program, place):
    os.environ.update(place, RANK=str(rank))
    try:
        program()
        dist.destroy_process_group()
        say(f"passed {program.__name__}")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    on_ranks(4, write)
    on_ranks(2, elsewhere)
