"""Decoders of attention and a dense MLP: a decoder layer is two letters, `AD`."""

from typing import Any

from megaplan.importers.parts import (
    FULL,
    SLIDING,
    TORCH_EPS,
    biases,
    common,
    even_head_dim,
    heads,
    layer_kinds,
    mlp,
    model_of,
    score_scale,
    side_by_side,
    windows,
)
from megaplan.importers.reader import ConfigReader
from megaplan.importers.rotary import rope, window_base


def llama(reader: ConfigReader) -> dict[str, Any]:
    """Llama and granite: RMSNorm before each block; biases on all projections or none."""
    return decoder(reader, biases(reader), mlp_bias=reader.flag("mlp_bias"))


def helium(reader: ConfigReader) -> dict[str, Any]:
    """helium: llama without a bias of the output projection; the heads' total width is the stream's."""
    hidden, heads, width = (reader.whole(key) for key in ("hidden_size", "num_attention_heads", "head_dim"))
    if heads * width != hidden:
        detail = f"num_attention_heads · head_dim = {heads} · {width}, and hidden_size = {hidden} is what o_proj takes"
        reader.contradicts("head_dim", detail, "correct the one that is wrong")
    return decoder(reader, biases(reader, output=False), mlp_bias=reader.flag("mlp_bias"))


def mistral(reader: ConfigReader) -> dict[str, Any]:
    """mistral: a window in all layers, or in the layers that `layer_types` names."""
    return decoder(reader, {}, windowed=SLIDING)


def stream_wide(reader: ConfigReader, norm: str) -> None:
    """Refuses a `head_dim`, no field of the class, with which the heads are not together as wide as the stream, as a norm over them is."""
    if reader.has("head_dim"):
        even = even_head_dim(reader, reader.whole("hidden_size"), reader.whole("num_attention_heads"), None)
        reader.only("head_dim", (even, None), f"{norm} is as wide as the stream")


def cwm(reader: ConfigReader) -> dict[str, Any]:
    """cwm: llama with windows, except in every fourth layer from the first on; no biases."""
    return decoder(reader, {}, mlp_bias=reader.flag("mlp_bias"), windowed=every(reader, 4, start=0))


def granite_swa(reader: ConfigReader) -> dict[str, Any]:
    """granite_swa: granite with windows as in cwm, sinks, and a rotary base by layer, of which 0 is not a rotation."""
    attention = {**biases(reader), "sinks": True, **unrotated(reader)}
    return decoder(reader, attention, mlp_bias=reader.flag("mlp_bias"), windowed=every(reader, 4, start=0))


def unrotated(reader: ConfigReader) -> dict[str, Any]:
    """`nope_layers` of `layer_rope_theta`; other bases of single layers are reported."""
    bases = reader.items("layer_rope_theta") if reader.value("layer_rope_theta") is not None else ()
    reader.skip("layer_rope_theta")
    if len({base for base in bases if base}) > 1:
        reader.warn("layer_rope_theta", list(bases), "layers have different rotary bases, but a spec has one; shapes are the same")
    straight = [2 * layer for layer, base in enumerate(bases) if not base]
    return {"nope_layers": straight} if straight else {}


def hyperclovax(reader: ConfigReader) -> dict[str, Any]:
    """hyperclovax: llama with a factor of the scores, and norms after each block, too, where `use_post_norm` says so."""
    model = {"norm_placement": "both"} if reader.flag("use_post_norm") else {}
    return decoder(reader, biases(reader), mlp_bias=reader.flag("mlp_bias"), model=model)


def jais2(reader: ConfigReader) -> dict[str, Any]:
    """jais2: LayerNorm, an MLP of two matrices, biases by their fields."""
    layer_norm = {"norm": "layernorm"}
    return decoder(reader, biases(reader), mlp_bias=reader.flag("mlp_bias"), model=layer_norm, eps="layer_norm_eps", gated=False)


def ministral(reader: ConfigReader) -> dict[str, Any]:
    """ministral: windows of some layers, as `layer_types` says; no biases."""
    return decoder(reader, {}, windowed=SLIDING)


def phi3(reader: ConfigReader) -> dict[str, Any]:
    """phi3: fused projections, read as separate ones."""
    reader.skip("original_max_position_embeddings")
    return decoder(reader, {}, windowed=SLIDING)


def qwen2(reader: ConfigReader) -> dict[str, Any]:
    """qwen2: biases on queries, keys and values; windows of the last layers."""
    return decoder(reader, biases(reader, None, output=False), windowed=qwen_kinds(reader))


