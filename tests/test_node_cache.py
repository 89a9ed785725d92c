"""The node's cache: each byte read once, nothing believed, nobody waited for."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import torch

import megatron_uring
from megatron_uring import Config, StorageError, _engine, checkpoint, read

MIB = _engine.BLOCK_BYTES
SLOT_BYTES = 2 * MIB


def attach(path, slots=4):
    return _engine.NodeCache(path, SLOT_BYTES, slots)


class Reader:
    """An engine of its own, as another process would have it, over one file of random blocks."""

    def __init__(self, kind, file_path, cache, slabs=3):
        self.data = np.fromfile(file_path, np.uint8)
        self.engine = _engine.Engine(kind, _engine.SlabPool(SLOT_BYTES, slabs), queue_depth=4)
        self.file = _engine.File.open(str(file_path), writable=False, direct=False)
        self.cache = cache
        self.out = np.zeros_like(self.data)

    def start(self, key=7):
        count = len(self.data) // MIB
        sums = [_engine.crc32c(self.data[i * MIB : (i + 1) * MIB]) for i in range(count)]
        one, none = np.zeros(1, np.int64), np.zeros((1, 0), np.int64)
        address = np.array([self.out.ctypes.data], np.uint64)
        length = np.array([len(self.data)], np.int64)
        pieces = _engine.Pieces(np.zeros(1, np.int32), one, address, length, none, none, none)
        return self.engine.read(
            [self.file],
            np.zeros(1, np.int32),
            one,
            length,
            pieces,
            np.array(sums, np.uint32),
            self.cache,
            [key],
        )

    def finish(self, job):
        assert job.wait(30.0)
        assert len(self.engine.bad_blocks(job)) == 0
        assert np.array_equal(self.out, self.data)
        return job.bytes_shared


@pytest.fixture
def blocks(tmp_path):
    file = tmp_path / "blocks"
    np.random.default_rng(0).integers(0, 256, 24 * MIB, dtype=np.uint8).tofile(file)
    return file


def test_what_one_reads_the_other_takes(config, shared_path, blocks):
    readers = [Reader(config.engine, blocks, attach(shared_path)) for _ in range(2)]
    # slow reads, so that neither is through before the other has begun
    _engine.inject_fault("read", "delay", count=-1, delay_s=0.01, path_contains="blocks")
    jobs = [reader.start() for reader in readers]
    shared = sum(reader.finish(job) for reader, job in zip(readers, jobs, strict=True))
    assert shared >= 8 * MIB


def test_alone_nothing_is_offered(config, shared_path, blocks):
    reader = Reader(config.engine, blocks, attach(shared_path))
    for _ in range(2):
        assert reader.finish(reader.start()) == 0


def test_chunks_that_nobody_takes_are_soon_not_offered_any_more(config, shared_path, blocks):
    bystander = Reader(config.engine, blocks, attach(shared_path))
    reader = Reader(config.engine, blocks, attach(shared_path))
    began = time.monotonic()
    for key in range(20):  # always other chunks: 240 of them, in 4 slots
        if key < 4:
            bystander.finish(bystander.start(key))  # wants them, and comes no more
        assert reader.finish(reader.start(key)) == 0
    assert time.monotonic() - began < 10
    del bystander


def test_a_damaged_slot_is_not_believed(config, shared_path, blocks):
    first = Reader(config.engine, blocks, attach(shared_path, slots=32))
    second = Reader(config.engine, blocks, attach(shared_path, slots=32))
    second.finish(second.start())  # wants the file
    assert first.finish(first.start()) == 0  # offers everything
    with open(shared_path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        for slot in range(32):
            for byte in range(0, SLOT_BYTES, MIB // 2):
                file.seek(size - (slot + 1) * SLOT_BYTES + byte)
                file.write(b"\x5a\xa5\x5a\xa5")
    assert second.finish(second.start()) == 0


def test_what_was_offered_is_taken_whole(config, shared_path, blocks):
    first = Reader(config.engine, blocks, attach(shared_path, slots=32))
    second = Reader(config.engine, blocks, attach(shared_path, slots=32))
    second.finish(second.start())  # wants the file
    first.finish(first.start())
    assert second.finish(second.start()) == 24 * MIB


def test_a_reader_that_is_stuck_is_waited_for_one_second_at_most(config, shared_path, blocks):
    stuck, quick = (Reader(config.engine, blocks, attach(shared_path)) for _ in range(2))
    _engine.inject_fault("read", "delay", count=3, delay_s=8.0, path_contains="blocks")
    slow = stuck.start()
    time.sleep(0.2)  # its first chunks are claimed now
    _engine.clear_faults()
    began = time.monotonic()
    quick.finish(quick.start())
    assert 0.5 < time.monotonic() - began < 6.0
    stuck.finish(slow)


def test_a_waiting_read_can_be_cancelled(config, shared_path, blocks):
    stuck, waiting = (Reader(config.engine, blocks, attach(shared_path)) for _ in range(2))
    _engine.inject_fault("read", "delay", count=3, delay_s=3.0, path_contains="blocks")
    slow = stuck.start()
    time.sleep(0.2)
    _engine.clear_faults()
    job = waiting.start()
    job.cancel()
    with pytest.raises(OSError, match="read"):
        job.wait(5.0)
    stuck.finish(slow)


def test_bad_blocks_are_not_offered(config, shared_path, blocks):
    first = Reader(config.engine, blocks, attach(shared_path, slots=32))
    second = Reader(config.engine, blocks, attach(shared_path, slots=32))
    second.finish(second.start())  # wants the file
    with open(blocks, "r+b") as file:
        file.write(b"\0" * 64)
    job = first.start()
    assert job.wait(30.0)
    assert first.engine.bad_blocks(job)[:, 1].tolist() == [0]
    other = second.start()
    assert other.wait(30.0)
    assert second.engine.bad_blocks(other)[:, 1].tolist() == [0]
    assert other.bytes_shared == 24 * MIB - SLOT_BYTES


def test_the_last_one_removes_it(shared_path):
    first, second = attach(shared_path), attach(shared_path)
    del first
    assert os.path.exists(shared_path)
    del second
    assert not os.path.exists(shared_path)


def test_what_the_dead_left_is_swept_and_what_is_held_is_not(shared_path):
    held = attach(shared_path)
    with open(shared_path + "-dead", "wb") as file:
        file.truncate(4096)
    _engine.sweep_node_caches("/dev/shm", os.path.basename(shared_path))
    assert not os.path.exists(shared_path + "-dead")
    assert os.path.exists(shared_path)
    del held


def test_attaching_again_and_again_from_many_threads_never_fails(shared_path):
    failures = []

    def work():
        try:
            for _ in range(100):
                attach(shared_path, slots=1)
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert not os.path.exists(shared_path)


def test_what_no_other_process_wants_costs_no_shared_memory(config, shared_path, blocks):
    readers = [Reader(config.engine, blocks, attach(shared_path, slots=32)) for _ in range(2)]
    for key, reader in enumerate(readers):
        assert reader.finish(reader.start(key)) == 0
    used = os.stat(shared_path).st_blocks * 512
    assert used < MIB, "slots were filled"


def test_too_little_shared_memory_is_as_good_as_none(config, small_disk, blocks):
    place = small_disk("3m")
    path = str(place / "cache")
    first = Reader(config.engine, blocks, attach(path, slots=32))
    second = Reader(config.engine, blocks, attach(path, slots=32))
    second.finish(second.start())  # wants the file
    first.finish(first.start())
    assert second.finish(second.start()) <= SLOT_BYTES  # what there was room for
    del first, second
    assert os.listdir(place) == []


def test_a_cache_beyond_all_memory_is_an_error_and_leaves_nothing(shared_path):
    with pytest.raises(OSError, match="node cache"):
        _engine.NodeCache(shared_path, 1 << 40, 1024)
    assert not os.path.exists(shared_path)


@pytest.mark.parametrize(("slot_bytes", "slots"), [(0, 1), (MIB + 1, 1), (MIB, 0), (MIB, 1025)])
def test_sizes_that_cannot_be_are_refused(shared_path, slot_bytes, slots):
    with pytest.raises(ValueError, match="slot_"):
        _engine.NodeCache(shared_path, slot_bytes, slots)


def test_a_cache_of_another_size_is_refused(shared_path):
    held = attach(shared_path, slots=2)
    with pytest.raises(OSError, match="node cache"):
        attach(shared_path, slots=3)
    del held


def test_the_holder_of_the_lock_may_die(config, shared_path, blocks):
    """A process is killed while it reads and offers, at random moments; the others go on."""
    program = textwrap.dedent("""
        import sys
        sys.path.insert(0, sys.argv[3])
        from test_node_cache import Reader, attach
        while True:
            reader = Reader("posix", sys.argv[2], attach(sys.argv[1]))
            for _ in range(20):
                reader.finish(reader.start())
    """)
    here = os.path.dirname(__file__)
    mine = Reader(config.engine, blocks, attach(shared_path))
    for number in range(4):
        other = subprocess.Popen([sys.executable, "-c", program, shared_path, str(blocks), here])
        time.sleep(2.0 + 0.37 * number)
        for _ in range(3):
            mine.finish(mine.start())
        other.send_signal(signal.SIGKILL)
        other.wait()
        mine.finish(mine.start())


# -------------------------------------------------------------------------------------------------
# through restore


def test_ranks_of_a_node_read_together_what_all_of_them_need(save, tmp_path):
    state = {f"t{n}": torch.randint(0, 256, (8 * MIB,), dtype=torch.uint8) for n in range(8)}
    save(state, str(tmp_path / "checkpoint"))
    program = textwrap.dedent("""
        import json, os, sys, time
        import torch, megatron_uring
        from megatron_uring import Config, _engine, checkpoint
        # slow reads, so that none is through before the others have begun
        _engine.inject_fault("read", "delay", count=-1, delay_s=0.05, path_contains="data-")
        directory, rank = sys.argv[1], sys.argv[2]
        wanted = {f"t{n}": torch.ones(8 << 20, dtype=torch.uint8) for n in range(8)}
        config = Config(node_sharing="on", slab_bytes=4 << 20, slab_count=4)
        open(f"{directory}-ready-{rank}", "w").close()
        while not all(os.path.exists(f"{directory}-ready-{other}") for other in range(3)):
            time.sleep(0.001)
        megatron_uring.restore(directory, wanted, config=config)
        report = checkpoint.last_reports()["restore"]
        sums = [int(tensor.sum()) for tensor in wanted.values()]
        print(json.dumps([report.file_bytes, report.shared_bytes, sums]))
    """)
    command = [sys.executable, "-c", program, str(tmp_path / "checkpoint")]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    answers = [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]
    assert all(answer[2] == [int(tensor.sum()) for tensor in state.values()] for answer in answers)
    assert all(answer[0] + answer[1] >= 64 * MIB for answer in answers)
    assert sum(answer[1] for answer in answers) >= 64 * MIB  # half of what could be


def test_without_shared_memory_each_rank_reads_for_itself(save, tmp_path, monkeypatch):
    save({"w": torch.arange(1000)}, str(tmp_path))
    monkeypatch.setattr(read, "_SHARED_MEMORY", str(tmp_path / "missing"))
    monkeypatch.setattr(read, "_SHARED_FROM_BYTES", 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    found = megatron_uring.restore(str(tmp_path), config=Config(engine="posix"))
    assert torch.equal(found["w"], torch.arange(1000))
    assert checkpoint.last_reports()["restore"].shared_bytes == 0
    with pytest.raises(StorageError, match="share reads"):
        megatron_uring.restore(str(tmp_path), config=Config(engine="posix", node_sharing="on"))


def test_any_restore_sweeps_what_killed_ones_left_unless_sharing_is_off(save, tmp_path):
    save({"w": torch.arange(10)}, str(tmp_path))
    left = f"/dev/shm/megatron_uring-{os.geteuid()}-left-by-{os.getpid()}"
    with open(left, "wb"):
        megatron_uring.restore(str(tmp_path), config=Config(node_sharing="off"))
        assert os.path.exists(left)
    megatron_uring.restore(str(tmp_path))
    assert not os.path.exists(left)
