"""Hybrids of attention and linear attention with a delta rule: qwen3_next, qwen3_5_text, qwen3_5_moe_text, olmo_hybrid, kimi_linear.

A decoder layer is `G` or `A`, then `D` or `E`.
"""

from collections.abc import Sequence
from typing import Any

from megakernels.ops.matrix_lstm.facts import LARGEST_CAP
from megaplan.importers.experts import qwen_dense, qwen_experts, sigmoid_choice
from megaplan.importers.latent import latent_widths
from megaplan.importers.parts import (
    FULL,
    LINEAR,
    SLIDING,
    biases,
    common,
    experts,
    heads,
    layer_kinds,
    lettered,
    mlp,
    model_of,
    positions,
    untied,
)
from megaplan.importers.reader import ConfigReader
from megaplan.importers.rotary import rope

_MIXERS = {LINEAR: "G", FULL: "A"}
_INTERVAL = 4
"""Interval of layers with full attention if the config does not say: the classes' default."""
_OLMO_EPS = 1e-5
"""Epsilon of the norm over value heads in olmo_hybrid, which no config has."""
_QWEN_ROTATED = 0.25
"""Rotated share of a head if the config does not say: the classes' default."""


def qwen3_next(reader: ConfigReader) -> dict[str, Any]:
    """qwen3_next: gated delta nets and gated attention, experts with a gated shared expert; dense MLPs as in qwen3_moe."""
    dense, layers = qwen_dense(reader), reader.layers(2)
    feeds = "".join("D" if layer in dense else "E" for layer in range(layers))
    return _qwen(reader, feeds, {"E": ("moe", _qwen_moe(reader)), "D": ("mlp", mlp(reader))})


def qwen3_5(reader: ConfigReader) -> dict[str, Any]:
    """qwen3_5_text: gated delta nets and gated attention, dense MLPs."""
    return _qwen(reader, "D" * reader.layers(2), {"D": ("mlp", mlp(reader))})


def qwen3_5_moe(reader: ConfigReader) -> dict[str, Any]:
    """qwen3_5_moe_text: experts in every layer, whose chosen weights sum to 1."""
    return _qwen(reader, "E" * reader.layers(2), {"E": ("moe", _qwen_moe(reader, normalize=True))})


def lara_mini(reader: ConfigReader) -> dict[str, Any]:
    """lara_mini: gated delta nets, attention with windows, and attention without rotation; experts with a shared one everywhere."""
    model, layers = common(reader), reader.layers(2)
    kinds = layer_kinds(reader, [_LARA[layer % len(_LARA)] for layer in range(layers)])
    mixers = lettered(reader, "layer_types", kinds, _MIXERS | {SLIDING: "A"})
    letters = "".join(mixer + "E" for mixer in mixers) or "GE"
    attention = heads(reader, model["hidden_size"]) | biases(reader) | {"qk_norm": True}
    attention |= rope(reader, attention["head_dim"])
    full = [2 * layer for layer, kind in enumerate(kinds) if kind == FULL]
    size = reader.whole_or_null("sliding_window") if SLIDING in kinds else None
    reader.skip("sliding_window")
    attention |= {"nope_layers": full} if full else {}
    attention |= {"window_size": size, **({"full_layers": full} if full else {})} if size is not None else {}
    moe = qwen_experts(reader) | {"shared_ffn_hidden_size": reader.whole("shared_expert_intermediate_size")}
    sections = {"A": ("attention", attention), "G": ("linear_attention", _delta(reader)), "E": ("moe", moe)}
    return model_of(reader, letters, model, sections)


_LARA = (LINEAR, SLIDING, LINEAR, FULL, SLIDING)
"""Kinds of lara_mini's layers, if the config does not list them."""


