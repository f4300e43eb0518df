"""Decoders whose layers with a window have other heads, rotary angles and rotated widths than layers without one."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from megaplan.importers import experts
from megaplan.importers.parts import FULL, SLIDING, biases, heads, layer_kinds
from megaplan.importers.parts import experts as routed
from megaplan.importers.reader import ConfigReader
from megaplan.importers.rotary import rope_scaling, rotary_width


def mimo_v2_flash(reader: ConfigReader) -> dict[str, Any]:
    """mimo_v2_flash: layers with a window have twice the key heads, and sinks; heads of values are narrower; values have a factor."""
    layers = reader.layers(2)
    kinds = _kinds(reader, "hybrid_layer_pattern", [SLIDING if (layer + 1) % 6 and layer else FULL for layer in range(layers)])
    section = heads(reader, reader.whole("hidden_size"))
    groups = reader.value("swa_num_key_value_heads") or 2 * section["num_kv_heads"]
    section |= {"value_head_dim": reader.whole("v_head_dim"), **_factor(reader), **biases(reader, output=False)}
    section |= by_window(reader, section["head_dim"], (5_000_000.0, 0.334), (10_000.0, 0.334), "swa_rope_theta")
    section["layer_heads"] = _of_windows(kinds, {"num_kv_heads": groups, "sinks": True})
    moe = routed(reader, count="n_routed_experts", width="moe_intermediate_size") | experts.sigmoid_choice(reader)
    for key in ("num_attention_heads", "head_dim", "v_head_dim"):
        reader.published(f"swa_{key}", reader.value(key), f"layers with a window have another {key}")
    reader.published("n_shared_experts", 0, "shared experts are not part of the class")
    reader.published("add_swa_attention_sink_bias", True, "layers with a window have sinks")
    reader.published("add_full_attention_sink_bias", False, "layers without a window have none")
    reader.skip("swa_num_key_value_heads", "attention_chunk_size", "sliding_window_size", "attention_projection_layout")
    eps = "layernorm_epsilon" if reader.has("layernorm_epsilon") and not reader.has("rms_norm_eps") else "rms_norm_eps"
    reader.skip("layernorm_epsilon")
    model = experts.decoder(reader, section, moe, windowed=kinds, dense=listed_dense(reader, {0}), rotates=False, eps=eps)
    before = reader.value("sliding_window_size")
    if isinstance(before, int) and "window_size" in model["attention"]:
        model["attention"]["window_size"] = before + 1  # the query itself is one more head
    return model


def laguna(reader: ConfigReader) -> dict[str, Any]:
    """laguna: heads by layer, a gate of one value a head or a channel, corrected sigmoid scores and a shared expert."""
    layers = reader.layers(2)
    kinds = layer_kinds(reader, (FULL,) * layers)
    section = heads(reader, reader.whole("hidden_size")) | biases(reader) | {"qk_norm": True, "gate": True}
    gating = reader.value("gating")
    reader.warn("gating", gating, "the gate is a softplus in the original and a sigmoid here; shapes are the same")
    section |= {"gate_width": "head"} if gating in (True, "per-head", None) else {}
    section |= by_window(reader, section["head_dim"], (500_000.0, 0.5), (10_000.0, 1.0))
    listed = reader.items("num_attention_heads_per_layer")
    counts = listed if len(listed) == layers else [section["num_heads"]] * layers
    section |= _by_count(counts, section["num_heads"])
    moe = routed(reader, count="num_experts", width="moe_intermediate_size", normalize=True)
    moe |= {"shared_ffn_hidden_size": reader.whole("shared_expert_intermediate_size"), "score": "sigmoid", "score_correction": True}
    scale = reader.factor("moe_routed_scaling_factor")
    moe |= {"routed_scale": scale} if scale not in (None, 1) else {}
    if reader.value("moe_router_logit_softcapping"):
        reader.warn("moe_router_logit_softcapping", reader.value("moe_router_logit_softcapping"), "logits of the router have no cap here")
    reader.only("moe_apply_router_weight_on_input", (False,), "weights multiply the experts' outputs")
    reader.skip("moe_router_logit_softcapping", "gating", "num_attention_heads_per_layer")
    return experts.decoder(reader, section, moe, windowed=kinds, dense=listed_dense(reader, {0}), rotates=False)


def step3p5(reader: ConfigReader) -> dict[str, Any]:
    """The text model of step3p7: other query heads in layers with a window, a gate of one value a head, norms of 1 + weight."""
    layers = reader.layers(2)
    padded = reader.value("layer_types")
    kinds = tuple(padded[:layers]) if isinstance(padded, list) else (FULL,) * layers
    section = heads(reader, reader.whole("hidden_size")) | biases(reader) | {"qk_norm": True, "gate": True, "gate_width": "head"}
    scalar = reader.factor("query_pre_attn_scalar")
    section |= {"softmax_scale": scalar**-0.5} if scalar not in (None, section["head_dim"]) else {}
    other = reader.mapping("attention_other_setting").get("num_attention_heads", section["num_heads"])
    own = reader.value("num_sliding_attention_heads") or other
    section |= {"layer_heads": _of_windows(kinds, {"num_heads": own})} if own != section["num_heads"] and SLIDING in kinds else {}
    section |= _by_layer(reader, kinds, section["head_dim"])
    moe = routed(reader, count="n_routed_experts", width="moe_intermediate_size", normalize=True)
    moe |= {"shared_ffn_hidden_size": reader.whole("share_expert_dim"), "score": "sigmoid", "expert_bias": True}
    scale = reader.number("moe_router_scaling_factor")
    moe |= {"routed_scale": scale} if scale != 1 else {}
    for key in ("swiglu_limits", "swiglu_limits_shared"):
        if reader.value(key) is not None and any(reader.items(key)):
            reader.warn(key, reader.value(key), "gates of single layers are clamped; shapes are the same")
    if reader.flag("mlp_bias"):
        reader.cannot("mlp_bias", True, "dense MLPs and shared experts have biases, the routed experts none", False)
    reader.skip(*_STEP_OTHER)
    return experts.decoder(
        reader, section, moe, model={"zero_centered_norm": True}, windowed=kinds, dense=listed_dense(reader, {0, 1, 2}), rotates=False
    )


_STEP_OTHER = (
    *("layer_types", "attention_other_setting", "num_sliding_attention_heads", "query_pre_attn_scalar", "swiglu_limits", "need_fp32_gate"),
    *("swiglu_limits_shared", "num_local_experts", "moe_layers_enum", "mtp_layer_types", "mtp_mlp_layer_types", "use_moe_router_bias"),
    *("max_seq_len", "use_qk_norm", "norm_expert_weight", "moe_every_n_layer", "yarn_only_types", "use_rope_layers", "use_moe", "sink"),
    *("moe_router_activation", "zero_centered", "use_head_wise_attn_gate", "layer_norm_eps", "sliding_window_pattern", "gating"),
)


def by_window(
    reader: ConfigReader, head_dim: int, full: tuple[float, float], window: tuple[float, float], flat: str | None = None, wide: int = 0
) -> dict[str, Any]:
    """Bases and rotated widths of layers without and with a window, from `rope_parameters` by kind of layer, or from flat fields.

    Args:
        reader: Reader of the config.
        head_dim: Width of a head.
        full: Base and rotated share of layers without a window, if the config does not say.
        window: Heads of layers with a window.
        flat: Field of the base of layers with a window, of releases before `rope_parameters`; None for a class that reads no flat field.
        wide: Width of a head in layers without a window; 0 if the same as in others.
    """
    given = reader.mapping("rope_parameters")
    by_kind = {kind: one for kind in (FULL, SLIDING) if isinstance(one := given.get(kind), dict)}
    share = reader.value("partial_rotary_factor") if flat else None
    inner = {"rope_theta": reader.value("rope_theta") if flat else None, "partial_rotary_factor": share} | by_kind.get(FULL, {})
    outer = {"rope_theta": reader.value(flat) if flat else None, "partial_rotary_factor": share} | by_kind.get(SLIDING, {})
    reader.skip("rope_theta", "partial_rotary_factor", *([flat] if flat else []))
    return _bases(reader, head_dim, (inner, full), (outer, window), wide or head_dim)


Side: TypeAlias = tuple[dict[str, Any], tuple[float, float]]
"""Rotary parameters of layers of one kind, and their base and rotated share without them."""


def _bases(reader: ConfigReader, head_dim: int, full: Side, window: Side, wide: int) -> dict[str, Any]:
    (inner, (theta, share)), (outer, (window_theta, window_share)) = full, window
    rotated = rotary_width(wide, inner.get("partial_rotary_factor") or share)
    turned = rotary_width(head_dim, outer.get("partial_rotary_factor") or window_share)
    found: dict[str, Any] = {"rope_theta": float(inner.get("rope_theta") or theta)}
    found |= {"rotary_dim": rotated} if rotated != head_dim else {}
    found |= {"window_rope_theta": float(outer.get("rope_theta") or window_theta)}
    return found | ({"window_rotary_dim": turned} if turned != rotated else {}) | rope_scaling(reader, inner)


def _by_layer(reader: ConfigReader, kinds: Sequence[str], head_dim: int) -> dict[str, Any]:
    """Bases and shares of the first layer of each kind, if they are lists by layer."""
    given = reader.mapping("rope_parameters")
    if any(isinstance(one, dict) for one in given.values()):
        return by_window(reader, head_dim, (10_000.0, 1.0), (10_000.0, 1.0))

    def of(key: str, kind: str) -> Any:
        value = reader.value(key)
        value = value[kinds.index(kind)] if isinstance(value, list) and kind in kinds and len(value) >= len(kinds) else value
        return None if isinstance(value, list) else value

    inner, outer = (
        {"rope_theta": of("rope_theta", kind), "partial_rotary_factor": of("partial_rotary_factors", kind)} for kind in (FULL, SLIDING)
    )
    scaling = reader.mapping("rope_scaling")
    reader.skip("rope_theta", "partial_rotary_factors", "partial_rotary_factor")
    return _bases(reader, head_dim, (inner | dict(scaling), (10_000.0, 1.0)), (outer, (10_000.0, 1.0)), head_dim)


def _kinds(reader: ConfigReader, key: str, derived: Sequence[str]) -> tuple[str, ...]:
    """Kinds of layers: from `layer_types`, or a list with 1 for a window."""
    marks = reader.value(key)
    reader.skip(key)
    if isinstance(marks, list) and len(marks) == len(derived):
        derived = [SLIDING if mark else FULL for mark in marks]
    return layer_kinds(reader, derived)


def listed_dense(reader: ConfigReader, derived: set[int]) -> set[int]:
    """Layers with a dense MLP: from `mlp_layer_types`, from marks or lists of sparse layers in earlier releases, or the class's default."""
    layers, marks, places = reader.layers(2), reader.value("moe_layer_freq"), reader.value("moe_layers_enum")
    reader.skip("moe_layer_freq", "moe_layers_enum")
    if isinstance(reader.value("mlp_layer_types"), list):
        names = reader.items("mlp_layer_types")[:layers]
        return {layer for layer, name in enumerate(names) if name == "dense"}
    reader.skip("mlp_layer_types")
    if isinstance(marks, list):
        return {layer for layer, mark in enumerate(marks[:layers]) if not mark}
    if places is not None:
        sparse = {int(place) for place in (places.split(",") if isinstance(places, str) else places)}
        return set(range(layers)) - sparse
    return {layer for layer in derived if layer < layers}


def _factor(reader: ConfigReader) -> dict[str, float]:
    """The factor of values, which is one of the block's output."""
    scale = reader.factor("attention_value_scale")
    return {} if scale in (None, 1) else {"output_multiplier": scale}


def _of_windows(kinds: Sequence[str], own: dict[str, Any]) -> list[dict[str, Any]]:
    """`layer_heads` of the layers with a window."""
    layers = [2 * layer for layer, kind in enumerate(kinds) if kind == SLIDING]
    return [{"layers": layers, **own}] if layers else []


def _by_count(counts: Sequence[Any], usual: int) -> dict[str, Any]:
    """`layer_heads` of layers with another number of query heads than the section's."""
    found = [
        {"layers": [2 * layer for layer, one in enumerate(counts) if one == count], "num_heads": count}
        for count in dict.fromkeys(counts)
        if count != usual
    ]
    return {"layer_heads": found} if found else {}
