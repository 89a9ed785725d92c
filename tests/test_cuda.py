"""Staging from devices, against a double of the CUDA runtime.

No GPU is needed here, and none is used: `fake_cudart.c` stands in for libcudart, and ordinary
memory for that of a device. This proves what our side does (which calls, in which order, what is
waited for, what happens when one fails), not what CUDA does. The check on a real GPU is
``scripts/gpu_check``.
"""

import ctypes
import errno
import gc
import logging
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import megatron_uring
from megatron_uring import StorageError, _engine, checkpoint, devices, lazy, stage, tensors
from megatron_uring.comm import SingleCommunicator
from megatron_uring.config import Config

MIB = _engine.BLOCK_BYTES
WAIT_S = 60.0
COMPILER = shutil.which("cc") or shutil.which("gcc")

alive = []

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler for the double")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("cuda") / "libfake_cudart.so"
    source = Path(__file__).with_name("fake_cudart.c")
    command = [COMPILER, "-shared", "-fPIC", "-pthread", "-Wall", "-Werror", "-o", path, source]
    subprocess.run(command, check=True)
    double = ctypes.CDLL(str(path))
    double.fake_stream.restype = ctypes.c_void_p
    double.fake_queue.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t]
    double.fake_registered.restype = double.fake_registered_bytes.restype = ctypes.c_long
    return double


@pytest.fixture
def double(library):
    gc.collect()
    library.fake_reset()
    yield library
    library.fake_hold(0)
    alive.clear()
    gc.collect()
    assert library.fake_violations() == 0
    assert library.fake_unread_errors() == 0
    assert library.fake_streams_alive() == library.fake_events_alive() == 0
    assert library.fake_registered() == 0
    assert library.fake_current_device() == 0  # this thread's, as it was


@pytest.fixture
def cuda(double):
    return _engine.Cuda(double._name)


@pytest.fixture
def make(double):
    """POSIX engines, closed afterwards, whose slabs must all have come back."""
    made = []

    def build(slab_bytes=2 * MIB, slab_count=3, **options):
        pool = _engine.SlabPool(slab_bytes, slab_count)
        engine = _engine.Engine("posix", pool, queue_depth=4, **options)
        made.append((engine, pool))
        return engine, pool

    yield build
    while made:
        engine, pool = made.pop()
        engine.close()
        assert pool.free_count == pool.slab_count
        del engine, pool


def random_bytes(length, seed=0):
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


def address_of(array):
    return array.__array_interface__["data"][0]


def on_devices(rows, events):
    """Pieces from rows (file_start, array, device); the arrays live as long as the test."""
    alive.extend(array for _, array, _ in rows)
    none = np.zeros((len(rows), 0), np.int64)
    return _engine.Pieces(
        np.zeros(len(rows), np.int32),
        np.array([start for start, _, _ in rows], np.int64),
        np.array([address_of(array) for _, array, _ in rows], np.uint64),
        np.array([array.nbytes for _, array, _ in rows], np.int64),
        none,
        none,
        none,
        device_number=np.array([device for _, _, device in rows], np.int32),
        device_events=events,
    )


def start_write(engine, path, length, pieces, direct=False):
    file = _engine.File.create(str(path), direct=direct)
    job = engine.write(file, 0, length, pieces)
    file.close()
    return job


def checksums_of(content):
    return [_engine.crc32c(content[at : at + MIB].tobytes()) for at in range(0, len(content), MIB)]


def wait_until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# ---- what is copied ----


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("copy_threads", [1, 3])
def test_pieces_of_devices_and_of_the_host_lie_side_by_side(
    make, cuda, double, tmp_path, direct, copy_threads
):
    engine, _ = make(copy_threads=copy_threads)
    parts = [random_bytes(size, size) for size in (5 * MIB + 77, 13, 0, MIB, 100, 3 * MIB, 64)]
    where = [1, -1, 0, -1, 0, 0, 1]
    want = np.zeros(11 * MIB, np.uint8)
    rows, start = [], 192
    for part, device in zip(parts, where, strict=True):
        want[start : start + len(part)] = part
        rows.append((start, part, device))
        start += len(part) + 1000
    events = _engine.DeviceEvents(cuda, [(0, 0), (1, 0)])
    pieces = on_devices(rows, events)
    for attempt in range(2):  # the second one finds streams that are there, and dirty slabs
        job = start_write(engine, tmp_path / str(attempt), len(want), pieces, direct)
        assert job.wait(WAIT_S)
        assert np.array_equal(np.fromfile(tmp_path / str(attempt), np.uint8), want)
        assert job.checksums().tolist() == checksums_of(want)
        assert job.copy_s > 0
    assert double.fake_calls(b"cudaStreamCreateWithFlags") <= 2 * copy_threads
    chosen = np.array([0, 5, 10], np.int64)
    found = _engine.block_checksums(pieces, 0, len(want), chosen)
    assert found.tolist() == np.array(checksums_of(want), np.uint32)[chosen].tolist()


