"""Traces of single ranks: what they must add up to, by hand."""

from typing import Any

import pytest
import torch
from trace_checks import BF16

from megaplan.columns import Column, Phase
from megaplan.hosts.megarun.products import ROUTERS
from megarun.trace.owners import ROUTED_OUTPUTS
from megarun.trace.rank import trace_rank
from megarun.trace.values import RankTrace

pytestmark = pytest.mark.runtime
DENSE: dict[str, Any] = {
    "model": {"pattern": "D", "num_layers": 1, "hidden_size": 32, "vocab_size": 64, "mlp": {"ffn_hidden_size": 48, "activation": "relu2"}}
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "pp2": {"mesh.pp": 2, "schedule.num_microbatches": 3},
    "pp2 tied": {"mesh.pp": 2, "schedule.num_microbatches": 2, "model.tie_embeddings": True},
    "dp_shard 4, bf16": {"mesh.dp_shard": 4, "precision": BF16},
    "dp_shard 2, resharded": {"mesh.dp_shard": 2, "sharding.reshard_after_forward": True},
    "interleaved": {"mesh": {"pp": 2, "vpp": 2}, "schedule": {"kind": "interleaved_1f1b", "num_microbatches": 4}},
    "recompute": {"recompute": {"default": "selective", "blocks": {"D": "full", "R": "full"}}},
    "ep 2, skewed": {"mesh": {"dp_shard": 4, "ep": 2}, "model.moe.routing_skew": 1.5, "precision": BF16},
    "ep 2, skewed by layer": {"mesh": {"dp_shard": 4, "ep": 2}, "model.moe.routing_skew": {"first": 2.0, "rest": 1.25}, "precision": BF16},
    "pp 2, ep 2, recompute": {
        "mesh": {"pp": 2, "dp_shard": 2, "ep": 2},
        "schedule.num_microbatches": 2,
        "recompute": {"default": "selective"},
    },
    "cp 2": {"mesh.cp": 2, "precision": BF16},
    "cp 2, tp 2, recompute": {
        "mesh": {"cp": 2, "tp": 2},
        "model.recurrent.num_heads": 4,
        "recompute": {"default": "full", "blocks": {"E": "selective", "M": "none"}},
    },
    "dp_replicate 2, adamw": {"mesh.dp_replicate": 2, "optimizer.matrix": "adamw"},
    "router losses, ep 2": {
        "mesh": {"dp_shard": 2, "ep": 2},
        "model.moe.balance_loss_coefficient": 0.1,
        "model.moe.z_loss_coefficient": 0.1,
    },
    "two depths, pp 2": {"mesh.pp": 2, "schedule.num_microbatches": 2, "model.features": {"mtp": {"depth": 2, "ffn_hidden_size": 40}}},
    "tied depth, bf16": {"model.tie_embeddings": True, "precision": BF16, "model.features": {"mtp": {"depth": 1, "ffn_hidden_size": 40}}},
    "side embeddings, tp 2": {
        "mesh.tp": 2,
        "model.recurrent.num_heads": 4,
        "model.features": {
            "ngram": {"num_tables": 3, "num_rows": 40, "dim": 4},
            "structure": {"num_categories": 7, "bottleneck": 6},
        },
    },
}


TRACES: dict[tuple[str, bool], RankTrace] = {}
"""Each takes seconds; two tests read those of first ranks."""


def traced(job_with: Any, name: str, *, last: bool) -> RankTrace:
    """The first or the last rank of a layout."""
    if (name, last) not in TRACES:
        job = job_with(LAYOUTS[name])
        TRACES[name, last] = trace_rank(job, job.spec.mesh.world_size - 1 if last else 0)
    return TRACES[name, last]


def has_stages(layout: dict[str, Any]) -> bool:
    return "mesh.pp" in layout or "pp" in layout.get("mesh", {})


@pytest.mark.parametrize(
    ("name", "last"),
    [
        pytest.param(name, last, marks=pytest.mark.slow if last and not has_stages(LAYOUTS[name]) else ())
        for name in LAYOUTS
        for last in (False, True)
    ],
)
def test_every_block_keeps_exactly_its_ledger(job_with: Any, name: str, last: bool) -> None:
    """Tensor by tensor, on the first and the last rank; and nothing is left over when a step has ended."""
    trace = traced(job_with, name, last=last)
    assert trace.differences == ()
    assert len(trace.kept) > 10  # a trace that sees nothing would agree too


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_cells_and_phases_are_the_same_bytes(job_with: Any, name: str) -> None:
    trace = traced(job_with, name, last=False)
    for phase in Phase:
        assert sum(row.nbytes for row in trace.rows[phase]) == trace.phases[phase] > 0
        for column in Column:
            assert trace.cells[phase][column] == sum(row.nbytes for row in trace.rows[phase] if row.column is column)
    assert trace.peak_bytes == max(trace.phases.values())


