"""Fixtures that the test modules share: both engines, one process as the world, real files."""

import dataclasses
import os
import subprocess

import numpy as np
import pytest
import torch

import megatron_uring
from megatron_uring import _engine, checkpoint, stage
from megatron_uring.comm import SingleCommunicator
from megatron_uring.config import Config

ENGINES = [
    pytest.param(
        "io_uring",
        marks=pytest.mark.skipif(not _engine.has_io_uring(), reason="built without liburing"),
    ),
    "posix",
]


@pytest.fixture(autouse=True)
def _no_faults_and_no_options_left(monkeypatch):
    monkeypatch.delenv("MEGATRON_URING", raising=False)
    _engine.clear_faults()
    yield
    _engine.clear_faults()


@pytest.fixture(scope="session", autouse=True)
def _engines_closed():
    yield
    stage.close_engines()


@pytest.fixture(params=ENGINES)
def config(request):
    """Few and small slabs, so that a tensor of a few MiB needs several and reuses them."""
    return Config(engine=request.param, slab_bytes=1 << 20, slab_count=2)


@pytest.fixture
def posix():
    """For what does not depend on the engine."""
    return Config(engine="posix", slab_bytes=1 << 20, slab_count=2)


@pytest.fixture
def world():
    return SingleCommunicator(30.0, "test", "host")


@pytest.fixture
def small_disk(tmp_path):
    """Makes a file system of its own of the size that it is told; skips without the right to."""
    mounted = []

    def mount(size):
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place)]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("no right to mount")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def shared_path(tmp_path):
    """Of a node cache, in shared memory, that no other test uses."""
    name = f"/dev/shm/megatron_uring-test-{os.getpid()}-{tmp_path.name}"
    yield name
    if os.path.exists(name):
        os.remove(name)


@pytest.fixture
def save(world, posix):
    """`megatron_uring.save` in one process."""

    def run(state, directory, config=posix, **options):
        return megatron_uring.save(state, directory, config=config, communicator=world, **options)

    return run


@pytest.fixture
def staging(tmp_path):
    """A staging directory of the node, beside the checkpoint directory."""
    place = tmp_path / "staging"
    place.mkdir()
    return place


@pytest.fixture
def save_tiered(world, posix, staging):
    """`megatron_uring.save_async` in one process, by way of `staging`."""

    def run(state, directory, config=posix, **options):
        tiered = dataclasses.replace(config, **{"staging_directory": str(staging), **options})
        return megatron_uring.save_async(state, directory, config=tiered, communicator=world)

    return run


@pytest.fixture
def restore_near(posix, staging):
    """`megatron_uring.restore` on the node of `staging`; the state, and its report."""

    def run(directory, config=posix, **options):
        tiered = dataclasses.replace(config, **{"staging_directory": str(staging), **options})
        state = megatron_uring.restore(directory, config=tiered)
        return state, checkpoint.last_reports()["restore"]

    return run


@pytest.fixture
def bytes_of():
    """The elements of a tensor in C order, as bytes: equal NaNs and the sign of zero count."""

    def run(tensor):
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""

    return run


@pytest.fixture
def random_tensor():
    """A tensor of random bytes, so that NaN payloads, infinities and subnormals occur."""

    def run(dtype, shape, seed=0):
        generator = np.random.default_rng(seed)
        size = int(np.prod(shape, dtype=np.int64)) * torch.empty(0, dtype=dtype).element_size()
        if not size:
            return torch.empty(shape, dtype=dtype)
        data = generator.integers(0, 2 if dtype == torch.bool else 256, size, dtype=np.uint8)
        return torch.from_numpy(data).view(dtype).reshape(shape)

    return run
