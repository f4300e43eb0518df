"""Decoders whose MLPs or heads have their own tensors inside, norms without a scale, or a layer before the head."""

from typing import Any

from megaplan.importers.decoders import decoder, stream_wide
from megaplan.importers.parts import FULL, SLIDING, activation, biases, layer_kinds
from megaplan.importers.reader import ConfigReader

_LLAMA3 = {"kind": "llama3", "factor": 8.0, "original_seq_length": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Scaling of apertus' rotary frequencies, if the config does not say."""


def apertus(reader: ConfigReader) -> dict[str, Any]:
    """apertus, and the text model of 1.5: an MLP of two matrices, whose activation has two parameters, and a norm over each head."""
    pruned = reader.value("output_vocab_size")
    reader.skip("output_vocab_size")
    if pruned not in (None, reader.value("vocab_size")):
        reader.cannot("output_vocab_size", pruned, "the head (lm_head) has fewer rows than the embedding", None)
    scaled = reader.value("rope_parameters") is None and reader.value("rope_scaling") is None
    attention = {**biases(reader), "qk_norm": True} | ({"rope_scaling": _LLAMA3} if scaled else {})
    return decoder(reader, attention, gated=False)


def nanochat(reader: ConfigReader) -> dict[str, Any]:
    """nanochat: no norm has a scale, the embedding has a norm, too; queries and keys are rotated before their norm, which is equivalent."""
    cap = reader.factor("final_logit_softcapping")
    model = {"norm": "rmsnorm_no_scale", "embedding_norm": True} | ({"logits_cap": cap} if cap is not None else {})
    return decoder(reader, {**biases(reader), "qk_norm": True, "qk_norm_scale": False}, model=model, gated=False)


def bitnet(reader: ConfigReader) -> dict[str, Any]:
    """bitnet: norms over the heads' outputs and over the MLP's inner values; linears have unquantised weights here."""
    stream_wide(reader, "the norm over the heads' outputs (attn_sub_norm)")
    attention = {**biases(reader), "output_norm": True}
    return decoder(reader, attention, head_dim=None, dense={"inner_norm": True})


def modernbert_decoder(reader: ConfigReader) -> dict[str, Any]:
    """modernbert-decoder: a norm on the embedding in place of the first block's, and a layer between the last norm and the head."""
    layers, step = reader.layers(2), reader.value("global_attn_every_n_layers") or 3
    kinds = layer_kinds(reader, [FULL if layer % step == 0 else SLIDING for layer in range(layers)])
    reader.skip("global_attn_every_n_layers", "sliding_window", "local_attention")
    window = reader.whole("local_attention", least=0) // 2 if reader.value("local_attention") else 0
    slides = [2 * layer for layer, kind in enumerate(kinds) if kind != FULL]
    attention = {
        **biases(reader),
        "num_kv_heads": reader.whole("num_attention_heads"),
        **_rotation(reader, windowed=bool(window and slides)),
    }
    if window and slides:
        full = [2 * layer for layer, kind in enumerate(kinds) if kind == FULL]
        attention |= {"window_size": window, **({"full_layers": full} if full else {})}
    tied, biased = reader.flag("tie_word_embeddings"), reader.flag("decoder_bias")
    layer: dict[str, Any] = {"activation": activation(reader, "classifier_activation", known=_HEAD_ACTIVATIONS)}
    layer |= ({"bias": True} if reader.flag("classifier_bias") else {}) | ({"logits_bias": True} if tied and biased else {})
    model: dict[str, Any] = {
        "norm": "layernorm" if reader.flag("norm_bias") else "layernorm_no_bias",
        "embedding_norm": True,
        "unnormed_layers": [0],
    }
    model |= {"head_layer": layer} | ({"head_bias": True} if biased and not tied else {})
    reader.skip("cls_token_id", "sep_token_id", "classifier_dropout", "embedding_dropout", "mlp_dropout", "num_key_value_heads")
    reader.skip("initializer_cutoff_factor", "global_rope_theta", "local_rope_theta", "rope_parameters", "rope_theta", "rope_scaling")
    return decoder(
        reader, attention, mlp_bias=reader.flag("mlp_bias"), model=model, eps="norm_eps", windowed=(FULL,) * layers,
        act="hidden_activation", head_dim=None, rotates=False,
    )  # fmt: skip


_HEAD_ACTIVATIONS = dict.fromkeys(("gelu", "gelu_new", "gelu_pytorch_tanh"), "gelu") | {"silu": "silu", "swish": "silu", "relu": "relu"}


def _rotation(reader: ConfigReader, *, windowed: bool) -> dict[str, Any]:
    """Bases of the rotary angles of layers without a window and with one."""
    given = reader.mapping("rope_parameters")
    bases = []
    for kind, older, usual in ((FULL, "global_rope_theta", 160_000.0), (SLIDING, "local_rope_theta", 10_000.0)):
        own = given.get(kind)
        base = (own.get("rope_theta") if isinstance(own, dict) else None) or reader.value(older) or usual
        bases.append(float(base))
        if isinstance(own, dict) and own.get("rope_type", "default") != "default":
            reader.warn("rope_parameters", own, "angles are scaled in the original; shapes are the same")
    return {"rope_theta": bases[0], **({"window_rope_theta": bases[1]} if windowed and bases[0] != bases[1] else {})}
