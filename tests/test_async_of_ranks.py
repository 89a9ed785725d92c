"""Asynchronous saves of two ranks that do not finish them alike: all raise, none is committed."""

import sys
from pathlib import Path

import megatron_uring
from megatron_uring import Config, verify

sys.path.insert(0, str(Path(__file__).parent / "mpi"))

from launch import run_processes

PROGRAM = """
import sys, threading, time
import torch
import megatron_uring
from megatron_uring import CommunicationError, Config, Shard, _engine, comm

root = sys.argv[1]
torch.distributed.init_process_group("gloo")
world = comm.connect(20.0, "gloo")
rank = world.rank
config = Config(engine="posix", slab_bytes=1 << 20, slab_count=2, aggregation="shared")

def begin(name, value):
    tensor = torch.full((300_000,), value + rank)
    state = {"w": Shard(tensor, (600_000,), (300_000 * rank,))}
    return megatron_uring.save_async(state, root + "/" + name, config=config, communicator=world)

def refused(call, *texts):
    began = time.perf_counter()
    try:
        call()
    except CommunicationError as error:
        assert all(text in str(error) for text in texts), (texts, error)
        assert time.perf_counter() - began < 10.0
    else:
        raise AssertionError(f"not refused: {texts}")

own_order = slice(None, None, 1 if rank == 0 else -1)
for value, name in enumerate("ab"):
    begin(name, value).wait()

# each rank waits for another one first
saves = [begin("a", 10), begin("b", 20)]
for save in saves[own_order]:
    refused(save.wait, *(one.save_id for one in saves))

# each rank polls another one first
_engine.inject_fault("write", "delay", path_contains="data-", delay_s=0.3)
saves = [begin("c", 30), begin("d", 40)]
assert not any([save.poll() for save in saves[own_order]])
for save in saves[own_order]:
    refused(save.poll, save.save_id, "same order")
assert saves[1].wait() and saves[0].wait()

# one of them has given it up, the other one would finish it first
save = begin("a", 50)
if rank == 1:
    save.abort()
refused(lambda: begin("a", 60), "in one step")
save = begin("e", 70)

# messages of two threads would be taken for each other's
def another_thread():
    for call in (save.wait, lambda: begin("f", 80)):
        refused(call, "only by the thread")
    ended.append(True)

ended = []
thread = threading.Thread(target=another_thread)
thread.start()
thread.join()
assert ended
save.wait()
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def test_ranks_that_finish_different_saves_commit_nothing(tmp_path, world):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run_processes(2, program, str(tmp_path))
    for name, value in (("a", 0), ("b", 1), ("c", 30), ("d", 40), ("e", 70)):
        assert verify.verify(str(tmp_path / name), world, Config()).good
        found = megatron_uring.restore(tmp_path / name)["w"].reshape(2, -1)
        assert [row.unique().tolist() for row in found] == [[value], [value + 1]]
        assert len(list((tmp_path / name).glob("data-*"))) == 1, name
