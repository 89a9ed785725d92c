"""`megatron-uring run`: a program cannot tell it from python itself, but for its checkpoints."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatron_uring import launching

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = '''
"""A program."""
import multiprocessing, os, sys

def tell(queue):
    queue.put((__name__, __file__, sys.argv[1:]))

class OwnError(Exception):
    pass

def fail():
    raise OwnError("of the program")

main = sys.modules[__name__]
print(__name__, __file__, __doc__, sys.argv, sys.path[0])
print(__package__, getattr(__spec__, "name", None), vars(main) is globals())
print({"torch", "megatron"} & set(sys.modules))
if __name__ == "__main__":
    if "spawn" in sys.argv:
        for method in ("spawn", "forkserver"):
            context = multiprocessing.get_context(method)
            queue = context.Queue()
            process = context.Process(target=tell, args=(queue,))
            process.start()
            print(queue.get())
            process.join()
    if "fail" in sys.argv:
        try:
            1 / 0
        except ZeroDivisionError:
            fail()
    if "interrupt" in sys.argv:
        raise KeyboardInterrupt
    if "status" in sys.argv:
        sys.exit(7)
    if "text" in sys.argv:
        sys.exit("the end")
    if "broken pipe" in sys.argv:
        raise BrokenPipeError(32, "a pipe of the program's")
    if "hook" in sys.argv:
        sys.excepthook = lambda kind, error, frames: print("hook", frames.tb_lineno)
        fail()
'''


@pytest.fixture
def folder(tmp_path):
    """Holds program.py, and the package `pack` whose `__main__` it is too."""
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "broken.py").write_text("print(1)\nif True\n", encoding="utf-8")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "pack" / "__main__.py").write_text(PROGRAM, encoding="utf-8")
    return tmp_path


def run(folder, *arguments, under=(), **variables):
    done = subprocess.run(
        [sys.executable, *under, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


def both(folder, *arguments):
    """What python and ``megatron-uring run`` gave; the same, but for one line of our own."""
    theirs = run(folder, *arguments)
    status, output, errors = run(folder, *arguments, under=("-m", "megatron_uring", "run"))
    own = [line for line in errors.splitlines(keepends=True) if "never imported megat" in line]
    assert len(own) == (status == 0)
    ours = status, output, "".join(x for x in errors.splitlines(keepends=True) if x not in own)
    assert ours == theirs
    return theirs


@pytest.mark.parametrize(
    "form", [["program.py"], ["./pack/../program.py"], ["-m", "program"], ["-m", "pack"]], ids=str
)
def test_a_program_and_its_spawned_children_see_what_python_gives_them(folder, form):
    # children cannot find the functions of a package's __main__ under python either
    spawn = ["spawn"] if form[-1] != "pack" else []
    status, output, errors = both(folder, *form, *spawn, "--help", "-m", "--", "")
    assert status == 0 and errors == ""
    assert output.count("set()") == (3 if spawn else 1)
    assert output.count("__mp_main__") == (4 if spawn else 0)


@pytest.mark.parametrize(
    ("how", "expected"),
    [("fail", 1), ("interrupt", -2), ("status", 7), ("text", 1), ("broken pipe", 1), ("hook", 1)],
)
def test_exit_status_and_traceback_are_the_programs_own(folder, how, expected):
    status, output, errors = both(folder, "program.py", how)
    assert status == expected and "megatron_uring" not in errors
    assert ("Traceback" in errors) is (how in ("fail", "interrupt", "broken pipe"))
    assert "hook" not in how or "hook" in output


def test_a_syntax_error_shows_no_frames(folder):
    status, _, errors = both(folder, "broken.py")
    assert status == 1 and "SyntaxError" in errors and "Traceback" not in errors


def test_the_console_script_is_the_same(folder):
    tool = str(Path(sys.executable).with_name("megatron-uring"))
    done = subprocess.run(
        [tool, "run", "program.py", "status"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == run(folder, "program.py", "status")[:2]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["nowhere.py"], 2, "nowhere.py"),
        (["-m", "nowhere"], 1, "no module named nowhere"),
        (["-m", "pack.nowhere"], 1, "no module named pack.nowhere"),
        (["--option", "slab_byte=1", "program.py"], 1, "slab_bytes"),
        (["--option", "slab_bytes=1", "program.py"], 1, "slab_bytes"),
        (["--option", "slab_bytes", "program.py"], 1, "slab_bytes"),
        (["--slab-bytes=1", "program.py"], 2, "--slab-bytes"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_line_and_nothing_runs(folder, arguments, status, said):
    found, output, errors = run(folder, *arguments, under=("-m", "megatron_uring", "run"))
    assert found == status and said in errors and "Traceback" not in errors and output == ""


def test_a_variable_that_cannot_be_used_is_refused_before_the_program_runs(folder):
    under = ("-m", "megatron_uring", "run")
    found = run(folder, "program.py", under=under, MEGATRON_URING_ENGINE="aio")
    assert found[0] == 1 and found[1] == "" and "MEGATRON_URING_ENGINE" in found[2]


def test_the_adapter_is_enabled_when_megatron_core_is_imported_and_not_before(folder):
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("print('core')\n__version__ = '0.1'\n", encoding="utf-8")
    (folder / "imports.py").write_text(
        textwrap.dedent(
            """
            import sys
            print(sorted({"torch", "numpy", "megatron"} & set(sys.modules)))
            try:
                import megatron.core.anything
            except Exception as error:
                print(type(error).__name__, error)
            """
        ),
        encoding="utf-8",
    )
    under = ("-m", "megatron_uring", "run")
    status, output, errors = run(folder, "imports.py", under=under)
    first, second, third = output.splitlines()
    assert (status, first, second) == (0, "[]", "core"), errors
    assert third.startswith("UnsupportedError") and "0.1" in third
    _, output, _ = run(folder, "imports.py", under=under, MEGATRON_URING="off")
    assert output.splitlines()[2].startswith("ModuleNotFoundError")


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "job-1",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
}


def test_ranks_of_mpirun_and_srun_are_told_as_torchrun_does():
    found = launching.launcher_variables(OPEN_MPI)
    port = found.pop("MASTER_PORT")
    assert found == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "3",
        "MASTER_ADDR": "127.0.0.1",
    }
    assert (
        port
        == launching.launcher_variables({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"})["MASTER_PORT"]
    )
    assert (
        port != launching.launcher_variables({**OPEN_MPI, "PMIX_NAMESPACE": "job-2"})["MASTER_PORT"]
    )
    # over several nodes nobody can know the address
    found = launching.launcher_variables(SRUN)
    assert found == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    found = launching.launcher_variables({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "8"})
    assert found["MASTER_ADDR"] == "127.0.0.1"


def test_what_the_user_or_torchrun_has_set_stays():
    assert launching.launcher_variables({**OPEN_MPI, "RANK": "0"}) == {}
    found = launching.launcher_variables({**OPEN_MPI, "MASTER_PORT": "1234"})
    assert found["MASTER_PORT"] == "1234"
    found = launching.launcher_variables({**OPEN_MPI, "MASTER_ADDR": "node1"})
    assert "MASTER_ADDR" not in found and "MASTER_PORT" not in found
    # a batch script has these, outside of srun
    assert launching.launcher_variables({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) == {}
    assert launching.launcher_variables({}) == {}
