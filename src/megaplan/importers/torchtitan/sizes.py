"""Sizes of a decoder from a flavor in Python.

A flavor is made of arguments of the model (2024 and 2025), of its configuration with those of a layer inside (March 2026), or by a function
that passes the sizes to another one, which builds all layers (July 2026).
"""

import math
from typing import Any

from megaplan.importers.torchtitan.models import LATENT, LLAMA3_VOCABULARY, LLAMA4_VOCABULARY, QWEN3_VOCABULARY, Experts, Flavor
from megaplan.importers.torchtitan.registry_file import Made
from megaplan.scalars import MAX_INT

VOCABULARIES = {
    "llama2": 32_000, "llama3": LLAMA3_VOCABULARY, "llama4": LLAMA4_VOCABULARY, "qwen3": QWEN3_VOCABULARY, "deepseek_v3": 102_400
}  # fmt: skip
"""Tokens of the tokenizers that the models' own configurations name."""
_SIZES = ("dim", "n_layers", "n_heads")
_EXPERTS = {"num_experts", "num_shared_experts", "top_k", "score_func", "route_norm", "route_scale", "score_before_experts"}
_READ = {
    *_SIZES, *LATENT, *_EXPERTS, "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "rope_theta", "head_dim", "hidden_dim",
    "qk_norm", "moe_hidden_dim", "moe_enabled", "n_dense_layers", "q_lora_rank", "enable_weight_tying", "interleave_moe_layer_step",
    "auto_scale_hidden_dim",
}  # fmt: skip
WIDTHS = ("ffn_dim", "ffn_hidden_dim", "ffn_hidden_size", "intermediate_size")
"""Names of the MLP's width in classes of forks, whose defaults decide where a flavor states none."""
_SAME = {
    **dict.fromkeys(WIDTHS, "hidden_dim"),
    "inter_dim": "hidden_dim", "dense_hidden_dim": "hidden_dim", "moe_inter_dim": "moe_hidden_dim", "theta": "rope_theta",
    "router_top_k": "top_k", "router_score_func": "score_func", "router_route_norm": "route_norm", "router_route_scale": "route_scale",
    "q_norm": "qk_norm", "share_embeddings": "enable_weight_tying", "tie_word_embeddings": "enable_weight_tying",
    "weight_tying": "enable_weight_tying", "use_shared_expert": "num_shared_experts",
}  # fmt: skip
"""Other names of the same sizes."""
_OF_EXPERTS = {
    "num_experts": 8, "num_shared_experts": 1, "top_k": 1, "score_func": "sigmoid", "route_norm": False, "score_before_experts": True
}  # fmt: skip
"""Defaults of the classes of experts."""
_INSIDE = ("layer", "layers", "attention", "feed_forward", "moe", "moe_args", "router", "rope")
"""Fields with sizes inside."""
_CHANGES_NOTHING = {
    "max_seq_len", "norm_eps", "depth_init", "eos_id", "rope_scaling_args", "mscale", "attn_mask_type", "use_flex_attn", "attn_backend",
    "norm", "tok_embeddings", "lm_head", "output", "attention_norm", "ffn_norm", "fuse_qkv", "moe_comm_backend", "tp_gemm_backend",
    "non_blocking_capacity_factor", "rope_backend", "mask_type", "k_norm", "kv_norm", "load_balance_coeff", "use_grouped_mm", "mtp_layers",
    "original_seq_len", "rope_factor", "beta_fast", "beta_slow", "num_mtp_layers", "param_init", "inner_attention", "attn_type",
    "fixed_attn_block_size", "num_expert_groups", "num_limited_groups",
}  # fmt: skip


def flavor_of(made: Made, model: str, vocabulary: int | None = None, width: int | None = None) -> Flavor | None:
    """The dimensions that a call states; None if it has a field that is not known, or lacks a size.

    Args:
        made: The call that makes arguments or a configuration.
        model: One of torchtitan's own models, of which `VOCABULARIES` has a size.
        vocabulary: Tokens of the tokenizer, for a call that states none.
        width: Inner width of the MLP, for a call that states none; None for the model's own rule.
    """
    sizes = _sizes(made, "")
    return None if sizes is None else _flavor({"vocab_size": vocabulary, "hidden_dim": width, **sizes}, model)


def _sizes(made: Made, of: str) -> dict[str, Any] | None:
    """Sizes by name, of a call and of nested calls; None if a field is not known. `of` is the field that the call is."""
    found: dict[str, Any] = {}
    for given, value in made.given.items():
        key = "moe_hidden_dim" if of == "moe" and given == "hidden_dim" else _SAME.get(given, given)
        if key in _INSIDE and isinstance(value, Made):
            inner = _sizes(value, given)
            if inner is None:
                return None
            found = inner | found
        elif of == "rope":
            found |= {key: value} if key == "rope_theta" else {}
        elif key == "qk_norm":
            found[key] = isinstance(value, Made) or bool(value)
        elif key in _READ:
            found[key] = _feed_forward_width(value) if isinstance(value, Made) else value
        elif key not in _CHANGES_NOTHING and value not in (False, None, 0):
            return None
    if of in ("moe", "moe_args"):
        found = _OF_EXPERTS | found
    return found


