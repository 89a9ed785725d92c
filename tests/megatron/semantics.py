"""Program for several ranks: what Megatron promises of its state dicts, next to Megatron itself."""

from __future__ import annotations

import argparse
import copy
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checking import (
    MegatronCannotError,
    agree,
    bytes_of,
    folder,
    load_all,
    main,
    meet,
    megatron_alone,
    outcome,
    raised,
    rank,
    same,
    save_both,
    size,
    start,
)
from megatron.core import dist_checkpointing as dc
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.validation import StrictHandling

import megatron_uring
from megatron_uring import timeline
from megatron_uring.errors import StateMismatchError
from megatron_uring.megatron import versions


def cut(key: str, data: torch.Tensor, **options: Any) -> ShardedTensor:
    """This rank's piece of a tensor that is cut along its first axis."""
    return ShardedTensor.from_rank_offsets(key, data, (0, rank(), size()), **options)


def whole(key: str, data: torch.Tensor, **options: Any) -> ShardedTensor:
    """A tensor that all ranks hold."""
    return ShardedTensor.from_rank_offsets(key, data, replica_id=rank(), **options)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def plain(scale: float = 1.0) -> dict[str, Any]:
    """A small state: cut, whole, an object for each rank, and common state."""
    return {
        "a": cut("a", scale * random(2, 3, seed=rank())),
        "nested": {"b": whole("b", scale * random(5, seed=99)), "list": [1, "two"]},
        "object": ShardedObject("o", {"rank": rank(), "x": [1.5]}, (size(),), (rank(),)),
        "step": 7,
        "args": argparse.Namespace(hidden=8, name="x"),
    }


def check_plain_state() -> None:
    found = agree("plain", plain, lambda: plain(0.0))
    assert found["step"] == 7 and found["object"]["rank"] == rank()
    assert bytes_of(found["a"]) == bytes_of(random(2, 3, seed=rank()))


def check_every_strictness() -> None:
    def saved() -> dict[str, Any]:
        made = {**plain(), "extra": cut("extra", random(2))}
        return {**made, "eo": ShardedObject("eo", 1, (1,), (0,), replica_id=rank())}

    def request(unknown: bool, partial: bool) -> dict[str, Any]:
        wanted = saved()
        if partial:
            del wanted["extra"], wanted["eo"]
        if unknown:
            wanted["none"] = cut("none", torch.zeros(2))
            wanted["no_object"] = ShardedObject("no_object", None, (1,), (0,), replica_id=rank())
            if rank() == size() - 1:  # what only one rank asks for
                wanted["own"] = ShardedTensor.from_rank_offsets("own", torch.zeros(2))
        return wanted

    theirs, ours = save_both("strict", saved)
    for strict in StrictHandling:
        for unknown, partial in ((False, True), (True, True), (True, False)):
            wanted = request(unknown, partial)

            def load(path: str, wanted: Any = wanted, strict: Any = strict) -> Any:
                return dc.load(copy.deepcopy(wanted), path, strict=strict)

            found = load_all(theirs, ours, load)
            if strict in (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL):
                # Megatron calls missing what is not asked for, and unexpected what is not there
                assert ("none" in found[2]) == ("no_object" in found[2]) == unknown, found[1:]
                everything = strict is StrictHandling.RETURN_ALL
                assert found[1] == ({"extra", "eo"} if partial and everything else set())


