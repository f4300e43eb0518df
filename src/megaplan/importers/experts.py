"""Decoders of grouped-query attention and experts: a decoder layer is `AE`, or `AD` where its MLP is dense."""

from collections.abc import Sequence
from typing import Any

from megaplan.importers.decoders import every, qwen_kinds, stream_wide, unrotated
from megaplan.importers.parts import FULL, SLIDING, biases, common, experts, heads, layer_kinds, mlp, model_of, uniform, windows
from megaplan.importers.reader import ConfigReader
from megaplan.importers.rotary import rope, window_base

CHUNKED = "chunked_attention"


def mixtral(reader: ConfigReader) -> dict[str, Any]:
    """mixtral: `intermediate_size` is one expert's width, and the chosen experts' weights sum to 1."""
    moe = experts(reader, count="num_local_experts", width="intermediate_size", normalize=True)
    return decoder(reader, {}, moe, windowed=SLIDING)


def qwen2_moe(reader: ConfigReader) -> dict[str, Any]:
    """qwen2_moe: a shared expert with a gate; windows of every second layer below `max_window_layers`."""
    moe = qwen_experts(reader) | {"shared_ffn_hidden_size": reader.whole("shared_expert_intermediate_size"), "shared_gate": True}
    layers, slides = reader.layers(2), reader.flag("use_sliding_window")
    first = reader.whole("max_window_layers", least=0) if slides else 0
    if not slides:
        reader.skip("sliding_window", "max_window_layers")
    meant = [SLIDING if slides and (layer + 1) % 2 and layer < first else FULL for layer in range(layers)]
    kinds = layer_kinds(reader, meant) if slides else (FULL,) * layers
    reader.skip("layer_types")
    attention = {"bias": True} if reader.flag("qkv_bias") else {}
    return decoder(reader, attention, moe, windowed=kinds, dense=qwen_dense(reader))


def qwen3_moe(reader: ConfigReader) -> dict[str, Any]:
    """qwen3_moe: a norm over each head; experts in every `decoder_sparse_step`-th layer, except in `mlp_only_layers`."""
    attention = {**biases(reader), "qk_norm": True}
    return decoder(reader, attention, qwen_experts(reader), windowed=qwen_kinds(reader), dense=qwen_dense(reader))


def qwen3_vl_moe(reader: ConfigReader) -> dict[str, Any]:
    """qwen3_vl_moe_text: qwen3_moe without windows, whose chosen experts' weights sum to 1."""
    moe = qwen_experts(reader, normalize=True)
    reader.skip("norm_topk_prob")
    return decoder(reader, {**biases(reader), "qk_norm": True}, moe, dense=qwen_dense(reader))


def qwen3_omni(reader: ConfigReader) -> dict[str, Any]:
    """qwen3_omni_moe_text: qwen3_moe without windows."""
    reader.skip("sliding_window")
    return decoder(reader, {**biases(reader), "qk_norm": True}, qwen_experts(reader), dense=qwen_dense(reader))


def olmoe(reader: ConfigReader) -> dict[str, Any]:
    """olmoe: a norm over all heads of the queries and of the keys; `intermediate_size` is one expert's width."""
    attention = {**biases(reader), "qk_norm": True, "qk_norm_width": "all_heads"}
    stream_wide(reader, "the norm over all heads of the queries (q_norm)")
    return decoder(reader, attention, experts(reader, count="num_experts", width="intermediate_size"))


def phimoe(reader: ConfigReader) -> dict[str, Any]:
    """phimoe: LayerNorm; a bias on the head by its own field."""
    moe = experts(reader, count="num_local_experts", width="intermediate_size", normalize=False)
    model: dict[str, Any] = {"norm": "layernorm", **({"head_bias": True} if reader.flag("lm_head_bias") else {})}
    reader.skip("original_max_position_embeddings")
    return decoder(reader, biases(reader), moe, model=model, windowed=SLIDING)


def granite_moe(reader: ConfigReader) -> dict[str, Any]:
    """granitemoe: `intermediate_size` is one expert's width, and the chosen experts' weights sum to 1."""
    return decoder(reader, biases(reader), experts(reader, count="num_local_experts", width="intermediate_size", normalize=True))


def granite_moe_shared(reader: ConfigReader) -> dict[str, Any]:
    """granitemoeshared: granitemoe with a shared expert of its own width."""
    moe = experts(reader, count="num_local_experts", width="intermediate_size", normalize=True)
    moe["shared_ffn_hidden_size"] = reader.whole("shared_intermediate_size", least=0)
    return decoder(reader, biases(reader), moe)


