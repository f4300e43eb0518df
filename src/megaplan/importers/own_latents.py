"""dots3_note: latent attention whose layers with a window have other heads and latents than layers that choose their keys."""

from collections.abc import Mapping, Sequence
from typing import Any

from megaplan.importers.experts import sigmoid_choice
from megaplan.importers.latent import latent_widths
from megaplan.importers.parts import FULL, SLIDING, common, experts, layer_kinds, mlp, model_of, windows
from megaplan.importers.reader import ConfigReader

CHOOSING = "indexed_attention"
_WINDOWED = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}
"""Heads and latents of layers with a window, if the config does not say."""
_WIDTHS = {"num_attention_heads": "num_heads"} | {
    name: name for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
}
"""Fields of one layer, each with its key in a spec."""


def dots3_note(reader: ConfigReader) -> dict[str, Any]:
    """dots3_note_text: a gate of one value per head, a norm of the rotary key, an indexer where a layer has no window."""
    layers = reader.layers(2)
    kinds = _kinds(reader, layers)
    attention = latent_widths(reader) | {"gate": True, "gate_width": "head", "rotary_norm": True, **_bases(reader, kinds)}
    attention.pop("latent_norm_eps", None)  # its norms have the model's epsilon
    choosing = [2 * layer for layer, kind in enumerate(kinds) if kind == CHOOSING]
    indexer = {"num_heads": reader.whole("index_n_heads"), "head_dim": reader.whole("index_head_dim"), "top_k": reader.whole("index_topk")}
    attention |= {"indexer": {**indexer, "layers": choosing}} if choosing else {}
    attention |= _own(reader, kinds, attention)
    letters = "".join("AD" if layer in _dense(reader, layers) else "AE" for layer in range(layers))
    attention |= windows(reader, tuple(SLIDING if kind == SLIDING else FULL for kind in kinds), letters)
    moe = experts(reader, count="n_routed_experts", width="moe_intermediate_size") | sigmoid_choice(reader)
    width = reader.value("moe_shared_expert_intermediate_size") or reader.whole("shared_experts_intermediate_size")
    moe["shared_ffn_hidden_size"] = reader.whole("n_shared_experts") * width
    effect = "latents have a factor of the root of hidden_size over their width in the original; shapes are the same"
    reader.warn("kv_lora_rank", attention["kv_lora_rank"], effect)
    reader.only("mlp_bias", (False, None), "the MLP's matrices have no bias here")
    reader.skip("head_dim", "num_key_value_heads", "use_dsa", "use_sliding_window", "moe_shared_expert_intermediate_size")
    reader.skip("first_k_dense_replace", "moe_layer_freq", "mlp_layer_types", "sliding_window_size")
    sections = {"A": ("attention", attention), "E": ("moe", moe), "D": ("mlp", mlp(reader))}
    return model_of(reader, letters, common(reader), sections)


def _kinds(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    """Kind of each layer; earlier configs say by `use_dsa` whether layers without a window choose their keys."""
    chooses = reader.value("use_dsa")
    if chooses is None and not reader.has("per_layer_config"):
        chooses = True
    slides = reader.value("use_sliding_window") is not False
    derived = [SLIDING if slides and layer >= 2 and layer % 4 != 1 else FULL if chooses is False else CHOOSING for layer in range(layers)]
    kinds = layer_kinds(reader, derived)
    if chooses is not None:
        kinds = tuple(kind if kind == SLIDING else CHOOSING if chooses else FULL for kind in kinds)
    for layer, kind in enumerate(kinds):
        if kind not in (SLIDING, CHOOSING, FULL):
            reader.cannot("layer_types", kind, f"layer {layer} is not {SLIDING}, {CHOOSING} or {FULL}", CHOOSING)
    return kinds


def _dense(reader: ConfigReader, layers: int) -> set[int]:
    """Layers with a dense MLP."""
    if isinstance(reader.value("mlp_layer_types"), list):
        return {layer for layer, name in enumerate(reader.items("mlp_layer_types")) if name == "dense"}
    first, step = reader.value("first_k_dense_replace"), reader.value("moe_layer_freq")
    first, step = 1 if first is None else first, 1 if step is None else step
    sparse = [bool(one) for one in step] if isinstance(step, list) else [layer % step == 0 for layer in range(layers)]
    return {layer for layer in range(layers) if layer < first or not (layer < len(sparse) and sparse[layer])}


def _own(reader: ConfigReader, kinds: Sequence[str], usual: Mapping[str, Any]) -> dict[str, Any]:
    """`layer_latents`: from each layer in `per_layer_config`, or for layers with a window from the fields that begin with swa."""
    given = reader.mapping("per_layer_config")
    found: dict[tuple[tuple[str, int], ...], list[int]] = {}
    common_own = None if reader.has("per_layer_config") else _windowed(reader)
    for name in _WINDOWED:
        reader.skip(f"swa_{name}")
    reader.skip("swa_qk_rope_head_dim", "per_layer_config")
    by_layer = {int(key): value for key, value in given.items() if str(key).isdigit()}
    for layer, kind in enumerate(kinds):
        own = by_layer.get(layer, {}) if common_own is None else common_own if kind == SLIDING else {}
        other = tuple((key, own[name]) for name, key in _WIDTHS.items() if own.get(name, usual[key]) != usual[key])
        if other:
            found.setdefault(other, []).append(2 * layer)
    return {"layer_latents": [{"layers": layers, **dict(other)} for other, layers in found.items()]} if found else {}


def _windowed(reader: ConfigReader) -> dict[str, int]:
    """Heads and latents of layers with a window."""
    own = {name: reader.value(f"swa_{name}") or usual for name, usual in _WINDOWED.items()}
    rotated = reader.value("swa_qk_rope_head_dim") or own["head_dim"] - own["qk_nope_head_dim"]
    return own | {"qk_rope_head_dim": rotated}


def _bases(reader: ConfigReader, kinds: Sequence[str]) -> dict[str, Any]:
    """Base of the rotary angles of layers without a window; another one of layers with a window is reported."""
    given = reader.mapping("rope_parameters")
    inner = next((one for kind in (CHOOSING, FULL) if isinstance(one := given.get(kind), dict)), given)
    outer = given.get(SLIDING)
    base = float(inner["rope_theta"]) if inner.get("rope_theta") else reader.number("rope_theta")
    other = float((outer if isinstance(outer, dict) else inner).get("rope_theta") or reader.value("swa_rope_theta") or 50_000.0)
    reader.skip("rope_theta", "swa_rope_theta", "rope_scaling")
    if SLIDING in kinds and other != base:
        reader.warn(
            "rope_parameters",
            dict(given),
            f"layers with a window have the rotary base {other:g}, but a spec has one base; shapes are the same",
        )
    return {"rope_theta": base}
