"""Two ranks of a node that save by way of one staging directory, together and each for itself."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

import megatron_uring
from megatron_uring import checkpoint, verify
from megatron_uring import index as index_module

sys.path.insert(0, str(Path(__file__).parent / "mpi"))

from launch import run_mpi, run_processes

PROGRAM = """
import logging, os, sys, time
import torch
import megatron_uring
from megatron_uring import CheckpointError, Config, Shard, _engine, comm
from megatron_uring.checkpoint import last_reports

root, kind = sys.argv[1:]
staging = root + "/staging"
if kind == "gloo":
    torch.distributed.init_process_group("gloo")
world = comm.connect(30.0, kind)
rank = world.rank
warned = []
handler = logging.Handler()
handler.emit = lambda record: warned.append(record.getMessage())
logging.getLogger("megatron_uring").addHandler(handler)

def config_of(aggregation="shared", staging=staging):
    return Config(
        engine="posix", slab_bytes=1 << 20, slab_count=2, aggregation=aggregation,
        staging_directory=staging, communicator=kind, node_sharing="off",
    )

def state(value):
    return {
        "w": Shard(torch.full((2, 700_000), value + rank), (4, 700_000), (2 * rank, 0)),
        "replicated": torch.arange(5) + value,
        "step": value,
    }

def save(name, value, config):
    directory = os.path.join(root, "run", name)
    return megatron_uring.save_async(state(value), directory, config=config, communicator=world)

def everyone(directory):
    whole = megatron_uring.restore(os.path.join(root, "run", directory), config=config_of())
    return whole, last_reports()["restore"]

for value, aggregation in enumerate(("shared", "rank"), 1):
    pending = save(aggregation, value, config_of(aggregation))
    while not pending.poll():
        time.sleep(0.01)
    assert pending.acknowledged()
    assert pending.wait().acknowledged_s > 0
    whole, report = everyone(aggregation)
    assert whole["step"] == value and whole["w"][:, 0].tolist() == [value] * 2 + [value + 1] * 2
    assert report.local_bytes == report.file_bytes, report
assert not warned, warned

# over the first one; rank 1 has no staging directory that could be used
if rank == 1:
    open(root + "/file", "w").close()
pending = save("shared", 3, config_of(staging=staging if rank == 0 else root + "/file/below"))
report = pending.wait()
assert (report.acknowledged_s > 0) == (rank == 0)
assert len(warned) == rank, warned
whole, report = everyone("shared")
assert whole["step"] == 3 and whole["w"][:, 0].tolist() == [3, 3, 4, 4]
assert 5_000_000 < report.local_bytes < report.file_bytes - 5_000_000, report

# rank 1 fails on the way from its copy to the checkpoint directory
for operation in ("write", "sync"):
    if rank == 1:
        _engine.inject_fault(operation, "eio", count=-1, path_contains=root + "/run/shared/data-")
    pending = save("shared", 4, config_of())
    try:
        pending.wait()
    except CheckpointError as error:
        assert "Input/output error" in str(error)
    else:
        raise AssertionError("nothing was raised on this rank")
    _engine.clear_faults()

# both give one up
_engine.inject_fault("write", "delay", count=-1, path_contains=root + "/run/", delay_s=0.2)
pending = save("shared", 5, config_of())
pending.abort()
_engine.clear_faults()

assert save("last", 6, config_of()).wait().acknowledged_s > 0
print("rank", rank, "is through", flush=True)
if kind == "gloo":
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module", params=["gloo", pytest.param("mpi", marks=pytest.mark.mpi)])
def root(tmp_path_factory, request):
    """What two ranks left behind; each test looks at one thing of it."""
    root = tmp_path_factory.mktemp("ranks")
    program = root / "program.py"
    program.write_text(PROGRAM)
    run = run_mpi if request.param == "mpi" else run_processes
    done = run(2, program, str(root), request.param, timeout_s=240.0)
    assert done.output.count("is through") == 2, done.output
    return root


@pytest.mark.parametrize(("name", "value"), [("shared", 3), ("rank", 2), ("last", 6)])
def test_their_checkpoints_are_proved_good(root, posix, world, name, value):
    directory = root / "run" / name
    findings = verify.verify(str(directory), world, posix)
    assert findings.good, findings.problems
    restored = megatron_uring.restore(directory, config=posix)
    expected = torch.tensor([value, value, value + 1, value + 1]).reshape(4, 1)
    assert torch.equal(restored["w"], expected.expand(4, 700_000)) and restored["step"] == value


def test_failed_and_aborted_saves_leave_nothing_in_the_checkpoint_directory(root):
    index = index_module.read_index(str(root / "run" / "shared"))
    names = {path.name for path in (root / "run" / "shared").iterdir()}
    own = {f"data-{index.save_id}-00000.bin", f"timeline-{index.save_id}.jsonl"}
    assert names == {"index.h5", *own}


def test_the_copies_of_the_last_checkpoint_stay_and_no_others(root):
    index = index_module.read_index(str(root / "run" / "last"))
    names = {path.name for path in (root / "staging").rglob("*") if path.is_file()}
    subfile = [f"data-{index.save_id}-{number:05d}.bin" for number in index.subfile_number]
    copies = {f"{subfile[0]}.{rank}{end}" for rank in (0, 1) for end in ("", ".json")}
    assert names == {"lock", *copies}


def test_one_damaged_copy_leaves_out_all_of_that_restore(root, posix, caplog):
    near = dataclasses.replace(posix, staging_directory=str(root / "staging"))
    directory = root / "run" / "last"
    megatron_uring.restore(directory, config=near)
    report = checkpoint.last_reports()["restore"]
    assert report.local_bytes == report.file_bytes and caplog.messages == []
    copy = sorted((root / "staging").rglob("data-*.1"))[-1]
    with copy.open("r+b") as file:
        file.truncate(1 << 20)
    assert megatron_uring.restore(directory, config=near)["step"] == 6
    assert checkpoint.last_reports()["restore"].local_bytes == 0
    assert len(caplog.messages) == 1 and "local copies are left out" in caplog.messages[0]