def gpt_oss(reader: ConfigReader) -> dict[str, Any]:
    """gpt_oss: biases on everything, attention sinks, windows of every second layer."""
    moe = experts(reader, count="num_local_experts", width="intermediate_size", normalize=True) | {"bias": True, "router_bias": True}
    limit = reader.factor("swiglu_limit")
    if limit is not None:
        moe["swiglu_limit"] = limit
    reader.skip("swiglu_alpha", "experts_per_token", "initial_context_length")
    return decoder(reader, {**biases(reader), "sinks": True}, moe, windowed=every(reader, 2))


def glm4_moe(reader: ConfigReader) -> dict[str, Any]:
    """glm4_moe: dense layers first; a shared expert; no bias on the output projection."""
    moe = _deepseek_experts(reader)
    normed = "use_qk_norm" in reader.facts.fields and reader.flag("use_qk_norm")
    attention = {**biases(reader, output=False), **({"qk_norm": True} if normed else {})}
    dense = first_dense(reader)
    return decoder(reader, attention, moe, dense=dense, partial=0.5)


def solar_open(reader: ConfigReader) -> dict[str, Any]:
    """solar_open: glm4_moe with experts in every layer, and all of a head rotated."""
    moe = _deepseek_experts(reader)
    reader.skip("intermediate_size", "first_k_dense_replace", "use_qk_norm")  # fields of the published config that belong to no tensor
    return decoder(reader, biases(reader, output=False), moe)


def sarvam_moe(reader: ConfigReader) -> dict[str, Any]:
    """sarvam_moe: glm4_moe's class under another name, with other defaults."""
    return glm4_moe(reader)


def dots1(reader: ConfigReader) -> dict[str, Any]:
    """dots1: a norm over each head; windows from `max_window_layers` on; dense layers first, corrected sigmoid scores."""
    layers, slides = reader.layers(2), reader.value("sliding_window") is not None
    first = min(reader.whole("max_window_layers", least=0), layers) if slides else layers
    reader.skip("max_window_layers")
    kinds = layer_kinds(reader, [FULL if layer < first else SLIDING for layer in range(layers)])
    return decoder(reader, {**biases(reader), "qk_norm": True}, _deepseek_experts(reader), windowed=kinds, dense=first_dense(reader))


def exaone_moe(reader: ConfigReader) -> dict[str, Any]:
    """exaone_moe: a norm over each head; if some layers have a window, those without one do not rotate; experts as in dots1."""
    pattern, layers = reader.value("sliding_window_pattern"), reader.layers(2)
    reader.skip("sliding_window_pattern")
    period = pattern if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0 else 4
    slides = reader.value("sliding_window") is not None
    kinds = every(reader, period) if slides else (FULL,) * layers
    reader.skip("layer_types")
    straight = [2 * layer for layer, kind in enumerate(kinds) if slides and kind == FULL]
    attention: dict[str, Any] = {"qk_norm": True, **({"nope_layers": straight} if straight else {})}
    moe = _deepseek_experts(reader, count="num_experts", shared="num_shared_experts")
    return decoder(reader, attention, moe, windowed=kinds, dense=first_dense(reader))


def hy_v3(reader: ConfigReader) -> dict[str, Any]:
    """hy_v3: a norm over each head; one dense layer unless `mlp_layer_types` lists them; corrected sigmoid scores."""
    if reader.flag("mlp_bias"):
        reader.cannot("mlp_bias", True, "the shared expert has biases, the routed experts none", False)
    moe = experts(reader, count="num_experts", width="moe_intermediate_size", normalize=True) | sigmoid_choice(reader, grouped=False)
    moe["shared_ffn_hidden_size"] = reader.whole("num_shared_experts", least=0) * moe["ffn_hidden_size"]
    scale = reader.number("router_scaling_factor")
    moe |= {"routed_scale": scale} if scale != 1 else {}
    dense = first_dense(reader) if reader.value("mlp_layer_types") is not None else {0}
    reader.skip("enable_moe_fp32_combine", "mlp_layer_types", "first_k_dense_replace")
    return decoder(reader, {**biases(reader), "qk_norm": True}, moe, dense=dense)


def mellum(reader: ConfigReader) -> dict[str, Any]:
    """mellum: qwen3_moe whose layers' kinds, MLPs and rotary bases are lists; experts everywhere if nothing lists them."""
    layers = reader.layers(2)
    kinds = layer_kinds(reader, (FULL,) * layers)
    dense = first_dense(reader) if reader.value("mlp_layer_types") is not None else set()
    reader.skip("mlp_layer_types", "mtp_layer_types", "mtp_mlp_layer_types")
    attention: dict[str, Any] = {**biases(reader), "qk_norm": True}
    if SLIDING in kinds:
        attention["window_rope_theta"] = window_base(reader)
    return decoder(reader, attention, qwen_experts(reader), windowed=kinds, dense=dense)


