"""Every data rank with its state whole: gradients are summed where they are, or in casts of one group at a time."""

from collections.abc import Callable
from typing import Any

import pytest
from trace_checks import BF16, compare_distinct_ranks

pytestmark = pytest.mark.runtime
BUCKETS = BF16 | {"reduce": "bf16"}
SMALL = {"model.pattern": "AEMR", "model.num_layers": 4}
CASES: dict[str, dict[str, Any]] = {
    "two": {"mesh": {"dp_replicate": 2}, "precision": BF16, "schedule.num_microbatches": 2},
    "experts-reshard": {"mesh": {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, "precision": BF16, "sharding.reshard_after_forward": True},
    "zbv": {"mesh": {"pp": 2, "vpp": 2, "dp_shard": 2}, "schedule": {"kind": "zbv", "num_microbatches": 2}, "precision": BF16},
    "buckets": {"mesh": {"dp_shard": 2}, "precision": BUCKETS},
    "buckets-two-of-units": {"mesh": {"dp_shard": 2}, "precision": BUCKETS, "schedule.num_microbatches": 2, "sharding.wrap": 2},
    "wide-buckets-experts": {"mesh": {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, "precision": BF16 | {"grads": "bf16"}},
    "buckets-1f1b": {"mesh": {"pp": 2, "dp_shard": 2}, "precision": BUCKETS, "schedule.num_microbatches": 2},
}


@pytest.mark.parametrize("name", CASES)
def test_traces_have_the_estimated_bytes(name: str, job_with: Callable[..., Any]) -> None:
    compare_distinct_ranks(job_with({**SMALL, "sharding.mode": "ddp", **CASES[name]}))
