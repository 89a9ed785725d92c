"""Several ranks that save together: groups, one error for all, structures that are kept."""

import sys
from pathlib import Path

import pytest
import torch

import megatron_uring
from megatron_uring import index as index_module
from megatron_uring import verify
from megatron_uring.layout import BLOCK_BYTES

sys.path.insert(0, str(Path(__file__).parent / "mpi"))

from launch import run_processes

PROGRAM = """
import os, sys
import torch
import megatron_uring
from megatron_uring import CheckpointError, Config, ObjectProvider, Shard, _engine, comm

torch.distributed.init_process_group("gloo")
rank, root = torch.distributed.get_rank(), sys.argv[1]
world = comm.connect(30.0, "gloo")

def state(value):
    return {
        "w": Shard(torch.full((2, 300_000), value + rank), (4, 300_000), (2 * rank, 0)),
        "replicated": torch.arange(5) + value,
        "step": value,
    }

def save(name, state, aggregation="shared", **options):
    config = Config(engine="posix", slab_bytes=1 << 20, slab_count=2, aggregation=aggregation)
    return megatron_uring.save(
        state, os.path.join(root, name), config=config, communicator=world, **options
    )

def refused(text, *arguments, **options):
    try:
        save(*arguments, **options)
    except CheckpointError as error:
        assert text in str(error), error
        return str(error)
    raise AssertionError("nothing was raised on this rank")

for name in ("shared", "rank"):
    report = save(name, state(1), name, common=b"common" if rank == 0 else None)
    assert report.aggregation.startswith(name)
    totals = torch.tensor([report.state_bytes, report.file_bytes, report.files])
    torch.distributed.broadcast(totals, 0)
    assert totals.tolist() == [report.state_bytes, report.file_bytes, report.files]

for value in (10, 20):
    save("again", state(value))

wrong = Shard(torch.zeros(2), (4,), (rank, ))
refused("tensor 'bad'", "shared", {"bad": wrong})
nobody = Shard(torch.zeros(2), (4,), (2 * rank, ), owner=rank == 1)
refused("none for 2 elements", "shared", {"bad": nobody})
refused("object 'mine'", "shared", {"mine": 1} if rank == 1 else {"yours": 2})
own = Shard(torch.ones(2), (2,), (0,))
refused("a tensor of that key", "shared", {"k": 1 if rank == 0 else own})
message = refused("'f'", "shared", ObjectProvider({"f": lambda: 1} if rank == 1 else {}))
assert message.startswith("rank 1: ") == (rank == 0), message
refused("object 'twice'", "shared", ObjectProvider({"twice": rank}))
for operation in ("write", "sync"):
    for aggregation in ("shared", "rank"):
        if rank == 1:
            _engine.inject_fault(operation, "enospc", path_contains="data-")
        refused("No space left on device", "shared", state(2), aggregation)
        _engine.clear_faults()
if rank == 0:
    _engine.inject_fault("rename", "eio", path_contains="index")
refused("Input/output error", "shared", state(2))
_engine.clear_faults()
save("new", state(5))

class Interrupted:
    def collect(self):
        if rank == 1:
            raise KeyboardInterrupt
        return ObjectProvider({}).collect()

world.timeout_s = 3.0
try:
    refused("no sign of rank 1", "new", Interrupted())
except KeyboardInterrupt:
    assert rank == 1
why = "interrupted by KeyboardInterrupt" if rank == 1 else "no sign of rank 1"
refused(why, "new", state(6))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
print("rank", rank, "is through", flush=True)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """What two ranks left behind; each test looks at one thing of it."""
    root = tmp_path_factory.mktemp("ranks")
    program = root / "program.py"
    program.write_text(PROGRAM)
    done = run_processes(2, program, str(root), timeout_s=240.0)
    assert done.output.count("is through") == 2, done.output
    return root


def assert_holds(directory, config, value):
    restored = megatron_uring.restore(directory, config=config)
    expected = torch.tensor([value, value, value + 1, value + 1]).reshape(4, 1)
    assert torch.equal(restored["w"], expected.expand(4, 300_000))
    assert restored["replicated"].tolist() == [value + n for n in range(5)]
    assert restored["step"] == value


@pytest.mark.parametrize(("name", "subfiles"), [("shared", 1), ("rank", 2)])
def test_two_ranks_make_one_checkpoint_that_one_process_restores(root, posix, name, subfiles):
    assert_holds(root / name, posix, 1)
    index = index_module.read_index(str(root / name))
    assert len(index.subfile_number) == subfiles
    assert len(list((root / name).glob("data-*.bin"))) == subfiles


@pytest.mark.parametrize("name", ["shared", "rank", "again", "new"])
def test_checkpoints_of_two_ranks_are_proved_good(root, posix, world, name):
    findings = verify.verify(str(root / name), world, posix)
    assert findings.good, findings.problems


def test_ranks_that_share_a_subfile_have_regions_of_their_own(root):
    index = index_module.read_index(str(root / "shared"))
    assert sorted(set(index.regions.rank.tolist())) == [0, 1]
    spans = sorted(zip(index.regions.start, index.regions.length, strict=True))
    blocks = [set(range(s // BLOCK_BYTES, -(-(s + n) // BLOCK_BYTES))) for s, n in spans]
    assert sum(map(len, blocks)) == len(set().union(*blocks))


def test_a_box_across_ranks_is_restored(root, posix):
    for name in ("shared", "rank"):
        box = torch.zeros(2, 10, dtype=torch.int64)
        shard = megatron_uring.Shard(box, (4, 300_000), (1, 5))
        megatron_uring.restore(root / name, {"w": shard}, config=posix)
        assert torch.equal(box, torch.tensor([[1], [2]]).expand(2, 10))


def test_a_second_save_of_the_same_structure_holds_the_second_values(root, posix):
    assert_holds(root / "again", posix, 20)


def test_after_failed_saves_the_old_checkpoint_is_there_without_debris(root, posix):
    assert_holds(root / "shared", posix, 1)
    index = index_module.read_index(str(root / "shared"))
    names = sorted(entry.name for entry in (root / "shared").iterdir())
    assert names == sorted(
        [
            "index.h5",
            f"common-{index.save_id}.pt",
            f"data-{index.save_id}-00000.bin",
            f"timeline-{index.save_id}.jsonl",
        ]
    )


def test_the_ranks_can_save_after_failures(root, posix):
    assert_holds(root / "new", posix, 5)


def test_facts_tell_versions_and_mode(root):
    index = index_module.read_index(str(root / "shared"))
    assert index.facts["aggregation"] == "shared" and index.facts["world_size"] == "2"
    assert index.facts["communicator"] == "gloo" and torch.__version__ in index.facts["versions"]
