"""Every data rank with its state whole: gradients are summed where they are, so that the trace counts no bytes for it."""

from collections.abc import Callable
from typing import Any

import pytest
from trace_checks import compare_distinct_ranks

pytestmark = pytest.mark.runtime
BF16 = {"params": "bf16", "grads": "fp32", "master": "fp32", "moments": "fp32", "reduce": "fp32"}
SMALL = {"model.pattern": "AEMR", "model.num_layers": 4}
CASES: dict[str, dict[str, Any]] = {
    "two": {"mesh": {"dp_replicate": 2}, "precision": BF16, "schedule.num_microbatches": 2},
    "experts-reshard": {"mesh": {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, "precision": BF16, "sharding.reshard_after_forward": True},
    "zbv": {"mesh": {"pp": 2, "vpp": 2, "dp_shard": 2}, "schedule": {"kind": "zbv", "num_microbatches": 2}, "precision": BF16},
}


@pytest.mark.parametrize("name", CASES)
def test_traces_have_the_estimated_bytes(name: str, job_with: Callable[..., Any]) -> None:
    compare_distinct_ranks(job_with({**SMALL, "sharding.mode": "ddp", **CASES[name]}))
