"""Cohere's decoders: attention and MLP read one LayerNorm without bias, and logits have a factor."""

from typing import Any

from megaplan.importers import decoders, experts, parts
from megaplan.importers.parts import FULL, SLIDING, biases, layer_kinds, positions
from megaplan.importers.reader import ConfigReader
from megaplan.importers.rotary import rope_by_kind


def cohere(reader: ConfigReader) -> dict[str, Any]:
    """cohere: every layer sees all positions and rotates."""
    if reader.flag("use_qk_norm"):
        reader.cannot("use_qk_norm", True, "q_norm and k_norm are LayerNorms with a weight a head and dim, and qk_norm is RMSNorm", False)
    return decoders.decoder(reader, biases(reader), model=_of_cohere(reader), eps="layer_norm_eps", parallel=True)


def cohere2(reader: ConfigReader) -> dict[str, Any]:
    """cohere2: windows of three layers in four, and rotation in these layers alone."""
    kinds = layer_kinds(reader, _derived(reader, reader.layers(2)))
    attention = {**biases(reader), **experts.straight(kinds)}
    return decoders.decoder(reader, attention, model=_of_cohere(reader), eps="layer_norm_eps", windowed=kinds, parallel=True)


def cohere_compass(reader: ConfigReader) -> dict[str, Any]:
    """cohere_compass_text: windows where `layer_types` has them, rotation by kind of layer."""
    kinds = layer_kinds(reader, (FULL,) * reader.layers(2))
    attention = {**biases(reader), **rope_by_kind(reader, kinds)}
    reader.skip("pooling")  # a field of a class with another head
    return decoders.decoder(reader, attention, model=_of_cohere(reader), eps="layer_norm_eps", windowed=kinds, parallel=True)


def cohere2_moe(reader: ConfigReader) -> dict[str, Any]:
    """cohere2_moe: cohere2 with experts after the first dense layers; RMSNorm where `rms_norm_eps` is given."""
    layers, first = reader.layers(2), reader.value("first_k_dense_replace")
    reader.skip("first_k_dense_replace")
    first = first if isinstance(first, int) and not isinstance(first, bool) else 0
    period = reader.whole("prefix_dense_sliding_window_pattern")
    before = [FULL if (layer + 1) % period == 0 else SLIDING for layer in range(min(first, layers))]
    kinds = layer_kinds(reader, [*before, *_derived(reader, max(0, layers - first))])
    listed = reader.value("mlp_layer_types") is not None
    dense = experts.first_dense(reader) if listed else set(range(min(first, layers)))
    reader.skip("mlp_layer_types")
    straight = [2 * layer for layer, kind in enumerate(kinds) if kind == FULL and not (period == 1 and layer in dense)]
    moe = _experts(reader)
    plain = reader.value("rms_norm_eps") is None
    reader.skip("layer_norm_eps" if not plain else "rms_norm_eps")
    wide = "intermediate_size" if reader.value("prefix_dense_intermediate_size") is None else "prefix_dense_intermediate_size"
    reader.skip("prefix_dense_intermediate_size")
    letters = "".join("AD" if layer in dense else "AE" for layer in range(layers))
    return experts.decoder(
        reader,
        {**biases(reader), **({"nope_layers": straight} if straight else {})},
        moe,
        model={**_of_cohere(reader, bare=plain), "parallel_layers": sorted({*range(len(letters))} - {*positions(letters, "A")})},
        windowed=kinds,
        dense=dense,
        wide=wide,
        eps="layer_norm_eps" if plain else "rms_norm_eps",
    )


def _experts(reader: ConfigReader) -> dict[str, Any]:
    """Routed experts, by softmax over the chosen scores or by sigmoid scores, and shared experts."""
    shared, chosen = reader.whole("num_shared_experts", least=0), reader.text("expert_selection_fn")
    if chosen not in ("softmax", "sigmoid"):
        reader.wrong("expert_selection_fn", chosen, "softmax or sigmoid")
    if shared and reader.text("shared_expert_combination_strategy") != "sum":
        reader.warn("shared_expert_combination_strategy", "average", "the sum of routed and shared outputs is halved in the original")
    reader.skip("shared_expert_combination_strategy")
    moe = parts.experts(reader, count="num_experts", width="intermediate_size", normalize=chosen == "softmax" or "norm_topk_prob")
    moe |= {"shared_ffn_hidden_size": shared * moe["ffn_hidden_size"], **({"score": "sigmoid"} if chosen == "sigmoid" else {})}
    reader.skip("norm_topk_prob")
    return moe


def _derived(reader: ConfigReader, layers: int) -> list[str]:
    """Kinds of layers by `sliding_window_pattern`: the last one of a period sees all positions."""
    given = reader.value("sliding_window_pattern")
    reader.skip("sliding_window_pattern")
    period = given if isinstance(given, int) and not isinstance(given, bool) and given > 0 else 4
    return [FULL if (layer + 1) % period == 0 else SLIDING for layer in range(layers)]


def _of_cohere(reader: ConfigReader, *, bare: bool = True) -> dict[str, Any]:
    """LayerNorm without bias, unless the norms are RMSNorm, and the factor of the logits."""
    scale = reader.factor("logit_scale")
    return {**({"norm": "layernorm_no_bias"} if bare else {}), **({"logits_multiplier": scale} if scale not in (None, 1) else {})}