def afmoe(reader: ConfigReader) -> dict[str, Any]:
    """afmoe: gated attention with a norm over each head, norms before and after each block, rotation in layers with a window alone."""
    layers, period = reader.layers(2), reader.whole("global_attn_every_n_layers")
    kinds = every(reader, period)
    straight = [2 * layer for layer, kind in enumerate(kinds) if kind == FULL]
    attention = {**biases(reader), "qk_norm": True, "gate": True, **({"nope_layers": straight} if straight else {})}
    moe = experts(reader, count="num_experts", width="moe_intermediate_size", normalize=True)
    moe |= {"shared_ffn_hidden_size": reader.whole("num_shared_experts", least=0) * moe["ffn_hidden_size"]}
    moe |= {"score": "sigmoid", "score_correction": True}  # a parameter without a gradient
    scale = reader.factor("route_scale")
    moe |= {"routed_scale": scale} if scale not in (None, 1) else {}
    reader.skip(
        "score_func",
        "route_norm",
        "n_group",
        "topk_group",
        "load_balance_coeff",
        "use_grouped_mm",
        "num_expert_groups",
        "num_limited_groups",
    )
    model: dict[str, Any] = {"norm_placement": "both"}
    if reader.flag("mup_enabled"):
        model["embedding_multiplier"] = reader.whole("hidden_size") ** 0.5
    dense = set(range(min(layers, reader.whole("num_dense_layers", least=0))))
    return decoder(reader, attention, moe, model=model, windowed=kinds, dense=dense)


def flex_olmo(reader: ConfigReader) -> dict[str, Any]:
    """flex_olmo: olmoe with norms on the blocks' outputs."""
    attention = {**biases(reader), "qk_norm": True, "qk_norm_width": "all_heads"}
    moe = experts(reader, count="num_experts", width="intermediate_size")
    return decoder(reader, attention, moe, model={"norm_placement": "post"})


def granite_moe_swa(reader: ConfigReader) -> dict[str, Any]:
    """granitemoe_swa: granitemoeshared with windows except in every fourth layer, sinks, and a rotary base by layer."""
    moe = experts(reader, count="num_local_experts", width="intermediate_size", normalize=True)
    moe["shared_ffn_hidden_size"] = reader.whole("shared_intermediate_size", least=0)
    return decoder(reader, {**biases(reader), "sinks": True, **unrotated(reader)}, moe, windowed=every(reader, 4, start=0))


def llama4(reader: ConfigReader) -> dict[str, Any]:
    """llama4_text: attention in chunks except in layers without rotation; experts of the shared one's width in every n-th layer."""
    layers = reader.layers(2)
    listed, interval = reader.items("no_rope_layers"), reader.whole("no_rope_layer_interval")
    rotates = listed or tuple(int((layer + 1) % interval != 0) for layer in range(layers))
    chunk = reader.whole_or_null("attention_chunk_size")
    derived = [CHUNKED if turns and chunk is not None else FULL for turns in rotates[:layers]]
    kinds = [SLIDING if kind == CHUNKED else kind for kind in layer_kinds(reader, derived)]
    if SLIDING in kinds:
        reader.warn("attention_chunk_size", chunk, "a token attends within its chunk only; it is counted as a window of the chunk's length")
    straight = [2 * layer for layer, turns in enumerate(rotates[:layers]) if not turns]
    if reader.flag("use_qk_norm"):
        reader.warn("use_qk_norm", True, "queries and keys are normed without a weight; tensors saved for it are not counted")
    reader.skip("attn_temperature_tuning", "floor_scale", "attn_scale", "rope_interleave", "for_llm_compressor", "intermediate_size_mlp")
    step, places = reader.whole("interleave_moe_layer_step"), reader.value("moe_layers")
    reader.skip("moe_layers")
    sparse = set(places) if isinstance(places, list) else set(range(step - 1, layers, step))
    width = reader.whole("intermediate_size")
    moe = experts(reader, count="num_local_experts", width="intermediate_size", normalize=False)
    moe |= {"shared_ffn_hidden_size": width, "score": "sigmoid"}
    attention = {**biases(reader), **({"nope_layers": straight} if straight else {})}
    dense = {layer for layer in range(layers) if layer not in sparse}
    return decoder(reader, attention, moe, windowed=kinds, dense=dense, wide="intermediate_size_mlp", window="attention_chunk_size")


