"""Peaks that lie in a gradient reduction: every column to the byte, whatever is cast, added or kept for replicas."""

from typing import Any

import pytest

from megaplan.budget.peaks import build_budget
from megaplan.columns import Column, Phase
from megarun.trace.rank import trace_rank

pytestmark = pytest.mark.runtime
MIXED = {"params": "bf16", "grads": "fp32", "master": "fp32", "moments": "fp32", "reduce": "fp32"}
VOCABULARY = {"pattern": "D", "num_layers": 2, "hidden_size": 64, "vocab_size": 1024, "mlp": {"ffn_hidden_size": 128}}
EXPERTS = {
    "pattern": "E",
    "num_layers": 2,
    "hidden_size": 64,
    "vocab_size": 64,
    "moe": {"num_experts": 16, "top_k": 2, "ffn_hidden_size": 64},
}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "divided for replicas of a whole shard": ({"model": EXPERTS, "mesh": {"dp_replicate": 2}}, "layers.0.experts"),
    "added to shards": ({"model": VOCABULARY, "mesh.dp_shard": 2}, "the slot's own parameters"),
    "cast to the gradients' dtype": ({"model": VOCABULARY, "mesh.dp_shard": 2, "precision.grads": "bf16"}, "the slot's own parameters"),
    "kept for replicas": ({"model": VOCABULARY, "mesh": {"dp_replicate": 2, "dp_shard": 2}}, "the slot's own parameters"),
    "cast and kept for replicas": (
        {"model": VOCABULARY, "mesh": {"dp_replicate": 2, "dp_shard": 2}, "precision.grads": "bf16", "schedule.num_microbatches": 1},
        "the slot's own parameters",
    ),
}
SCALARS_BYTES = 16
"""The loss of a microbatch, and the sum of all: in no ledger."""


@pytest.mark.parametrize("name", CASES)
def test_every_column_of_a_reduction(name: str, job_with: Any) -> None:
    overrides, reduced = CASES[name]
    few = {"schedule.num_microbatches": 2, "batch": {"micro_batch_size": 1, "seq_length": 8}, "precision": dict(MIXED)}
    job = job_with({**few, **overrides})
    estimate = build_budget(job.spec, job.inventory, job.layout).of_rank(0)
    trace = trace_rank(job, 0)
    for phase in (Phase.FIRST_FORWARD_BACKWARD, Phase.FORWARD_BACKWARD):
        assert estimate.peak_places[phase] == f"reduction of {reduced}"
        for column, traced in trace.cells[phase].items():
            if column not in (Column.WORKSPACE, Column.OVERHEAD):  # the device's, which no tensor shows
                assert abs(estimate.cells[phase][column] - traced) <= SCALARS_BYTES, column
