"""Gemma 4's text models: norms of values, values from keys, keys of earlier layers, embeddings of layers, experts next to an MLP."""

from typing import Any

from megaplan.importers import decoders, experts
from megaplan.importers.layer_heads import by_window
from megaplan.importers.parts import FULL, biases, layer_kinds
from megaplan.importers.parts import experts as routed
from megaplan.importers.reader import ConfigReader

GLOBAL_WIDTH = 512
"""Width of a head in layers without a window, if the config does not say."""


def gemma4_unified(reader: ConfigReader, model: dict[str, Any] | None = None, *, routes: bool = False) -> dict[str, Any]:
    """gemma4_unified_text: norms before and after each block and over each head, of values without a weight; scores have no factor."""
    layers = reader.layers(2)
    kinds = [FULL if (layer + 1) % 6 == 0 else "sliding_attention" for layer in range(layers)]
    kinds = [*layer_kinds(reader, kinds)[: layers - 1], FULL]  # the last layer of the class has no window, even if the config has one
    shared, wide_layers = shared_keys(reader, kinds)
    width, cap = reader.whole("head_dim"), reader.factor("final_logit_softcapping")
    own, wide = _global_heads(reader, kinds, width)
    attention = biases(reader) | {"head_dim": width, "qk_norm": True, "value_norm": True, "softmax_scale": 1.0}
    attention |= by_window(reader, width, (1_000_000.0, 0.25), (10_000.0, 1.0), wide=wide)
    full = [2 * layer for layer, kind in enumerate(kinds) if kind == FULL]
    attention |= ({"layer_heads": [{"layers": full, **own}]} if own else {}) | shared
    model = (model or {}) | {"norm_placement": "both", "embedding_multiplier": reader.whole("hidden_size") ** 0.5}
    model |= {} if cap is None else {"logits_cap": cap}
    if routes:
        moe = routed(reader, count="num_experts", width="moe_intermediate_size", top_k="top_k_experts", normalize=True, act=_ACTIVATION)
        moe |= {"shared_ffn_hidden_size": reader.whole("intermediate_size"), "own_norms": True}
        if wide_layers:
            reader.cannot("use_double_wide_mlp", True, "experts next to MLPs of two widths", False)
        return experts.decoder(reader, attention, moe, model=model, windowed=tuple(kinds), rotates=False)
    widths = [{"layers": wide_layers, "ffn_hidden_size": 2 * reader.whole("intermediate_size")}]
    dense = {"layer_widths": widths} if wide_layers else {}
    return decoders.decoder(reader, attention, model=model, act=_ACTIVATION, windowed=tuple(kinds), rotates=False, dense=dense)


_ACTIVATION = "hidden_activation"


def shared_keys(reader: ConfigReader, kinds: list[str]) -> tuple[dict[str, Any], list[int]]:
    """`shared_keys` of the last layers, which read keys of the last preceding layer of their kind; and the layers of twice the width."""
    count = reader.whole("num_kv_shared_layers", least=0)
    doubled, first = reader.value("use_double_wide_mlp"), max(0, len(kinds) - count)
    reader.skip("use_double_wide_mlp")
    if count and set(kinds[:first]) != set(kinds):
        detail = f"num_kv_shared_layers = {count}: each of the kinds {', '.join(sorted(set(kinds)))} needs a layer with its own keys"
        reader.contradicts("num_kv_shared_layers", detail, "num_kv_shared_layers: 0, or a number that leaves earlier layers of each kind")
        return {}, []
    found = [
        {
            "source": 2 * max(layer for layer in range(first) if kinds[layer] == kind),
            "layers": [2 * layer for layer in range(first, len(kinds)) if kinds[layer] == kind],
        }
        for kind in dict.fromkeys(kinds[first:])
    ]
    return ({"shared_keys": found} if found else {}), [2 * layer + 1 for layer in range(first, len(kinds))] if doubled else []


def gemma4(reader: ConfigReader) -> dict[str, Any]:
    """gemma4_text: gemma4_unified with embeddings of layers, or with experts next to the MLPs."""
    routes = reader.flag("enable_moe_block")
    if not routes:
        reader.skip("num_experts", "top_k_experts", "moe_intermediate_size")
    return gemma4_unified(reader, layer_embeddings(reader), routes=routes)


def layer_embeddings(reader: ConfigReader) -> dict[str, Any]:
    """`features` with the embeddings of all layers, if the config has them."""
    width = reader.whole("hidden_size_per_layer_input", least=0) if reader.value("hidden_size_per_layer_input") is not None else 0
    if not width:
        reader.skip("hidden_size_per_layer_input", "vocab_size_per_layer_input")
        return {}
    layers = [2 * layer + 1 for layer in range(reader.layers(2))]
    return {"features": {"layer_embeddings": {"num_rows": reader.whole("vocab_size_per_layer_input"), "dim": width, "layers": layers}}}


def _global_heads(reader: ConfigReader, kinds: list[str], width: int) -> tuple[dict[str, Any], int]:
    """Heads, and their width, of layers without a window if they differ: from fields, or from `per_layer_config` in saved configs."""
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
