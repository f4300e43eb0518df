"""Values of the routers in a step's line, against the routing distribution computed by hand."""

from math import log
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.models import Spec
from megarun.engine.build import build_stage, materialise
from megarun.engine.initialise import initialise
from megarun.metrics.records import routing_keys
from megarun.model.stage import Stage
from megarun.model.step_sums import LayerRouting, Routed, biases, move_biases, routing_table, start_sums
from megarun.parallel.apply.recompute import recompute_stage

pytestmark = pytest.mark.runtime
CPU, ROWS, LENGTH, TOP_K, NUM_EXPERTS = torch.device("cpu"), 2, 24, 2, 4


def expert_stage(spec_with: Any, **more: Any) -> Stage:
    """Two layers: the last one is never recomputed."""
    spec = Spec.model_validate(spec_with({"model.pattern": "E", "model.num_layers": 2, **more}))
    inventory = build_inventory(spec)
    stage = build_stage(spec, inventory, build_layout(spec, inventory, [(0, 2)]).slots[0])
    recompute_stage(stage, spec, inventory)
    materialise(stage, CPU)
    initialise(stage, inventory, 0)
    return stage


FIRST_TWO = ["layers.0", "layers.1"]


def by_hand(stage: Stage, tokens: Tensor) -> LayerRouting:
    """The first layer's, from softmax of its router's logits alone."""
    block = stage.layers["0"]
    x = stage.embedding(tokens)
    probs = torch.softmax(rms_norm(x, (x.shape[-1],), block.norm.weight, 1e-5) @ block.router.weight.T, -1).flatten(0, 1).double()
    rows = probs.topk(TOP_K).indices.flatten().bincount(minlength=NUM_EXPERTS)
    entropy = -(probs * probs.log()).sum(-1).mean()
    return LayerRouting("0", float(rows.max() / rows.double().mean()), float(entropy.detach()), int((rows == 0).sum()))


@pytest.mark.parametrize(
    "more",
    [{}, {"model.moe.balance_loss_coefficient": 0.1}, {"recompute": {"default": "selective"}}, {"host.kernels": "triton"}],
    ids=["plain", "losses", "recompute", "gathering"],
)
def test_sums_are_those_of_the_routing_distribution(spec_with: Any, more: dict[str, Any]) -> None:
    """Over two microbatches with their backward; what an evaluation routes is not counted."""
    stage = expert_stage(spec_with, **more)
    tokens = torch.randint(0, 61, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    start_sums([stage])
    for row in tokens:
        stage(row[None]).sum().backward()
    with torch.no_grad():
        stage(tokens[:, :7])
    found = Routed.of(FIRST_TWO, routing_table([stage], FIRST_TWO, NUM_EXPERTS, CPU).tolist(), TOP_K)
    expected = by_hand(stage, tokens)
    layer = found.layers[0]
    assert (layer.layer, layer.load, layer.num_idle) == ("0", expected.load, expected.num_idle)
    assert layer.entropy == pytest.approx(expected.entropy, rel=1e-6)
    assert 0 < layer.entropy < log(NUM_EXPERTS)
    assert (found.balance_loss > 0) == ("model.moe.balance_loss_coefficient" in more)
    start_sums([stage])
    assert not routing_table([stage], FIRST_TWO, NUM_EXPERTS, CPU).any()


def test_biases_move_towards_the_mean(spec_with: Any) -> None:
    """Up where an expert has fewer rows than the mean, down where it has more; the rows are those of the layer in the model."""
    stage = expert_stage(spec_with, **{"model.moe.score": "sigmoid", "model.moe.expert_bias": True})
    table = [[9.0] * (NUM_EXPERTS + 3), [3.0, 7.0, 5.0, 5.0, 0.0, 0.0, 0.0]]
    move_biases([stage], FIRST_TWO, table, 0.25)
    assert {name: bias.tolist() for name, bias in biases([stage])} == {
        "layers.0.expert_bias": [0.0] * 4,
        "layers.1.expert_bias": [0.25, -0.25, 0.0, 0.0],
    }


def test_a_layer_of_another_stage_is_left_to_its_rank(spec_with: Any) -> None:
    """Rows of the table go by index in the model, so that stages sum to the whole."""
    stage = expert_stage(spec_with)
    stage.layers["0"].sums += 1.0
    table = routing_table([stage], [*FIRST_TWO, "layers.7"], NUM_EXPERTS, CPU)
    assert table.sum(-1).tolist() == [NUM_EXPERTS + 3.0, 0.0, 0.0]


def test_keys_are_by_layer() -> None:
    """All rows to one of four experts, and evenly."""
    table = [[16.0, 0.0, 0.0, 0.0, 4.0, 0.5, 0.25], [4.0, 4.0, 4.0, 4.0, 8 * log(4), 0.5, 0.0]]
    routed = Routed.of(["layers.2", "mtp.0.mlp"], table, TOP_K)
    assert (routed.balance_loss, routed.z_loss) == (1.0, 0.25)
    assert routing_keys(routed) == {
        "router_load": {"2": 4.0, "mtp.0.mlp": 1.0},
        "router_entropy": {"2": 0.5, "mtp.0.mlp": pytest.approx(log(4))},
        "idle_experts": {"2": 3, "mtp.0.mlp": 0},
    }