def test_one_call_of_cuda_for_each_piece_and_slab(make, cuda, double, tmp_path):
    engine, _ = make(slab_bytes=2 * MIB)
    events = _engine.DeviceEvents(cuda, [(0, 0)])
    pieces = on_devices([(0, random_bytes(5 * MIB), 0)], events)
    assert start_write(engine, tmp_path / "f", 5 * MIB, pieces).wait(WAIT_S)
    assert double.fake_copies() == double.fake_calls(b"cudaStreamSynchronize") == 3


# ---- what is waited for ----


@pytest.mark.parametrize("handle", ["default stream", "stream"])
def test_copies_come_after_what_was_queued_when_the_events_were_made(
    make, cuda, double, tmp_path, handle
):
    engine, _ = make()
    stream = double.fake_stream(3) if handle == "stream" else 0
    tensor, late, later = (random_bytes(3 * MIB, seed) for seed in range(3))
    if stream:
        double.fake_queue(stream, address_of(tensor), address_of(late), len(late))
    events = _engine.DeviceEvents(cuda, [(3, stream)])
    if stream:
        double.fake_queue(stream, address_of(tensor), address_of(later), len(later))
    want = late.copy() if stream else tensor.copy()
    pieces = on_devices([(0, tensor, 3)], events)
    found = _engine.block_checksums(pieces, 0, len(want), np.arange(3))
    assert found.tolist() == checksums_of(want)
    assert start_write(engine, tmp_path / "f", len(want), pieces).wait(WAIT_S)
    assert np.array_equal(np.fromfile(tmp_path / "f", np.uint8), want)


def test_a_write_is_staged_only_when_its_copies_are_over(make, cuda, double, tmp_path):
    engine, _ = make(slab_count=4)
    tensor = random_bytes(4 * MIB)
    events = _engine.DeviceEvents(cuda, [(0, 0)])
    double.fake_hold(1)
    job = start_write(engine, tmp_path / "f", len(tensor), on_devices([(0, tensor, 0)], events))
    wait_until(double.fake_held_threads)
    assert not job.wait_staged(0.05) and not job.done() and job.bytes_staged == 0
    double.fake_hold(0)
    assert job.wait_staged(WAIT_S)
    want = tensor.copy()
    tensor[:] = 0  # what the fence is for
    assert job.wait(WAIT_S)
    assert np.array_equal(np.fromfile(tmp_path / "f", np.uint8), want)


def test_all_free_slabs_are_filled_before_the_first_checksum(make, cuda, double, tmp_path):
    engine, pool = make(slab_bytes=MIB, slab_count=6)
    tensor = random_bytes(9 * MIB)
    events = _engine.DeviceEvents(cuda, [(0, 0)])
    double.fake_hold_after(5)
    job = start_write(engine, tmp_path / "f", len(tensor), on_devices([(0, tensor, 0)], events))
    wait_until(double.fake_held_threads)
    assert job.bytes_staged == 5 * MIB
    assert job.checksum_s == 0 and job.bytes_done == 0 and pool.free_count == 0
    double.fake_hold(0)
    assert job.wait(WAIT_S)
    assert np.array_equal(np.fromfile(tmp_path / "f", np.uint8), tensor)
    assert job.checksums().tolist() == checksums_of(tensor)


def test_a_cancelled_write_ends_when_the_copy_in_flight_does(make, cuda, double, tmp_path):
    engine, pool = make()
    events = _engine.DeviceEvents(cuda, [(0, 0)])
    double.fake_hold(1)
    pieces = on_devices([(0, random_bytes(8 * MIB), 0)], events)
    job = start_write(engine, tmp_path / "f", 8 * MIB, pieces)
    wait_until(double.fake_held_threads)
    job.cancel()
    assert not job.done() and pool.free_count < pool.slab_count
    double.fake_hold(0)
    with pytest.raises(OSError) as caught:
        job.wait(WAIT_S)
    assert caught.value.errno == errno.ECANCELED
    assert double.fake_copies() == 1


# ---- what fails ----


