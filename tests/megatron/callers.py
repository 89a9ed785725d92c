"""Program for several ranks: who saves and loads, into what, and what else is in the directory."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from checking import (
    MegatronCannotError,
    agree,
    folder,
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
from megatron.core import fp8_utils
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from quantized import Quantized
from semantics import cut, plain, random, whole

import megatron_uring
from megatron_uring.errors import StateMismatchError
from megatron_uring.megatron import versions


class Custom:
    """A class of the user's, which objects of a checkpoint may hold only if it is named."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


def check_load_by_one_rank() -> None:
    path = folder("one")
    dc.save(plain(), str(path))
    meet()
    if rank() == size() - 1:  # the others do nothing at all meanwhile
        request = {
            "a": ShardedTensor.from_rank_offsets("a", torch.zeros(2 * size(), 3)),
            "object": ShardedObject("o", None, (size(),), (0,)),
        }
        found = dc.load(request, str(path), validate_access_integrity=False)
        same(found["a"], torch.cat([random(2, 3, seed=n) for n in range(size())]))
        assert found["object"] == {"rank": 0, "x": [1.5]} and found["step"] == 7
    meet()


def check_load_by_a_subgroup() -> None:
    path = folder("subgroup")
    dc.save(plain(), str(path))
    members = list(range(1, size()))
    group = torch.distributed.new_group(members, backend="gloo")
    if rank() in members:
        place = (0, members.index(rank()), len(members))
        rows = 2 * size() // len(members) if 2 * size() % len(members) == 0 else 0
        wanted = whole("b", torch.zeros(5))
        request: dict[str, Any] = {"b": wanted}
        if rows:
            request["a"] = ShardedTensor.from_rank_offsets("a", torch.zeros(rows, 3), place)
        found = dc.load(request, str(path), validate_access_integrity=False)
        same(found["b"], random(5, seed=99))
        if rows:
            everything = torch.cat([random(2, 3, seed=n) for n in range(size())])
            same(found["a"], everything[place[1] * rows : (place[1] + 1) * rows].clone())
        torch.distributed.barrier(group)
    meet()


def check_several_models_take_turns() -> None:
    def state(model: int, scale: float) -> dict[str, Any]:
        rows = 2 + model
        made = {
            f"m{model}.w": cut(f"m{model}.w", scale * random(rows, 4, seed=10 * model + rank())),
            "shared.name": cut("shared.name", scale * random(model + 1, seed=model)),
        }
        return {**made, "model": model}

    for turn in range(3):
        for model in range(3):
            path = folder(f"models/{model}/{turn}")
            dc.save(state(model, 1.0 + turn), str(path))
    for turn in range(3):
        for model in range(3):
            found = dc.load(state(model, 0.0), str(folder(f"models/{model}/{turn}")))
            expected = state(model, 1.0 + turn)
            same(found[f"m{model}.w"], expected[f"m{model}.w"].data)
            same(found["shared.name"], expected["shared.name"].data)
            assert found["model"] == model


def check_others_files_in_the_directory() -> None:
    path = folder("crowded")
    inner = folder("crowded/modelopt_state")
    if rank() == 0:
        (path / "run_config.yaml").write_text("a: 1\n")
        (path / "data-of-mine.bin").write_bytes(b"mine")
    meet()
    for scale in (1.0, 2.0):
        dc.save(plain(scale), str(path))
        dc.save({"inner": cut("inner", scale + random(2, seed=rank()))}, str(inner))
    for scale, place, key in ((2.0, path, "a"), (2.0, inner, "inner")):
        request = plain(0.0) if key == "a" else {"inner": cut("inner", torch.zeros(2))}
        expected = plain(scale)["a"].data if key == "a" else scale + random(2, seed=rank())
        same(dc.load(request, str(place))[key], expected)
    meet()
    assert (path / "run_config.yaml").read_text() == "a: 1\n"
    assert (path / "data-of-mine.bin").read_bytes() == b"mine"


def check_fully_parallel_wrappers_with_a_cached_distribution() -> None:
    group = torch.distributed.group.WORLD
    saver = FullyParallelSaveStrategyWrapper(
        dc.serialization.get_default_save_sharded_strategy(), group, True
    )

    def state(scale: float) -> dict[str, Any]:
        made = {f"w{n}": whole(f"w{n}", scale * random(3 + n, 4, seed=n)) for n in range(6)}
        return {**made, "c": cut("c", scale * random(2, seed=rank()))}

    for scale in (1.0, 2.0, 3.0):  # from the second on the distribution of the first is used
        path = folder(f"cached/{scale}")
        dc.save(state(scale), str(path), saver)
    base = dc.serialization.get_default_load_sharded_strategy(str(folder("cached/1.0")))
    loader = FullyParallelLoadStrategyWrapper(base, group, do_cache_distribution=True)
    for scale in (3.0, 1.0, 2.0):
        found = dc.load(state(0.0), str(folder(f"cached/{scale}")), loader)
        for key, leaf in state(scale).items():
            same(found[key], leaf.data)
    counted = [len(list(folder(f"cached/{scale}").glob("data-*.bin"))) for scale in (1.0, 3.0)]
    assert counted == [size(), size()], counted


