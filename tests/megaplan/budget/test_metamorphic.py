"""R-41: which column answers to which change, cell by cell at a fixed phase."""

from collections.abc import Callable
from typing import Any

import pytest

from megaplan.budget.values import Budget
from megaplan.columns import Column, Phase
from megaplan.spec.models import Spec

pytestmark = pytest.mark.requirement("R-41")
C = Column
PARAMS = (C.REPLICATED_PARAMS, C.TENSOR_PARALLEL_PARAMS, C.EXPERT_PARALLEL_PARAMS)
STATES = (*PARAMS, C.MATRIX_OPTIMIZER, C.OTHER_OPTIMIZER)

# change -> (columns that must grow, columns that must shrink, columns that must stay); other columns may do either
CASES: dict[str, tuple[dict[str, Any], tuple[Column, ...], tuple[Column, ...], tuple[Column, ...]]] = {
    "micro-batch": ({"batch.micro_batch_size": 4}, (C.ACTIVATIONS, C.ROUTING, C.FEATURE_ACTIVATIONS), (), STATES),
    "sequence": ({"batch.seq_length": 128}, (C.ACTIVATIONS, C.ROUTING), (), STATES),
    "vocabulary": ({"model.vocab_size": 1024}, (C.REPLICATED_PARAMS, C.OTHER_OPTIMIZER), (), (*PARAMS[1:], C.MATRIX_OPTIMIZER, C.ROUTING)),
    "features": (
        {"model.features.platform": {"num_categories": 64, "bottleneck": 16}},
        (C.REPLICATED_PARAMS, C.FEATURE_ACTIVATIONS, C.OTHER_OPTIMIZER),
        (),
        (*PARAMS[1:], C.MATRIX_OPTIMIZER),
    ),
    "experts": (
        {"model.moe.num_experts": 16},
        (C.EXPERT_PARALLEL_PARAMS, C.REPLICATED_PARAMS, C.MATRIX_OPTIMIZER, C.ROUTING),
        (),
        (C.TENSOR_PARALLEL_PARAMS,),
    ),
    "expert width": ({"model.moe.ffn_hidden_size": 64}, (C.EXPERT_PARALLEL_PARAMS,), (), (*PARAMS[:2], C.ROUTING)),
    "attention": (
        {"model.attention.num_heads": 16},
        (C.TENSOR_PARALLEL_PARAMS, C.ACTIVATIONS, C.MATRIX_OPTIMIZER),
        (),
        (C.EXPERT_PARALLEL_PARAMS, C.REPLICATED_PARAMS, C.ROUTING, C.OTHER_OPTIMIZER),
    ),
    "top-k": ({"model.moe.top_k": 4}, (C.ROUTING, C.ACTIVATIONS), (), STATES),
    "tp": ({"mesh.tp": 2}, (), (C.TENSOR_PARALLEL_PARAMS, C.ACTIVATIONS), (C.REPLICATED_PARAMS,)),
    "ep": ({"mesh.ep": 2}, (), (), (C.REPLICATED_PARAMS, C.TENSOR_PARALLEL_PARAMS, C.OTHER_OPTIMIZER)),
    "cp": ({"mesh.cp": 2, "model.pattern": "AED"}, (), (C.ACTIVATIONS,), (C.REPLICATED_PARAMS, C.TENSOR_PARALLEL_PARAMS)),
    "dp_shard": ({"mesh.dp_shard": 4}, (), STATES, (C.ROUTING, C.FEATURE_ACTIVATIONS)),
    "dp_replicate": ({"mesh.dp_replicate": 2}, (), (), tuple(Column)),
    "moments": (
        {"precision.moments": "bf16"},
        (),
        (C.MATRIX_OPTIMIZER, C.OTHER_OPTIMIZER),
        (*PARAMS, C.ACTIVATIONS, C.ROUTING, C.GRADIENTS, C.COMMUNICATION),
    ),
    "optimizer": ({"optimizer.matrix": "adamw"}, (C.MATRIX_OPTIMIZER,), (), (*PARAMS, C.OTHER_OPTIMIZER, C.ACTIVATIONS)),
    "skew without ep": ({"model.moe.routing_skew": 2.0}, (), (), tuple(Column)),
    "recompute": ({"recompute.blocks": {"A": "full", "R": "full"}}, (), (C.ACTIVATIONS,), (*STATES, C.FEATURE_ACTIVATIONS)),
}