def qwen2_vl(reader: ConfigReader) -> dict[str, Any]:
    """qwen2_vl_text, qwen2_5_vl_text: qwen2, whose heads are together as wide as the stream, whatever `head_dim` says."""
    reader.skip("head_dim")
    return decoder(reader, biases(reader, None, output=False), windowed=qwen_kinds(reader), head_dim=None)


def qwen3(reader: ConfigReader) -> dict[str, Any]:
    """qwen3: a norm over each query and key head; windows of the last layers."""
    return decoder(reader, {**biases(reader), "qk_norm": True}, windowed=qwen_kinds(reader))


def qwen3_vl(reader: ConfigReader) -> dict[str, Any]:
    """qwen3_vl_text: qwen3 without windows."""
    return decoder(reader, {**biases(reader), "qk_norm": True})


def olmo(reader: ConfigReader) -> dict[str, Any]:
    """olmo: llama whose LayerNorms have neither a weight nor a bias."""
    reader.warn("model_type", "olmo", "norms subtract the mean in the original; RMSNorm without a weight is planned")
    return decoder(reader, biases(reader), model={"norm": "rmsnorm_no_scale"}, eps=TORCH_EPS)


def olmo2(reader: ConfigReader) -> dict[str, Any]:
    """olmo2: norms on a block's output, and over all heads of the queries and of the keys."""
    attention = {**biases(reader), "qk_norm": True, "qk_norm_width": "all_heads"}
    return decoder(reader, attention, model={"norm_placement": "post"})


def olmo3(reader: ConfigReader) -> dict[str, Any]:
    """olmo3: olmo2 with a window of three layers in four."""
    attention = {**biases(reader), "qk_norm": True, "qk_norm_width": "all_heads"}
    return decoder(reader, attention, model={"norm_placement": "post"}, windowed=every(reader, 4))


def exaone4(reader: ConfigReader) -> dict[str, Any]:
    """exaone4: norms on a block's output, and over each head; if some layers have a window, those without one do not rotate."""
    pattern = reader.value("sliding_window_pattern")
    reader.skip("sliding_window_pattern")
    period = pattern if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0 else 4
    attention: dict[str, Any] = {"qk_norm": True}
    slides = reader.value("sliding_window") is not None
    windowed = every(reader, period) if slides else (FULL,) * reader.layers(2)
    straight = [2 * layer for layer, kind in enumerate(windowed) if slides and kind == FULL]
    attention |= {"nope_layers": straight} if straight else {}
    return decoder(reader, attention, model={"norm_placement": "post"}, windowed=windowed)


def gemma(reader: ConfigReader) -> dict[str, Any]:
    """gemma: embeddings are scaled, norms scale by 1 + weight; the gate is gelu."""
    return decoder(reader, biases(reader), act=gelu_name(reader), model=_of_gemma(reader))


def gemma2(reader: ConfigReader) -> dict[str, Any]:
    """gemma2: norms before and after each block, windows of every second layer, scores and logits with a cap."""
    scores, logits = _caps(reader)
    return decoder(
        reader,
        biases(reader) | scores,
        model={"norm_placement": "both", **_of_gemma(reader), **logits},
        windowed=every(reader, 2),
        act="hidden_activation",
        score="query_pre_attn_scalar",
    )


def vaultgemma(reader: ConfigReader) -> dict[str, Any]:
    """vaultgemma: gemma2 without the norms after its blocks."""
    scores, logits = _caps(reader)
    return decoder(
        reader,
        biases(reader) | scores,
        model={**_of_gemma(reader), **logits},
        windowed=every(reader, 2),
        act="hidden_activation",
        score="query_pre_attn_scalar",
    )


def gemma3(reader: ConfigReader) -> dict[str, Any]:
    """gemma3's text model: gemma2 with a norm over each head, and windows of five layers in six."""
    period = reader.value("sliding_window_pattern")
    reader.skip("sliding_window_pattern", "_sliding_window_pattern")
    period = period if isinstance(period, int) and not isinstance(period, bool) and period > 0 else 6
    _, logits = _caps(reader)  # the class has a cap for attention scores, but its attention ignores it
    attention = {**biases(reader), "qk_norm": True, "window_rope_theta": window_base(reader)}
    return decoder(
        reader,
        attention,
        model={"norm_placement": "both", **_of_gemma(reader), **logits},
        windowed=every(reader, period),
        act="hidden_activation",
        score="query_pre_attn_scalar",
    )


