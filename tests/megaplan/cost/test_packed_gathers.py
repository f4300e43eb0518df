"""Launches before a gather of which some weights are packed: those alone are rounded, scaled and rounded again."""

from collections.abc import Callable
from typing import Any

import pytest

from megaplan.cost.data import held_of
from megaplan.cost.elements import local_elements, with_recipe
from megaplan.cost.outside_layers import gather_parts
from megaplan.inventory.build import build_inventory
from megaplan.spec.local import packed_gather
from megaplan.spec.models import Spec

MESHES = ({"dp_shard": 4}, {"dp_shard": 4, "tp": 2}, {"dp_shard": 4, "ep": 2, "pp": 2})


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("gathers", [True, False])
def test_only_packed_tensors_are_packed(gathers: bool, mesh: dict[str, int], make_spec: Callable[..., Spec]) -> None:
    recipe: dict[str, Any] = {"name": "fp8_rowwise", "param_gather": gathers}
    host = {"kernels": "triton"}
    spec = make_spec("ADEMAD", precision={"params": "bf16", "recipe": recipe}, mesh=mesh, host=host, schedule={"num_microbatches": 2})
    inventory = build_inventory(spec)
    held = held_of(spec, with_recipe(spec, inventory, local_elements(inventory, mesh.get("tp", 1), mesh.get("ep", 1), 1)))
    packs, packed = packed_gather(spec), 0
    if packs is not None:
        degrees = mesh.get("tp", 1), mesh.get("ep", 1), 1
        for index, block in enumerate(inventory.layers):
            if packs.covers(f"layers.{index}", block.family):
                sizes = [packs.shard_bytes(block.family, tensor.name, tensor.local_shape(*degrees)) for tensor in block.tensors]
                packed += sum(size is not None for size in sizes)
    tensors = sum(1 for _ in inventory.tensors())
    assert 0 < packed < tensors or not gathers
    assert [part.launches for part in gather_parts(spec, held)] == [tensors - packed, *[3 * packed] * gathers, tensors]
