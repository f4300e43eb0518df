"""The small models of the matrix: widths that every degree of the matrix divides."""

import copy
from typing import Any

from megaplan.families.registry import FAMILIES

BASE: dict[str, Any] = {
    "format": "megaplan.spec/1",
    "name": "parity",
    "model": {
        "pattern": "AMEDR",
        "num_layers": 8,
        "hidden_size": 32,
        "vocab_size": 64,
        "attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
        "mamba": {"kind": "mamba2", "expand": 2, "head_dim": 16, "state_dim": 8, "num_groups": 4, "chunk_size": 8, "time_step_min": 0.003},
        "moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 16},
        "recurrent": {"kind": "m2rnn", "num_heads": 4, "key_dim": 4, "value_dim": 4, "save_every": 8},
        "mlp": {"ffn_hidden_size": 40},
        "linear_attention": {
            "kind": "gated_delta", "num_key_heads": 4, "num_value_heads": 8, "key_dim": 4, "value_dim": 4, "chunk_size": 3, "save_every": 8,
        },
        "short_convolution": {"conv_kernel": 4, "bias": True},
    },
    "sharding": {"reshard_after_forward": False},
    "batch": {"micro_batch_size": 2, "seq_length": 16},
    "host": {"kernels": "reference"},
    "precision": dict.fromkeys(("params", "grads", "master", "moments", "reduce"), "fp32"),
    "optimizer": {"newton_schulz_dtype": "fp32"},
    "training": {"steps": 10, "learning_rate": 1.0e-3},
}  # fmt: skip
MAMBA3 = {"kind": "mamba3", "expand": 2, "head_dim": 16, "state_dim": 8, "num_groups": 4, "chunk_size": 4, "save_every": 8}
MIMO = {**MAMBA3, "mimo_rank": 2, "num_angles": 3, "rate_activation": "heavy_tail"}
KDA = {"kind": "kda", "num_heads": 4, "head_dim": 8, "chunk_size": 4, "save_every": 5, "negative_eigenvalues": True}
MLA = {
    "kind": "mla",
    "num_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "nope_layers": [2],
}
INDEXED = {**MLA, "indexer": {"num_heads": 2, "head_dim": 6, "layers": [0, 2], "top_k": 5}}


def spec_with(overrides: dict[str, Any]) -> dict[str, Any]:
    """The small spec as plain values, dotted keys replaced; sections of families that the pattern does not have are left out."""
    spec = copy.deepcopy(BASE)
    for key, value in overrides.items():
        *path, last = key.split(".")
        section = spec
        for step in path:
            section = section.setdefault(step, {})
        section[last] = copy.deepcopy(value)
    letters = set(spec["model"]["pattern"])
    for letter, family in FAMILIES.items():
        if letter not in letters:
            spec["model"].pop(family.section, None)
    return spec