@pytest.mark.parametrize(
    ("call", "skip"),
    [
        ("cudaSetDevice", 0),
        ("cudaThreadExchangeStreamCaptureMode", 0),
        ("cudaStreamCreateWithFlags", 0),
        ("cudaStreamWaitEvent", 0),
        ("cudaMemcpyAsync", 0),
        ("cudaMemcpyAsync", 3),
        ("cudaStreamSynchronize", 0),
        ("cudaStreamSynchronize", 1),
    ],
)
def test_a_call_that_fails_fails_the_job_and_nothing_else(make, cuda, double, tmp_path, call, skip):
    engine, _ = make()
    parts = [random_bytes(MIB, seed) for seed in range(6)]
    events = _engine.DeviceEvents(cuda, [(0, 0), (1, 0)])
    rows = [(number * MIB, part, number % 2) for number, part in enumerate(parts)]
    double.fake_fail(call.encode(), skip, 2)
    job = start_write(engine, tmp_path / "f", 6 * MIB, on_devices(rows, events))
    with pytest.raises(OSError, match=f"{call}.*out of memory \\(2\\)") as caught:
        job.wait(WAIT_S)
    assert caught.value.errno == errno.EIO
    double.fake_fail(call.encode(), 0, 0)
    job = start_write(engine, tmp_path / "again", 6 * MIB, on_devices(rows, events))
    assert job.wait(WAIT_S)
    assert np.array_equal(np.fromfile(tmp_path / "again", np.uint8), np.concatenate(parts))


def test_copies_before_the_one_that_failed_are_over_before_the_slab_goes_back(
    make, cuda, double, tmp_path
):
    engine, pool = make(slab_count=1)
    events = _engine.DeviceEvents(cuda, [(0, 0)])
    rows = [(number * MIB, random_bytes(MIB), 0) for number in range(2)]
    double.fake_fail(b"cudaMemcpyAsync", 1, 2)
    double.fake_hold(1)
    job = start_write(engine, tmp_path / "f", 2 * MIB, on_devices(rows, events))
    wait_until(double.fake_held_threads)
    assert pool.free_count == 0 and not job.done()
    double.fake_hold(0)
    with pytest.raises(OSError, match="cudaMemcpyAsync on device 0 of 1048576 bytes"):
        job.wait(WAIT_S)
    assert double.fake_calls(b"cudaStreamSynchronize") == 1


@pytest.mark.parametrize("call", ["cudaEventCreateWithFlags", "cudaEventRecord", "cudaGetDevice"])
def test_events_that_cannot_be_made_are_an_error_and_leave_none(cuda, double, call):
    double.fake_fail(call.encode(), 1, 2)
    with pytest.raises(OSError, match=call):
        _engine.DeviceEvents(cuda, [(0, 0), (1, 0)])
    double.fake_fail(call.encode(), 0, 0)
    gc.collect()


def test_checksums_of_blocks_that_cannot_be_copied_are_an_error(cuda, double):
    events = _engine.DeviceEvents(cuda, [(0, 0)])
    pieces = on_devices([(0, random_bytes(MIB), 0)], events)
    double.fake_fail(b"cudaMemcpyAsync", 0, 2)
    with pytest.raises(OSError, match="cudaMemcpyAsync"):
        _engine.block_checksums(pieces, 0, MIB, np.zeros(1, np.int64))


def test_a_library_that_is_not_there_or_not_cuda_is_named(tmp_path):
    with pytest.raises(OSError, match="load libcudart") as caught:
        _engine.Cuda(str(tmp_path / "libcudart.so.12"))
    assert caught.value.errno == errno.EIO
    assert caught.value.filename == str(tmp_path / "libcudart.so.12")
    with pytest.raises(OSError, match="cudaGetDevice"):
        _engine.Cuda(_engine.__file__)


def test_wrong_pieces_are_refused(make, cuda, tmp_path):
    part = random_bytes(MIB)
    events = _engine.DeviceEvents(cuda, [(0, 0)])
    for given, rows, why in [
        (None, [(0, part, 0)], "piece 0: device has no event"),
        (events, [(0, part, -1), (MIB, part, 1)], "piece 1: device has no event"),
        (events, [(0, part, 0), (5, part, -1)], "pieces overlap"),
    ]:
        with pytest.raises(ValueError, match=why):
            on_devices(rows, given)
    two = np.full((1, 1), 2, np.int64)
    column = np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="not contiguous"):
        _engine.Pieces(
            np.zeros(1, np.int32),
            column,
            np.array([address_of(part)], np.uint64),
            column + 8,
            two,
            two * 4,
            two * 8,
            device_number=np.zeros(1, np.int32),
            device_events=events,
        )
    for streams in ([(0, 0), (0, 0)], [(-1, 0)]):
        with pytest.raises(ValueError, match="device"):
            _engine.DeviceEvents(cuda, streams)


