"""Options of blocks over a TP group: biases, which are added once, and norms of rows that several ranks hold."""

from typing import Any

import pytest
from parity_cells import DENSE, EXPERTS, FEW_WORDS, MLA, ROUTED, SELECTIVE, T2, T2V, Cell, pattern
from parity_compare import course_difference
from parity_model import INDEXED, KDA
from parity_world import Worlds

pytestmark = [pytest.mark.runtime, pytest.mark.jobs]
OPTIONS: dict[str, Any] = {
    "model.norm": "layernorm",
    "model.norm_placement": "both",
    "model.attention": {
        "kind": "gqa",
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "bias": True,
        "output_bias": True,
        "qk_norm": True,
        "qk_norm_width": "all_heads",
        "rotary_dim": 4,
        "gate": True,
    },
    "model.mlp": {"ffn_hidden_size": 40, "bias": True},
}
MAMBA = {"kind": "mamba2", "expand": 2, "head_dim": 16, "state_dim": 8, "num_groups": 2, "chunk_size": 8, "bias": True}
UNNORMED = {"kind": "mamba2", "head_dim": 16, "state_dim": 8, "num_groups": 2, "chunk_size": 8, "gated_norm": False}
FALCON: dict[str, Any] = {
    **pattern("MAD", 6),
    "model.parallel_layers": [1, 4],
    "model.embedding_multiplier": 5.5,
    "model.logits_multiplier": 0.3,
    "model.attention": {
        "kind": "gqa",
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "softmax_scale": 0.2,
        "output_multiplier": 0.6,
    },
    "model.mamba": {**UNNORMED, "part_multipliers": [0.5, 0.7, 1.5, 2.0, 0.3], "output_multiplier": 0.4},
    "model.mlp": {"ffn_hidden_size": 40, "gate_multiplier": 0.8, "output_multiplier": 0.9},
}
GATED = {"model.moe.shared_gate": True}
ROUTER: dict[str, Any] = {
    "model.moe": {
        "num_experts": 8,
        "top_k": 2,
        "ffn_hidden_size": 24,
        "shared_ffn_hidden_size": 16,
        "score": "sigmoid",
        "expert_bias": True,
        "expert_bias_rate": 0.01,
        "num_groups": 4,
        "top_groups": 2,
        "routed_scale": 2.5,
        "router_bias": True,
        "latent_size": 16,
    }
}
GPT_OSS: dict[str, Any] = {
    "model.attention": {
        "kind": "gqa",
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "bias": True,
        "output_bias": True,
        "sinks": True,
        "window_size": 5,
        "full_layers": [2],
        "value_head_dim": 6,
        "value_norm": True,
        "qk_norm": True,
        "gate": True,
        "gate_width": "head",
        "window_rope_theta": 300.0,
        "window_rotary_dim": 4,
        "layer_heads": [
            {"layers": [0], "num_heads": 8, "num_kv_heads": 4, "sinks": False},
            {"layers": [2], "value_head_dim": 8, "values_from_keys": True},
        ],
    },
    "model.moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 24, "bias": True, "router_bias": True, "swiglu_limit": 0.02},
}
GEGLU: dict[str, Any] = {
    "model.norm": "layernorm_no_bias",
    "model.mlp": {"ffn_hidden_size": 40, "activation": "geglu"},
    "model.moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 16, "activation": "geglu"},
}
GEMMA: dict[str, Any] = {
    "model.norm_placement": "both",
    "model.zero_centered_norm": True,
    "model.embedding_multiplier": 5.5,
    "model.tie_embeddings": True,
    "model.attention": {
        "kind": "gqa",
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "qk_norm": True,
        "window_size": 5,
        "full_layers": [2],
        "window_rope_theta": 300.0,
        "rope_scaling": {"kind": "linear", "factor": 8.0},
    },
    "model.mlp": {"ffn_hidden_size": 40, "activation": "geglu"},
}
CAPPED: dict[str, Any] = {
    "model.logits_cap": 0.5,
    "model.attention": {
        "kind": "gqa",
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "score_cap": 0.2,
        "sinks": True,
        "window_size": 7,
        "full_layers": [2],
    },
}
LEARNED: dict[str, Any] = {"model.mlp": {"ffn_hidden_size": 40, "activation": "xielu", "bias": True}}
NANOCHAT: dict[str, Any] = {
    "model.norm": "rmsnorm_no_scale",
    "model.embedding_norm": True,
    "model.attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "qk_norm": True, "qk_norm_scale": False},
    "model.mlp": {"ffn_hidden_size": 40, "activation": "relu2"},
}
SUB_NORMS: dict[str, Any] = {
    "model.embedding_norm": True,
    "model.attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "gate": True, "output_norm": True},
    "model.mlp": {"ffn_hidden_size": 40, "inner_norm": True},
}
BITNET: dict[str, Any] = {
    "model.attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "output_norm": True},
    "model.mlp": {"ffn_hidden_size": 40, "activation": "relu2glu", "inner_norm": True},
}
QWEN_NEXT: dict[str, Any] = {
    **pattern("GEAE", 4),
    "model.zero_centered_norm": True,
    "model.attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "qk_norm": True, "gate": True, "rotary_dim": 2},
    "model.moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 16, "shared_gate": True},
}
KIMI: dict[str, Any] = {
    **pattern("GEAE", 4, linear_attention=KDA, attention={**MLA, "nope_layers": [2], "latent_norm_eps": 1e-3, "output_multiplier": 0.6}),
    "model.moe": {
        "num_experts": 8,
        "top_k": 2,
        "ffn_hidden_size": 24,
        "shared_ffn_hidden_size": 16,
        "score": "sigmoid",
        "expert_bias": True,
        "routed_scale": 2.4,
    },
}
LING: dict[str, Any] = KIMI | {
    "model.linear_attention": {**KDA, "full_gates": True},
    "model.attention": {**MLA, "gate": True, "gate_width": "head", "sinks": True},
    "model.added_norm_layers": [1, 3],
}
BEAM: dict[str, Any] = {
    "model.norm_placement": "both",
    "model.attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "qk_norm": True, "gate": True, "gate_bias": True},
}
LFM2_MOE: dict[str, Any] = {
    **pattern("CEAE", 4),
    "model.short_convolution": {"conv_kernel": 3},
    "model.attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "qk_norm": True},
    "model.moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 24, "score": "sigmoid", "expert_bias": True},
}
OLMO_HYBRID: dict[str, Any] = {
    **pattern("GDAD", 8),
    "model.post_norm_layers": [2, 3, 6, 7],
    "model.attention": {
        "kind": "gqa",
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "qk_norm": True,
        "qk_norm_width": "all_heads",
        "nope_layers": [2, 6],
    },
    "model.linear_attention": {
        "kind": "gated_delta",
        "num_key_heads": 4,
        "num_value_heads": 4,
        "key_dim": 4,
        "value_dim": 8,
        "negative_eigenvalues": True,
        "gated_norm_eps": 1e-4,
        "chunk_size": 3,
        "save_every": 8,
    },
}
CELLS = [
    Cell("falcon", {"pp": 2, **T2}, spec=FALCON),
    Cell("falcon-tp-cp", {**T2, "cp": 2}, spec=FALCON | SELECTIVE),
    Cell("falcon-stages", {"pp": 2, "cp": 2}, spec=FALCON | FEW_WORDS),
    Cell(
        "falcon-recompute",
        {"pp": 2, "dp_shard": 2},
        spec=FALCON | {"recompute": {"blocks": {"A": "full", "D": "full", "M": "selective"}}, "sharding.reshard_after_forward": True},
    ),
    Cell(
        "three-on-one",
        {"ep": 2, "dp_shard": 2, **T2},
        spec=pattern("MADEA", 5) | {"model.parallel_layers": [1, 2, 3], "model.mamba": UNNORMED},
    ),
    Cell("olmo-hybrid", {"pp": 2, **T2}, spec=OLMO_HYBRID),
    Cell("olmo-hybrid-tp-cp", {**T2, "cp": 2}, "1f1b", spec=OLMO_HYBRID),
    Cell(
        "olmo-hybrid-recompute",
        {"pp": 2, "vpp": 2, "dp_shard": 2},
        "interleaved_1f1b",
        spec=OLMO_HYBRID | {"recompute": {"default": "full", "blocks": {"G": "selective"}}},
    ),
    Cell("capped", {"pp": 2, **T2}, spec=DENSE | CAPPED),
    Cell("capped-vocabulary-cp", {"cp": 2, **T2V}, spec=DENSE | CAPPED | SELECTIVE),
    Cell("capped-packed", {"pp": 2, "vpp": 2, "cp": 2}, "zbv", spec=DENSE | CAPPED | FEW_WORDS),
    Cell("gemma", {"pp": 2, **T2}, spec=DENSE | GEMMA),
    Cell("gemma-vocabulary-cp", {"cp": 2, **T2V}, spec=DENSE | GEMMA),
    Cell("ling", {"pp": 2, **T2}, spec=LING),
    Cell("ling-cp-recompute", {"cp": 2, **T2}, spec=LING | {"recompute": {"default": "selective"}}),
    Cell("beam", {"pp": 2, **T2}, spec=DENSE | BEAM),
    Cell("gated-indexers", T2, spec=pattern("AD", 4, attention={**INDEXED, "gate": True})),
    Cell("xielu", {"pp": 2, **T2}, spec=DENSE | LEARNED | SELECTIVE, ci=True),
    Cell("no-scales", {"pp": 2, **T2}, spec=DENSE | NANOCHAT, ci=True),
    Cell("gated-squares", {"pp": 2, **T2}, spec=DENSE | BITNET | SELECTIVE, ci=True),
    Cell("gated-squares-cp", {"cp": 2, "dp_shard": 2}, spec=DENSE | BITNET),
    Cell("inner-norms", {"cp": 2, **T2}, spec=DENSE | SUB_NORMS | SELECTIVE, ci=True),
    Cell("xielu-cp", {"cp": 2, **T2}, "1f1b", spec=DENSE | LEARNED),
    Cell("qwen-next", {"pp": 2, "ep": 2, "dp_shard": 2}, spec=QWEN_NEXT, ci=True),
    Cell("qwen-next-tp-cp", {**T2, "cp": 2, "ep": 2}, spec=QWEN_NEXT),
    Cell("qwen-next-pp-tp", {"pp": 2, **T2, "ep": 2}, "interleaved_zero_bubble", spec=QWEN_NEXT),
    Cell("kimi-pp-ep", {"pp": 2, "ep": 2, "dp_shard": 2}, spec=KIMI),
    Cell("kimi-tp-cp", {**T2, "cp": 2, "ep": 2}, spec=KIMI),
    Cell("lfm2-moe-pp-ep", {"pp": 2, "ep": 2, "dp_shard": 2}, spec=LFM2_MOE),
    Cell("lfm2-moe-tp-cp", {**T2, "cp": 2, "ep": 2}, spec=LFM2_MOE),
    Cell("both", T2, spec=DENSE | OPTIONS),
    Cell("post", T2, spec=EXPERTS | OPTIONS | {"model.norm_placement": "post"}),
    Cell("zero-bubble", {"pp": 2, **T2}, "interleaved_zero_bubble", DENSE | OPTIONS),
    Cell("shared-gate", {**T2, "ep": 2, "dp_shard": 2}, spec=EXPERTS | GATED),
    Cell("shared-gate-stages", {"pp": 2, **T2}, "interleaved_zero_bubble", EXPERTS | GATED),
    Cell("sigmoid-latent", {"pp": 2, "ep": 2, "dp_shard": 2}, spec=EXPERTS | ROUTER),
    Cell("sigmoid-latent-tp-cp", {**T2, "cp": 2, "ep": 2}, spec=EXPERTS | ROUTER),
    Cell("sigmoid-losses", {"pp": 2, **T2, "ep": 2}, spec=EXPERTS | ROUTER | ROUTED),
    Cell("sinks-biased-experts", {"pp": 2, "ep": 2, "dp_shard": 2}, spec=EXPERTS | GPT_OSS, ci=True),
    Cell("sinks-biased-experts-tp-cp", {**T2, "cp": 2, "ep": 2}, spec=EXPERTS | GPT_OSS),
    Cell("sinks-biased-experts-packed", {"cp": 2, "dp_shard": 2}, spec=EXPERTS | GPT_OSS | FEW_WORDS),
    Cell("geglu", {**T2, "ep": 2, "dp_shard": 2}, spec=pattern("AED") | GEGLU),
    Cell("states", T2, spec=pattern("MD") | {"model.mamba": MAMBA, "model.mlp": OPTIONS["model.mlp"]}),
    Cell("states-gate-alone", {"pp": 2, **T2, "cp": 2}, spec=pattern("MD", mamba=UNNORMED) | SELECTIVE),
]


@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.name, marks=() if cell.ci else pytest.mark.slow) for cell in CELLS])
def test_options_train_as_in_one_process(cell: Cell, worlds: Worlds) -> None:
    """Every gradient of three steps, and the optimizers' steps on equal gradients: biases start at zero, and are only steps."""
    case, reference = ({**each, "run": "course"} for each in (cell.case, cell.reference))
    records, expected = worlds.train(case, cell.world_size), worlds.reference(reference)
    found = course_difference(case, records, expected, cell.bound, lambda number: worlds.reference({**reference, "perturbed": number}))
    assert found is None, f"{cell.name} ({cell.axes}): {found} > {cell.bound:.0e}"
