"""Packed rows train as their documents do one by one, on one process without packing: every family, whichever rank and stage has it."""

from typing import Any

import pytest
from parity_cells import C2, PACKED, Cell, pattern
from parity_compare import whole
from parity_model import INDEXED, MIMO, MLA
from parity_world import Worlds

from megaplan.inventory.build import build_inventory
from megaplan.spec.models import Spec

pytestmark = [pytest.mark.runtime, pytest.mark.slow]
FAMILIES = {
    "A": pattern("A", 4),
    "mla": pattern("A", 4, attention=MLA),
    "indexer": pattern("A", 4, attention=INDEXED),
    "mamba2": pattern("M", 4),
    "mamba3": pattern("M", 4, mamba=MIMO),
    "R": pattern("R", 4),
    "E": pattern("E", 4),
    "D": pattern("D", 4),
    "mixed": pattern("AMERD", 5, mamba=MIMO, attention=INDEXED),
}
MESHES = [{}, C2, {"pp": 2}, C2 | {"pp": 2}]
LONG = {"batch": {"micro_batch_size": 1, "seq_length": 32}}


@pytest.mark.requirement("R-33")
@pytest.mark.requirement("R-63")
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "-".join(f"{axis}{degree}" for axis, degree in mesh.items()) or "alone")
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_train_like_their_separate_documents(family: str, mesh: dict[str, Any], worlds: Worlds) -> None:
    """Loss and every gradient, to 1e-5."""
    cell = Cell(family, mesh, spec=FAMILIES[family] | PACKED | LONG, num_microbatches=2)
    first, *others = worlds.train(cell.case | {"run": "separate"}, cell.world_size)
    expected = first["separate"]
    assert sum(record["loss"] for record in (first, *others)) == pytest.approx(expected["loss"], rel=1e-5)
    tensors, degrees = dict(build_inventory(Spec.model_validate(cell.case["spec"])).tensors()), Spec.model_validate(cell.case["spec"]).mesh
    assert tensors.keys() == expected["gradients"].keys()
    for name, right in expected["gradients"].items():
        found = whole(tensors[name], [record["gradients"].get(name, []) for record in (first, *others)], degrees)
        assert found is not None, name
        assert (found - right).abs().max() <= 1e-5 * right.abs().max(), name