def check_classes_that_are_allowed_by_name() -> None:
    path = folder("custom")

    def state(value: int) -> dict[str, Any]:
        return {
            "o": ShardedObject("custom", Custom(value), (size(),), (rank(),)),
            "a": cut("a", random(2)),
            "common": Custom(7),
        }

    raised(lambda: dc.save(state(rank()), str(path)), "Custom", kind=StateMismatchError)
    megatron_uring.enable(allowed_globals=[f"{Custom.__module__}.Custom"])
    try:
        dc.save(state(rank()), str(path))
        found = dc.load(state(-1), str(path))
        assert found["o"] == Custom(rank()) and found["common"] == Custom(7)
    finally:
        megatron_uring.enable()
    raised(lambda: dc.load(state(-1), str(path)), "Custom")
    meet()


def check_integrity_manifest() -> None:
    path = folder("manifest")
    try:
        dc.save(plain(), str(path), verify_integrity=True)
    except TypeError as error:  # up to 0.16
        raise MegatronCannotError("save() knows no verify_integrity") from error
    meet()
    listed = json.loads((path / "integrity.json").read_text())["files"]
    assert "index.h5" in listed and any(name.startswith("data-") for name in listed), listed
    found = dc.load(plain(0.0), str(path), verify_integrity=True)
    same(found["a"], plain()["a"].data)
    meet()
    subfile = next(path.glob("data-*.bin"))
    if rank() == 0:
        with subfile.open("r+b") as file:
            file.seek(5)
            byte = file.read(1)
            file.seek(5)
            file.write(bytes([byte[0] ^ 1]))
    meet()
    error = outcome(lambda place: dc.load(plain(0.0), place, verify_integrity=True), str(path))
    assert subfile.name in str(error), error


def check_quantized_tensors() -> None:
    values = random(4, 6, seed=rank()).to(torch.bfloat16)

    def state(fill: torch.Tensor) -> dict[str, Any]:
        return {"q": cut("q", Quantized.of(fill)), "p": cut("p", fill.clone())}

    path = folder("quantized")
    engine = {"HAVE_TE_FP8_TENSOR_CLASS": True, "FP8_TENSOR_CLASS": Quantized}
    engine["is_te_min_version"] = lambda *_: True
    # Megatron then takes the stand-in for Transformer Engine's
    with mock.patch.multiple(fp8_utils, create=True, **engine):
        dc.save(state(values), str(path))
        request = state(torch.zeros_like(values))
        own, amax = request["q"].data, request["q"].data._quantizer.amax
        found = dc.load(request, str(path))
    # what it stood for when it was saved, to the last bit
    stored = dc.load({"q": cut("q", torch.zeros(4, 6, dtype=torch.bfloat16))}, str(path))
    same(stored["q"], Quantized.of(values).dequantize())
    loaded = found["q"].dequantize() if isinstance(found["q"], Quantized) else found["q"]
    same(loaded, stored["q"])
    same(found["p"], values)
    assert amax.item() == 0.0
    # from 0.19 on it is filled in place; before, Megatron gives a tensor of the values
    in_place = hasattr(versions.load_strategy()(), "stream_ckpt_dequant")
    assert isinstance(found["q"], Quantized) == in_place
    if in_place:
        same(own.dequantize(), stored["q"])


def check_common_state_alone() -> None:
    """State without any tensor, and with nothing in common."""
    agree("only_common", lambda: {"step": 3, "name": "x"}, dict)
    path = folder("only_objects")
    dc.save({"o": ShardedObject("o", rank(), (size(),), (rank(),))}, str(path))
    request = {"o": ShardedObject("o", None, (size(),), (rank(),))}
    assert dc.load(request, str(path))["o"] == rank()


def check_megatrons_own_checkpoint_is_loaded_unchanged() -> None:
    theirs, _ = save_both("own", plain)
    before = megatron_uring.status()["loads"]
    with megatron_alone():
        expected = dc.load(plain(0.0), theirs)
    same(expected, dc.load(plain(0.0), theirs))
    assert megatron_uring.status()["loads"] == before
    assert SimpleNamespace(**dc.load_common_state_dict(theirs)).step == 7


def begin() -> None:
    start()
    megatron_uring.enable()


if __name__ == "__main__":
    main(globals(), begin)
