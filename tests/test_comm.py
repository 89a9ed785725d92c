"""The communicators, under mpirun, torchrun and without a launcher."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "mpi"))

from launch import PROGRAMS, ROOT, Finished, free_rendezvous, run_mpi, run_processes, run_torchrun

from megatron_uring.comm import SingleCommunicator
from megatron_uring.comm import launch as comm_launch
from megatron_uring.comm import parts as comm_parts
from megatron_uring.errors import CheckpointError, CommunicationError, CorruptionError, StorageError

COLLECTIVES, STUCK, CHOICES = (PROGRAMS / f"{n}.py" for n in ("collectives", "stuck", "choices"))


@pytest.mark.mpi
def test_collectives_under_mpirun_without_torch():
    expected = {"EXPECTED_KIND": "mpi", "EXPECTED_SIZE": "2", "WITH_TORCH": "0", "PROGRESS": "1"}
    done = run_mpi(2, COLLECTIVES, "all_collectives", env=expected)
    assert done.output.count("passed all_collectives") == 2, done.output
    assert done.output.count("torch.distributed is not initialised, 2 ranks on 1 node") == 2


@pytest.mark.mpi
def test_collectives_under_mpirun_with_torch_ranks_reversed_on_two_nodes():
    expected = {"EXPECTED_KIND": "mpi", "EXPECTED_SIZE": "4", "REVERSE": "1"}
    fake = {"MEGATRON_URING_NODE_OF_RANK": "7,3,7,3"}
    done = run_mpi(4, COLLECTIVES, "all_collectives", env={**expected, **fake})
    assert done.output.count("passed all_collectives") == 4, done.output
    assert done.output.count("COMM_WORLD matches torch.distributed, 4 ranks on 2 nodes") == 4
    assert done.output.count("nodes [0, 1, 0, 1]") == 4


def test_collectives_under_torchrun():
    expected = {"EXPECTED_KIND": "gloo", "EXPECTED_SIZE": "2", "PROGRESS": "1"}
    done = run_torchrun(2, COLLECTIVES, "all_collectives", env=expected)
    assert done.output.count("passed all_collectives") == 2, done.output
    assert done.output.count("nodes [0, 0]") == 2


def test_collectives_under_torchrun_on_uneven_nodes():
    expected = {"EXPECTED_KIND": "gloo", "EXPECTED_SIZE": "4"}
    fake = {"MEGATRON_URING_NODE_OF_RANK": "0,1,1,1"}
    done = run_torchrun(4, COLLECTIVES, "all_collectives", env={**expected, **fake})
    assert done.output.count("passed all_collectives") == 4, done.output
    assert done.output.count("nodes [0, 1, 1, 1]") == 4


STUCK_CASES = [
    ("mpi", "stopped_before_agree", 4, 1),
    ("mpi", "stopped_before_agree", 2, 0),
    ("mpi", "without_progress", 2, 1),
    ("mpi", "missing_in_collectives", 2, 1),
    ("gloo", "stopped_before_agree", 3, 1),
    ("gloo", "stopped_before_agree", 2, 0),  # and with rank 0 the server of the store
    ("gloo", "without_progress", 2, 1),
    ("gloo", "missing_in_collectives", 2, 1),
    ("gloo", "dead_rank", 3, 1),
]


def _run_stuck(kind: str, program: str, size: int, victim: int) -> Finished:
    env = {"VICTIM": str(victim), "EXPECTED_KIND": kind}
    if kind == "gloo":
        return run_processes(size, STUCK, program, env=env)
    # mpirun counts leaving without MPI_Finalize, which is what a broken MPI asks for, as a failure.
    return run_mpi(size, STUCK, program, env=env, ok=False)


@pytest.fixture(scope="module")
def stuck_runs() -> Iterator[dict[object, Future[Finished]]]:
    """All cases, several at a time: they sleep most of the time."""
    with ThreadPoolExecutor(3) as pool:
        yield {case: pool.submit(_run_stuck, *case) for case in STUCK_CASES}


@pytest.mark.mpi
@pytest.mark.parametrize("case", STUCK_CASES, ids=lambda case: "-".join(map(str, case)))
def test_stuck_rank_is_named_by_the_others(
    case: tuple[str, str, int, int], stuck_runs: dict[object, Future[Finished]]
):
    done = stuck_runs[case].result()
    _, program, size, _ = case
    assert done.output.count(f"passed {program}") == size, done.output
    assert "Traceback" not in done.output, done.output


@pytest.mark.mpi
def test_choices_and_restart_under_mpirun():
    env = {"SECOND_PORT": free_rendezvous()["MASTER_PORT"]}
    done = run_mpi(2, CHOICES, "under_mpirun", env=env)
    assert done.output.count("passed under_mpirun") == 2, done.output


@pytest.mark.mpi
def test_two_torch_worlds_under_one_mpirun_do_not_use_mpi():
    second = {"SECOND_PORT": free_rendezvous()["MASTER_PORT"]}
    done = run_mpi(4, CHOICES, "two_torch_worlds", env=second)
    assert done.output.count("passed two_torch_worlds") == 4, done.output


@pytest.mark.mpi
@pytest.mark.parametrize(("whose", "finalized"), [("theirs", False), ("ours", True)])
def test_only_our_own_mpi_is_finalized(whose: str, finalized: bool):
    done = run_mpi(2, CHOICES, "mpi_of_others", env={"WHOSE": whose})
    assert done.output.count(f"finalized {finalized}") == 2, done.output


def test_small_store_and_restart_on_gloo():
    env = {"SECOND_PORT": free_rendezvous()["MASTER_PORT"]}
    done = run_processes(2, CHOICES, "on_gloo", env=env)
    assert done.output.count("passed on_gloo") == 2, done.output


@pytest.mark.parametrize("evidence", [{"OMPI_COMM_WORLD_RANK": "0"}, {"PMI_RANK": "0"}])
def test_worlds_of_one_are_noticed(evidence: dict[str, str]):
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = run_processes(2, CHOICES, "worlds_of_one", env={**allowed, **evidence})
    assert done.output.count("passed worlds_of_one") == 2, done.output


def test_worlds_of_one_without_torch_are_refused():
    env = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    done = run_processes(1, CHOICES, "worlds_of_one_without_torch", env=env)
    assert "passed worlds_of_one_without_torch" in done.output


def test_one_process_is_single():
    assert "passed alone" in run_processes(1, CHOICES, "alone").output


def test_import_brings_neither_torch_nor_mpi():
    # The package itself may import torch; this module must not, so import it without the package.
    code = (
        "import sys, types; package = types.ModuleType('megatron_uring');"
        f"package.__path__ = [{str(ROOT / 'megatron_uring')!r}];"
        "sys.modules['megatron_uring'] = package; import megatron_uring.comm;"
        "assert not {'torch', 'mpi4py'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_single_answers_itself():
    single = SingleCommunicator(5.0, "test", "here")
    assert single.broadcast(b"abc") == b"abc"
    assert [part.tobytes() for part in single.gather(np.arange(3, dtype=np.int16)) or []] == [
        np.arange(3, dtype=np.int16).tobytes()
    ]
    values = np.array([3, -4], np.int64)
    assert single.allgather(values).tolist() == [[3, -4]]
    assert single.allreduce(values, "min").tolist() == [3, -4]
    assert single.split(3).size == 1
    single.agree("well")
    cause = OSError(5, "Input/output error", "/x")
    with pytest.raises(StorageError, match=r"^write: /x") as caught:
        single.agree("write", cause)
    assert caught.value.__cause__ is cause
    with pytest.raises(CheckpointError, match="float64"):
        single.allgather(np.zeros(1))  # type: ignore[arg-type]
    single.close()
    with pytest.raises(CommunicationError, match="closed"):
        single.agree("after the end")


def test_three_failures_are_listed_and_the_others_counted():
    arrivals = {rank: comm_parts.encode_arrival("read", None) for rank in range(8)}
    for rank in (6, 2, 3, 5, 7):
        arrivals[rank] = comm_parts.encode_arrival("read", CorruptionError(f"block {rank}"))
    verdict = comm_parts.decode(comm_parts.encode(comm_parts.judge(arrivals)))
    with pytest.raises(CorruptionError) as caught:
        comm_parts.raise_failures(verdict["failures"], verdict["failed"])
    assert str(caught.value) == "rank 2: block 2; rank 3: block 3; rank 5: block 5; and 2 more"


def test_failure_counts_more_than_different_steps():
    arrivals = {
        0: comm_parts.encode_arrival("write", None),
        1: comm_parts.encode_arrival("open", StorageError("open")),
    }
    assert comm_parts.judge(arrivals)["failed"] == 1


def test_nodes_are_told_apart_by_host_and_boot_id():
    def place(host: str, boot: str, fake: str = "") -> bytes:
        return comm_parts.encode({"host": host, "boot_id": boot, "fake": fake})

    names = [("b", "1"), ("a", "1"), ("b", "2"), ("b", "1")]
    real = comm_parts.topology({r: place(*name) for r, name in enumerate(names)})
    assert real == {"node_of_rank": [0, 1, 2, 0], "hosts": ["b", "a", "b"]}
    fake = comm_parts.topology({r: place("b", "1", "5, 2,5") for r in range(3)})
    assert fake["node_of_rank"] == [0, 1, 0]
    wrong = comm_parts.topology({r: place("b", "1", "0,0") for r in range(3)})
    assert "2 ranks of 3" in wrong["refusal"]


def test_one_verdict_even_if_rank_0_comes_after_it_was_given_up():
    from torch.distributed import HashStore

    from megatron_uring.comm.store import StoreCaller, StoreChannel

    families = [comm_parts.Family(0.2), comm_parts.Family(0.2)]
    store = HashStore()
    callers = [StoreCaller(store, family) for family in families]
    leader, follower = (StoreChannel(callers[r], "x", r, 2, families[r]) for r in range(2))
    arrival = comm_parts.encode_arrival("write", None)
    assert follower.exchange(arrival, comm_parts.judge)["missing"] == [0]
    assert leader.exchange(arrival, comm_parts.judge)["missing"] == [0]


def test_store_that_does_not_answer_is_given_up():
    from megatron_uring.comm.store import StoreCaller

    family = comm_parts.Family(0.1)
    caller = StoreCaller(object(), family)
    with pytest.raises(CommunicationError, match="did not answer"):
        caller.call(time.sleep, 0.6)
    with pytest.raises(CommunicationError, match="broken"):
        caller.call(time.sleep, 0.0)


def test_waiter_counts_from_the_last_progress():
    waiter = comm_parts.Waiter(0.2)
    for _ in range(4):
        time.sleep(0.1)
        assert not waiter.expired()
        waiter.progressed()
    time.sleep(0.25)
    assert waiter.expired()


def test_progress_needs_new_bytes_and_time():
    meter = comm_parts.ProgressMeter()
    assert meter.worth_sending(1, 0.1)
    assert not meter.worth_sending(2, 0.1)
    time.sleep(0.12)
    assert not meter.worth_sending(1, 0.1)
    assert meter.worth_sending(2, 0.1)


@pytest.mark.parametrize(
    ("variables", "fragment"),
    [
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "no PMIX_"),
        ({"OMPI_MCA_btl": "self", "OMPI_ALLOW_RUN_AS_ROOT": "1"}, "no PMIX_"),
        ({"PMIX_RANK": "0", "TORCHELASTIC_RUN_ID": "1"}, "torchelastic"),
        ({"PMIX_RANK": "0"}, None),
        ({"OMPI_COMM_WORLD_RANK": "0"}, None),
    ],
)
def test_evidence_of_mpi(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], fragment: str | None
):
    for name in [name for name in os.environ if name.startswith(("OMPI", "PMI", "TORCHEL"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    refusal = comm_launch.mpi_refusal()
    assert refusal is None if fragment is None else fragment in (refusal or "")
    assert "mpi4py.MPI" not in sys.modules
