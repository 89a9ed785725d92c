"""Every failure raises an error of ours and Megatron's at once, on every rank; nothing is lost."""

import subprocess

import programs
import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.mpi]

TIMEOUT_S = 3


@pytest.fixture(scope="module")
def small_file_system(tmp_path_factory):
    """A file system of 16 MiB, or None where only root could mount one."""
    path = tmp_path_factory.mktemp("small")
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(path)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    yield path if mounted else None
    if mounted:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("check", programs.checks_of("failures"))
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_failure(check, launcher, small_file_system, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / f"failures_{launcher}"
    small = None if small_file_system is None else str(small_file_system)
    done = programs.run("failures", launcher, 2, folder, small_file_system=small)
    programs.require(check, 2, done)


@pytest.mark.parametrize("saved_before", ["0", "1"])
@pytest.mark.parametrize(
    ("launcher", "kind", "size"), [("mpirun", "mpi", 2), ("torchrun", "gloo", 3)]
)
def test_rank_0_raises_before_our_save(launcher, kind, size, saved_before, tmp_path):
    env = {
        "MEGATRON_URING_TIMEOUT_S": str(TIMEOUT_S),
        "EXPECTED_KIND": kind,
        "SAVED_BEFORE": saved_before,
        "OMP_NUM_THREADS": "1",
    }
    program = programs.FOLDER / "lost_rank.py"
    start = programs.LAUNCHERS[launcher]
    done = start(size, program, str(tmp_path), env=env, timeout_s=90.0, ok=False)
    programs.require("lost_rank", size, done)
