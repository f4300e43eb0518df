"""Every layout trains as one process does: same start, same gradients, same losses, same parameters after three steps.

`pytest tests/megarun/parity -m "not slow"` is the subset that CI runs; `pytest tests/megarun/parity` is the whole matrix.
"""

import pytest
from block_cells import BLOCK_CELLS
from choice_cells import CHOICE_CELLS
from context_cells import CONTEXT_CELLS
from controls_cells import CONTROLS_CELLS
from copied_cells import COPIED_CELLS
from dtype_cells import DTYPE_CELLS
from feature_cells import FEATURE_CELLS
from gathered_cells import GATHERED_CELLS
from linear_cells import LINEAR_CELLS
from lora_cells import LORA_CELLS
from low_precision_cells import LOW_PRECISION_CELLS
from mirrored_cells import MIRRORED_CELLS
from packed_cells import PACKED_CELLS
from parity_cells import BF16_GRADIENTS, CELLS, DENSE, ROUTED, Cell
from parity_compare import course_difference, first_difference
from parity_world import Worlds
from payload_cells import PAYLOAD_CELLS
from shared_norm_cells import SHARED_NORM_CELLS
from slice_cells import SLICE_CELLS
from stream_cells import DEPTH_CELLS, STREAM_CELLS
from tower_cells import TOWER_CELLS

from megaplan.schedules import KINDS

pytestmark = [pytest.mark.runtime, pytest.mark.jobs]
ALL_CELLS = (
    *CELLS,
    *PACKED_CELLS,
    *FEATURE_CELLS,
    *CONTEXT_CELLS,
    *LINEAR_CELLS,
    *BLOCK_CELLS,
    *CHOICE_CELLS,
    *PAYLOAD_CELLS,
    *LORA_CELLS,
    *LOW_PRECISION_CELLS,
    *COPIED_CELLS,
    *CONTROLS_CELLS,
    *DTYPE_CELLS,
    *SLICE_CELLS,
    *STREAM_CELLS,
    *DEPTH_CELLS,
    *GATHERED_CELLS,
    *TOWER_CELLS,
    *MIRRORED_CELLS,
    *SHARED_NORM_CELLS,
)


def _marked(cell: Cell) -> object:
    return pytest.param(cell, id=cell.name, marks=() if cell.ci else pytest.mark.slow)


@pytest.mark.requirement("R-8")
@pytest.mark.requirement("R-9")
@pytest.mark.requirement("R-10")
@pytest.mark.requirement("R-13")
@pytest.mark.requirement("R-14")
@pytest.mark.requirement("R-15")
@pytest.mark.requirement("R-26")
@pytest.mark.requirement("R-55")
@pytest.mark.requirement("R-62")
@pytest.mark.requirement("R-63")
@pytest.mark.requirement("R-64")
@pytest.mark.requirement("R-67")
@pytest.mark.parametrize("cell", [_marked(cell) for cell in ALL_CELLS])
def test_a_layout_trains_as_one_process(cell: Cell, worlds: Worlds) -> None:
    """Initial parameters and pp alone are bitwise equal; other axes up to the rounding of their sums."""
    case, reference = cell.case, cell.reference
    if cell.by_course:
        case, reference = case | {"run": "course"}, reference | {"run": "course"}
        records, expected = worlds.train(case, cell.world_size), worlds.reference(reference)
        found = course_difference(case, records, expected, cell.bound, lambda number: worlds.reference({**reference, "perturbed": number}))
    else:
        found = first_difference(case, worlds.train(case, cell.world_size), worlds.reference(reference), cell.bound)
    assert found is None, f"{cell.name} ({cell.axes}): {found} > {cell.bound:.0e}"


def test_buckets_are_summed_as_shards_are(worlds: Worlds) -> None:
    """Copies whose gradients are cast to be summed train bit for bit as FSDP2's shards do, on two ranks with one microbatch each."""
    for dtypes in ({"precision.reduce": "bf16"}, BF16_GRADIENTS | {"precision.reduce": "fp32"}):
        copies, shards = (
            Cell(mode, {"dp_shard": 2}, spec=DENSE | dtypes | {"sharding.mode": mode}, num_microbatches=2) for mode in ("ddp", "fsdp")
        )
        whole = worlds.train(copies.case, 2)[0]
        found = first_difference(shards.case, worlds.train(shards.case, 2), whole, 0.0)
        assert found is None, f"{dtypes}: {found}"


def test_names_are_unique() -> None:
    """A cell is found by its name."""
    names = [cell.name for cell in ALL_CELLS]
    assert len(set(names)) == len(names)


@pytest.mark.requirement("R-33")
def test_context_parallelism_meets_everything_else() -> None:
    """At least thirty cells over two to eight context ranks; `pytest tests/megarun/parity -k cp --collect-only` lists them."""
    cells = [cell for cell in ALL_CELLS if cell.mesh.get("cp", 1) > 1]
    assert len(cells) >= 30
    assert {cell.mesh["cp"] for cell in cells} == {2, 4, 8}
    assert all("cp" in cell.name for cell in cells)
    assert {cell.case["spec"]["model"]["pattern"] for cell in cells} >= {*"AMERD", "AMEDR"}
    assert {axis for cell in cells for axis, degree in cell.mesh.items() if degree != 1} >= {"pp", "tp", "dp_shard", "dp_replicate", "ep"}
    assert {cell.schedule for cell in cells} == set(KINDS)
    keys = {key for cell in cells for key in cell.spec}
    assert {"data.packing", *(f"model.features.{feature}" for feature in ("mtp", "ngram", "structure")), *ROUTED} <= keys
    assert any("window_size" in cell.case["spec"]["model"].get("attention", {}) for cell in cells)
