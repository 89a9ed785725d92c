"""Converted checkpoints against Megatron's own: loaded with the adapter off, and by us."""

import programs
import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.mpi, pytest.mark.slow]


@pytest.mark.parametrize("check", programs.checks_of("interchange"))
def test_interchange_of_two_ranks(check, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "interchange"
    programs.require(check, 2, programs.run("interchange", "mpirun", 2, folder))
