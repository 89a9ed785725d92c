"""Megatron's promises about its state dicts, held by ours as by torch_dist."""

import programs
import pytest

pytestmark = pytest.mark.megatron


@pytest.mark.mpi
@pytest.mark.parametrize("check", programs.checks_of("semantics"))
@pytest.mark.parametrize(("launcher", "size"), [("mpirun", 2), ("torchrun", 4)])
def test_semantics(check, launcher, size, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / f"semantics_{launcher}"
    programs.require(check, size, programs.run("semantics", launcher, size, folder))
