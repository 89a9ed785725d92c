"""Program for one process: what `enable` and `disable` do to Megatron, and what `status` says."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

import torch
from checking import folder as new_folder
from checking import main, meet, start
from megatron import core
from megatron.core import dist_checkpointing as dc
from megatron.core.dist_checkpointing import ShardedTensor, serialization
from megatron.core.dist_checkpointing.strategies import common
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from torch.distributed.checkpoint.api import CheckpointException

import megatron_uring
from megatron_uring import timeline
from megatron_uring.errors import UnsupportedError
from megatron_uring.megatron import versions

SAVER = torch_strategies.TorchDistSaveShardedStrategy
LOADER = torch_strategies.TorchDistLoadShardedStrategy
PLACES: list[Any] = [SAVER, LOADER, serialization, dc, common, torch_strategies]
PLACES += [kind for kind in vars(common).values() if isinstance(kind, type)]
REGISTRY = versions.registry()  # of strategies; none from 0.19 on


def snapshot() -> list[Any]:
    """Every name of every place that the adapter may touch, and the table of strategies."""
    names = [dict(vars(place)) for place in PLACES]
    strategies = REGISTRY.default_strategies if REGISTRY is not None else {}
    return [*names, {action: dict(found) for action, found in strategies.items()}]


def identical(before: list[Any], after: list[Any]) -> None:
    """The same names, each bound to the same object."""
    for left, right in zip(before, after, strict=True):
        assert list(left) == list(right) or set(left) == set(right), set(left) ^ set(right)
        for name in left:
            if isinstance(left[name], dict) and left is before[-1]:
                assert left[name] == right[name], name
            else:
                assert left[name] is right[name], name


def state() -> dict[str, Any]:
    return {"a": ShardedTensor.from_rank_offsets("a", torch.arange(4.0)), "step": 3}


def check_undone_exactly() -> None:
    before = snapshot()
    own = "save" in vars(SAVER)  # up to 0.18 inherited: it must be gone from the class again
    for options in ({}, {"save": False}):
        assert megatron_uring.enable(**options)
        changed = [n for n in vars(SAVER) if vars(SAVER)[n] is not before[0].get(n)]
        assert set(changed) == ({"async_save", "save"} if not options else set()), changed
        assert vars(LOADER)["load"] is not before[1]["load"]
        megatron_uring.disable()
        identical(before, snapshot())
        assert ("save" in vars(SAVER)) == own


def check_twice_is_once() -> None:
    before = snapshot()
    megatron_uring.disable()
    identical(before, snapshot())
    assert megatron_uring.enable() and megatron_uring.enable()
    status = megatron_uring.status()
    assert status["enabled"] and status["reason"] == "enabled", status
    assert status["patched"] == [point.path for point in versions.points(save=True)]
    assert len(status["patched"]) == len(set(status["patched"])) >= 11, status["patched"]
    assert all(name.startswith("megatron.core.dist_checkpointing.") for name in status["patched"])
    assert status["versions"]["megatron.core"] == core.__version__
    megatron_uring.disable()
    megatron_uring.disable()
    identical(before, snapshot())
    status = megatron_uring.status()
    assert (status["enabled"], status["patched"], status["saves"]) == (False, [], 0)
    assert "disable" in status["reason"]


def check_before_init_process_group() -> None:
    assert not torch.distributed.is_initialized()
    megatron_uring.enable()
    assert not torch.distributed.is_initialized()
    start()
    path = new_folder("before_init")
    dc.save(state(), str(path))
    loaded = dc.load({"a": ShardedTensor.from_rank_offsets("a", torch.zeros(4))}, str(path))
    assert loaded["a"].tolist() == [0, 1, 2, 3] and loaded["step"] == 3
    status = megatron_uring.status()
    assert (status["saves"], status["loads"], status["bypassed_saves"]) == (1, 1, 0), status
    assert status["last_save"]["directory"] == str(path)
    assert status["last_save"]["state_bytes"] >= 16
    assert status["last_save"]["blocked_ms"] > 0 and status["last_save"]["gigabytes_per_s"] > 0
    assert not timeline.read(str(path)).asynchronous
    assert status["last_restore"]["save_id"] == status["last_save"]["save_id"]
    assert status["engines"], status
    megatron_uring.disable()


def check_switched_off_by_the_environment() -> None:
    before = snapshot()
    megatron_uring.enable()
    os.environ["MEGATRON_URING"] = "off"
    try:
        assert not megatron_uring.enable()
        identical(before, snapshot())
        assert "MEGATRON_URING=off" in megatron_uring.status()["reason"]
    finally:
        del os.environ["MEGATRON_URING"]


def check_reading_only() -> None:
    path, theirs = new_folder("reading/ours"), new_folder("reading/theirs")
    megatron_uring.enable()
    dc.save(state(), str(path))
    megatron_uring.enable(save=False)
    loaded = dc.load({"a": ShardedTensor.from_rank_offsets("a", torch.zeros(4))}, str(path))
    assert loaded["a"].tolist() == [0, 1, 2, 3] and loaded["step"] == 3
    dc.save(state(), str(theirs))
    assert (theirs / ".metadata").exists() and not (theirs / "index.h5").exists()
    status = megatron_uring.status()
    assert (status["saves"], status["loads"], status["bypassed_saves"]) == (0, 1, 0), status
    assert "reading only" in status["reason"]
    megatron_uring.disable()
    # without us Megatron refuses it: by the name of the format while it asks for that (up to 0.16)
    try:
        dc.load({"a": ShardedTensor.from_rank_offsets("a", torch.zeros(4))}, str(path))
    except (dc.mapping.CheckpointingException, CheckpointException) as error:
        assert ("megatron_uring" if REGISTRY is not None else str(path)) in str(error), error
    else:
        raise AssertionError("Megatron loaded what it cannot know")


def check_unsupported_version() -> None:
    before, version = snapshot(), core.__version__
    for wrong in ("0.11.3", "0.99.0", "1.0.0rc1"):
        core.__version__ = wrong
        try:
            try:
                megatron_uring.enable()
            except UnsupportedError as error:
                assert wrong in str(error), error
            else:
                raise AssertionError(f"{wrong} was accepted")
            identical(before, snapshot())
            records: list[str] = []
            handler = logging.Handler()
            handler.emit = lambda record, kept=records: kept.append(record.getMessage())
            logging.getLogger("megatron_uring").addHandler(handler)
            assert megatron_uring.enable(required=False) is False
            logging.getLogger("megatron_uring").removeHandler(handler)
            assert any(wrong in text for text in records), records
            identical(before, snapshot())
            assert wrong in megatron_uring.status()["reason"]
        finally:
            core.__version__ = version


def check_missing_patch_point() -> None:
    owners = {
        (SAVER, "async_save"): "TorchDistSaveShardedStrategy.async_save",
        (LOADER, "load_sharded_metadata"): "TorchDistLoadShardedStrategy.load_sharded_metadata",
        (serialization, "save_config"): "serialization.save_config",
    }
    if versions.has_common_object():
        owners[dc, "load_common_state_dict"] = "dist_checkpointing.load_common_state_dict"
    elif hasattr(common, "TorchCommonLoadStrategy"):
        loader = common.TorchCommonLoadStrategy
        owners[loader, "load_common"] = "TorchCommonLoadStrategy.load_common"
    if REGISTRY is not None:
        owners[REGISTRY, "register_default_strategy"] = "base.register_default_strategy"
    for (owner, name), path in owners.items():
        kept = vars(owner)[name]
        bases, abstract = getattr(owner, "__bases__", ()), None
        for each in bases:  # an abstract method that is inherited would hide that it is gone
            if name in vars(each):
                abstract = (each, vars(each)[name])
                delattr(each, name)
        delattr(owner, name)
        before = snapshot()
        try:
            megatron_uring.enable()
        except UnsupportedError as error:
            assert path in str(error) and core.__version__ in str(error), error
        else:
            raise AssertionError(f"enable() did not miss {path}")
        finally:
            identical(before, snapshot())
            setattr(owner, name, kept)
            if abstract is not None:
                setattr(abstract[0], name, abstract[1])
        assert not megatron_uring.status()["enabled"]
    assert importlib.import_module("megatron_uring").enable()
    megatron_uring.disable()


def check_unknown_option() -> None:
    before = snapshot()
    try:
        megatron_uring.enable(slab_megabytes=3)
    except UnsupportedError as error:
        assert "slab_megabytes" in str(error)
    else:
        raise AssertionError("an unknown option was accepted")
    identical(before, snapshot())


def check_wrapped_by_somebody_else() -> None:
    path = new_folder("wrapped")
    original = vars(LOADER)["load"]
    megatron_uring.enable()
    dc.save(state(), str(path))
    ours, calls = vars(LOADER)["load"], []

    def wrapped(self: Any, *arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        return ours(self, *arguments, **keywords)

    LOADER.load = wrapped
    megatron_uring.disable()
    assert vars(LOADER)["load"] is wrapped
    theirs = new_folder("wrapped_theirs")
    dc.save(state(), str(theirs))
    request = {"a": ShardedTensor.from_rank_offsets("a", torch.zeros(4))}
    assert dc.load(request, str(theirs))["a"].tolist() == [0, 1, 2, 3]
    assert calls == [1]
    megatron_uring.enable()  # on top of the wrapper, and off again
    assert dc.load(request, str(path))["a"].tolist() == [0, 1, 2, 3]
    megatron_uring.disable()
    assert vars(LOADER)["load"] is wrapped
    assert dc.load(request, str(theirs))["a"].tolist() == [0, 1, 2, 3]
    LOADER.load = original
    meet()


if __name__ == "__main__":
    main(globals(), begin=lambda: None)
