"""Objects: what is not a tensor, as bytes and back.

Guarantees
----------
- Loading never runs code from a checkpoint: torch's safe classes, numpy's arrays and scalars, a few
  plain classes of the standard library, what Megatron registers and what the user names, nothing
  else.
- What could not be loaded again fails when it is saved, naming key and class.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import io
import pathlib
import re
import signal
import threading
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron_uring.errors import CheckpointError, StateMismatchError, UnsupportedError

# Data alone. Megatron registers them too, for what it saves; a process without Megatron reads it.
_PLAIN_CLASSES = (
    argparse.Namespace,
    types.SimpleNamespace,
    io.BytesIO,
    pathlib.PosixPath,
    signal.Signals,
)
# Lines of torch's message that tell nothing of the object.
_ADVICE = re.compile(
    r"weights[_ ]only|arbitrary code|trusted? source|torch\.load|Please file", re.I
)
_one_at_a_time = threading.Lock()  # what is safe is one list for the whole process


def serialize_object(key: str, value: object, allowed_globals: Sequence[str] = ()) -> bytes:
    """`value` as bytes, proved to load again.

    Raises
    ------
    StateMismatchError
        Naming key and class, if it cannot be pickled or not be loaded with ``weights_only=True``.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:
        raise StateMismatchError(
            f"save object {key!r}",
            found=class_name(value),
            cause=cure_for(value) or _reason(error),
        ) from error
    data = buffer.getvalue()
    prove_loadable(key, data, allowed_globals, found=class_name(value), cure=cure_for(value))
    return data


def prove_loadable(
    key: str,
    data: bytes,
    allowed_globals: Sequence[str] = (),
    *,
    found: str | None = None,
    cure: str | None = None,
) -> None:
    """Load what ``torch.save`` made, on trial, without running any code of it.

    Raises
    ------
    StateMismatchError
        Naming `key`, and `found` as its class, if that needs more than ``weights_only=True``; with
        `cure`, if there is one better than to allow the class.
    """
    try:
        _load_safely(data, allowed_globals)
    except CheckpointError:
        raise
    except Exception as error:
        raise StateMismatchError(
            f"save object {key!r}", found=found, cause=cure or _reason(error)
        ) from error


def deserialize_object(key: str, data: bytes, allowed_globals: Sequence[str] = ()) -> object:
    """Inverse of `serialize_object`, without running any code of the checkpoint."""
    try:
        return _load_safely(data, allowed_globals)
    except CheckpointError:
        raise
    except Exception as error:
        raise StateMismatchError(f"load object {key!r}", cause=_reason(error)) from error


def _load_safely(data: bytes, allowed_globals: Sequence[str]) -> object:
    named = [_import_global(name) for name in allowed_globals]
    with _one_at_a_time:
        # torch takes back all that it was given here: what others registered must not be among it
        known = torch.serialization.get_safe_globals()
        missing = [one for one in (*_numpy_globals(), *_PLAIN_CLASSES, *named) if one not in known]
        with torch.serialization.safe_globals(missing):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


@functools.cache
def _numpy_globals() -> tuple[Any, ...]:
    """What arrays and scalars of numpy are pickled with: data alone, no code of anybody's."""
    numpy_2 = np.lib.NumpyVersion(np.__version__) >= "2.0.0"
    core = importlib.import_module(f"numpy.{'_core' if numpy_2 else 'core'}.multiarray")
    dtypes = [
        kind
        for name, kind in vars(np.dtypes).items()
        if isinstance(kind, type) and name != "ObjectDType"
    ]
    return (core._reconstruct, core.scalar, np.ndarray, np.dtype, *dtypes)


def _import_global(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnsupportedError(
            "read option allowed_globals", expected="module.name", found=repr(name), cause=error
        ) from error


def class_name(value: object) -> str:
    """``module.name`` of the class of `value`."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def cure_for(value: object) -> str | None:
    """What to save in the place of a module, an optimizer and their like; None of anything else."""
    if callable(getattr(type(value), "state_dict", None)):
        return "save its .state_dict()"
    return None


def _reason(error: Exception) -> str:
    """What torch refused, if that is what happened; else the first line that says why.

    What torch advises, to load with ``weights_only=False``, would run whatever is in there.
    """
    text = str(error)
    refused = re.search(
        r"GLOBAL (\S+) was not an allowed global|allowlisted via .*but got <class '([^']+)'>", text
    )
    if refused:
        name = refused.group(1) or refused.group(2)
        cure = f"if you trust it: MEGATRON_URING_ALLOWED_GLOBALS={name}"
        return f"class {name} is not allowed; {cure}"
    blocked = re.search(r"unsupported GLOBAL (\S+) whose module", text)
    if blocked:
        return f"it names {blocked.group(1)}, which is never loaded: it could do anything"
    if "TorchScript" in text:
        return "it is a TorchScript archive, which holds code"
    lines = [line.strip() for line in text.splitlines()]
    told = [line for line in lines if line and not _ADVICE.search(line)]
    return told[0] if told else type(error).__name__
