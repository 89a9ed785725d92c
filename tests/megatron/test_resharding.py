"""The resharding matrix (`matrix`), cell by cell, against torch_dist and the tensors in memory."""

import matrix
import programs
import pytest

# the first test of a world waits for all saves of it, and for those of others that it loads
pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.timeout(1200)]

VERSION = matrix.numbers(programs.VERSION)
CELLS = {cell.name: cell for cell in matrix.cells_of(VERSION)}
LAUNCHER = "alone"
TIMEOUT_S = 280.0  # eight ranks on two cores, all cells of a world in one run


PARAMETERS = [
    pytest.param(name, marks=[] if cell.often else [pytest.mark.matrix], id=name)
    for name, cell in CELLS.items()
]


@pytest.fixture
def runs(request, tmp_path_factory):
    """Runs the program for all selected cells of a world at once."""
    callspecs = [getattr(item, "callspec", None) for item in request.session.items]
    names = {spec.params["name"] for spec in callspecs if spec and "name" in spec.params}
    selected = [cell for name, cell in CELLS.items() if name in names]
    folder = tmp_path_factory.getbasetemp() / "resharding"

    def run(what, size, items):
        words = (what, *(item.name for item in items))
        return programs.run("resharding", LAUNCHER, size, folder, *words, timeout_s=TIMEOUT_S)

    def save(size):
        sources = {cell.source for cell in selected if cell.source.layout.world == size}
        return run("save", size, sorted(sources, key=lambda item: (item.layout, item.name)))

    def load(size):
        cells = [cell for cell in selected if cell.layout.world == size]
        for world in sorted({cell.source.layout.world for cell in cells}):
            save(world)
        return run("load", size, sorted(cells, key=lambda c: (c.layout, c.model, c.name)))

    return save, load


def _record(record_property, cell):
    """What the table of features is made of."""
    refusal = matrix.refusal(cell, VERSION)
    record_property("area", "resharding")
    record_property("feature", cell.feature)
    record_property("outcome", f"not in Megatron: {refusal.reason}" if refusal else "same bits")


@pytest.mark.parametrize("name", PARAMETERS)
def test_save_and_load(name, runs, record_property):
    cell, (save, load) = CELLS[name], runs
    _record(record_property, cell)
    world = cell.source.layout.world
    programs.require(cell.source.name, world, save(world))
    programs.require(name, cell.layout.world, load(cell.layout.world))
