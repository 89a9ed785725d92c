"""A GPT with its optimizer, saved and loaded at equal and at other layouts, as by torch_dist."""

import programs
import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.mpi, pytest.mark.slow]

AT_FOUR = ["other_layouts"]


@pytest.mark.parametrize("check", programs.checks_of("roundtrip"))
def test_round_trip_of_two_ranks(check, tmp_path_factory):
    if check in AT_FOUR:
        folder = tmp_path_factory.getbasetemp() / "roundtrip_4"
        done = programs.run("roundtrip", "torchrun", 4, folder, *AT_FOUR)
        programs.require(check, 4, done)
        return
    folder = tmp_path_factory.getbasetemp() / "roundtrip_2"
    checks = [name for name in programs.checks_of("roundtrip") if name not in AT_FOUR]
    programs.require(check, 2, programs.run("roundtrip", "mpirun", 2, folder, *checks))
