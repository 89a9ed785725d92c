"""Devices: which tensors native threads may copy from a GPU, and what those copies wait for.

Guarantees
----------
- CUDA is looked for when the first tensor on a GPU is met, and not before. Where its runtime cannot
  be loaded one warning says why, and such tensors are copied to the host whole, by PyTorch.
- A native copy comes after everything that was queued on PyTorch's current stream of the device
  when `order` was called; what other streams do with a tensor is not waited for.
- A pool that cannot be page-locked is used as it is; one warning says why.
"""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import util

import numpy as np
import torch

from megatron_uring import _engine
from megatron_uring.columns import BoolArray, Int32Array
from megatron_uring.errors import UnsupportedError

_log = logging.getLogger("megatron_uring")


@dataclass
class _Runtime:
    """Of this process, once it was looked for."""

    sought: bool = False
    cuda: _engine.Cuda | None = None
    warned: set[str] = field(default_factory=set)


_runtime = _Runtime()


def cuda_runtime() -> _engine.Cuda | None:
    """The CUDA runtime that PyTorch uses, or None where there is none that can be loaded."""
    if not _runtime.sought:
        _runtime.sought = True
        refusals = []
        # PyTorch has loaded one, most likely; if not under its usual name, then from one of these
        major = (torch.version.cuda or "").partition(".")[0]
        names = [f"libcudart.so.{'11.0' if major == '11' else major}"] if major else []
        for path in ("", *_packaged_libraries(), *names):
            try:
                _runtime.cuda = _engine.Cuda(path)
                break
            except OSError as error:
                refusals.append(str(error.strerror))
        if _runtime.cuda is None:
            _warn("tensors on GPUs are copied before saves go on: " + "; ".join(refusals))
    return _runtime.cuda


def _packaged_libraries() -> list[str]:
    """Where wheels put the library: beside the ``nvidia`` packages, or within PyTorch."""
    found = []
    for name, inside in (("nvidia", "*/lib"), ("torch", "lib")):
        spec = util.find_spec(name)
        for folder in [] if spec is None else spec.submodule_search_locations or []:
            found += sorted(glob.glob(os.path.join(folder, inside, "libcudart*.so*")), reverse=True)
    return found


def readable(tensors: Sequence[torch.Tensor]) -> BoolArray:
    """Which of these plain tensors lie on a GPU, and as one run of bytes, bool [N]."""
    facts = [tensor.is_cuda and tensor.is_contiguous() for tensor in tensors]
    if not any(facts) or torch.version.cuda is None or cuda_runtime() is None:
        return np.zeros(len(tensors), np.bool_)
    return np.array(facts, np.bool_)


def order(device_number: Int32Array) -> _engine.DeviceEvents:
    """What copies from these devices have to wait for: all that is queued there now.

    Raises
    ------
    UnsupportedError
        While a CUDA graph is captured: nothing that is queued then is done when it is queued.
    """
    cuda = cuda_runtime()
    assert cuda is not None
    return _engine.DeviceEvents(cuda, _current_streams(np.unique(device_number).tolist()))


def _current_streams(devices: Sequence[int]) -> list[tuple[int, int]]:
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError("save tensors on a GPU", cause="a CUDA graph is being captured")
    return [(device, torch.cuda.current_stream(device).cuda_stream) for device in devices]


def page_lock(engine: _engine.Engine, device_number: Int32Array) -> str:
    """Let devices copy straight into the pool of `engine`; what came of it, in words."""
    cuda = cuda_runtime()
    assert cuda is not None
    refusal = engine.page_lock(cuda, int(device_number[0]))
    if not refusal:
        return "page-locked"
    _warn(f"slabs are not page-locked, so that copies from GPUs are slower: {refusal}")
    return f"pageable: {refusal}"


def _warn(text: str) -> None:
    if text not in _runtime.warned:
        _runtime.warned.add(text)
        _log.warning("%s", text)