def _deepseek_experts(reader: ConfigReader, *, count: str = "n_routed_experts", shared: str = "n_shared_experts") -> dict[str, Any]:
    """Experts chosen by corrected sigmoid scores in groups, and a shared one."""
    moe = experts(reader, count=count, width="moe_intermediate_size") | sigmoid_choice(reader)
    moe["shared_ffn_hidden_size"] = (reader.whole_or_null(shared, least=0) or 0) * moe["ffn_hidden_size"]
    return moe


def flint(reader: ConfigReader) -> dict[str, Any]:
    """flint: sinks, a norm over each head, rotation in layers with a window alone; a shared expert without a gate, two dense layers."""
    layers = reader.layers(2)
    full = {0, 1, layers - 1, *range(1, layers, 4)}
    kinds = layer_kinds(reader, [FULL if layer in full else SLIDING for layer in range(layers)])
    attention = {**biases(reader), "qk_norm": True, "sinks": True, **straight(kinds)}
    moe = qwen_experts(reader) | {"shared_ffn_hidden_size": reader.whole("shared_expert_intermediate_size"), "score": "sigmoid"}
    if reader.value("mlp_only_layers") is None:
        reader.skip("mlp_only_layers")
        dense = {layer for layer in range(layers) if layer < 2 or (layer + 1) % reader.whole("decoder_sparse_step")}
    else:
        dense = qwen_dense(reader)
    return decoder(reader, attention, moe, windowed=kinds, dense=dense)


def kolibri1(reader: ConfigReader) -> dict[str, Any]:
    """kolibri1: norms before and after each block, and over each head; rotation in layers with a window alone; corrected sigmoid scores."""
    kinds = every(reader, 5)
    moe = qwen_experts(reader) | {"shared_ffn_hidden_size": reader.whole("shared_expert_intermediate_size")}
    moe |= {"score": "sigmoid", "expert_bias": True}
    return decoder(reader, {"qk_norm": True, **straight(kinds)}, moe, model={"norm_placement": "both"}, windowed=kinds)


def straight(kinds: Sequence[str]) -> dict[str, Any]:
    """`nope_layers` of a decoder whose layers without a window do not rotate, if it has windows."""
    layers = [2 * layer for layer, kind in enumerate(kinds) if kind == FULL]
    return {"nope_layers": layers} if layers else {}


def minimax_m2(reader: ConfigReader) -> dict[str, Any]:
    """minimax_m2: a norm over all heads of the queries and of the keys; `rotary_dim` of each head is rotated."""
    moe = experts(reader, count="num_local_experts", width="intermediate_size", normalize=True)
    moe |= sigmoid_choice(reader, grouped=False)
    rotary = reader.value("rotary_dim")
    reader.published("use_qk_norm", True, "queries and keys always have a norm")
    reader.skip("rotary_dim", "qk_norm_type", "use_routing_bias", "attn_type_list", "mlp_intermediate_size")
    partial = rotary / reader.whole("head_dim") if isinstance(rotary, int) and not isinstance(rotary, bool) and rotary > 0 else 1.0
    return decoder(reader, {"qk_norm": True, "qk_norm_width": "all_heads"}, moe, partial=partial)


def ernie4_5_moe(reader: ConfigReader) -> dict[str, Any]:
    """ernie4_5_moe: experts from one layer to another at an interval; the router's correction is a parameter."""
    if reader.flag("use_bias"):
        reader.cannot("use_bias", True, "a spec has no bias of a head that can be tied, and none of experts", False)
    moe = experts(reader, count="moe_num_experts", width="moe_intermediate_size", top_k="moe_k", normalize=True)
    moe |= {"shared_ffn_hidden_size": reader.whole("moe_num_shared_experts", least=0) * moe["ffn_hidden_size"]}
    moe |= {"score_correction": True}
    layers, first, step = reader.layers(2), reader.whole("moe_layer_start_index", least=0), reader.whole("moe_layer_interval")
    last = reader.value("moe_layer_end_index")
    reader.skip("moe_layer_end_index")
    last = layers - 1 if not isinstance(last, int) or last == -1 else last
    reader.skip("moe_norm_min", "moe_capacity", "moe_use_aux_free", "moe_gate")
    dense = {layer for layer in range(layers) if (layer + 1) % step or not first <= layer <= last}
    return decoder(reader, {}, moe, dense=dense)


