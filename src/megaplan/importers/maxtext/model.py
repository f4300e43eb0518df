"""The section `model` of a MaxText configuration, by way of the transformers configuration of the same model.

Source: `src/maxtext/configs/base.yml` and `configs/models`, AI-Hypercomputer/maxtext at e591f30c; `models.json` has the dimensions of the
models that these files name.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megaplan.importers.hf import import_hf

DATA = Path(__file__).with_name("models.json")
DEFAULTS: dict[str, Any] = {
    "decoder_block": "llama2", "base_emb_dim": 2048, "base_num_query_heads": 16, "base_num_kv_heads": 16, "base_mlp_dim": 7168,
    "base_moe_mlp_dim": -1, "base_num_decoder_layers": 16, "head_dim": 128, "mlp_activations": ["silu", "linear"], "vocab_size": 32000,
    "logits_via_embedding": False, "normalization_layer_epsilon": 1e-5, "rope_max_timescale": 10000, "rope_type": "default",
    "rope_factor": 40, "original_max_position_embeddings": 4096, "rope_linear_scaling_factor": 1.0, "local_rope_max_timescale": -1,
    "partial_rotary_factor": 1.0, "use_qk_norm": False, "attention_bias": False, "attention_sink": False, "attention_type": "global",
    "sliding_window_size": 0, "chunk_attn_window_size": 0, "attn_logits_soft_cap": 0.0, "final_logits_soft_cap": 0.0,
    "trainable_position_size": -1, "num_experts": 1, "num_experts_per_tok": 1, "norm_topk_prob": False, "shared_experts": 0,
    "first_num_dense_layers": 0, "routed_scaling_factor": 1.0, "routed_score_func": "", "routed_bias": False, "n_routing_groups": -1,
    "topk_routing_group": -1, "q_lora_rank": 0, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "use_indexer": False, "indexer_head_dim": 128, "indexer_n_heads": 64, "indexer_topk": 2048, "inhomogeneous_layer_cycle_interval": 1,
    "interleave_moe_layer_step": 1, "nope_layer_interval": -1, "gdn_conv_kernel_dim": 4, "gdn_key_head_dim": 128,
    "gdn_value_head_dim": 128, "gdn_num_key_heads": 16, "gdn_num_value_heads": 32, "capacity_factor": -1.0,
    "load_balance_loss_weight": 0.0, "share_kv_projections": False, "global_head_dim": 0, "global_num_kv_heads": 0,
}  # fmt: skip
"""Keys of the model, with the defaults of base.yml."""
PAIRED = {"gemma2": 2}
"""Layers of the model in one of the file's layers."""
CYCLES = {"gemma3": 6, "gemma2": 2}
"""Layers of one iteration of the scan, of blocks for which no key says it."""
CYCLED = ("gpt_oss", "llama4", "olmo3", "qwen3_next", "qwen3_5")
"""Blocks whose number of layers per cycle is `inhomogeneous_layer_cycle_interval`; others have one."""
OWN_NAMES = "gpt2"
"""Type of a configuration whose fields have other names."""
ACTIVATIONS = {"silu": "silu", "gelu": "gelu_pytorch_tanh", "sigmoid": "silu"}
Given = Mapping[str, Any]


@cache
def models() -> dict[str, dict[str, Any]]:
    """Keys by the name of a model."""
    found: dict[str, dict[str, Any]] = json.loads(DATA.read_text(encoding="utf-8"))
    return found


def section_of(given: Given) -> dict[str, Any]:
    """The section `model`.

    Args:
        given: All keys of `DEFAULTS`.

    Raises:
        KeyError: No such decoder block is known.
        MegaplanError: The model does not allow a value.
    """
    family, fields = BLOCKS[given["decoder_block"]]
    if family == "deepseek_v3":
        family = "deepseek_v32" if given["use_indexer"] else family if given["routed_score_func"] == "sigmoid" else "deepseek_v2"
    config = {**({} if family == OWN_NAMES else _common(given)), **fields(given), "model_type": family}
    found: dict[str, Any] = import_hf(json.dumps(config), "config.json").document["model"]
    if len(given["mlp_activations"]) == 1:
        for part in {"mlp", "moe"} & found.keys():
            found[part] |= {"activation": given["mlp_activations"][0]}
    found.get("attention", {}).pop("latent_norm_eps", None)  # its norms have the same epsilon as all others
    if "moe" in found:
        capacity, balance = given["capacity_factor"], given["load_balance_loss_weight"]
        found["moe"] |= {"capacity_factor": float(capacity)} if capacity > 0 else {}
        found["moe"].pop("balance_loss_coefficient", None)
        found["moe"] |= {"balance_loss_coefficient": float(balance)} if balance else {}
    return found


