"""Loads by one rank and by some, several models, others' files, classes and quantized tensors."""

import programs
import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.mpi]


@pytest.mark.parametrize("check", programs.checks_of("callers"))
def test_callers(check, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "callers"
    programs.require(check, 4, programs.run("callers", "torchrun", 4, folder))
