"""Runs of `pretrain.py`, one after the other, each with as many ranks as it wants.

Guarantees
----------
- Torch and Megatron are imported once: a rank is a fork of this process, made before anything of
  torch.distributed or megatron_uring has begun. What a rank does is what a new process would do.
- With "adapter" a rank calls `megatron_uring.enable` when all of Megatron has been imported: the
  other order than that of ``megatron-uring run``. With "undo" it calls `disable` in the end, and
  fails if anything of ``megatron.training`` is not what it was.
- Standard input is a list of runs as JSON: "name", "size", "adapter", "undo", "arguments". In the
  folder that is named on the command line, NAME/output-RANK.txt and NAME/statuses.json tell what
  became of each. A run that takes longer than its share is killed.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import megatron_uring

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "mpi"))

import launch

LONGEST_S = 60.0


def main():
    """Run all."""
    import pretrain  # not above: processes that Megatron spawns import this file, and need no more

    root = Path(sys.argv[1])
    for run in json.load(sys.stdin):
        folder = root / run["name"]
        folder.mkdir()
        variables = {**launch.free_rendezvous(), "WORLD_SIZE": str(run["size"])}
        ranks = [start(rank, run, folder, variables, pretrain.main) for rank in range(run["size"])]
        (folder / "statuses.json").write_text(json.dumps(wait(ranks)), encoding="utf-8")


def start(rank, run, folder, variables, train):
    """Fork a rank; returns its process number."""
    child = os.fork()
    if child:
        return child
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
    output = os.open(folder / f"output-{rank}.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["pretrain.py", "--records", str(folder), *run["arguments"]]
    before = names_of_training()
    if run["adapter"]:
        megatron_uring.enable()
    patched = {name for name, value in names_of_training().items() if value != before[name]}
    assert bool(patched) is run["adapter"]
    train()
    if run["undo"]:
        megatron_uring.disable()
        after = names_of_training()
        assert [name for name in patched if after[name] != before[name]] == []
    sys.exit()  # this process ends here, as one of its own would: no other run is its


def names_of_training():
    """What the modules of Megatron's training loop know by which name."""
    return {
        (module, name): id(value)
        for module in sorted(sys.modules)
        if module.startswith("megatron.training")
        for name, value in vars(sys.modules[module]).items()
        if callable(value) or name in ("shutil", "multiprocessing", "maybe_msc")
    }


def wait(ranks):
    """Exit status of each."""
    deadline = time.monotonic() + LONGEST_S
    statuses = {}
    while len(statuses) < len(ranks):
        for rank in ranks:
            if rank in statuses:
                continue
            done, status = os.waitpid(rank, os.WNOHANG)
            if done:
                statuses[rank] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(rank, signal.SIGKILL)
        time.sleep(0.02)
    return [statuses[rank] for rank in ranks]


if __name__ == "__main__":
    main()