def cycle_of(given: Given) -> int:
    """Decoder layers of one iteration of the scan over layers, at most all."""
    block = given["decoder_block"]
    cycle = given["inhomogeneous_layer_cycle_interval"] if block in CYCLED else CYCLES.get(block, 1)
    return int(min(cycle, given["base_num_decoder_layers"] * PAIRED.get(block, 1)))


def _common(given: Given) -> dict[str, Any]:
    layers = given["base_num_decoder_layers"] * PAIRED.get(given["decoder_block"], 1)
    scaling = None
    if given["rope_type"] == "yarn":
        scaling = {"rope_type": "yarn", "factor": float(given["rope_factor"]),
                   "original_max_position_embeddings": given["original_max_position_embeddings"]}  # fmt: skip
    return {
        "hidden_size": given["base_emb_dim"],
        "num_hidden_layers": layers,
        "num_attention_heads": given["base_num_query_heads"],
        "num_key_value_heads": given["base_num_kv_heads"],
        "head_dim": given["head_dim"],
        "intermediate_size": given["base_mlp_dim"],
        "vocab_size": given["vocab_size"],
        "rms_norm_eps": given["normalization_layer_epsilon"],
        "tie_word_embeddings": given["logits_via_embedding"],
        "rope_theta": float(given["rope_max_timescale"]),
        "hidden_act": ACTIVATIONS.get(given["mlp_activations"][0], given["mlp_activations"][0]),
        "max_position_embeddings": 131072,
        **({} if scaling is None else {"rope_scaling": scaling}),
    }


def _inner(given: Given) -> int:
    return int(given["base_moe_mlp_dim"] if given["base_moe_mlp_dim"] > 0 else given["base_mlp_dim"])


def _llama(given: Given) -> dict[str, Any]:
    return {"attention_bias": given["attention_bias"], "mlp_bias": False}


