"""Linears in eight bits: the trace counts what the estimate does, under every axis, recompute and both recipes."""

from collections.abc import Callable
from typing import Any

import pytest
from trace_checks import compare_distinct_ranks

pytestmark = [pytest.mark.runtime, pytest.mark.requirement("R-58")]
BF16 = {"params": "bf16", "grads": "fp32", "master": "fp32", "moments": "fp32", "reduce": "fp32"}
NARROW = dict.fromkeys(("params", "grads", "master", "moments", "reduce"), "bf16")
MLA = {
    "kind": "mla",
    "num_heads": 4,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
}
GATED = {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "bias": True, "gate": True}
DELTA = {"kind": "gated_delta", "num_key_heads": 2, "num_value_heads": 4, "key_dim": 4, "value_dim": 8, "save_every": 8}
SELECTIVE = {"recompute": {"default": "selective"}}
FULL = {"recompute": {"blocks": {"A": "full", "D": "full"}}}


@pytest.mark.parametrize("name", ["fp8_current", "fp8_rowwise"])
@pytest.mark.parametrize(
    ("pattern", "settings", "precision", "recipe"),
    [
        ("AMDA", {"mesh": {"tp": 2}}, BF16, {}),
        pytest.param("AMDA", {"mesh": {"tp": 2}, **SELECTIVE}, NARROW, {}, marks=pytest.mark.slow),
        ("AMDR", {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": {"num_microbatches": 4}}, BF16, {"format": "e4m3"}),
        ("AMDA", {"mesh": {"cp": 2}, "data.packing": "documents", **FULL}, BF16, {"first_last_bf16": (1, 0)}),
        pytest.param(
            "GD", {"mesh": {"tp": 2, "dp_shard": 2}, "model.linear_attention": DELTA, **SELECTIVE}, NARROW, {}, marks=pytest.mark.slow
        ),
        pytest.param("AD", {"mesh": {"tp": 2}, "model.attention": MLA, "data.packing": "documents"}, BF16, {}, marks=pytest.mark.slow),
        pytest.param(
            "AD",
            {"model.attention": GATED, "model.norm_placement": "post", **SELECTIVE},
            BF16,
            {"format": "hybrid"},
            marks=pytest.mark.slow,
        ),
        pytest.param("AED", {"mesh": {"dp_shard": 2, "ep": 2}}, BF16, {"families": ("A", "D")}, marks=pytest.mark.slow),
    ],
    ids=["tp", "tp-selective", "pp-dp", "cp-packed-full", "delta", "latent", "gated-post-norm", "with-experts"],
)
def test_estimate_is_what_the_runtime_allocates(
    job_with: Callable[..., Any], pattern: str, settings: dict[str, Any], precision: dict[str, Any], recipe: dict[str, Any], name: str
) -> None:
    """Of every distinct rank, in every column, but for scalars; what a block keeps is storage by storage what its ledger lists."""
    model = {"model.pattern": pattern, "model.num_layers": len(pattern)}
    job = job_with({**model, "precision": {**precision, "recipe": {"name": name, **recipe}}, **settings})
    compare_distinct_ranks(job)