def check_shape_mismatch_allowed() -> None:
    def state() -> dict[str, Any]:
        return {"a": cut("a", 1 + random(3, 4, seed=rank())), "b": whole("b", 1 + random(6))}

    rows = 3 * size()
    for name, total in (("bigger", rows + size()), ("smaller", rows - size())):
        for with_data in (True, False):

            def request(total: int = total, with_data: bool = with_data) -> dict[str, Any]:
                wanted = {
                    "a": cut("a", torch.full((total // size(), 4), 9.0), allow_shape_mismatch=True),
                    "b": whole("b", torch.full((total,), 9.0), allow_shape_mismatch=True),
                }
                if not with_data:
                    wanted = {key: leaf.without_data() for key, leaf in wanted.items()}
                return wanted

            found = agree(f"mismatch_{name}_{with_data}", state, request)
            if name == "bigger":
                assert found["b"][6:].eq(0).all() and found["b"][:6].ne(0).all()


def check_shape_mismatch_refused() -> None:
    found = agree("mismatch_refused", plain, lambda: {"b": whole("b", torch.zeros(6))})
    assert "b" in str(found) and "[6]" in str(found) and "[5]" in str(found), found


def check_objects_and_local_values() -> None:
    def state() -> dict[str, Any]:
        return {
            "grid": ShardedObject("grid/x|y", (rank(), "é"), (2, size()), (0, rank())),
            "grid2": ShardedObject(
                "grid/x|y", np.arange(3, dtype=np.uint32) + rank(), (2, size()), (1, rank())
            ),
            "shared": ShardedObject("shared", torch.arange(4), (1,), (0,), replica_id=rank()),
            "local": LocalNonpersistentObject({"never": "saved"}),
        }

    found = agree("objects", state, state)
    assert found["local"] == {"never": "saved"} and found["grid"] == (rank(), "é")
    assert found["grid2"].tolist() == [rank(), rank() + 1, rank() + 2]
    # an object of another rank, and one that all ranks ask for at once
    other = (rank() + 1) % size()

    def request() -> dict[str, Any]:
        return {"grid": ShardedObject("grid/x|y", None, (2, size()), (0, other), replica_id=1)}

    options = {"validate_access_integrity": False}
    assert agree("objects_other", state, request, **options)["grid"] == (other, "é")


def check_factories() -> None:
    def build(
        key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any
    ) -> dict[str, Any]:
        halves = torch.chunk(data, 2)
        return {
            "w": ShardedTensor.from_rank_offsets(
                f"{key}/w", halves[0], (0, rank(), size()), replica_id=replica_id
            ),
            "v": ShardedTensor.from_rank_offsets(
                f"{key}/v", halves[1], (0, rank(), size()), replica_id=replica_id
            ),
        }

    def state(scale: float = 1.0) -> dict[str, Any]:
        data = scale * random(4, 3, seed=rank())
        return {
            "glu": ShardedTensorFactory(
                "glu", data, build, lambda parts: torch.cat([parts["w"], parts["v"]])
            )
        }

    found = agree("factories", state, lambda: state(0.0))
    assert bytes_of(found["glu"]) == bytes_of(random(4, 3, seed=rank()))


def check_layers_under_one_key() -> None:
    layers = 3

    def state(scale: float = 1.0) -> dict[str, Any]:
        return {
            f"layer{n}": ShardedTensor.from_rank_offsets(
                "layers.weight",
                scale * random(2, 5, seed=10 * rank() + n),
                (0, rank() * layers + n, size() * layers),
                (2, 0, 1),
                prepend_axis_num=1,
            )
            for n in range(layers)
        }

    def other_layout() -> dict[str, Any]:
        total = layers * size()
        return {
            f"layer{n}": ShardedTensor.from_rank_offsets(
                "layers.weight",
                torch.zeros(1, 5),
                (0, n, total),
                (1, rank() % 2, 2),
                prepend_axis_num=1,
                replica_id=rank() // 2,
            )
            for n in range(total)
        }

    agree("layers", state, lambda: state(0.0))
    agree("layers_resharded", state, other_layout)


def check_uneven_shards_with_empty_ones() -> None:
    _check_splits([[2, 2, 2, 0], [0, 6, 0, 0]] if size() == 4 else [[6, 0], [0, 6], [5, 1]])


def check_shards_that_are_no_regular_grid() -> None:
    irregular = [2, 1, 0, 3] if size() == 4 else [2, 4]
    try:
        for own_rank in range(size()):
            _piece(irregular, own_rank)
    except CheckpointingException as error:
        raise MegatronCannotError(str(error).partition(" for ")[0]) from None
    _check_splits([irregular, [3, 3, 0, 0] if size() == 4 else [3, 3]])


def _check_splits(ways: list[list[int]]) -> None:
    """Each way of cutting 6 rows saved, and loaded in each of the others."""
    for source in ways:
        for target in ways:
            # Megatron's torch_dist cannot write an empty shard that ends where its tensor does
            path = folder(f"uneven_{source}_{target}")
            saved = {"u": _piece(source, rank())}
            dc.save(saved, str(path), validate_access_integrity=False)
            wanted = {"u": _piece(target, rank(), scale=0.0)}
            found = dc.load(wanted, str(path), validate_access_integrity=False)
            same(found["u"], _piece(target, rank()).data)


def _piece(split: list[int], number: int, scale: float = 1.0) -> ShardedTensor:
    at, rows = sum(split[:number]), split[number]
    data = random(sum(split), 3)[at : at + rows].clone() * scale
    shape = tuple(data.shape)
    return ShardedTensor("u", data, data.dtype, shape, (sum(split), 3), (at, 0), None, 0)


def check_every_dtype_and_shape() -> None:
    names = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64"

    def state(fill: bool = True) -> dict[str, Any]:
        made: dict[str, Any] = {}
        generator = np.random.default_rng(rank())
        for name in names.split():
            values = generator.integers(0, 2 if name == "bool" else 256, 48, np.uint8)
            data = torch.from_numpy(values if fill else np.zeros_like(values))
            made[name] = cut(name, data.view(getattr(torch, name)).clone())
        for number, shape in enumerate(((), (1,), (1, 1, 1), (2, 1, 3, 1, 2))):
            data = random(*shape, seed=number) if fill else torch.zeros(shape)
            made[f"shape{number}"] = whole(f"shape{number}", data)
        return made

    agree("dtypes", state, lambda: state(False))


def check_tensor_without_elements() -> None:
    def empty() -> dict[str, Any]:
        data = torch.zeros(3, 0, 2)
        leaf = ShardedTensor(
            "empty", data, data.dtype, (3, 0, 2), (3, 0, 2), (0, 0, 0), None, rank()
        )
        return {"empty": leaf, "full": cut("full", random(2, seed=rank()))}

    # Megatron's torch_dist divides by the size of a dimension here
    path = folder("empty")
    dc.save(empty(), str(path), validate_access_integrity=False)
    found = dc.load(empty(), str(path), validate_access_integrity=False)
    assert found["empty"].shape == (3, 0, 2)
    same(found["full"], random(2, seed=rank()))


def check_views_and_strides() -> None:
    def state() -> dict[str, Any]:
        big = random(40, 40, seed=rank())
        return {
            "view": cut("view", big[3:7, ::5]),
            "transposed": cut("transposed", big[:6, :4].t()),
            "expanded": cut("expanded", big[:1, :1].expand(3, 4)),
        }

    def request() -> dict[str, Any]:
        return {
            "view": cut("view", torch.full((8, 8), -1.0).t()[::2]),
            "transposed": cut("transposed", torch.full((6, 4), -1.0).t()),
            "expanded": cut("expanded", torch.full((3, 9), -1.0)[:, 1:5]),
        }

    agree("strides", state, request)
    # the destination is filled in place, and nothing around it
    path = folder("strides_ours")
    dc.save(state(), str(path))
    around = torch.full((8, 9), -1.0)
    loaded = dc.load({"view": cut("view", around[::2, :8])}, str(path))
    assert bytes_of(around[::2, :8]) == bytes_of(random(40, 40, seed=rank())[3:7, ::5])
    assert around[1::2].eq(-1).all() and around[:, 8].eq(-1).all()
    assert loaded["view"].data_ptr() == around.data_ptr()
    parameter = torch.nn.Parameter(torch.zeros(4, 8))
    assert not dc.load({"view": cut("view", parameter)}, str(path))["view"].requires_grad


def check_data_is_none() -> None:
    def request() -> dict[str, Any]:
        return {key: leaf.without_data() for key, leaf in plain().items() if key == "a"}

    agree("without_data", plain, request)


def check_two_leaves_of_one_shard() -> None:
    def request() -> dict[str, Any]:
        return {"one": cut("a", torch.zeros(2, 3)), "other": cut("a", torch.zeros(2, 3))}

    def load(path: str) -> Any:
        return dc.load(request(), path, validate_access_integrity=False)

    theirs, ours = save_both("tied", plain)
    with megatron_alone():
        expected = outcome(load, theirs)
    if isinstance(expected, ValueError):
        raise MegatronCannotError(str(expected).rpartition(" ")[2])
    load_all(theirs, ours, load)


def check_who_owns_a_shard() -> None:
    path = folder("owners")
    dc.save(plain(), str(path))
    # one main replica each: two ranks that both say 0, and nobody who does
    for what, replica in (("two", 0), ("no", 1 + rank())):
        state = {"kept": cut("kept", random(2)), "bad": whole("bad/key", random(3))}
        state["bad"].replica_id = replica
        raised(
            lambda state=state: dc.save(state, str(path), validate_access_integrity=False),
            "bad/key",
            what if what == "two" else "",
            kind=StateMismatchError,
        )
        same(dc.load(plain(0.0), str(path))["a"], plain()["a"].data)
    # two ranks that save an object of one key
    state = {"bad": ShardedObject("bad/object", 1, (1,), (0,))}
    raised(
        lambda: dc.save(state, str(path), validate_access_integrity=False),
        "bad/object",
        "two",
        kind=StateMismatchError,
    )
    # pieces that overlap in part: rank 0's of 4 elements is one of 2 too long
    rows = 2 if rank() else 4
    at = 2 * rank()
    piece = ShardedTensor(
        "bad/key", random(rows), torch.float32, (rows,), (2 * size(),), (at,), None, 0
    )
    state = {"bad": piece}
    raised(
        lambda: dc.save(state, str(path), validate_access_integrity=False),
        "bad/key",
        kind=StateMismatchError,
    )
    same(dc.load(plain(0.0), str(path))["a"], plain()["a"].data)


def check_metadata_without_loading() -> None:
    metadata = {"sharding": "fully", "n": [1]}
    theirs, ours = save_both("metadata", plain, content_metadata=metadata)
    for load in (
        dc.load_tensors_metadata,
        dc.serialization.load_sharded_metadata,
        dc.load_common_state_dict,
        dc.load_content_metadata,
        dc.load_plain_tensors,
    ):
        found = load_all(theirs, ours, load)
        assert not isinstance(found, BaseException), found
    assert dc.load_content_metadata(ours) == metadata
    keys = set(dc.serialization.load_sharded_metadata(ours))
    objects = {f"o/shard_{n}_{size()}" for n in range(size())}
    common = {"common_state/shard_0_1"} if versions.has_common_object() else set()
    assert keys == {"a", "b"} | objects | common, keys
    plain_tensors = dc.load_plain_tensors(ours)
    assert plain_tensors["a"].shape == (2 * size(), 3), plain_tensors


def check_tensors_removed() -> None:
    path = folder("removed")
    dc.save({"x": cut("drop.x", random(2)), "y": whole("drop.y", random(4)), **plain()}, str(path))
    meet()
    failure = [None]
    if rank() == 0:
        failure = [outcome(lambda place: dc.remove_sharded_tensors(place, "drop."), str(path))]
    torch.distributed.broadcast_object_list(failure)
    if isinstance(failure[0], AttributeError):  # in 0.17 and 0.18, whoever has saved
        raise MegatronCannotError(str(failure[0]))
    assert set(dc.load_tensors_metadata(str(path))) == {"a", "b"}
    same(dc.load(plain(0.0), str(path))["a"], plain()["a"].data)
    raised(lambda: dc.load({"x": cut("drop.x", torch.zeros(2))}, str(path)), "drop.x")
    assert dc.load_common_state_dict(str(path))["step"] == 7


def check_asynchronous_request() -> None:
    for persistent in (False, True):
        calls = AsyncCallsQueue(persistent)
        for number in range(2):
            path = folder(f"async_{persistent}_{number}")
            order: list[str] = []
            state = plain(1.0 + number)
            request = dc.save(state, str(path), async_sharded_save=True)
            request.add_finalize_fn(lambda order=order: order.append("finalized"))
            calls.schedule_async_request(request)
            state["a"].data.zero_()  # the optimizer's next step
            calls.maybe_finalize_async_calls(blocking=True)
            assert order == ["finalized"] and calls.get_num_unfinalized_calls() == 0
            meet()
            assert (path / "metadata.json").exists()
            kept = timeline.read(str(path))
            assert kept.asynchronous and len(kept.ranks) == torch.distributed.get_world_size()
            same(dc.load(plain(0.0), str(path))["a"], plain(1.0 + number)["a"].data)
            assert dc.load_common_state_dict(str(path))["step"] == 7
        calls.close()


def check_newest_of_one_directory() -> None:
    path = folder("overwritten")

    def expect(scale: float, ours: bool) -> None:
        meet()
        found = dc.load(plain(0.0), str(path))
        same(found["a"], plain(scale)["a"].data)
        assert found["step"] == int(scale)
        assert dc.load_common_state_dict(str(path))["step"] == int(scale)
        assert '"megatron_uring"' in (path / "metadata.json").read_text() or not ours
        assert (path / "index.h5").exists() == ours
        own = [name for name in _names(path) if name.endswith(".bin") or "uring" in name]
        assert bool(own) == ours, own
        meet()

    for scale, ours in enumerate((True, True, False, False, True, False, True), 1):
        state = {**plain(float(scale)), "step": scale}
        if ours:
            dc.save(state, str(path))
        else:
            megatron_uring.enable(save=False)
            dc.save(state, str(path))
            megatron_uring.enable()
        expect(float(scale), ours)
    _check_that_megatron_reads_its_own(path)


def _names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def _check_that_megatron_reads_its_own(path: Path) -> None:
    megatron_uring.enable(save=False)
    dc.save({**plain(3.0), "step": 3}, str(path))
    megatron_uring.enable()
    with megatron_alone():
        same(dc.load(plain(0.0), str(path))["a"], plain(3.0)["a"].data)


def check_save_by_another_strategy_is_told() -> None:
    class Other(TorchDistSaveShardedStrategy):
        """A strategy that writes on its own, as an extension of Megatron may."""

        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            with megatron_saving():
                # from 0.17 on NVRx is what it would take, which need not be there
                known = inspect.signature(TorchDistSaveShardedStrategy.async_save).parameters
                strategy = {"async_strategy": "mcore"} if "async_strategy" in known else {}
                super().async_save(sharded_state_dict, checkpoint_dir, **strategy).execute_sync()

    class megatron_saving:  # noqa: N801 - a context manager
        def __enter__(self) -> None:
            installed = _installed()
            self.kept, installed.active = installed.active, False

        def __exit__(self, *error: object) -> None:
            _installed().active = self.kept

    path = folder("bypassed")
    before = megatron_uring.status()["bypassed_saves"]
    dc.save(plain(), str(path), Other("torch_dist", 1))
    assert megatron_uring.status()["bypassed_saves"] == before + (rank() == 0)
    meet()
    found = dc.load(plain(0.0), str(path))
    same(found["a"], plain()["a"].data)
    assert found["step"] == 7
    assert (path / "common.pt").exists() != versions.has_common_object()


def _installed() -> Any:
    from megatron_uring.megatron import switch

    return switch._switch.installed


def begin() -> None:
    start()
    megatron_uring.enable()


if __name__ == "__main__":
    main(globals(), begin)
