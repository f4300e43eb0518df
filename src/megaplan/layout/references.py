"""Small specs whose counted operations identify measured constants: together they contain every kind of kernel."""

from typing import Any

SHARED: dict[str, Any] = {
    "format": "megaplan.spec/1",
    "schedule": {"kind": "1f1b", "num_microbatches": 2},
    "batch": {"micro_batch_size": 2, "seq_length": 4096},
    "host": {"kernels": "triton"},
}
EXPERTS = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 1024, "shared_ffn_hidden_size": 1024}
REFERENCES: tuple[dict[str, Any], ...] = (
    {
        **SHARED,
        "name": "grouped-attention-mamba2-gated-experts-m2rnn",
        "model": {
            "pattern": "AMEDR",
            "num_layers": 5,
            "hidden_size": 2048,
            "vocab_size": 32768,
            "attention": {"kind": "gqa", "num_heads": 16, "num_kv_heads": 4, "head_dim": 128},
            "mamba": {"kind": "mamba2", "head_dim": 64, "state_dim": 128, "num_groups": 2, "chunk_size": 128},
            "moe": {**EXPERTS, "activation": "swiglu"},
            "mlp": {"ffn_hidden_size": 5632, "activation": "swiglu"},
            "recurrent": {"kind": "m2rnn", "num_heads": 32, "key_dim": 64, "value_dim": 16},
        },
        "optimizer": {"matrix": "muon", "other": "adamw"},
    },
    {
        **SHARED,
        "name": "latent-attention-indexer-mamba3-experts",
        "model": {
            "pattern": "AMEA",
            "num_layers": 4,
            "hidden_size": 2048,
            "vocab_size": 32768,
            "attention": {
                **{"kind": "mla", "num_heads": 16, "q_lora_rank": 64, "kv_lora_rank": 64},
                **{"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64},
                "indexer": {"num_heads": 8, "head_dim": 64, "layers": [0]},
            },
            "mamba": {"kind": "mamba3", "head_dim": 64, "state_dim": 128, "num_groups": 8, "mimo_rank": 4, "num_angles": 32},
            "moe": {**EXPERTS, "activation": "relu2"},
        },
    },
    {
        **SHARED,
        "name": "eight-bits",
        "model": {
            "pattern": "AD",
            "num_layers": 4,
            "hidden_size": 2048,
            "vocab_size": 32768,
            "attention": {"kind": "gqa", "num_heads": 16, "num_kv_heads": 4, "head_dim": 128},
            "mlp": {"ffn_hidden_size": 5632, "activation": "swiglu"},
        },
        "precision": {"recipe": {"name": "fp8_rowwise"}},
    },
)
