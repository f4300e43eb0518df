"""Optimizer state in host memory: the estimate has the bytes of the trace, on the device in every column and on the host."""

from collections.abc import Callable
from typing import Any

import pytest
from trace_checks import BF16, SCALARS_BYTES, compare_distinct_ranks

from megaplan.budget.peaks import build_budget
from megaplan.columns import Phase
from megaplan.devices import load_device
from megarun.trace.compare import RankComparison
from megarun.trace.rank import trace_rank

pytestmark = pytest.mark.runtime
NARROW = {"precision": BF16 | {"grads": "bf16"}}
ADAMW, MUON, LOW = {"optimizer.matrix": "adamw"}, {"optimizer.matrix": "muon"}, {"precision": dict.fromkeys(BF16, "bf16")}
NUMBERS_BYTES = 48
"""The numbers of a step, in no ledger: two copies of three in fp64 where the update's are of graphs."""
CASES: dict[str, tuple[float, dict[str, Any]]] = {
    "muon": (1.0, MUON),
    "adamw": (1.0, ADAMW),
    "adamw-narrow": (0.5, ADAMW | NARROW),
    "muon-narrow": (1.0, MUON | NARROW),
    "low": (1.0, {**MUON, **LOW, "mesh": {"dp_shard": 2}}),
    "low-adamw": (0.6, {**ADAMW, **LOW, "mesh": {"dp_shard": 2}}),
    "uneven-muon": (0.7, {**MUON, "mesh": {"dp_shard": 5}}),
    "uneven-adamw": (1.0, {**ADAMW, **NARROW, "mesh": {"dp_shard": 5}}),
    "pipeline": (0.3, {**MUON, "mesh": {"pp": 2, "dp_shard": 2}, "schedule.num_microbatches": 4, "model.tie_embeddings": True}),
    "chunks": (1.0, {**ADAMW, "mesh": {"pp": 2, "vpp": 2}, "schedule": {"kind": "zbv", "num_microbatches": 4}}),
    "experts": (0.9, {**MUON, "mesh": {"dp_shard": 4, "ep": 2}}),
    "tensor": (1.0, {**MUON, "mesh": {"tp": 2, "dp_shard": 2, "ep": 2, "etp": 2}, "model.pattern": "AEMDAD"}),
    "lora": (1.0, {**ADAMW, "precision": BF16, "lora": {"rank": 4, "alpha": 8.0}, "mesh": {"dp_shard": 3}}),
    "copies": (0.4, {**MUON, "mesh": {"dp_replicate": 2}, "sharding.mode": "ddp"}),
    "graphs": (1.0, {**MUON, "host.kernels": "triton"}),
}
IN_CI = ("graphs", "lora", "low")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow) for name in CASES])
def test_traces_have_the_estimated_bytes(name: str, job_with: Callable[..., Any]) -> None:
    fraction, changes = CASES[name]
    small = {"model.pattern": "AEMRAD", "model.num_layers": 6, "precision": BF16}
    job = job_with({**small, **changes, "host.optimizer_offload": fraction})
    compare_distinct_ranks(job)
    for group in build_budget(job.spec, job.inventory, job.layout).ranks:
        workspace = load_device("h200").gemm_workspace.value
        found = RankComparison(group, trace_rank(job, group.ranks[0], workspace_bytes=workspace))
        assert found.within
        assert found.host.estimate == found.host.trace > 0
        for phase in (Phase.FIRST_OPTIMIZER, Phase.OPTIMIZER):
            for column, pair in found.columns(phase).items():
                assert abs(pair.difference) <= max(SCALARS_BYTES, NUMBERS_BYTES), (phase, column, pair)
