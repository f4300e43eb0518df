"""Gemma 4's dense text models: values with a norm, and layers without a window that take values from keys."""

from __future__ import annotations

from typing import Any

from megaplan.importers import decoders
from megaplan.importers.layer_heads import by_window
from megaplan.importers.parts import FULL, biases, layer_kinds
from megaplan.importers.reader import ConfigReader

GLOBAL_WIDTH = 512
"""Width of a head in layers without a window, if the config does not say."""


def gemma4_unified(reader: ConfigReader) -> dict[str, Any]:
    """gemma4_unified_text: norms before and after each block and over each head, of values without a weight; scores have no factor."""
    layers = reader.layers(2)
    kinds = [FULL if (layer + 1) % 6 == 0 else "sliding_attention" for layer in range(layers)]
    kinds = [*layer_kinds(reader, kinds)[: layers - 1], FULL]  # the class's last layer has no window, whatever the config says
    if reader.whole("num_kv_shared_layers", least=0):
        reader.cannot("num_kv_shared_layers", reader.value("num_kv_shared_layers"), "layers read the keys and values of earlier ones", 0)
    reader.skip("use_double_wide_mlp")  # of layers that share keys alone
    width, cap = reader.whole("head_dim"), reader.factor("final_logit_softcapping")
    own, wide = _global_heads(reader, kinds, width)
    attention = biases(reader) | {"head_dim": width, "qk_norm": True, "value_norm": True, "softmax_scale": 1.0}
    attention |= by_window(reader, width, (1_000_000.0, 0.25), (10_000.0, 1.0), wide=wide)
    full = [2 * layer for layer, kind in enumerate(kinds) if kind == FULL]
    attention |= {"layer_heads": [{"layers": full, **own}]} if own else {}
    model = {"norm_placement": "both", "embedding_multiplier": reader.whole("hidden_size") ** 0.5}
    model |= {} if cap is None else {"logits_cap": cap}
    return decoders.decoder(reader, attention, model=model, act="hidden_activation", windowed=tuple(kinds), rotates=False)


def gemma4(reader: ConfigReader) -> dict[str, Any]:
    """gemma4_text without embeddings of layers and without experts next to the MLPs."""
    if reader.value("hidden_size_per_layer_input"):
        why = "each layer adds an embedding of its own (per_layer_input_gate, per_layer_projection)"
        reader.cannot("hidden_size_per_layer_input", reader.value("hidden_size_per_layer_input"), why, 0)
    if reader.flag("enable_moe_block"):
        reader.cannot("enable_moe_block", True, "experts next to an MLP have norms of their own (pre_feedforward_layernorm_2)", False)
    reader.skip("hidden_size_per_layer_input", "vocab_size_per_layer_input", "num_experts", "top_k_experts", "moe_intermediate_size")
    return gemma4_unified(reader)


def _global_heads(reader: ConfigReader, kinds: list[str], width: int) -> tuple[dict[str, Any], int]:
    """Heads of layers without a window that differ from the others, and the width of one: fields, or `per_layer_config` as it is saved."""
    same = reader.flag("attention_k_eq_v")
    wide, groups = reader.value("global_head_dim") or GLOBAL_WIDTH, reader.value("num_global_key_value_heads") if same else None
    saved = {int(key) if key.isdigit() else -1: one for key, one in reader.mapping("per_layer_config").items()}  # "05" in 10 layers or more
    if saved:
        first = saved.get(kinds.index(FULL), {})
        wide, groups = first.get("head_dim", width), first.get("num_key_value_heads")
        uneven = {layer for layer, kind in enumerate(kinds) if kind == FULL} != set(saved) or any(one != first for one in saved.values())
        if uneven or not set(first) <= {"head_dim", "num_key_value_heads"}:
            reader.cannot("per_layer_config", saved, "layers without a window differ among each other, or by other fields", None)
    reader.skip("global_head_dim", "num_global_key_value_heads", "per_layer_config")
    own = {"head_dim": wide} if wide != width else {}
    own |= {"num_kv_heads": groups} if groups not in (None, reader.value("num_key_value_heads")) else {}
    return own | ({"values_from_keys": True} if same else {}), wide