@pytest.mark.parametrize("change", CASES)
def test_columns_answer_to_what_they_should(change: str, hybrid: Callable[..., Spec], budget_of: Callable[..., Budget]) -> None:
    overrides, grow, shrink, stay = CASES[change]
    base = {"model.pattern": "AED"} if change == "cp" else {}
    before, after = (budget_of(hybrid(values)).of_rank(0) for values in (base, overrides))
    for phase in (Phase.FORWARD_BACKWARD, Phase.OPTIMIZER):
        old, new = before.cells[phase], after.cells[phase]
        lasting = {*STATES, C.GRADIENTS} if phase is Phase.OPTIMIZER else set(Column)
        for column in lasting.intersection(grow):
            assert new[column] > old[column], (phase, column)
        for column in lasting.intersection(shrink):
            assert new[column] < old[column], (phase, column)
        for column in stay:
            assert new[column] == old[column], (phase, column)


def test_skew_fills_receive_buffers_of_the_busiest_rank_only(hybrid: Callable[..., Spec], budget_of: Callable[..., Budget]) -> None:
    """A skew of 1.5 with ep 2 moves half again the rows, and the expert GEMMs' activations with them."""
    even, skewed = (
        budget_of(hybrid({"mesh.ep": 2, "model.moe.routing_skew": skew})).of_rank(0).cells[Phase.FORWARD_BACKWARD] for skew in (1.0, 1.5)
    )
    assert skewed[C.ROUTING] > even[C.ROUTING]
    assert skewed[C.ACTIVATIONS] > even[C.ACTIVATIONS]
    unmoved = set(Column) - {C.ROUTING, C.ACTIVATIONS, C.OVERHEAD}
    assert {column: skewed[column] for column in unmoved} == {column: even[column] for column in unmoved}


def test_expert_parallel_leaves_residuals_of_other_blocks_alone(hybrid: Callable[..., Spec], budget_of: Callable[..., Budget]) -> None:
    """A model without E has the same cells whatever the banks would be sharded over."""
    plain = {"model.pattern": "AMRD", "model.moe": None, "model.features.mtp": None}
    cells = [budget_of(hybrid({**plain, "mesh.dp_shard": shard})).of_rank(0).cells[Phase.FORWARD_BACKWARD] for shard in (2, 4)]
    assert cells[0][C.ACTIVATIONS] == cells[1][C.ACTIVATIONS]
    assert cells[0][C.EXPERT_PARALLEL_PARAMS] == cells[0][C.ROUTING] == 0


def test_a_job_of_one_rank_reserves_nothing_for_communication(hybrid: Callable[..., Spec], budget_of: Callable[..., Budget]) -> None:
    """A value of the spec is kept; else NCCL has no communicator without a peer."""
    alone = {"mesh.pp": 1, "mesh.dp_shard": 1, "mesh.dp_replicate": 1, "mesh.tp": 1, "mesh.cp": 1, "mesh.ep": 1}
    one, two = budget_of(hybrid(alone)).device, budget_of(hybrid(alone | {"mesh.dp_shard": 2})).device
    assert {item.name for item in two.reserve} - {item.name for item in one.reserve} == {"nccl"}
    assert one.usable_bytes > two.usable_bytes
    given = budget_of(hybrid(alone | {"device.reserve": {"nccl": 5}})).device
    assert {item.name: item.bytes for item in given.reserve}["nccl"] == 5


@pytest.mark.parametrize("overrides", [{"mesh.dp_shard": 8}, {"mesh.pp": 1}, {"mesh.tp": 2}, {"model.moe.num_experts": 64}])
def test_the_reserve_answers_to_no_axis(overrides: dict[str, Any], hybrid: Callable[..., Spec], budget_of: Callable[..., Budget]) -> None:
    assert budget_of(hybrid(overrides)).device == budget_of(hybrid()).device
