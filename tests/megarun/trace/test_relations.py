"""A relation bias: the trace counts what the estimate does, under every axis, recompute, and with Triton's kernels planned."""

from collections.abc import Callable
from typing import Any

import pytest
from trace_checks import BF16, compare_distinct_ranks

pytestmark = [pytest.mark.runtime, pytest.mark.requirement("R-58")]
MLA = {
    "kind": "mla",
    "num_heads": 4,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
}
TWO = {"schedule.num_microbatches": 2}


@pytest.mark.parametrize(
    ("pattern", "settings"),
    [
        ("ADAA", {"mesh": {"pp": 2}, **TWO, "precision": BF16, "model.features.structure": {"num_categories": 9, "bottleneck": 4}}),
        ("ADA", {"mesh": {"cp": 2, "tp": 2}, "data.packing": "documents", "recompute": {"default": "selective"}}),
        pytest.param("AD", {"host.kernels": "triton", "precision": BF16}, marks=pytest.mark.slow),
        pytest.param(
            "AD",
            {
                "host.kernels": "triton",
                "precision": BF16,
                "mesh": {"cp": 2},
                "model.attention.score_cap": 30.0,
                "model.attention.sinks": True,
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "ADDA",
            {"mesh": {"pp": 2, "vpp": 2}, "schedule": {"kind": "zbv", "num_microbatches": 4}, "precision": BF16},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "ADAD",
            {
                "model.attention": MLA,
                "mesh": {"pp": 2},
                **TWO,
                "model.features.mtp": {"depth": 1, "ffn_hidden_size": 40},
                "recompute": {"blocks": {"A": "full"}},
                "sharding.reshard_after_forward": True,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["pp-bf16-structure", "cp-tp-packed-selective", "kernels", "kernels-cp-cap-sinks", "zbv", "latent-mtp-full-reshard"],
)
def test_estimate_is_what_the_runtime_allocates(job_with: Callable[..., Any], pattern: str, settings: dict[str, Any]) -> None:
    """Traces equal estimates, in every column but scalars: 400 rows, so that no part of the table's gradient hides."""
    model = {"model.pattern": pattern, "model.num_layers": len(pattern)}
    job = job_with({**model, "model.features.relation_bias": {"num_relations": 400}, **settings})
    compare_distinct_ranks(job)