def test_a_dense_layer_by_hand(job_with: Any) -> None:
    """One D block, fp32, one process: model states to the byte, and the peak of the update."""
    job = job_with({**DENSE, "optimizer.matrix": "muon"})
    trace = trace_rank(job, 0)
    embedding, matrix, norm = 64 * 32 * 4, 48 * 32 * 4, 32 * 4
    init, update = trace.cells[Phase.INIT], trace.cells[Phase.OPTIMIZER]
    assert init[Column.REPLICATED_PARAMS] == 2 * embedding + 2 * norm
    assert init[Column.TENSOR_PARALLEL_PARAMS] == 2 * matrix
    assert sum(init.values()) == 2 * embedding + 2 * norm + 2 * matrix
    assert update[Column.MATRIX_OPTIMIZER] == 2 * matrix
    assert update[Column.OTHER_OPTIMIZER] == 2 * (2 * embedding + 2 * norm) + 4 * 4  # exp_avg and exp_avg_sq, and a step counter per tensor
    assert update[Column.GRADIENTS] == 2 * matrix  # AdamW has dropped the others
    assert update[Column.COMMUNICATION] == 0


def test_columns_follow_the_owner(job_with: Any) -> None:
    """Experts, gathered parameters, receive buffers, token ids and routed rows are where the columns say."""
    trace = trace_rank(job_with({"mesh.pp": 2, "schedule.num_microbatches": 2, "precision": BF16}), 1)
    rows = trace.rows[Phase.FORWARD_BACKWARD]

    def columns(**wanted: str) -> set[Column]:
        return {row.column for row in rows if all(value in getattr(row, key) for key, value in wanted.items())}

    assert columns(kind="parameter", name="experts.up_proj") == {Column.EXPERT_PARALLEL_PARAMS, Column.COMMUNICATION}
    assert columns(kind="receive buffer") == {Column.COMMUNICATION}
    assert columns(kind="optimizer state", name="experts.up_proj") == {Column.MATRIX_OPTIMIZER}
    assert columns(kind="optimizer state", name="norm.weight") == {Column.OTHER_OPTIMIZER}
    assert columns(op="megakernels.dispatch_plan") == {Column.ROUTING}
    assert columns(name="batch") == {Column.ACTIVATIONS}
    receives = sum(row.count for row in rows if row.kind == "receive buffer")
    assert receives == 1  # shared by both microbatches, for the whole run


def test_every_router_takes_the_workspace() -> None:
    """The trace sees no product of a router, which is one operation; each score has its own."""
    names = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("megakernels::route")}
    routers = {name for name in names if not name.startswith("router_") and not name.startswith("routed_") and "backward" not in name}
    assert routers == set(ROUTERS)
    assert {f"megakernels.{name}.default" for name in routers} <= ROUTED_OUTPUTS.keys()


def test_the_first_step_lacks_optimizer_state_only(job_with: Any) -> None:
    trace = trace_rank(job_with({"mesh.dp_shard": 2}), 0)
    first, later = trace.cells[Phase.FIRST_FORWARD_BACKWARD], trace.cells[Phase.FORWARD_BACKWARD]
    assert first[Column.MATRIX_OPTIMIZER] == first[Column.OTHER_OPTIMIZER] == 0
    states = later[Column.MATRIX_OPTIMIZER] + later[Column.OTHER_OPTIMIZER]
    assert states > 0
    assert trace.phases[Phase.FORWARD_BACKWARD] - states == trace.phases[Phase.FIRST_FORWARD_BACKWARD]


def test_library_workspace_is_declared_from_the_first_product_on(job_with: Any) -> None:
    job = job_with(DENSE)
    without, declared = trace_rank(job, 0), trace_rank(job, 0, workspace_bytes=1 << 20)
    extra = {phase: declared.cells[phase][Column.WORKSPACE] - without.cells[phase][Column.WORKSPACE] for phase in Phase}
    assert extra == {phase: 0 if phase is Phase.INIT else 1 << 20 for phase in Phase}
