"""Side embeddings that prediction modules add too: copies on the last stage, and their tensors saved by a module."""

from collections.abc import Callable

import pytest

from megaplan.budget.values import Budget
from megaplan.columns import Column, Phase
from megaplan.cost.model import model_costs
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout, slot_parameters
from megaplan.spec.models import Spec

AHEAD = {"model.features.mtp.side_embeddings": True}


def test_stages_of_nam56r_hold_what_is_published(nam56r: Callable[..., Spec]) -> None:
    """Cut in two with two depths; the second count is published with one more block of 20,480 parameters that the model does not have."""
    spec = nam56r(AHEAD | {"model.features.mtp.depth": 2})
    inventory = build_inventory(spec)
    slots = build_layout(spec, inventory, ((0, 13), (13, 26), (26, 39), (39, 52))).slots
    held = [slot_parameters(inventory, slot) for slot in slots]
    assert held[0] + held[2] == 2_290_979_442
    assert held[1] + held[3] == 2_968_353_426 - 20_480
    without = build_layout(spec, build_inventory(nam56r({"model.features.mtp.depth": 2})), ((0, 13), (13, 26), (26, 39), (39, 52))).slots[
        -1
    ]
    assert set(slots[-1].blocks) - set(without.blocks) == {"ngram", "structure"}
    assert set(slots[-1].copies) - set(without.copies) == {"ngram", "structure"}
    assert held[3] - slot_parameters(inventory, without) == 129_130_274


@pytest.mark.parametrize("depth", [1, 2])
def test_a_depth_keeps_its_side_embeddings(depth: int, hybrid: Callable[..., Spec], budget_of: Callable[..., Budget]) -> None:
    """Ids and rows of both, and the projected rows that the gate multiplies: of one microbatch on the last stage."""
    base = {"model.features.mtp.depth": depth}
    plain, ahead = (budget_of(hybrid(base | more)).of_rank(2) for more in ({}, AHEAD))
    tokens, hidden = 2 * 64, 64
    ngram, structure = tokens * (4 * 8 + 4 * 8 * 2), tokens * (8 + 8 * 2 + hidden * 2)
    kept = [rank.cells[Phase.FORWARD_BACKWARD][Column.FEATURE_ACTIVATIONS] for rank in (plain, ahead)]
    assert kept == [0, depth * (ngram + structure)]
    parameters = 1024 * 8 + 32 * hidden + 16 * 8 + 8 * hidden + 2
    assert ahead.parameters - plain.parameters == parameters
    first = [budget_of(hybrid(base | more)).of_rank(0) for more in ({}, AHEAD)]
    assert first[0].cells == first[1].cells


@pytest.mark.parametrize("depth", [1, 2])
def test_one_stage_has_one_copy(depth: int, hybrid: Callable[..., Spec], budget_of: Callable[..., Budget]) -> None:
    """The embedding's gradients are counted once, from when the first depth hands them on."""
    base = {"mesh.pp": 1, "model.features.mtp.depth": depth}
    plain, ahead = (budget_of(hybrid(base | more)).of_rank(0) for more in ({}, AHEAD))
    assert ahead.parameters == plain.parameters
    for column in (Column.REPLICATED_PARAMS, Column.OTHER_OPTIMIZER, Column.GRADIENTS):
        assert ahead.cells[Phase.OPTIMIZER][column] == plain.cells[Phase.OPTIMIZER][column]
    assert ahead.cells[Phase.FORWARD_BACKWARD][Column.FEATURE_ACTIVATIONS] > plain.cells[Phase.FORWARD_BACKWARD][Column.FEATURE_ACTIVATIONS]


def test_a_depth_multiplies_by_their_projections(hybrid: Callable[..., Spec]) -> None:
    """Per token 6 FLOPs per weight, forward and backward."""
    plain, ahead = (model_costs(spec, build_inventory(spec)) for spec in (hybrid(), hybrid(AHEAD)))
    assert ahead.mtp[0].model_flops - plain.mtp[0].model_flops == 6 * (32 * 64 + 8 * 64)
    assert (ahead.embedding, ahead.side_embeddings, ahead.layers) == (plain.embedding, plain.side_embeddings, plain.layers)
