"""megarun refuses what it cannot build, naming the key, before any process group exists."""

from pathlib import Path
from typing import Any

import pytest

from megaplan.errors import MegaplanError, Severity
from megaplan.plan.read import read_plan
from megaplan.spec.models import Spec
from megarun.job.support import refuse_other_orders, refuse_unbuilt

pytestmark = pytest.mark.runtime

ENCODER = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "head_dim": 8, "ffn_hidden_size": 20, "patch_values": 5, "patches": 6}
PROJECTOR = {"projection": {"widths": [16, 32]}}
TOWERS, ROTARY = ({"vision": {"encoder": {**ENCODER, "rotary": rotary}}, "projector": PROJECTOR} for rotary in (False, True))
PLAN = Path(__file__).parents[3] / "plans/nam56r-8xh200.json"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"model.towers": {"vision": {"parameters": 7}}}, "model.towers = given, with parameters that are counted"),
        ({"model.towers": ROTARY}, "model.towers = given, with vision.encoder.rotary, without a grid"),
        (
            {"model.towers": TOWERS, "model.features": {"mtp": {"depth": 1, "ffn_hidden_size": 8}}},
            "model.towers = given, with model.features",
        ),
        ({"precision.params": "fp8"}, "precision.params = fp8"),
        ({"precision.families": {"E": "fp8"}}, "precision.families = E: fp8"),
        ({"precision.params": "fp16", "precision.recipe": {"name": "fp8_current", "families": ["A"]}}, "precision.params = fp16"),
    ],
)
def test_unbuilt_is_an_error(overrides: dict[str, Any], key: str, spec_with: Any) -> None:
    """Each thing that megaplan prices and megarun does not build."""
    with pytest.raises(MegaplanError) as refused:
        refuse_unbuilt(Spec.model_validate(spec_with(overrides)))
    found = refused.value.diagnostics[0]
    assert (found.code, found.severity) == ("MP790", Severity.ERROR)
    assert key in found.detail


PIPELINE = {"mesh.pp": 2, "mesh.dp_shard": 2, "schedule.num_microbatches": 4}


@pytest.mark.parametrize(
    ("overrides", "codes"),
    [
        ({**PIPELINE, "precision.reduce": "bf16"}, [("MP602", "precision.reduce")]),
        ({**PIPELINE, "precision.grads": "bf16"}, [("MP602", "precision.reduce")]),
        (
            {**PIPELINE, "precision.moments": "bf16", "precision.grads": "bf16"},
            [("MP602", "precision.reduce"), ("MP603", "precision.moments")],
        ),
    ],
)
def test_dtypes_torch_would_not_keep_are_errors(overrides: dict[str, Any], codes: list[tuple[str, str]], spec_with: Any) -> None:
    """All of them together, each with its key."""
    with pytest.raises(MegaplanError) as refused:
        refuse_unbuilt(Spec.model_validate(spec_with(overrides)))
    assert [(found.code, found.location.key) for found in refused.value.diagnostics] == codes


def test_a_plans_orders_are_the_runtimes() -> None:
    """The runtime does what a committed plan decides; another order, or a step that there is not, is refused by its key."""
    decisions = read_plan(str(PLAN)).decisions
    refuse_other_orders(decisions)
    for name, other in (("code_order", decisions.code_order[::-1]), ("wrap_order", ("blocks", "optimizer"))):
        with pytest.raises(MegaplanError) as refused:
            refuse_other_orders(decisions.model_copy(update={name: other}))
        assert [(found.code, found.location.key) for found in refused.value.diagnostics] == [("MP790", f"decisions.{name}")]


def test_what_is_built_passes(spec_with: Any) -> None:
    """A reduction in another dtype is exact without a pipeline: each microbatch accumulates in the shard; bf16 gradients work anywhere."""
    everywhere = {f"precision.{role}": "bf16" for role in ("params", "grads", "master", "moments", "reduce")}
    pipelined = {"mesh.pp": 2, "schedule.num_microbatches": 4}
    narrow = {"precision.grads": "bf16", "precision.reduce": "bf16"}
    reduced = {"precision.reduce": "bf16", "schedule.num_microbatches": 4}
    for overrides in ({}, {"precision.params": "bf16"}, reduced, everywhere, {"precision.grads": "bf16"}, {**pipelined, **narrow}):
        refuse_unbuilt(Spec.model_validate(spec_with(overrides)))
