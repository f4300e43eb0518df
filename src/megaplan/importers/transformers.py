"""Transformers by Llama's plan: llama, mixtral, qwen3, qwen3_moe. A decoder layer is two letters, `AD` or `AE`."""

from __future__ import annotations

from typing import Any

from megaplan.importers.parts import (
    common,
    cycled,
    even_head_dim,
    gated_silu,
    heads,
    heads_without_bias_field,
    rope_theta,
    stated_head_dim,
)
from megaplan.importers.reader import ConfigReader


def llama(reader: ConfigReader) -> dict[str, Any]:
    """`model` of a llama config: AD, no biases, no QK-norm."""
    model, attention = common(reader), heads(reader)
    head_dim, attention["rope_theta"] = stated_head_dim(reader), rope_theta(reader)
    gated_silu(reader)
    reader.only("mlp_bias", (False,), "the MLP's matrices have no bias here")
    layers, width = reader.layers(2), reader.whole("intermediate_size")
    reader.finish_reading()
    attention["head_dim"] = head_dim or even_head_dim(reader, model["hidden_size"], attention["num_heads"])
    return {**cycled("AD" * layers), **model, "attention": attention, "mlp": {"ffn_hidden_size": width, "activation": "swiglu"}}


def mixtral(reader: ConfigReader) -> dict[str, Any]:
    """`model` of a mixtral config: AE; `intermediate_size` is one expert's width, and the chosen experts' weights sum to 1."""
    model, attention = common(reader), heads_without_bias_field(reader)
    head_dim, attention["rope_theta"] = stated_head_dim(reader), rope_theta(reader)
    gated_silu(reader)
    attention["window_size"] = reader.whole_or_null("sliding_window")
    moe = {
        "num_experts": reader.whole("num_local_experts"),
        "top_k": reader.whole("num_experts_per_tok"),
        "ffn_hidden_size": reader.whole("intermediate_size"),
        "activation": "swiglu",
        "normalize_top_k": True,
    }
    layers = reader.layers(2)
    reader.finish_reading()
    attention["head_dim"] = head_dim or even_head_dim(reader, model["hidden_size"], attention["num_heads"])
    return {**cycled("AE" * layers), **model, "attention": attention, "moe": moe}


def qwen3(reader: ConfigReader) -> dict[str, Any]:
    """`model` of a qwen3 config: AD with a norm over each query and key head."""
    model, layers = common(reader), reader.layers(2)
    attention = _qwen3_attention(reader, layers)
    width = reader.whole("intermediate_size")
    reader.finish_reading()
    return {**cycled("AD" * layers), **model, "attention": attention, "mlp": {"ffn_hidden_size": width, "activation": "swiglu"}}


def qwen3_moe(reader: ConfigReader) -> dict[str, Any]:
    """`model` of a qwen3_moe config: experts in every `decoder_sparse_step`-th layer, except in `mlp_only_layers`."""
    model, layers = common(reader), reader.layers(2)
    attention = _qwen3_attention(reader, layers)
    moe = {
        "num_experts": reader.whole("num_experts"),
        "top_k": reader.whole("num_experts_per_tok"),
        "ffn_hidden_size": reader.whole("moe_intermediate_size"),
        "activation": "swiglu",
        "normalize_top_k": reader.flag("norm_topk_prob"),
    }
    step, dense = reader.whole("decoder_sparse_step"), reader.items("mlp_only_layers")
    for layer in dense:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < layers:
            reader.wrong("mlp_only_layers", list(dense), f"a list of layers from 0 to {layers - 1}")
            break
    width = reader.whole("intermediate_size")
    reader.finish_reading()
    letters = "".join("AD" if layer in dense or (layer + 1) % step else "AE" for layer in range(layers))
    sections: dict[str, Any] = {"attention": attention}
    if "E" in letters:
        sections["moe"] = moe
    if "D" in letters:
        sections["mlp"] = {"ffn_hidden_size": width, "activation": "swiglu"}
    return {**cycled(letters), **model, **sections}


def _qwen3_attention(reader: ConfigReader, layers: int) -> dict[str, Any]:
    gated_silu(reader)
    attention = heads(reader)
    attention |= {"head_dim": reader.whole("head_dim"), "qk_norm": True, "rope_theta": rope_theta(reader)}
    return attention | _qwen3_window(reader, layers)


def _qwen3_window(reader: ConfigReader, layers: int) -> dict[str, Any]:
    """The window and the A layers without it: every second letter, from `max_window_layers` on with the window."""
    first, window = layers, None
    if reader.flag("use_sliding_window"):
        window = reader.whole_or_null("sliding_window")
        first = min(reader.whole("max_window_layers", least=0), layers) if window is not None else layers
    else:
        reader.skip("sliding_window", "max_window_layers")
    meant = ["full_attention"] * first + ["sliding_attention"] * (layers - first)
    if reader.has("layer_types") and list(reader.items("layer_types")) != meant:
        detail = f"layer_types differs from what use_sliding_window and max_window_layers say: {first} full, then {layers - first} sliding"
        reader.contradicts("layer_types", detail, "correct the one that is wrong")
    if window is None or first == layers:
        return {"window_size": None}
    return {"window_size": window, "full_layers": [2 * index for index in range(first)]}
