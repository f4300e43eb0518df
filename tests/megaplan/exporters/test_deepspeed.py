"""Settings that DeepSpeed cannot express are reported only if the plan uses them."""

import json
from collections.abc import Callable

import pytest

from megaplan.exporters.deepspeed import export_deepspeed
from megaplan.exporters.values import Source


@pytest.mark.parametrize(
    ("pp", "reshard", "stage", "told"),
    [(1, "false", 2, False), (1, "true", 3, False), (2, "false", 1, False), (2, "true", 1, True)],
)
def test_zero_under_a_pipeline_keeps_parameters_whole(
    pp: int, reshard: str, stage: int, told: bool, source_of: Callable[..., Source]
) -> None:
    """ZeRO 2 and 3 are written without a pipeline; with one, only freeing after forward is lost."""
    sizes = [f"mesh.pp={pp}", "mesh.dp_shard=8", f"sharding.reshard_after_forward={reshard}", "schedule.num_microbatches=4"]
    found = export_deepspeed(source_of(*sizes))
    assert json.loads(found.text)["zero_optimization"]["stage"] == stage
    assert ("sharding.reshard_after_forward" in {loss.key for loss in found.losses}) is told
