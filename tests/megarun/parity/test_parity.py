"""Every layout trains as one process does: same start, same gradients, same losses, same parameters after three steps.

`pytest tests/megarun/parity -m "not slow"` is the subset that CI runs; `pytest tests/megarun/parity` is the whole matrix.
"""

import pytest
from feature_cells import FEATURE_CELLS
from parity_cells import CELLS, Cell
from parity_compare import first_difference
from parity_world import Worlds

pytestmark = pytest.mark.runtime


def _marked(cell: Cell) -> object:
    return pytest.param(cell, id=cell.name, marks=() if cell.ci else pytest.mark.slow)


@pytest.mark.requirement("R-8")
@pytest.mark.requirement("R-9")
@pytest.mark.requirement("R-10")
@pytest.mark.requirement("R-13")
@pytest.mark.requirement("R-15")
@pytest.mark.requirement("R-26")
@pytest.mark.requirement("R-55")
@pytest.mark.requirement("R-62")
@pytest.mark.requirement("R-63")
@pytest.mark.requirement("R-67")
@pytest.mark.parametrize("cell", [_marked(cell) for cell in (*CELLS, *FEATURE_CELLS)])
def test_a_layout_trains_as_one_process(cell: Cell, worlds: Worlds) -> None:
    """Initial parameters and pp alone to the bit; other axes to the rounding of their sums."""
    found = first_difference(cell.case, worlds.train(cell.case, cell.world_size), worlds.reference(cell.reference), cell.bound)
    assert found is None, f"{cell.name} ({cell.axes}): {found} > {cell.bound:.0e}"


def test_names_are_unique() -> None:
    """A cell is found by its name."""
    names = [cell.name for cell in (*CELLS, *FEATURE_CELLS)]
    assert len(set(names)) == len(names)
