"""Degrees and batches of a MaxText file match the spec's, under MaxText's names."""

from math import prod
from pathlib import Path

import pytest
import yaml

from megaplan.exporters.maxtext import export_maxtext
from megaplan.exporters.values import Source
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.partition.choose import choose_cuts
from megaplan.spec.load import load_spec
from megaplan.spec.models import Spec

PLANS = Path(__file__).parents[3] / "plans"
MESHES = [
    ("mesh.dp_shard=8", "mesh.ep=1"),
    ("mesh.dp_shard=4", "mesh.ep=2"),
    ("mesh.dp_shard=8", "mesh.ep=8"),
    ("mesh.dp_shard=2", "mesh.dp_replicate=2", "mesh.tp=2", "mesh.ep=2"),
    ("mesh.pp=4", "mesh.dp_shard=2", "mesh.cp=2", "mesh.ep=2"),
]


def exported(spec: Spec) -> tuple[dict[str, object], set[str]]:
    inventory = build_inventory(spec)
    layout = build_layout(spec, inventory, choose_cuts(spec, inventory).spans)
    found = export_maxtext(Source(spec, inventory, layout))
    return yaml.safe_load(found.text), {loss.key for loss in found.losses}


@pytest.mark.parametrize("overrides", MESHES, ids=" ".join)
@pytest.mark.parametrize("schedule", [(8, 1), (4, 3)])
def test_its_axes_hold_every_device_and_its_batch_every_sequence(overrides: tuple[str, ...], schedule: tuple[int, int]) -> None:
    """Expert ranks are data ranks here and their own axis there; a device's batch is for a complete schedule step."""
    sizes = (f"schedule.num_microbatches={schedule[0]}", f"schedule.steps_per_update={schedule[1]}", "batch.micro_batch_size=2")
    spec = load_spec(str(PLANS / "mixtral-8x7b.yaml"), ["split.mode=equal", *overrides, *sizes]).spec
    found, _ = exported(spec)
    degrees = [value for key, value in found.items() if key.startswith("ici_")]
    assert prod(degrees) == spec.mesh.world_size
    sequences = 2 * schedule[0] * spec.mesh.dp_replicate * spec.mesh.dp_shard
    assert found["per_device_batch_size"] * spec.mesh.world_size == sequences
    assert found["gradient_accumulation_steps"] == schedule[1]


@pytest.mark.parametrize(("activation", "told"), [("swiglu", False), ("gelu", False), ("relu2", True)])
def test_an_activation_it_lacks_is_told(activation: str, told: bool) -> None:
    spec = load_spec(str(PLANS / "llama-3.1-8b.yaml"), [f"model.mlp.activation={activation}"]).spec
    assert ("model.mlp.activation" in exported(spec)[1]) is told