def _caps(reader: ConfigReader) -> tuple[dict[str, float], dict[str, float]]:
    """Caps of the scores and of the logits; null for no cap."""
    scores, logits = reader.factor("attn_logit_softcapping"), reader.factor("final_logit_softcapping")
    return {} if scores is None else {"score_cap": scores}, {} if logits is None else {"logits_cap": logits}


def _of_gemma(reader: ConfigReader) -> dict[str, Any]:
    """Keys that all Gemmas have: norms with weights around zero, and embeddings times the root of their width."""
    return {"zero_centered_norm": True, "embedding_multiplier": reader.whole("hidden_size") ** 0.5}


def nemotron(reader: ConfigReader) -> dict[str, Any]:
    """nemotron: LayerNorm, an MLP of two matrices, half of each head rotated."""
    return decoder(
        reader,
        biases(reader),
        mlp_bias=reader.flag("mlp_bias"),
        model={"norm": "layernorm"},
        eps="norm_eps",
        gated=False,
        partial=0.5,
    )


def starcoder2(reader: ConfigReader) -> dict[str, Any]:
    """starcoder2: LayerNorm, biases everywhere, an MLP of two matrices."""
    bias = reader.flag("use_bias")
    attention = {"bias": True, "output_bias": True} if bias else {}
    layer_norm = {"norm": "layernorm"}
    return decoder(reader, attention, mlp_bias=bias, model=layer_norm, eps="norm_epsilon", gated=False, windowed=SLIDING)


def phi(reader: ConfigReader) -> dict[str, Any]:
    """phi: attention and MLP read one LayerNorm; biases everywhere, on the head too."""
    if reader.flag("qk_layernorm"):
        reader.cannot("qk_layernorm", True, "q_layernorm and k_layernorm are LayerNorms with a bias, and qk_norm is RMSNorm", False)
    return decoder(
        reader,
        biases(reader, None),
        mlp_bias=True,
        model={"norm": "layernorm", "head_bias": True},
        eps="layer_norm_eps",
        gated=False,
        partial=0.5,
        parallel=True,
    )


def ernie4_5(reader: ConfigReader) -> dict[str, Any]:
    """ernie4_5: biases on all projections or none."""
    bias = reader.flag("use_bias")
    return decoder(reader, {"bias": True, "output_bias": True} if bias else {}, mlp_bias=bias)


def hunyuan(reader: ConfigReader) -> dict[str, Any]:
    """hunyuan_v1_dense: a norm over each query and key head, after the rotation."""
    return decoder(reader, {**biases(reader), "qk_norm": True})


def smollm3(reader: ConfigReader) -> dict[str, Any]:
    """smollm3: layers without rotary embedding, one in `no_rope_layer_interval`."""
    layers = reader.layers(2)
    listed, interval = reader.items("no_rope_layers"), reader.whole("no_rope_layer_interval")
    rotates = listed or tuple(int((layer + 1) % interval != 0) for layer in range(layers))
    nope = [2 * layer for layer, turns in enumerate(rotates[:layers]) if not turns]
    bias = {**biases(reader), **({"nope_layers": nope} if nope else {})}
    slides = reader.flag("use_sliding_window") and reader.value("sliding_window") is not None
    derived = [SLIDING if slides and not turns else FULL for turns in rotates[:layers]]
    return decoder(reader, bias, mlp_bias=reader.flag("mlp_bias"), windowed=layer_kinds(reader, derived))


def seed_oss(reader: ConfigReader) -> dict[str, Any]:
    """seed_oss: biases on queries, keys and values, and on the output, each with its own field."""
    inner, output = reader.flag("attention_bias"), reader.flag("attention_out_bias")
    return decoder(
        reader, {**({"bias": True} if inner else {}), **({"output_bias": True} if output else {})}, mlp_bias=reader.flag("mlp_bias")
    )


def cosmos3_edge(reader: ConfigReader) -> dict[str, Any]:
    """cosmos3_edge_text: llama with an MLP of two matrices."""
    return decoder(reader, biases(reader), mlp_bias=reader.flag("mlp_bias"), gated=False)


def arcee(reader: ConfigReader) -> dict[str, Any]:
    """arcee: an MLP of two matrices."""
    return decoder(reader, biases(reader), mlp_bias=reader.flag("mlp_bias"), gated=False)


