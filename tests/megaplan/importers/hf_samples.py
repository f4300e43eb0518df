"""Configs of the imports' tests.

`config` holds the fields that decide a model's shapes, `released` others of the published file: nulls, epsilons, bases, ignored ones.
"""

import json
from pathlib import Path
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    model["model"]: model for model in json.loads((Path(__file__).parent / "models.json").read_text(encoding="utf-8"))
}
GONE = object()
"""A field that is taken away."""

DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "num_nextn_predict_layers": 0, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "rope_scaling": {"factor": 40, "type": "yarn"}, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip


def config(name: str, **changes: Any) -> dict[str, Any]:
    """A model's config with fields changed, added or (`GONE`) taken away."""
    model = MODELS[name]
    fields = {"model_type": model["model_type"], **model["config"], **model["released"], **changes}
    return {key: value for key, value in fields.items() if value is not GONE}


def text(fields: dict[str, Any]) -> str:
    """A config as transformers writes it."""
    return json.dumps(fields, indent=2)
