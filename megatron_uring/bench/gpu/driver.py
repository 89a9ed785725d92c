"""What only a driver can show: captured graphs, refused page-locking, memory of the device.

Guarantees
----------
- A page-lock is refused for real, by registering a page of the pool beforehand; the next kernel of
  PyTorch and a copy through the pageable slabs have to work then.
- A low limit on locked memory is tried in a process of its own. Drivers need not heed it, and it
  does not bind root: the row says which of the two happened.
- A capture counts as made beside copies only if copies were still going on when it ended.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile

import numpy as np
import torch

from megatron_uring import _engine, checkpoint, devices, fencing, lazy
from megatron_uring.bench.gpu.setting import (
    FAILED,
    MEASURED,
    PASSED,
    NotRunError,
    Row,
    Setting,
    digest,
    save,
    save_async,
)
from megatron_uring.config import MEBIBYTE

CHILD_OPTION = "--with-little-locked-memory"
_LIMIT_BYTES = 64 * 1024
_REPLAYS = 5


def graphed_step(setting: Setting) -> list[Row]:
    """Saves beside an optimizer whose step is a CUDA graph, with the fence before each replay."""
    setting.require_gpu()
    undo = lazy.watch()
    try:
        parameters = [
            torch.nn.Parameter(torch.randn(1 << 22, device=setting.device)) for _ in range(4)
        ]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2, capturable=True)
        for one in parameters:
            one.grad = torch.randn_like(one)
        side = torch.cuda.Stream(setting.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(setting.device))
        with torch.cuda.stream(side):
            for _ in range(3):
                optimizer.step()
        torch.cuda.current_stream(setting.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        wrong = sum(
            not _save_and_replay(setting, optimizer, parameters, graph) for _ in range(_REPLAYS)
        )
    finally:
        undo()
    return [
        Row(
            "CUDA graph of the optimizer, fence() before replay",
            FAILED if wrong else PASSED,
            f"{_REPLAYS - wrong} of {_REPLAYS} saves equal",
            "digests of synchronous saves",
        )
    ]


def _save_and_replay(
    setting: Setting,
    optimizer: torch.optim.Optimizer,
    parameters: list[torch.nn.Parameter],
    graph: torch.cuda.CUDAGraph,
) -> bool:
    state: dict[str, torch.Tensor] = {}
    for place, one in enumerate(parameters):
        state[f"parameter{place}"] = one
        state[f"average{place}"] = optimizer.state[one]["exp_avg"]
        state[f"step{place}"] = optimizer.state[one]["step"]
    config = setting.config(verify_staging="off")
    with setting.directories(2) as (synchronous, asynchronous):
        save(state, synchronous, config)
        pending = save_async(state, asynchronous, config)
        fencing.fence()
        graph.replay()
        setting.synchronize()
        pending.wait()
        first = digest(checkpoint.restore(synchronous, config=config))
        second = digest(checkpoint.restore(asynchronous, config=config))
    return first == second


def capture_beside_copies(setting: Setting) -> list[Row]:
    """A graph that is captured, in the strictest mode, while native threads copy."""
    setting.require_gpu()
    undo = lazy.watch()
    try:
        parameters = [
            torch.nn.Parameter(torch.randn(1 << 22, device=setting.device)) for _ in range(6)
        ]
        optimizer = torch.optim.SGD(parameters, lr=1e-2)
        for one in parameters:
            one.grad = torch.randn_like(one)
        optimizer.step()
        state = {f"parameter{place}": one for place, one in enumerate(parameters)}
        bytes_total = sum(one.numel() * 4 for one in parameters)
        slow = setting.config(
            slab_bytes=MEBIBYTE,
            slab_count=2,
            staging_bytes=2 * MEBIBYTE,
            verify_staging="off",
            drain_bytes_per_s=bytes_total // 4,
        )
        with setting.directories(1) as (path,):
            pending = save_async(state, path, slow)
            values = torch.ones(1000, device=setting.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="global"):
                for _ in range(2000):
                    values.add_(1)
            drain = pending._saving.drain
            beside = drain is not None and not drain.staged()
            graph.replay()
            right = bool((values == 2001).all())
            pending.wait()
            restored = checkpoint.restore(path, config=setting.config())
            right &= digest(restored) == digest(state)
    finally:
        undo()
    if not beside:
        raise NotRunError("copies were over before the capture was")
    what = "CUDA graph captured while copies go on"
    return [Row(what, PASSED if right else FAILED, "captured, replayed, save equal", "no error")]


# -------------------------------------------------------------------------------------------------
# page-locking


def refused_page_lock(setting: Setting) -> list[Row]:
    """A pool of which a page is registered already."""
    setting.require_gpu()
    cuda = devices.cuda_runtime()
    if cuda is None:
        raise NotRunError("no CUDA runtime was found")
    pool = _engine.SlabPool(MEBIBYTE, 4)
    driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    page = pool.address + MEBIBYTE
    if int(driver.cudaHostRegister(page, 4096, 0)) != 0:
        raise NotRunError("a single page could not be registered")
    try:
        why = pool.page_lock(cuda, setting.device.index or 0)
        torch.ones(8, device=setting.device).sum().item()  # raises what was left of the refusal
        equal = _copies(setting, pool)
    finally:
        driver.cudaHostUnregister(page)
    found = f"{why or 'granted'}; next kernel ran; copy through pageable slabs "
    found += "equal" if equal else "different"
    return [
        Row(
            "refused page-lock", PASSED if why and equal else FAILED, found, "refused, nothing else"
        )
    ]


def _copies(setting: Setting, pool: _engine.SlabPool) -> bool:
    tensor = torch.randint(0, 256, (5 * MEBIBYTE,), dtype=torch.uint8, device=setting.device)
    column, none = np.zeros(1, np.int64), np.zeros((1, 0), np.int64)
    device = np.array([setting.device.index or 0], np.int32)
    pieces = _engine.Pieces(
        np.zeros(1, np.int32),
        column,
        np.array([tensor.data_ptr()], np.uint64),
        column + tensor.numel(),
        none,
        none,
        none,
        device_number=device,
        device_events=devices.order(device),
    )
    engine = _engine.Engine("posix", pool, queue_depth=4)
    with setting.directories(1) as (path,):
        os.mkdir(path)
        file = _engine.File.create(os.path.join(path, "file"), direct=False)
        job = engine.write(file, 0, tensor.numel(), pieces)
        done = job.wait(60.0)
        content = np.fromfile(os.path.join(path, "file"), np.uint8)
        file.close()
        engine.close()
    return done and np.array_equal(content, tensor.cpu().numpy())


def little_locked_memory(setting: Setting) -> list[Row]:
    """A save in a process that may lock 64 KiB."""
    setting.require_gpu()
    setting.require_time(60)
    command = [sys.executable, "-m", "megatron_uring.bench.gpu", CHILD_OPTION, setting.folder]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        why = (done.stderr.strip().splitlines() or [str(done.returncode)])[-1]
        return [Row("RLIMIT_MEMLOCK of 64 KiB", FAILED, why, "save equal")]
    said = json.loads(lines[-1])
    refused = "pageable" in said["staging"]
    found = f"save {'equal' if said['equal'] else 'different'}; {said['staging']}"
    if not refused:
        found += "; the driver did not heed the limit" + ("" if os.getuid() else ", or root may")
    outcome = (PASSED if refused else MEASURED) if said["equal"] else FAILED
    return [Row("RLIMIT_MEMLOCK of 64 KiB", outcome, found, "save equal, refusal told")]


def child(folder: str) -> None:
    """That process."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (_LIMIT_BYTES, _LIMIT_BYTES))
    tensor = torch.randn(3_000_000, device="cuda")
    setting = Setting(tensor.device, folder, 0, 0, 0.0)
    with tempfile.TemporaryDirectory(dir=folder) as path:
        report = save({"tensor": tensor}, path, setting.config())
        restored = checkpoint.restore(path, config=setting.config())
    equal = digest(restored) == digest({"tensor": tensor})
    print(json.dumps({"staging": report.staging, "equal": equal}))


def device_memory(setting: Setting) -> list[Row]:
    """What PyTorch has to allocate on the device for a save."""
    setting.require_gpu()
    undo = lazy.watch()
    try:
        parameter = torch.nn.Parameter(torch.randn(1 << 25, device=setting.device))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        setting.synchronize()
        torch.cuda.reset_peak_memory_stats(setting.device)
        before = torch.cuda.memory_allocated(setting.device)
        with setting.directories(1) as (path,):
            save_async({"parameter": parameter}, path, setting.config()).wait()
        added = torch.cuda.max_memory_allocated(setting.device) - before
    finally:
        undo()
    found = f"{added} bytes for a state of {parameter.numel() * 4}"
    return [
        Row("device memory allocated for a save", FAILED if added else PASSED, found, "0 bytes")
    ]
