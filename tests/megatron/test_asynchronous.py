"""Asynchronous saves of Megatron: training goes on beside them, and nothing is torn or lost."""

import programs
import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.mpi]


@pytest.mark.parametrize("check", programs.checks_of("asynchronous"))
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_asynchronous(check, launcher, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / f"asynchronous_{launcher}"
    programs.require(check, 2, programs.run("asynchronous", launcher, 2, folder))
