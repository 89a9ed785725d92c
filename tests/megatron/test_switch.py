"""`enable`, `disable` and `status`, in a process of their own: they change Megatron for good."""

import programs
import pytest

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize("check", programs.checks_of("switch"))
def test_switch(check, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "switch"
    programs.require(check, 1, programs.run("switch", "alone", 1, folder))