def _feed_forward_width(made: Made) -> int | None:
    """The width that `compute_ffn_hidden_dim` gives."""
    dim = made.positional[0] if made.positional else made.given.get("dim")
    if made.name.rpartition(".")[2] != "compute_ffn_hidden_dim":
        return None
    return _rounded(dim, made.given.get("multiple_of", 256), made.given.get("ffn_dim_multiplier"))


def _rounded(dim: Any, multiple: Any, share: Any, parts: int = 1) -> int | None:
    """Two thirds of four times the width, times `share`, cut into `parts`, rounded up."""
    if not _is_size(dim) or not _is_size(multiple) or not (share is None or isinstance(share, int | float)):
        return None
    width = int(8 * dim / 3) if share is None else int(share * int(8 * dim / 3))
    return int(math.ceil(int(width / parts) / multiple) * multiple)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_INT


def _flavor(given: dict[str, Any], model: str) -> Flavor | None:
    latent = model == "deepseek_v3"
    if model == "llama4":
        given = _of_llama4(given)
    routed = given.get("moe_enabled", "num_experts" in given)
    if not all(_is_size(given.get(key)) for key in _SIZES) or not all(_is_size(given.get(key, width)) for key, width in LATENT.items()):
        return None
    experts = _experts(given, model) if routed else None
    dim, blocks, heads = given["dim"], given["n_layers"], given["n_heads"]
    sizes = _widths(given, model)
    theta = given.get("rope_theta", 1_000_000 if model == "qwen3" else 10_000)
    if not all(map(_is_size, sizes)) or not isinstance(theta, int | float) or (experts is None and (latent or routed)):
        return None
    return Flavor(
        dim,
        blocks,
        heads,
        sizes[0],
        sizes[1],
        sizes[2],
        vocab=sizes[3],
        rope_theta=float(theta),
        qk_norm=given.get("qk_norm", model == "qwen3"),
        tied=given.get("enable_weight_tying") is True,
        experts=experts,
        dense=given.get("n_dense_layers", 1) if latent else 0,
        q_rank=given.get("q_lora_rank") or 0 if latent else None,
        every=given.get("interleave_moe_layer_step", 1) if routed else 1,
        latent=tuple(given.get(key, width) for key, width in LATENT.items()),
        scored_first=bool(routed and given.get("score_before_experts")),
    )


def _of_llama4(given: dict[str, Any]) -> dict[str, Any]:
    """Defaults of llama4: experts in every second block, with the MLP's width divided by the number of experts per token."""
    found: dict[str, Any] = _OF_EXPERTS | {"interleave_moe_layer_step": 2} | given
    shared = int(found["num_shared_experts"])
    parts = int(found["top_k"]) + shared if found.get("auto_scale_hidden_dim", True) else 1
    width = _rounded(found.get("dim"), found.get("multiple_of", 256), found.get("ffn_dim_multiplier"), parts)
    return {"moe_enabled": True, **found, "num_shared_experts": shared, "moe_hidden_dim": found.get("moe_hidden_dim", width)}


def _widths(given: dict[str, Any], model: str) -> tuple[Any, Any, Any, Any]:
    """Key heads, width of a head and of the MLP, and vocabulary, if known."""
    dim, heads = given["dim"], given["n_heads"]
    head_dim = given.get("head_dim") or (128 if model == "qwen3" else dim // heads)
    if model == "deepseek_v3":
        head_dim = sum(given.get(key, LATENT[key]) for key in ("qk_nope_head_dim", "qk_rope_head_dim"))
    ffn = given.get("hidden_dim") or _rounded(dim, given.get("multiple_of", 256), given.get("ffn_dim_multiplier"))
    return given.get("n_kv_heads") or heads, head_dim, ffn, given.get("vocab_size") or VOCABULARIES[model]


def _experts(given: dict[str, Any], model: str) -> Experts | None:
    """The experts of a block; None if a size is not known."""
    shared = given.get("num_shared_experts", 0)
    number, top_k, width = (given.get(key, 0) for key in ("num_experts", "top_k", "moe_hidden_dim"))
    if not all(map(_is_size, (number, top_k, width))) or not (shared == 0 or _is_size(shared)):
        return None
    score, scale = given.get("score_func", "softmax"), given.get("route_scale", 1.0)
    normed = given.get("route_norm", model == "qwen3")
    if score not in ("softmax", "sigmoid") or not isinstance(scale, int | float) or not isinstance(normed, bool):
        return None
    return Experts(number, top_k, width, shared * width, score, normed, float(scale))
