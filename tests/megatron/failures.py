"""Program for two ranks: every way to fail raises on every rank, and the old checkpoint is there.

The folder of each check is on an ordinary file system, but for ``$SMALL_FILE_SYSTEM``, if set.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from checking import FOLDER, folder, main, meet, raised, rank, same, size, start
from megatron.core import dist_checkpointing as dc
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

import megatron_uring
from megatron_uring.errors import (
    CorruptionError,
    NotACheckpointError,
    StateMismatchError,
    StorageError,
    UnsupportedError,
)

NOBODY = 65534


class Custom:
    """A class that no checkpoint may hold."""


def cut(key: str, data: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data, (0, rank(), size()))


def state(value: float, elements: int = 1000) -> dict[str, Any]:
    return {
        "a": cut("a", torch.full((elements,), value)),
        "o": ShardedObject("o", {"value": value}, (size(),), (rank(),)),
        "step": int(value),
    }


def expect(path: Path, value: float, elements: int = 1000) -> None:
    """The checkpoint of `value` loads, and nothing of a failed save is left."""
    found = dc.load(state(0.0, elements), str(path))
    same(found["a"], torch.full((elements,), value))
    assert found["step"] == int(value) and found["o"] == {"value": value}
    meet()
    names = sorted(entry.name for entry in path.iterdir())
    ids = {part for name in names for part in _save_ids(name)}
    assert len(ids) == 1, names
    meet()


def _save_ids(name: str) -> list[str]:
    return re.findall(r"[0-9a-f]{16}", name)


def fails_to_save(
    path: Path, bad: Any, *fragments: str, kind: type = StateMismatchError, elements: int = 1000
) -> None:
    """Saving `bad` over a checkpoint raises on this rank; the old one loads, the next is saved."""
    raised(lambda: dc.save(bad, str(path)), *fragments, kind=kind)
    meet()
    expect(path, 1.0, elements)
    dc.save(state(2.0, elements), str(path))
    expect(path, 2.0, elements)


def saved(name: str) -> Path:
    path = folder(name)
    dc.save(state(1.0), str(path))
    return path


def check_missing_key() -> None:
    path = saved("missing_key")
    wanted = {**state(0.0), "b": cut("bb", torch.zeros(2))}
    raised(lambda: dc.load(wanted, str(path)), "bb", str(path), kind=StateMismatchError)
    wanted = {**state(0.0), "b": ShardedObject("oo", None, (size(),), (rank(),))}
    raised(lambda: dc.load(wanted, str(path)), "oo", str(path), kind=StateMismatchError)
    meet()
    expect(path, 1.0)


def check_wrong_shape_and_dtype() -> None:
    path = saved("wrong_shape")
    for data, found in ((torch.zeros(999), "[2000]"), (torch.zeros(1000, 1), "[2000]")):
        wanted = {"a": cut("a", data)}
        raised(lambda w=wanted: dc.load(w, str(path)), "'a'", found, kind=StateMismatchError)
    wanted = {"a": cut("a", torch.zeros(1000, dtype=torch.bfloat16))}
    raised(
        lambda: dc.load(wanted, str(path)), "'a'", "bfloat16", "float32", kind=StateMismatchError
    )
    megatron_uring.enable(allow_dtype_conversion=True)
    assert dc.load(wanted, str(path))["a"].eq(1).all()
    megatron_uring.enable()
    meet()
    expect(path, 1.0)


def check_damaged_index() -> None:
    path = saved("damaged_index")
    index = path / "index.h5"
    whole = index.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 4
    for content in (bytes(flipped), whole[:-7], whole[: len(whole) // 2], b""):
        _replace(index, content)
        for load in (
            lambda: dc.load(state(0.0), str(path)),
            lambda: dc.load_tensors_metadata(str(path)),
            lambda: dc.load_common_state_dict(str(path)),
        ):
            raised(load, "index.h5", kind=CorruptionError)
        meet()
    _replace(index, None)
    raised(lambda: dc.load(state(0.0), str(path)), "index.h5", kind=NotACheckpointError)
    meet()
    _replace(index, whole)
    expect(path, 1.0)
    _replace(index, bytes(flipped))
    dc.save(state(2.0), str(path))  # a damaged checkpoint does not stand in the way of a new one
    expect(path, 2.0)


def _replace(path: Path, content: bytes | None) -> None:
    meet()
    if rank() == 0:
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
    meet()


def _subfiles(path: Path) -> list[Path]:
    skip = ("index.h5", "metadata.json", "common", "timeline")
    return sorted(entry for entry in path.iterdir() if not entry.name.startswith(skip))


def check_damaged_subfile() -> None:
    path = saved("damaged_subfile")
    for number, subfile in enumerate(_subfiles(path)):
        whole = subfile.read_bytes()
        flipped = bytearray(whole)
        flipped[5000] ^= 1  # in the first tensor: every tensor of a page begins on one
        for content in (bytes(flipped), whole[:4096], None):
            _replace(subfile, content)
            everything = {f"t{n}": _piece(n) for n in range(size())}
            raised(
                lambda wanted=everything: dc.load(
                    wanted, str(path), validate_access_integrity=False
                ),
                subfile.name,
                kind=CorruptionError,
            )
        _replace(subfile, whole)
        assert number < size()
    expect(path, 1.0)


def _piece(number: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("a", torch.zeros(1000), (0, number, size()))


def check_damaged_common_state() -> None:
    path = saved("damaged_common")
    kept = next(entry for entry in path.iterdir() if entry.name.startswith("common-"))
    whole = kept.read_bytes()
    _replace(path / "common.pt", b"what other tools read; not what we load")
    expect(path, 1.0)
    for content in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-1], None):
        _replace(kept, content)
        raised(lambda: dc.load(state(0.0), str(path)), kept.name, kind=CorruptionError)
    _replace(kept, whole)
    expect(path, 1.0)


def check_common_state_that_cannot_be_loaded_again() -> None:
    path = saved("custom_class")
    bad = {**state(3.0), "args": {"deep": [Custom()]}}
    fails_to_save(path, bad, "args", "Custom")
    bad = {**state(3.0), "o": ShardedObject("o/key", Custom(), (size(),), (rank(),))}
    fails_to_save(saved("custom_object"), bad, "o/key", "Custom")


def check_one_rank_cannot_give_its_state() -> None:
    path = saved("one_rank")
    bad = state(3.0)
    if rank() == size() - 1:
        bad["a"].data = None
    fails_to_save(path, bad, "'a'", "data")
    dtype = torch.float64 if rank() else torch.float32
    bad = {**state(3.0), "quaint": cut("quaint", torch.zeros(2, dtype=dtype))}
    raised(
        lambda: dc.save(bad, str(path), validate_access_integrity=False),
        "quaint",
        kind=StateMismatchError,
    )
    meet()
    expect(path, 2.0)
    bad = {**state(3.0), "sparse": cut("sparse", torch.zeros(2))}
    if rank():
        bad["sparse"].data = torch.zeros(2).to_sparse()
    raised(lambda: dc.save(bad, str(path)), "sparse", kind=UnsupportedError)
    meet()
    expect(path, 2.0)


def check_directory_that_cannot_be_written() -> None:
    path = saved("read_only")
    meet()
    if rank() == 0:
        for parent in path.parents:  # pytest's own let nobody else in
            if parent.name.startswith("pytest-"):
                parent.chmod(0o711)
        path.chmod(0o555)
    meet()
    with as_nobody():
        raised(lambda: dc.save(state(3.0), str(path)), str(path), kind=StorageError)
    meet()
    if rank() == 0:
        path.chmod(0o755)
    meet()
    expect(path, 1.0)
    dc.save(state(2.0), str(path))
    expect(path, 2.0)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may write everywhere: be somebody else for a while, who may at least look."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(NOBODY)
    yield
    os.seteuid(was)


def check_file_size_limit() -> None:
    path = folder("file_size")
    elements = 1 << 18
    dc.save(state(1.0, elements), str(path))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    victim = rank() == size() - 1
    if victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, limit[1]))
    try:
        raised(lambda: dc.save(state(3.0, elements), str(path)), kind=StorageError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    meet()
    expect(path, 1.0, elements)
    dc.save(state(2.0, elements), str(path))
    expect(path, 2.0, elements)


def check_full_file_system() -> None:
    """Room for one checkpoint and a half."""
    small = os.environ.get("SMALL_FILE_SYSTEM")
    elements = (6 << 18) if small else (1 << 18)
    path = folder("full") if small is None else Path(small) / "checkpoint"
    path.mkdir(exist_ok=True)
    meet()
    dc.save(state(1.0, elements // size()), str(path))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if small is None:  # only root can mount: the next best is a limit on every rank
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, limit[1]))
    try:
        for _ in range(3):
            raised(lambda: dc.save(state(3.0, elements // size()), str(path)), kind=StorageError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    meet()
    expect(path, 1.0, elements // size())
    dc.save(state(2.0), str(path))  # a smaller one still fits
    expect(path, 2.0)
    if rank() == 0:
        shutil.rmtree(path)
    meet()


def check_directory_that_is_gone() -> None:
    path = saved("gone")
    meet()
    if rank() == 0:
        shutil.rmtree(path)
    meet()
    try:
        dc.load(state(0.0), str(path))
    except dc.core.CheckpointingException as error:
        assert str(path) in str(error)
    else:
        raise AssertionError("loaded from nowhere")
    assert FOLDER.exists()


def begin() -> None:
    start()
    megatron_uring.enable()


if __name__ == "__main__":
    main(globals(), begin)
