"""Program for two ranks: conversions that they share, and errors of one that both raise."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from world import raises, say

import megatron_uring
from megatron_uring import Config, _engine, comm, verify
from megatron_uring.convert import convert, parts
from megatron_uring.errors import CorruptionError

parts.WINDOW_BYTES = 1 << 20
CONFIG = Config(engine="posix", slab_bytes=1 << 20, slab_count=2, aggregation="rank")


def state():
    """Several tensors of several windows, some of them smaller."""
    generator = torch.Generator().manual_seed(1)
    sizes = {"a": (700, 900), "b": (7,), "c": (3, 500_000), "e": (), "f": (0, 2)}
    return {key: torch.randn(size, generator=generator) for key, size in sizes.items()}


def main():
    """All that two ranks do."""
    folder, world = Path(sys.argv[1]), comm.current(40.0, "auto")
    assert world.size == 2
    whole = state()
    rows = {
        key: megatron_uring.Shard(
            tensor.tensor_split(2)[world.rank],
            tuple(tensor.shape),
            (sum(map(len, tensor.tensor_split(2)[: world.rank])), 0),
        )
        for key, tensor in whole.items()
        if tensor.dim() == 2 and len(tensor)
    }
    megatron_uring.save({**whole, **rows, "step": 7}, folder / "0", config=CONFIG)
    kinds = ["torch_dist", "safetensors", "ours", "safetensors", "torch_dist", "ours", "ours"]
    for number, kind in enumerate(kinds[:-1]):
        done = convert(folder / str(number), folder / str(number + 1), kind, config=CONFIG)
        assert (done.tensors, done.nbytes) == (5, sum(one.nbytes for one in whole.values()))
    shared = replace(CONFIG, aggregation="shared")
    _engine.trace_start()
    convert(folder / "5", folder / "7", "ours", config=shared)
    synced = {
        Path(path).name[:5] for operation, path, *_ in _engine.trace_stop() if operation == "sync"
    }
    assert "data-" in synced, synced  # each rank what it wrote
    for number in (3, 6, 7):
        found = megatron_uring.restore(folder / str(number), config=CONFIG)
        assert all(torch.equal(value, found[key]) for key, value in whole.items())
        assert verify.verify(str(folder / str(number)), world, CONFIG).good
    assert len(list((folder / "1").glob("*.distcp"))) == 2
    assert len(list((folder / "2").glob("*.safetensors"))) >= 2
    assert len(list((folder / "6").glob("data-*"))) == 2
    assert len(list((folder / "7").glob("data-*"))) == 1
    names = set(
        json.loads((folder / "2" / "model.safetensors.index.json").read_text())["weight_map"]
    )
    assert names == set(whole)
    errors(folder, world)
    say("passed")


def errors(folder, world):
    """A file that one rank reads was cut; both raise, and nothing is left."""
    if world.rank == 0:
        path = folder / "1" / "__1_0.distcp"
        os.truncate(path, path.stat().st_size // 2)
    world.barrier()
    for kind in ("ours", "safetensors"):
        with raises(CorruptionError, "__1_0.distcp", "the file was cut"):
            convert(folder / "1", folder / "bad", kind, config=CONFIG)
        world.barrier()
        assert not (folder / "bad").exists() and not list(folder.glob(".*"))
        world.barrier()


if __name__ == "__main__":
    main()
