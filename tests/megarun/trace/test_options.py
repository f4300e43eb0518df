"""Options of blocks: the trace counts what the estimate does, under the axes, recompute and both kinds of kernels."""

from collections.abc import Callable
from typing import Any

import pytest
from trace_checks import compare_distinct_ranks

pytestmark = [pytest.mark.runtime, pytest.mark.requirement("R-58")]
BF16 = {"params": "bf16", "grads": "fp32", "master": "fp32", "moments": "fp32", "reduce": "fp32"}
TWO = {"schedule.num_microbatches": 2}
GATE_ALONE = {"model.mamba": {"kind": "mamba2", "head_dim": 16, "state_dim": 16, "num_groups": 2, "chunk_size": 8, "gated_norm": False}}
CASES = {
    "gate-alone-pp-selective": ("MDM", GATE_ALONE | TWO | {"mesh": {"pp": 2}, "recompute": {"default": "selective"}}),
    "gate-alone-tp-cp-kernels": ("MM", GATE_ALONE | {"mesh": {"tp": 2, "cp": 2}, "precision": BF16, "host.kernels": "triton"}),
}


@pytest.mark.parametrize(("pattern", "settings"), CASES.values(), ids=CASES)
def test_estimate_is_what_the_runtime_allocates(job_with: Callable[..., Any], pattern: str, settings: dict[str, Any]) -> None:
    """Of every distinct rank, in every column, but for scalars."""
    compare_distinct_ranks(job_with({"model.pattern": pattern, "model.num_layers": len(pattern), **settings}))