def hunyuan_moe(reader: ConfigReader) -> dict[str, Any]:
    """hunyuan_v1_moe: a norm over each head, and a shared expert as wide as a routed one."""
    moe: dict[str, Any] = {
        "num_experts": uniform(reader, "num_experts"),
        "top_k": uniform(reader, "moe_topk"),
        "ffn_hidden_size": reader.whole("intermediate_size"),
        "shared_ffn_hidden_size": reader.whole("intermediate_size"),
        "activation": "swiglu",
        "normalize_top_k": True,
    }
    reader.only("hidden_act", ("silu",), "a gated MLP is swiglu here")
    return decoder(reader, {**biases(reader), "qk_norm": True}, moe)


def sigmoid_choice(reader: ConfigReader, *, grouped: bool = True) -> dict[str, Any]:
    """Experts are chosen by sigmoid scores with a bias, a buffer outside the gradient (arXiv:2408.15664), in groups if `grouped`."""
    reader.skip("topk_method", "scoring_func", "moe_router_activation_func", "use_grouped_topk")  # each class has one of these fields
    return {"score": "sigmoid", "expert_bias": True, **(grouped_choice(reader) if grouped else {})}


def grouped_choice(reader: ConfigReader) -> dict[str, Any]:
    """Groups of experts and the factor of the weights, if they are not neutral."""
    groups, chosen = (reader.whole_or_null(key) or 1 for key in ("n_group", "topk_group"))
    scale = reader.factor("routed_scaling_factor") or 1.0
    found: dict[str, Any] = {"num_groups": groups, "top_groups": chosen} if chosen < groups else {}
    return found | ({"routed_scale": scale} if scale != 1 else {})


def first_dense(reader: ConfigReader, key: str = "first_k_dense_replace") -> set[int]:
    """Number of first layers with a dense MLP; `mlp_layer_types` gives it layer by layer."""
    layers = reader.layers(2)
    if reader.has("mlp_layer_types") and reader.value("mlp_layer_types") is not None:
        reader.skip(key)
        names = reader.items("mlp_layer_types")
        wrong = [name for name in names if name not in ("dense", "sparse")]
        if wrong or len(names) != layers:
            reader.wrong("mlp_layer_types", list(names), f"a list of {layers} of dense and sparse")
        return {layer for layer, name in enumerate(names) if name == "dense"}
    reader.skip("mlp_layer_types")
    return set(range(min(layers, reader.whole(key, least=0))))


def qwen_experts(reader: ConfigReader, *, normalize: str | bool = "norm_topk_prob") -> dict[str, Any]:
    """Routed experts of Qwen's models."""
    return experts(reader, count="num_experts", width="moe_intermediate_size", normalize=normalize)


def qwen_dense(reader: ConfigReader) -> set[int]:
    """Layers with a dense MLP."""
    layers, step, listed = reader.layers(2), reader.whole("decoder_sparse_step"), reader.items("mlp_only_layers")
    for layer in listed:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < layers:
            reader.wrong("mlp_only_layers", list(listed), f"a list of layers from 0 to {layers - 1}")
            break
    return {layer for layer in range(layers) if layer in listed or (layer + 1) % step}


def decoder(
    reader: ConfigReader,
    attention: dict[str, Any],
    moe: dict[str, Any],
    *,
    model: dict[str, Any] | None = None,
    windowed: str | Sequence[str] = FULL,
    dense: set[int] | None = None,
    partial: float = 1.0,
    wide: str = "intermediate_size",
    window: str = "sliding_window",
    eps: str = "rms_norm_eps",
    rotates: bool = True,
) -> dict[str, Any]:
    """The section `model` of one of these decoders.

    Args:
        reader: Reader of the config.
        attention: Keys of attention in addition to counts and widths.
        moe: Section of the experts.
        model: Keys of `model` in addition to the common ones.
        windowed: Kind of each layer, or one kind for all.
        dense: Layers with a dense MLP; None for a class that has none.
        partial: Rotated share of a head, if the config does not say.
        wide: Field of the dense MLP's width.
        window: Field of the window.
        eps: Field of the norms' epsilon.
        rotates: False if `attention` has the rotary angles.
    """
    keys, layers = common(reader, eps), reader.layers(2)
    section = heads(reader, keys["hidden_size"]) | attention
    if rotates:
        section |= rope(reader, section["head_dim"], partial=partial, by_window="window_rope_theta" in section)
    letters = "".join("AD" if layer in (dense or ()) else "AE" for layer in range(layers))
    kinds = windowed if not isinstance(windowed, str) else layer_kinds(reader, (windowed,) * layers)
    section |= windows(reader, kinds, letters, window)
    sections = {"A": ("attention", section), "E": ("moe", moe)}
    if dense is not None:
        sections["D"] = ("mlp", mlp(reader, wide))
    return model_of(reader, letters, {**keys, **(model or {})}, sections)
