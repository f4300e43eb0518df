"""deepseek_v2 and deepseek_v3: latent attention, dense layers first, experts after; a decoder layer is `AD` or `AE`."""

from __future__ import annotations

from typing import Any

from megaplan.importers.parts import common, cycled, gated_silu, rope_theta
from megaplan.importers.reader import ConfigReader

_DIMS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def deepseek(reader: ConfigReader) -> dict[str, Any]:
    """`model` of a deepseek_v2 or deepseek_v3 config. The shared expert is n_shared_experts experts wide."""
    model = common(reader)
    gated_silu(reader)
    reader.only("attention_bias", (False,), "latent attention has no bias here")
    attention: dict[str, Any] = {"kind": "mla", "num_heads": reader.whole("num_attention_heads")}
    attention["q_lora_rank"] = reader.whole_or_null("q_lora_rank")
    attention |= {name: reader.whole(name) for name in _DIMS}
    attention["rope_theta"] = rope_theta(reader)
    _check_heads(reader, attention)
    shared, width = reader.whole_or_null("n_shared_experts", least=0), reader.whole("moe_intermediate_size")
    moe = {
        "num_experts": reader.whole("n_routed_experts"),
        "top_k": reader.whole("num_experts_per_tok"),
        "ffn_hidden_size": width,
        "shared_ffn_hidden_size": (shared or 0) * width,
        "activation": "swiglu",
        "normalize_top_k": reader.flag("norm_topk_prob"),
    }
    layers, dense, mlp_width = reader.layers(2), reader.whole("first_k_dense_replace", least=0), reader.whole("intermediate_size")
    step = reader.whole("moe_layer_freq") if reader.has("moe_layer_freq") else 1  # a release without the field has experts in every layer
    if reader.family == "deepseek_v3" and not reader.has("scoring_func"):
        reader.tell("scoring_func", "sigmoid", "deepseek_v3 always scores so; shapes are the same")
    reader.finish_reading()
    letters = "".join("AE" if layer >= dense and layer % step == 0 else "AD" for layer in range(layers))
    sections: dict[str, Any] = {"attention": attention}
    if "E" in letters:
        sections["moe"] = moe
    if "D" in letters:
        sections["mlp"] = {"ffn_hidden_size": mlp_width, "activation": "swiglu"}
    return {**cycled(letters), **model, **sections}


def _check_heads(reader: ConfigReader, attention: dict[str, Any]) -> None:
    """Fields that repeat what the others say: key-value heads are the heads, `head_dim` is the rotated part."""
    heads, rope = attention["num_heads"], attention["qk_rope_head_dim"]
    whole = attention["qk_nope_head_dim"] + rope
    for key, meant in (("num_key_value_heads", (heads,)), ("head_dim", (rope,)), ("qk_head_dim", (whole,))):
        if reader.has(key) and (value := reader.whole_or_null(key)) is not None and value not in meant:
            reader.contradicts(key, f"{key} = {value}, and latent attention has {meant[0]}", f"write {meant[0]}")
