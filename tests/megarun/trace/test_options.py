"""Options of blocks: the trace counts what the estimate does, under the axes, recompute and both kinds of kernels."""

from collections.abc import Callable
from typing import Any

import pytest
from trace_checks import compare_distinct_ranks

pytestmark = [pytest.mark.runtime, pytest.mark.requirement("R-58")]
BF16 = {"params": "bf16", "grads": "fp32", "master": "fp32", "moments": "fp32", "reduce": "fp32"}
TWO = {"schedule.num_microbatches": 2}
GATE_ALONE = {"model.mamba": {"kind": "mamba2", "head_dim": 16, "state_dim": 16, "num_groups": 2, "chunk_size": 8, "gated_norm": False}}
FACTORS = {
    "model.attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "softmax_scale": 0.1, "output_multiplier": 0.6},
    "model.mamba": {**GATE_ALONE["model.mamba"], "part_multipliers": [0.5, 0.7, 1.5, 2.0, 0.3], "output_multiplier": 0.4},
    "model.mlp": {"ffn_hidden_size": 48, "gate_multiplier": 0.8, "output_multiplier": 0.9},
    "model.logits_multiplier": 0.2,
    "model.embedding_multiplier": 5.5,
}
CAPS = {
    "model.attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "score_cap": 2.0},
    "model.logits_cap": 3.0,
}
FALCON = FACTORS | {"model.parallel_layers": [1, 4]}
MLA = {
    "kind": "mla",
    "num_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "nope_layers": [1],
}
ENDING = FALCON | TWO | {"model.parallel_layers": [2, 5], "mesh": {"pp": 2}, "batch": {"micro_batch_size": 2, "seq_length": 192}}
WINDOWS = {
    "model.attention": {**CAPS["model.attention"], "window_size": 9, "windows": [{"size": 3, "layers": [0]}, {"size": 40, "layers": [2]}]},
}
CASES = {
    "windows-pp-kernels": ("ADAD", WINDOWS | TWO | {"mesh": {"pp": 2}, "precision": BF16, "host.kernels": "triton"}),
    "gate-alone-pp-selective": ("MDM", GATE_ALONE | TWO | {"mesh": {"pp": 2}, "recompute": {"default": "selective"}}),
    "gate-alone-tp-cp-kernels": ("MM", GATE_ALONE | {"mesh": {"tp": 2, "cp": 2}, "precision": BF16, "host.kernels": "triton"}),
    "caps-pp-tied": ("ADAD", CAPS | TWO | {"mesh": {"pp": 2}, "precision": BF16, "model.tie_embeddings": True}),
    "caps-tp-cp-vocabulary-reshard": (
        "AD",
        CAPS | {"mesh": {"tp": 2, "cp": 2, "dp_shard": 2, "vocab_parallel": True}, "sharding.reshard_after_forward": True},
    ),
    "caps-selective": ("AD", CAPS | {"recompute": {"default": "selective"}}),
    "caps-kernels": ("AD", CAPS | {"host.kernels": "triton", "precision": BF16}),
    "factors": ("MAD", FACTORS),
    "falcon": ("MADMAD", FALCON),
    "falcon-pp-bf16-full": (
        "MADMAD",
        FALCON | TWO | {"mesh": {"pp": 2}, "precision": BF16, "recompute": {"blocks": {"A": "full", "D": "selective"}}},
    ),
    "falcon-ends-a-stage": ("DMADMA", ENDING | {"recompute": {"default": "full", "blocks": {"M": "selective"}}}),
    "falcon-ends-a-stage-latent": (
        "DAADMA",
        ENDING | {"model.parallel_layers": [2, 5], "model.attention": MLA, "precision": BF16, "sharding.reshard_after_forward": True},
    ),
    "falcon-tp-cp-selective": ("MADMAD", FALCON | {"mesh": {"tp": 2, "cp": 2}, "recompute": {"default": "selective"}}),
    "falcon-kernels-reshard": (
        "MADMAD",
        FALCON | TWO | {"mesh": {"dp_shard": 2}, "precision": BF16, "host.kernels": "triton", "sharding.reshard_after_forward": True},
    ),
    "attention-before-mlp": ("ADAD", {"model.parallel_layers": [1, 3], "model.mlp": {"ffn_hidden_size": 48, "activation": "relu2"}}),
    "mamba-before-mlp-alone": ("MD", {"model.parallel_layers": [1], "model.mlp": {"ffn_hidden_size": 48, "activation": "relu2"}}),
    "three-on-one": ("MADE", {"model.parallel_layers": [1, 2, 3], "mesh": {"ep": 2, "dp_shard": 2}}),
}


@pytest.mark.parametrize(("pattern", "settings"), CASES.values(), ids=CASES)
def test_estimate_is_what_the_runtime_allocates(job_with: Callable[..., Any], pattern: str, settings: dict[str, Any]) -> None:
    """Traces equal estimates, for every distinct rank, in every column but scalars."""
    compare_distinct_ranks(job_with({"model.pattern": pattern, "model.num_layers": len(pattern), **settings}))