def olmo_hybrid(reader: ConfigReader) -> dict[str, Any]:
    """olmo_hybrid: gated delta nets, and attention without rotary embedding unless a base is given; a norm over all query and key heads."""
    model, layers = common(reader), reader.layers(2)
    derived = [FULL if layer % 4 == 3 else LINEAR for layer in range(layers)]
    if FULL not in derived:
        derived[-1] = FULL
    letters = _letters(reader, layer_kinds(reader, derived), "D" * layers)
    if "A" in letters:  # attention layers norm their blocks' outputs, all others their blocks' inputs
        model["post_norm_layers"] = sorted([*positions(letters, "A"), *(index + 1 for index in positions(letters, "A"))])
    attention = heads(reader, model["hidden_size"]) | biases(reader) | {"qk_norm": True, "qk_norm_width": "all_heads"}
    inside = reader.mapping("rope_parameters") if reader.has("rope_parameters") else {}
    if inside.get("rope_theta") is not None or (reader.has("rope_theta") and reader.value("rope_theta") is not None):
        attention |= rope(reader, attention["head_dim"])
    else:
        reader.skip("rope_theta", "rope_scaling", "rope_parameters")
        attention["nope_layers"] = positions(letters, "A")
    reader.skip(*(f"linear_{name}" for name in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor")))  # initial values
    key_heads = reader.whole_or_null("linear_num_key_heads") or attention["num_heads"]
    key_dim = reader.whole_or_null("linear_key_head_dim") or max(1, int(0.75 * model["hidden_size"] / key_heads))
    delta = {
        "kind": "gated_delta",
        "num_key_heads": key_heads,
        "num_value_heads": reader.whole_or_null("linear_num_value_heads") or attention["num_heads"],
        "key_dim": key_dim,
        "value_dim": reader.whole_or_null("linear_value_head_dim") or 2 * key_dim,
        "conv_kernel": reader.whole("linear_conv_kernel_dim"),
        "negative_eigenvalues": reader.flag("linear_allow_neg_eigval"),
        **({"gated_norm_eps": _OLMO_EPS} if model["norm_eps"] != _OLMO_EPS else {}),
    }
    sections = {"A": ("attention", attention), "G": ("linear_attention", delta), "D": ("mlp", mlp(reader))}
    return model_of(reader, letters, model, sections)


def kimi_linear(reader: ConfigReader) -> dict[str, Any]:
    """kimi_linear: Kimi delta attention, and latent attention without rotary embedding; dense layers first, experts after."""
    model, layers = untied(reader, common(reader)), reader.layers(2)
    inside = reader.inside("linear_attn_config", ("full_attn_layers", "kda_layers", "num_heads", "head_dim", "short_conv_kernel_size"))
    letters = _letters(reader, _kimi_kinds(reader, inside, layers), _kimi_feeds(reader, layers))
    delta = {
        "kind": "kda",
        "num_heads": _inside(reader, inside, "num_heads", "linear_num_heads"),
        "head_dim": _inside(reader, inside, "head_dim", "linear_head_dim"),
        "conv_kernel": _inside(reader, inside, "short_conv_kernel_size", "linear_conv_kernel_dim"),
    }
    attention = latent_widths(reader) | {"nope_layers": positions(letters, "A")}
    if reader.has("num_key_value_heads") and reader.value("num_key_value_heads") not in (None, attention["num_heads"]):
        detail = f"num_attention_heads = {attention['num_heads']}, num_key_value_heads = {reader.value('num_key_value_heads')}"
        reader.contradicts("num_key_value_heads", detail, "latent attention needs one key-value head per head")
    reader.skip("num_key_value_heads", "head_dim", "qk_head_dim", "rope_theta", "rope_scaling", "rope_parameters", "mla_use_nope")
    reader.skip("moe_layer_freq")
    moe = experts(reader, count="num_local_experts", width="moe_intermediate_size") | sigmoid_choice(reader)
    moe["shared_ffn_hidden_size"] = reader.whole("n_shared_experts", least=0) * moe["ffn_hidden_size"]
    sections = {
        "A": ("attention", attention),
        "G": ("linear_attention", delta),
        "E": ("moe", moe),
        "D": ("mlp", mlp(reader)),
    }
    return model_of(reader, letters, model, sections)


def _qwen(reader: ConfigReader, feeds: str, sections: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The section `model` of the Qwen hybrids: every `full_attention_interval`-th layer attends, gated, and a quarter of a head rotates."""
    model = common(reader) | {"zero_centered_norm": True}
    interval = reader.whole("full_attention_interval") if reader.value("full_attention_interval") is not None else _INTERVAL
    reader.skip("full_attention_interval")
    derived = [LINEAR if (layer + 1) % interval else FULL for layer in range(len(feeds))]
    letters = _letters(reader, layer_kinds(reader, derived), feeds)
    reader.only("attention_bias", (False, None), "q_proj's bias covers the gate, but attention.bias does not")
    attention = heads(reader, model["hidden_size"]) | {"qk_norm": True, "gate": True}
    attention |= rope(reader, attention["head_dim"], partial=_QWEN_ROTATED)
    return model_of(reader, letters, model, {"A": ("attention", attention), "G": ("linear_attention", _delta(reader)), **sections})


def _delta(reader: ConfigReader) -> dict[str, Any]:
    """The section of a gated delta net."""
    return {
        "kind": "gated_delta",
        "num_key_heads": reader.whole("linear_num_key_heads"),
        "num_value_heads": reader.whole("linear_num_value_heads"),
        "key_dim": reader.whole("linear_key_head_dim"),
        "value_dim": reader.whole("linear_value_head_dim"),
        "conv_kernel": reader.whole("linear_conv_kernel_dim"),
    }


def _qwen_moe(reader: ConfigReader, *, normalize: bool | str = "norm_topk_prob") -> dict[str, Any]:
    shared = {"shared_ffn_hidden_size": reader.whole("shared_expert_intermediate_size"), "shared_gate": True}
    return qwen_experts(reader, normalize=normalize) | shared


def _letters(reader: ConfigReader, kinds: Sequence[str], feeds: str) -> str:
    mixers = lettered(reader, "layer_types", kinds, _MIXERS)
    return "".join(mixer + feed for mixer, feed in zip(mixers, feeds, strict=False)) or "GD"


def _inside(reader: ConfigReader, inside: Any, name: str, key: str) -> int:
    """A field of `linear_attn_config`, or the class's default."""
    if name not in inside:
        return reader.whole(key)
    reader.skip(key)
    value = inside[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        reader.wrong(f"linear_attn_config.{name}", value, "an integer of at least 1")
        return 1
    return value


def _kimi_kinds(reader: ConfigReader, inside: Any, layers: int) -> Sequence[str]:
    """`layer_types`, or the lists of `linear_attn_config`, which count from 1, or every fourth layer after the first."""
    listed = inside.get("full_attn_layers"), inside.get("kda_layers")
    if not all(isinstance(one, list) for one in listed):
        return layer_kinds(reader, [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(layers)])
    kinds = {layer: kind for kind, named in zip((FULL, LINEAR), listed, strict=True) for layer in named}
    if set(kinds) != set(range(1, layers + 1)) and not reader.has("layer_types"):
        detail = f"linear_attn_config lists {len(kinds)} layers, and num_hidden_layers = {layers}"
        reader.contradicts("linear_attn_config", detail, "list every layer once, counted from 1")
        return [LINEAR] * layers
    return layer_kinds(reader, [kinds.get(layer + 1, LINEAR) for layer in range(layers)])


def _kimi_feeds(reader: ConfigReader, layers: int) -> str:
    """`mlp_layer_types`, or the first `first_k_dense_replace` layers; one layer if nothing says so."""
    given = reader.value("mlp_layer_types")
    if given is not None:
        reader.skip("first_k_dense_replace")
        return lettered(reader, "mlp_layer_types", reader.items("mlp_layer_types"), {"dense": "D", "sparse": "E"})
    reader.skip("mlp_layer_types")
    dense = min(layers, reader.whole("first_k_dense_replace", least=0) if reader.has("first_k_dense_replace") else 1)
    return "D" * dense + "E" * (layers - dense)


def xlstm(reader: ConfigReader) -> dict[str, Any]:
    """xlstm: mLSTM blocks and MLPs whose width is rounded up; fused projections have as many parameters."""
    reader.only("use_bias", (False,), "norms and all projections have biases")
    hidden = reader.value("hidden_size") or reader.whole("embedding_dim")
    layers = reader.layers(2, "num_hidden_layers" if reader.value("num_hidden_layers") is not None else "num_blocks")
    for name, other, value in (("embedding_dim", "hidden_size", hidden), ("num_blocks", "num_hidden_layers", layers)):
        reader.only(name, (None, value), f"it is {other} under another name")
    heads = reader.whole("num_heads")
    widths = {name: int(hidden * reader.number(f"{name}_dim_factor")) for name in ("qk", "v")}
    for name, width in widths.items():
        if width % heads:
            detail = f"{width} wide, num_heads = {heads}: heads are equally wide"
            reader.contradicts(f"{name}_dim_factor", detail, "correct the one that is wrong")
    step = reader.whole("ffn_round_up_to_multiple_of")
    inner = int((hidden * reader.number("ffn_proj_factor") + step - 1) // step) * step
    linear = {"kind": "mlstm", "num_heads": heads, "key_dim": widths["qk"] // heads, "value_dim": widths["v"] // heads}
    model = {"hidden_size": hidden, "vocab_size": reader.whole("vocab_size"), "norm_eps": reader.number("norm_eps")}
    if reader.flag("tie_word_embeddings"):
        reader.warn("tie_word_embeddings", True, "the class never ties the head, and the spec follows it")
    if not reader.flag("add_out_norm"):
        reader.warn("add_out_norm", False, "the class always has the norm, and the spec follows it")
    if (cap := reader.factor("output_logit_soft_cap")) is not None:
        model["logits_cap"] = cap
    linear["chunk_size"] = reader.whole("chunk_size")
    gates = reader.factor("gate_soft_cap")
    if gates is None or gates > LARGEST_CAP:
        reader.cannot("gate_soft_cap", gates, f"gates are bounded before their exponential, by at most {LARGEST_CAP:g}", 15.0)
    elif gates != 15:
        linear["gate_soft_cap"] = gates
    reader.skip(*_XLSTM_OTHER)
    sections = {"G": ("linear_attention", linear), "D": ("mlp", {"ffn_hidden_size": inner, "activation": "swiglu"})}
    return model_of(reader, "GD" * layers, model, sections)


_XLSTM_OTHER = (
    *("chunkwise_kernel", "sequence_kernel", "step_kernel", "mode", "return_last_states", "autocast_kernel_dtype", "eps", "weight_mode"),
    *("inference_state_dtype", "max_inference_chunksize", "norm_reduction_force_float32", "hidden_size"),
    *("num_hidden_layers", "num_blocks", "embedding_dim", "rope_theta", "rope_parameters", "rope_scaling"),
)
"""Fields of xlstm that choose kernels, or that others repeat, and angles, which no layer of it has."""
