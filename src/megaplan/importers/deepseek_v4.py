"""deepseek_v4: one head of keys that are values, compressed keys, several streams, experts in every layer."""

from typing import Any

from megaplan.importers.experts import decoder
from megaplan.importers.parts import connections, experts
from megaplan.importers.reader import ConfigReader
from megaplan.importers.rotary import rotary_width

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATES = {0: SLIDING, 4: SPARSE, 128: HEAVY}
"""Marks of earlier configs, and the kinds of layers that they mean."""


def deepseek_v4(reader: ConfigReader) -> dict[str, Any]:
    """deepseek_v4: latent queries, outputs by groups of heads, experts in every layer, chosen by a table in the first ones."""
    layers, width = reader.layers(2), reader.whole("head_dim")
    kinds, rates = _kinds(reader, layers), dict(reader.mapping("compress_rates"))
    older = {SPARSE: reader.value("compress_rate_csa"), HEAVY: reader.value("compress_rate_hca")}
    rates = {kind: older[kind] or rates.get(kind) or usual for usual, kind in RATES.items() if kind != SLIDING}
    indexer = {
        name: reader.whole(f"index_{key}") for name, key in {"index_heads": "n_heads", "index_dim": "head_dim", "top_k": "topk"}.items()
    }
    compressors = [
        {"layers": own, "rate": rates[kind], **({"overlaps": True, **indexer} if kind == SPARSE else {})}
        for kind in (SPARSE, HEAVY)
        if (own := [2 * layer for layer, one in enumerate(kinds) if one == kind])
    ]
    rotated = reader.value("qk_rope_head_dim") or rotary_width(width, reader.value("partial_rotary_factor") or 64 / 512)
    attention: dict[str, Any] = {
        "query_rank": reader.whole("q_lora_rank"),
        "values_are_keys": True,
        "qk_norm": True,
        "query_norm_scale": False,
        "sinks": True,
    }
    attention |= {"output_groups": reader.whole("o_groups"), "output_rank": reader.whole("o_lora_rank"), "compressors": compressors}
    attention |= {"window_size": reader.whole("sliding_window"), "rope_theta": reader.number("rope_theta")}
    attention |= {"rotary_dim": rotated} if rotated != width else {}
    reader.only("num_key_value_heads", (1,), "keys and values are one head")
    reader.only("mlp_bias", (False,), "shared experts have biases, and routed ones none")
    reader.warn(
        "scoring_func", reader.value("scoring_func"), "scores are the root of a softplus, or chosen by a table; shapes are the same"
    )
    reader.warn("swiglu_limit", reader.value("swiglu_limit"), "gates are clamped in the original; shapes are the same")
    reader.warn("compress_rope_theta", reader.value("compress_rope_theta"), "layers with compressed keys have another rotary base")
    moe = experts(reader, count="n_routed_experts", width="moe_intermediate_size")
    scale = reader.number("routed_scaling_factor")
    moe |= {"shared_ffn_hidden_size": moe["ffn_hidden_size"], "score": "sigmoid"} | ({"routed_scale": scale} if scale != 1 else {})
    mlps = reader.items("mlp_layer_types") if isinstance(reader.value("mlp_layer_types"), list) else ()
    if wrong := [name for name in mlps if name not in ("hash_moe", "moe")]:
        reader.cannot("mlp_layer_types", wrong[0], "every layer has experts", "moe")
    moe |= {} if mlps[:layers] == ("hash_moe",) * layers else {"expert_bias": True}
    reader.skip(*_OTHER)
    model = {"streams": connections(reader, "constrained")}
    return decoder(reader, attention, moe, model=model, windowed=("full_attention",) * layers, rotates=False)


_OTHER = (
    *("mlp_layer_types", "layer_types", "compress_ratios", "compress_rate_csa", "compress_rate_hca", "num_hash_layers", "topk_method"),
    *("qk_rope_head_dim", "partial_rotary_factor", "n_shared_experts", "num_nextn_predict_layers"),
    *("attention_bias", "rope_parameters", "rope_scaling", "expert_dtype", "hidden_act", "router_jitter_noise"),
)


def _kinds(reader: ConfigReader, layers: int) -> list[str]:
    """Kind of each layer: a list, marks of earlier configs, or two heavily compressed layers and the two kinds in turn."""
    listed, marks = reader.value("layer_types"), reader.value("compress_ratios")
    if isinstance(listed, list):
        kinds = list(reader.items("layer_types"))[:layers]
    elif isinstance(marks, list):
        kinds = [RATES.get(mark, f"compress_ratios {mark}") for mark in marks[:layers]]
    else:
        kinds = [HEAVY if layer < 2 or layer % 2 == 0 else SPARSE for layer in range(layers)]
    wrong = [kind for kind in kinds if kind not in RATES.values()]
    if wrong or len(kinds) < layers:
        reader.cannot("layer_types", wrong[0] if wrong else len(kinds), f"{layers} layers are of {', '.join(RATES.values())}", SLIDING)
        kinds = [SLIDING] * layers
    return kinds