def _gemma2(given: Given) -> dict[str, Any]:
    layers = PAIRED["gemma2"] * given["base_num_decoder_layers"]
    kinds = ["sliding_attention", "full_attention"]
    caps = {
        "attn_logit_softcapping": given["attn_logits_soft_cap"] or None,
        "final_logit_softcapping": given["final_logits_soft_cap"] or None,
    }
    return {**_gemma3(given), **caps, "layer_types": kinds * (layers // 2)}


def _gemma3(given: Given) -> dict[str, Any]:
    layers, local = given["base_num_decoder_layers"], given["local_rope_max_timescale"]
    kinds = ["full_attention" if (layer + 1) % CYCLES["gemma3"] == 0 else "sliding_attention" for layer in range(layers)]
    linear = given["rope_linear_scaling_factor"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": given["sliding_window_size"],
        "layer_types": kinds,
        "query_pre_attn_scalar": given["head_dim"],
        "attention_bias": False,
        **({"rope_local_base_freq": float(local)} if local > 0 else {}),
        **({"rope_scaling": {"rope_type": "linear", "factor": float(linear)}} if linear != 1 else {}),
    }


def _gemma4(given: Given) -> dict[str, Any]:
    wide, groups = given["global_head_dim"] or given["head_dim"], given["global_num_kv_heads"] or given["base_num_kv_heads"]
    routes, layers = given["num_experts"] > 1, given["base_num_decoder_layers"]
    experts = {"num_experts": given["num_experts"], "top_k_experts": given["num_experts_per_tok"], "moe_intermediate_size": _inner(given)}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": given["sliding_window_size"],
        "layer_types": ["full_attention" if (layer + 1) % CYCLES["gemma3"] == 0 else "sliding_attention" for layer in range(layers)],
        "attention_bias": False,
        "attention_k_eq_v": given["share_kv_projections"],
        "global_head_dim": wide,
        "num_global_key_value_heads": groups,
        "final_logit_softcapping": given["final_logits_soft_cap"] or None,
        "enable_moe_block": routes,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        **(experts if routes else {}),
    }


def _routed(given: Given) -> dict[str, Any]:
    return {
        "moe_intermediate_size": _inner(given),
        "num_experts": given["num_experts"],
        "num_experts_per_tok": given["num_experts_per_tok"],
        "norm_topk_prob": given["norm_topk_prob"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": given["attention_bias"],
    }


def _next(given: Given) -> dict[str, Any]:
    layers, cycle = given["base_num_decoder_layers"], given["inhomogeneous_layer_cycle_interval"]
    return {
        **_routed(given),
        "shared_expert_intermediate_size": _inner(given) * given["shared_experts"],
        "linear_conv_kernel_dim": given["gdn_conv_kernel_dim"],
        "linear_key_head_dim": given["gdn_key_head_dim"],
        "linear_value_head_dim": given["gdn_value_head_dim"],
        "linear_num_key_heads": given["gdn_num_key_heads"],
        "linear_num_value_heads": given["gdn_num_value_heads"],
        "partial_rotary_factor": given["partial_rotary_factor"],
        "layer_types": ["full_attention" if (layer + 1) % cycle == 0 else "linear_attention" for layer in range(layers)],
    }


def _mixtral(given: Given) -> dict[str, Any]:
    chosen = {"num_local_experts": given["num_experts"], "num_experts_per_tok": given["num_experts_per_tok"]}
    return {**chosen, "intermediate_size": _inner(given), "sliding_window": None}


def _gpt_oss(given: Given) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention"] * (given["base_num_decoder_layers"] // 2)
    window = {"sliding_window": given["sliding_window_size"], "layer_types": kinds, "attention_bias": given["attention_bias"]}
    return {**_mixtral(given), **window, "hidden_act": "silu"}


def _llama4(given: Given) -> dict[str, Any]:
    layers, every, step = given["base_num_decoder_layers"], given["nope_layer_interval"], given["interleave_moe_layer_step"]
    return {
        "intermediate_size": _inner(given),
        "intermediate_size_mlp": given["base_mlp_dim"],
        "num_local_experts": given["num_experts"],
        "num_experts_per_tok": given["num_experts_per_tok"],
        "interleave_moe_layer_step": step,
        "moe_layers": list(range(step - 1, layers, step)),
        "no_rope_layers": [int(every <= 0 or (layer + 1) % every != 0) for layer in range(layers)],
        "attention_chunk_size": given["chunk_attn_window_size"] or None,
        "use_qk_norm": given["use_qk_norm"],
        "attention_bias": False,
    }


def _deepseek(given: Given) -> dict[str, Any]:
    sigmoid = given["routed_score_func"] == "sigmoid"
    scored: dict[str, Any] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc" if given["routed_bias"] else "greedy"} if sigmoid else {}
    groups = {"n_group": max(1, given["n_routing_groups"]), "topk_group": max(1, given["topk_routing_group"])}
    found = {
        "moe_intermediate_size": _inner(given),
        "head_dim": given["qk_rope_head_dim"],
        "n_routed_experts": given["num_experts"],
        "num_experts_per_tok": given["num_experts_per_tok"],
        "n_shared_experts": given["shared_experts"],
        "first_k_dense_replace": given["first_num_dense_layers"],
        "moe_layer_freq": 1,
        "routed_scaling_factor": given["routed_scaling_factor"],
        "q_lora_rank": given["q_lora_rank"] or None,
        **{key: given[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
        **(scored or {"topk_method": "greedy"}),
        "norm_topk_prob": sigmoid,
        "attention_bias": False,
        **groups,
    }
    if given["use_indexer"]:
        found |= {
            "index_n_heads": given["indexer_n_heads"],
            "index_head_dim": given["indexer_head_dim"],
            "index_topk": given["indexer_topk"],
        }
    return found


def _gpt3(given: Given) -> dict[str, Any]:
    return {
        "n_embd": given["base_emb_dim"],
        "n_layer": given["base_num_decoder_layers"],
        "n_head": given["base_num_query_heads"],
        "n_inner": given["base_mlp_dim"],
        "n_positions": given["trainable_position_size"],
        "vocab_size": given["vocab_size"],
        "tie_word_embeddings": given["logits_via_embedding"],
        "layer_norm_epsilon": given["normalization_layer_epsilon"],
        "activation_function": "gelu",
    }


Fields = Callable[[Given], dict[str, Any]]
BLOCKS: dict[str, tuple[str, Fields]] = {
    "default": ("llama", _llama),
    "llama2": ("llama", _llama),
    "mistral": ("mistral", lambda _: {"sliding_window": None}),
    "mixtral": ("mixtral", _mixtral),
    "gemma": ("gemma", lambda _: {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}),
    "gemma2": ("gemma2", _gemma2),
    "gemma3": ("gemma3_text", _gemma3),
    "gemma4": ("gemma4_text", _gemma4),
    "gpt3": ("gpt2", _gpt3),
    "qwen2": ("qwen2", lambda _: {"use_sliding_window": False}),
    "qwen3": ("qwen3", lambda given: {"attention_bias": given["attention_bias"], "use_sliding_window": False}),
    "qwen3_moe": ("qwen3_moe", _routed),
    "qwen3_next": ("qwen3_next", _next),
    "qwen3_5": ("qwen3_5_moe_text", _next),
    "gpt_oss": ("gpt_oss", _gpt_oss),
    "llama4": ("llama4_text", _llama4),
    "deepseek": ("deepseek_v3", _deepseek),
    "olmo3": ("olmo3", lambda given: {"attention_bias": False, "sliding_window": given["sliding_window_size"], "layer_types": [
        "full_attention" if (layer + 1) % given["inhomogeneous_layer_cycle_interval"] == 0 else "sliding_attention"
        for layer in range(given["base_num_decoder_layers"])]}),
}  # fmt: skip
"""Type of the transformers configuration and its further fields, by decoder block; other blocks are not priced."""