def test_a_read_refuses_pieces_on_devices(make, cuda, tmp_path):
    engine, _ = make()
    pieces = on_devices([(0, random_bytes(10), 0)], _engine.DeviceEvents(cuda, [(0, 0)]))
    with pytest.raises(ValueError, match="host memory"):
        engine.read(
            [_engine.File.create(str(tmp_path / "f"), direct=False)],
            np.zeros(0, np.int32),
            np.zeros(0, np.int64),
            np.zeros(0, np.int64),
            pieces,
            None,
        )


# ---- page-locking ----


def test_a_pool_is_page_locked_once_and_whole(cuda, double):
    pool = _engine.SlabPool(MIB, 3, touched=False)
    assert pool.page_lock(cuda, 2) == pool.page_lock(cuda, 2) == ""
    assert double.fake_calls(b"cudaHostRegister") == 1
    assert double.fake_registered() == pool.address
    assert double.fake_registered_bytes() == 3 * MIB
    del pool
    gc.collect()
    assert double.fake_calls(b"cudaHostUnregister") == 1


def test_a_pool_that_cannot_be_page_locked_works_and_says_why(cuda, double):
    pool = _engine.SlabPool(MIB, 1)
    double.fake_fail(b"cudaHostRegister", 0, 2)
    why = pool.page_lock(cuda, 0)
    assert why.startswith("cudaHostRegister of 1048576 bytes: out of memory (2)")
    assert double.fake_unread_errors() == 0  # else the next kernel of PyTorch would be blamed
    assert pool.page_lock(cuda, 0) == why and double.fake_calls(b"cudaHostRegister") == 1
    del pool
    gc.collect()
    assert double.fake_calls(b"cudaHostUnregister") == 0


# ---- through Python: tensors of the host that pose as those of a GPU ----


@pytest.fixture
def posing(monkeypatch, double, cuda):
    """Tensors of more than 99 elements count as tensors on device 1."""

    def on_device(tensor):
        return tensor.numel() > 99

    known = []

    def readable(some):
        return np.array([on_device(one) and one.is_contiguous() for one in some], np.bool_)

    def numbers(some):
        copied = {id(one) for one in known}
        found = [1 if on_device(one) and id(one) not in copied else -1 for one in some]
        return np.array(found, np.int32)

    to = torch.Tensor.to

    def to_host(tensor, *arguments, **keywords):
        known.append(to(tensor, *arguments, **keywords))
        return known[-1]

    monkeypatch.setattr(devices._runtime, "sought", True)
    monkeypatch.setattr(devices._runtime, "cuda", cuda)
    monkeypatch.setattr(devices._runtime, "warned", set())
    monkeypatch.setattr(devices, "_current_streams", lambda some: [(one, 0) for one in some])
    monkeypatch.setattr(devices, "readable", readable)
    monkeypatch.setattr(tensors, "on_host", lambda some: ~readable(some) & (numbers(some) < 0))
    monkeypatch.setattr(tensors, "device_numbers", numbers)
    monkeypatch.setattr(lazy, "device_numbers", numbers)
    monkeypatch.setattr(torch.Tensor, "to", to_host)
    yield double
    megatron_uring.fence()  # forgets what is staged
    stage.close_engines()  # their pools and streams belong to the double


POSIX = Config(engine="posix", slab_bytes=MIB, slab_count=2, timeout_s=30.0, probe="off")


def save(state, directory, config=POSIX, **options):
    world = SingleCommunicator(30.0, "test", "host")
    return megatron_uring.save(state, directory, config=config, communicator=world, **options)


def test_a_save_takes_contiguous_tensors_from_their_device(posing, tmp_path):
    state = {
        "long": torch.randn(700, 1000),
        "strided": torch.randn(300, 20).t(),
        "few": torch.ones(3),
        "objects": {"step": 7},
        "bf16": torch.randn(1001, dtype=torch.bfloat16),
    }
    report = save(state, tmp_path / "c")
    assert posing.fake_copies() >= 4  # three slabs of one tensor, and the other
    assert report.staging == "2 slabs of 1 MiB, depth 8, page-locked"
    restored = megatron_uring.restore(tmp_path / "c", config=POSIX)
    for key in ("long", "strided", "few", "bf16"):
        assert torch.equal(restored[key], state[key]), key
    assert restored["objects"] == {"step": 7}


