"""Settings that DeepSpeed cannot express are reported where the plan asks for them, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaplan.exporters.deepspeed import export_deepspeed
from megaplan.exporters.values import Source
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.partition.choose import choose_cuts
from megaplan.spec.load import load_spec

PLANS = Path(__file__).parents[3] / "plans"


@pytest.mark.parametrize(
    ("pp", "reshard", "stage", "told"),
    [(1, "false", 2, False), (1, "true", 3, False), (2, "false", 1, False), (2, "true", 1, True)],
)
def test_zero_under_a_pipeline_keeps_parameters_whole(pp: int, reshard: str, stage: int, told: bool) -> None:
    """ZeRO 2 and 3 are there without a pipeline; with one, only what would be freed after forward is lost."""
    sizes = [f"mesh.pp={pp}", "mesh.dp_shard=8", f"sharding.reshard_after_forward={reshard}", "schedule.num_microbatches=4"]
    spec = load_spec(str(PLANS / "llama-3.1-8b.yaml"), sizes).spec
    inventory = build_inventory(spec)
    found = export_deepspeed(Source(spec, inventory, build_layout(spec, inventory, choose_cuts(spec, inventory).spans)))
    assert json.loads(found.text)["zero_optimization"]["stage"] == stage
    assert ("sharding.reshard_after_forward" in {loss.key for loss in found.losses}) is told
