"""Options of blocks: the trace counts what the estimate does, under the axes, recompute and both kinds of kernels."""

from collections.abc import Callable
from typing import Any

import pytest
from trace_checks import BF16, compare_distinct_ranks

pytestmark = [pytest.mark.runtime, pytest.mark.requirement("R-58")]
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
DIVIDED = {
    "model.parallel_layers": [1, 2, 4],
    "model.mlp": {"ffn_hidden_size": 48, "activation": "relu2"},
    "batch": {"micro_batch_size": 2, "seq_length": 96},
}
"""Layers divided from a norm that they share: one is recomputed, a backward is split, or one multiplies in eight bits."""
IN_V = {"mesh": {"pp": 2, "vpp": 2}, "schedule": {"kind": "zbv", "num_microbatches": 4}}
ZERO_BUBBLE = {
    "model.parallel_layers": [1, 2, 4, 5, 7, 8, 10, 11],
    "schedule": {"kind": "interleaved_zero_bubble", "num_microbatches": 4},
}
OF_MLP, OF_ATTENTION = (
    {"precision": BF16 | {"recipe": {"name": name, "families": (letter,)}}} for name, letter in (("fp8_rowwise", "D"), ("fp8_current", "A"))
)
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
    "full-before-a-reader": ("ADDADA", DIVIDED | {"recompute": {"default": "full"}}),
    "full-tp": ("ADDADA", DIVIDED | {"mesh": {"tp": 2}, "recompute": {"blocks": {"A": "full"}}}),
    "zbv": ("ADADADAD", DIVIDED | IN_V | {"model.parallel_layers": [1, 3, 5, 7]}),
    "zbv-full": ("ADADADAD", DIVIDED | IN_V | {"model.parallel_layers": [1, 3, 5, 7], "recompute": {"default": "full"}}),
    "zero-bubble-three-full": ("DAADDADDDADA", DIVIDED | IN_V | ZERO_BUBBLE | {"recompute": {"blocks": {"A": "full"}}}),
    "dualpipev-experts": ("EDADEDAD", DIVIDED | IN_V | {"model.parallel_layers": [1, 3, 5, 7], "schedule.kind": "dualpipev"}),
    "recipe": ("MADMAD", FALCON | {"precision": BF16 | {"recipe": {"name": "fp8_current"}}}),
    "recipe-of-mlp-full": ("ADDADA", DIVIDED | OF_MLP | {"recompute": {"blocks": {"A": "full"}}}),
    "recipe-of-attention-tp": ("ADDADA", DIVIDED | OF_ATTENTION | {"mesh": {"tp": 2}}),
    "recipe-zbv": (
        "ADADADAD",
        DIVIDED | IN_V | {"model.parallel_layers": [1, 3, 5, 7], "precision": BF16 | {"recipe": {"name": "mxfp8"}}},
    ),
    "three-on-one": ("MADE", {"model.parallel_layers": [1, 2, 3], "mesh": {"ep": 2, "dp_shard": 2}}),
}


SLOW = ("full-tp", "zbv", "zero-bubble-three-full", "dualpipev-experts", "recipe-of-attention-tp", "recipe-zbv", "recipe-of-mlp-full")


@pytest.mark.parametrize(
    ("pattern", "settings"), [pytest.param(*case, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name, case in CASES.items()]
)
def test_estimate_is_what_the_runtime_allocates(job_with: Callable[..., Any], pattern: str, settings: dict[str, Any]) -> None:
    """Traces equal estimates, for every distinct rank, in every column but scalars."""
    compare_distinct_ranks(job_with({"model.pattern": pattern, "model.num_layers": len(pattern), **settings}))