def glm(reader: ConfigReader) -> dict[str, Any]:
    """glm: biases on queries, keys and values; half of each head rotated."""
    return decoder(reader, biases(reader, output=False), partial=0.5)


def glm4(reader: ConfigReader) -> dict[str, Any]:
    """glm4: glm with norms before and after each block."""
    return decoder(reader, biases(reader, output=False), partial=0.5, model={"norm_placement": "both"})


def glm4v(reader: ConfigReader) -> dict[str, Any]:
    """glm4v_text: glm4, always with biases, and with heads that are together as wide as the stream, whatever `head_dim` says."""
    reader.skip("head_dim")
    return decoder(reader, {"bias": True}, partial=0.5, model={"norm_placement": "both"}, head_dim=None)


def glm_ocr(reader: ConfigReader) -> dict[str, Any]:
    """glm_ocr_text: glm4v_text without biases."""
    return decoder(reader, {}, partial=0.5, model={"norm_placement": "both"})


def gelu_name(reader: ConfigReader) -> str:
    """Gemma's activation: `hidden_activation` if given, else `hidden_act`."""
    given = reader.value("hidden_activation")
    reader.skip("hidden_activation" if given is None else "hidden_act")
    return "hidden_act" if given is None else "hidden_activation"


def every(reader: ConfigReader, period: int, *, start: int | None = None) -> tuple[str, ...]:
    """Layers with a window, but each `period`-th from `start` on (the last of a period if None), unless the config lists them."""
    first = period - 1 if start is None else start
    return layer_kinds(reader, [FULL if layer % period == first else SLIDING for layer in range(reader.layers(2))])


def qwen_kinds(reader: ConfigReader) -> tuple[str, ...]:
    """Layers from `max_window_layers` on have the window, if `use_sliding_window` says so."""
    layers, slides = reader.layers(2), reader.flag("use_sliding_window")
    if not slides:
        reader.skip("sliding_window", "max_window_layers")
    slides = slides and reader.value("sliding_window") is not None
    first = min(reader.whole("max_window_layers", least=0), layers) if slides else layers
    meant = (FULL,) * first + (SLIDING,) * (layers - first)
    given = layer_kinds(reader, meant)
    if slides is False and SLIDING in given:
        detail = "layer_types has windows, and use_sliding_window and sliding_window give none"
        reader.contradicts("layer_types", detail, "correct the one that is wrong")
    return given


def decoder(
    reader: ConfigReader,
    attention: dict[str, Any],
    *,
    mlp_bias: bool = False,
    model: dict[str, Any] | None = None,
    eps: str | float = "rms_norm_eps",
    windowed: str | tuple[str, ...] = FULL,
    act: str = "hidden_act",
    gated: bool = True,
    partial: float = 1.0,
    score: str | None = None,
    parallel: bool = False,
    head_dim: str | None = "head_dim",
    rotates: bool = True,
    dense: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The section `model` of one of these decoders.

    Args:
        reader: Reader of the config.
        attention: Keys of attention in addition to counts and widths.
        mlp_bias: Biases of the MLP.
        model: Keys of `model` in addition to the common ones.
        eps: Field of the norms' epsilon, or the epsilon of a class without a field for it.
        windowed: Kind of each layer, or one kind for all.
        act: Field of the activation.
        gated: True if the MLP has three matrices.
        partial: Rotated share of a head, if the config does not say.
        score: Field of a scale of scores, given as the width whose inverse root it is.
        parallel: Attention and MLP read one norm.
        head_dim: Field of a head's width; None for a class that derives it.
        rotates: False if `attention` has the rotary angles.
        dense: Keys of the MLP in addition to width, activation and bias.
    """
    keys, layers = common(reader, eps), reader.layers(2)
    section = heads(reader, keys["hidden_size"], head_dim=head_dim) | attention
    if rotates:
        section |= rope(reader, section["head_dim"], partial=partial, by_window="window_rope_theta" in section)
    letters = "AD" * layers
    kinds = windowed if isinstance(windowed, tuple) else layer_kinds(reader, (windowed,) * layers)
    section |= windows(reader, kinds, letters)
    if score is not None:
        section |= score_scale(reader, score, section["head_dim"], width=True)
    side = side_by_side(layers) if parallel else {}
    feed = mlp(reader, act=act, gated=gated, bias=mlp_bias) | (dense or {})
    return model_of(reader, letters, {**keys, **(model or {}), **side}, {"A": ("attention", section), "D": ("mlp", feed)})