def test_refused_page_locking_is_said_in_the_report_and_logged_once(posing, tmp_path, caplog):
    posing.fake_fail(b"cudaHostRegister", 0, 2)
    with caplog.at_level(logging.WARNING, "megatron_uring"):
        for name in ("a", "b"):
            report = save({"x": torch.ones(2000)}, tmp_path / name)
    assert "pageable: cudaHostRegister of 2097152 bytes: out of memory" in report.staging
    assert sum("page-locked" in record.message for record in caplog.records) == 1


def test_a_copy_that_fails_fails_the_save(posing, tmp_path):
    posing.fake_fail(b"cudaMemcpyAsync", 0, 2)
    with pytest.raises(StorageError, match=r"write subfile.*cudaMemcpyAsync on device 1"):
        save({"x": torch.ones(2000)}, tmp_path / "c")
    assert list((tmp_path / "c").iterdir()) == []


def lazy_model():
    model = torch.nn.Linear(400, 300)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    lazy._before_step(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("verified", ["full", "off"])
def test_parameters_stay_on_their_device_until_the_fence(posing, tmp_path, verified):
    model, optimizer = lazy_model()
    buffer = torch.randn(5000)
    state = {"model": model.state_dict(), "m": optimizer.state[model.weight]["exp_avg"]}
    want = {key: value.detach().clone() for key, value in state["model"].items()}
    want_buffer = buffer.clone()
    config = Config(**{**vars(POSIX), "verify_staging": verified, "staging_bytes": 8 * MIB})
    world = SingleCommunicator(30.0, "test", "host")
    undo = lazy.watch()
    try:
        posing.fake_hold(verified == "off")  # checksums at the call have to be let through
        pending = checkpoint.save_async(
            {**state, "buffer": buffer}, tmp_path / "c", config=config, communicator=world
        )
        buffer.zero_()  # was copied before the call returned
        posing.fake_hold(0)
        optimizer.step()  # the fence stands before it
        report = pending.wait()
    finally:
        undo()
    assert report.lazy_bytes == (2 * 400 * 300 + 300) * 4
    assert "page-locked" in report.staging
    restored = megatron_uring.restore(tmp_path / "c", config=config)
    for key, value in want.items():
        assert torch.equal(restored["model"][key], value)
        assert not torch.equal(restored["model"][key], model.state_dict()[key])
    assert torch.equal(restored["buffer"], want_buffer)


def test_a_tensor_that_changes_on_its_device_before_it_was_copied_is_noticed(posing, tmp_path):
    model, _ = lazy_model()
    config = Config(**{**vars(POSIX), "verify_staging": "full", "staging_bytes": 8 * MIB})
    world = SingleCommunicator(30.0, "test", "host")
    undo = lazy.watch()
    original = _engine.block_checksums
    try:
        pending = None

        class Changing:
            """The engine module, but for a change right after the checksums were taken."""

            def __getattr__(self, name):
                return getattr(_engine, name)

            @staticmethod
            def block_checksums(*arguments):
                found = original(*arguments)
                with torch.no_grad():
                    model.weight.zero_()
                return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("megatron_uring.drain._engine", Changing())
            pending = checkpoint.save_async(
                {"model": model.state_dict()}, tmp_path / "c", config=config, communicator=world
            )
        with pytest.raises(megatron_uring.StateMismatchError, match=r"model/weight|model\.weight"):
            pending.wait()
    finally:
        undo()


def test_laziness_looks_at_each_device_for_itself(monkeypatch):
    parameter = torch.zeros(1000)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    undo = lazy.watch()
    try:
        lazy._before_step(optimizer)
        view = parameter[100:200]
        assert lazy.may_wait([view, torch.zeros(5)]).tolist() == [True, False]
        # the same address, on another device
        monkeypatch.setattr(
            lazy,
            "device_numbers",
            lambda some: np.array([0 if one is view else -1 for one in some], np.int32),
        )
        assert lazy.may_wait([view, parameter[:7]]).tolist() == [False, True]
    finally:
        undo()


def test_without_a_runtime_tensors_on_gpus_are_copied_and_one_warning_says_why(monkeypatch, caplog):
    monkeypatch.setattr(devices, "_runtime", devices._Runtime())
    monkeypatch.setattr(devices, "_packaged_libraries", lambda: ["/nowhere/libcudart.so.12"])
    monkeypatch.setattr(torch.version, "cuda", None)
    with caplog.at_level(logging.WARNING, "megatron_uring"):
        assert devices.cuda_runtime() is None and devices.cuda_runtime() is None
    (record,) = caplog.records
    assert "the process has loaded none" in record.message
    assert "/nowhere/libcudart.so.12" in record.message
