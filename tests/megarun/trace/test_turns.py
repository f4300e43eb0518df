"""Peaks of pairs that take turns (`host.moe_overlap`): every column of every rank, byte by byte."""

from typing import Any

import pytest
from trace_checks import BF16, compare_distinct_ranks, compare_passes

from megaplan.budget.peaks import build_budget
from megaplan.columns import Phase

pytestmark = [pytest.mark.runtime, pytest.mark.requirement("R-58")]
MOE = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 96}
MODEL = {"model.pattern": "AE", "model.num_layers": 8, "model.hidden_size": 64, "model.vocab_size": 128, "model.moe": MOE}
V = {"mesh": {"pp": 2, "vpp": 2, "dp_shard": 2, "ep": 2}, "schedule": {"kind": "dualpipev", "num_microbatches": 5}}
MIRROR = {"mesh": {"pp": 2, "dp_shard": 2, "ep": 2}, "schedule": {"kind": "dualpipe", "num_microbatches": 6}}
DEPTHS = {"depth": 2, "ffn_hidden_size": 96, "experts": True}
LINE = {"mesh": {"pp": 2, "dp_shard": 2, "ep": 2}, "schedule": {"kind": "paired_1f1b", "num_microbatches": 5}}
LOOP = {"mesh": {"pp": 2, "vpp": 2, "dp_shard": 2, "ep": 2}, "schedule": {"kind": "paired_1f1b", "num_microbatches": 4}}
CASES: dict[str, dict[str, Any]] = {
    "v": V | {"precision": BF16},
    "v-in-place-ddp": V | {"sharding": {"mode": "ddp"}},
    "v-casts-ddp-selective": V | {"precision": BF16, "sharding": {"mode": "ddp"}, "recompute": {"default": "selective"}},
    "v-kernels": V | {"precision": BF16, "host": {"kernels": "triton"}},
    "v-few-rows": V | {"model.moe": {**MOE, "routing_skew": 1.5}, "model.tie_embeddings": True},
    "v-limited": V | {"precision": BF16, "model.moe": {**MOE, "capacity_factor": 1.0}},
    "v-limited-slices": V
    | {"mesh": {"pp": 2, "vpp": 2, "dp_shard": 2, "tp": 2, "ep": 2, "etp": 2}, "model.moe": {**MOE, "capacity_factor": 1.0}},
    "v-slices": V | {"mesh": {"pp": 2, "vpp": 2, "dp_shard": 2, "tp": 2, "ep": 2, "etp": 2}},
    "v-experts-first": V | {"precision": BF16, "model.pattern": "ED"},
    "v-unequal": V | {"precision": BF16, "model.pattern": "AEMD"},
    "v-depths": V | {"precision": BF16, "model.features": {"mtp": DEPTHS}},
    "v-depths-ddp-tied": V | {"sharding": {"mode": "ddp"}, "model.features": {"mtp": DEPTHS}, "model.tie_embeddings": True},
    "line-depth": LINE | {"precision": BF16, "model.features": {"mtp": {**DEPTHS, "depth": 1}}},
    "line": LINE | {"precision": BF16},
    "line-tied-ddp": LINE | {"model.tie_embeddings": True, "sharding": {"mode": "ddp"}},
    "line-recompute": LINE | {"precision": BF16, "recompute": {"default": "selective", "blocks": {"A": "full"}}},
    "loop": LOOP | {"precision": BF16},
    "loop-unequal-kernels": LOOP | {"precision": BF16, "model.pattern": "AEMD", "host": {"kernels": "triton"}},
    "mirror": MIRROR | {"precision": BF16},
    "mirror-tied-ddp": MIRROR | {"model.tie_embeddings": True, "sharding": {"mode": "ddp"}},
    "mirror-shared": MIRROR | {"precision": BF16, "model.moe": {**MOE, "shared_ffn_hidden_size": 64}},
}


def overrides(case: dict[str, Any]) -> dict[str, Any]:
    """The case with the small model and turns."""
    return {**MODEL, "batch": {"micro_batch_size": 1, "seq_length": 64}, **case, "host": {"moe_overlap": True, **case.get("host", {})}}


IN_CI = ("v", "v-depths", "v-slices", "v-few-rows", "line-recompute", "loop", "mirror-shared", "mirror-tied-ddp")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow) for name in CASES])
def test_pairs_in_turns_hold_what_the_estimate_says(job_with: Any, name: str) -> None:
    compare_distinct_ranks(job_with(overrides(CASES[name])))


def test_the_peak_names_both_parts(job_with: Any) -> None:
    """Wide rows: the peak is where one part's rows are on their way and the other runs."""
    job = job_with(overrides(V | {"model.moe": {**MOE, "top_k": 8}, "precision": BF16}))
    assert "with backward of" in compare_passes(job).budget.peak_places[Phase.FORWARD_BACKWARD]


def test_without_turns_no_peak_is_that_of_a_pair(job_with: Any) -> None:
    job = job_with(overrides(V | {"host": {"moe_overlap": False}}))
    for rank in build_budget(job.spec, job.inventory, job.layout).ranks:
        assert "with backward of" not in rank.peak_places[Phase.FORWARD_BACKWARD]
