"""Decoders whose attention has a gate with a number or a value of each head: beam and bailing_hybrid."""

from typing import Any

from megaplan.importers.experts import decoder, qwen_experts, sigmoid_choice
from megaplan.importers.latent import latent_attention
from megaplan.importers.layer_heads import listed_dense
from megaplan.importers.parts import FULL, LINEAR, SLIDING, biases, common, experts, layer_kinds, lettered, mlp, model_of, untied
from megaplan.importers.reader import ConfigReader
from megaplan.importers.rotary import rope_by_kind


def beam(reader: ConfigReader) -> dict[str, Any]:
    """beam: norms before and after each block, a gate of one value per head, no rotation in layers without a window."""
    layers = reader.layers(2)
    kinds = layer_kinds(reader, [FULL if (layer + 1) % 6 == 0 or layer + 1 == layers else SLIDING for layer in range(layers)])
    attention = biases(reader) | {"qk_norm": True, "gate": True, "gate_bias": True}
    if reader.value("rope_parameters") is None:
        straight = [2 * layer for layer, kind in enumerate(kinds) if kind == FULL]
        attention |= {"nope_layers": straight} if straight else {}
    else:
        attention |= rope_by_kind(reader, kinds)
    cap = reader.factor("final_logit_softcapping")
    model = {"norm_placement": "both"} | ({"logits_cap": cap} if cap is not None else {})
    moe = qwen_experts(reader) | sigmoid_choice(reader)
    dense = listed_dense(reader, {0, 1, 2})
    reader.warn(
        "num_hidden_layers",
        layers,
        "in the original, parts of a sum have factors that depend on the layer's depth, and on scores of positions",
    )
    return decoder(reader, attention, moe, model=model, windowed=kinds, dense=dense)


def bailing_hybrid(reader: ConfigReader) -> dict[str, Any]:
    """bailing_hybrid: Kimi delta attention whose gates are whole projections, and latent attention with a gate of one value per head."""
    if reader.value("group_norm_size") is not None or "V2" in str(reader.value("architectures")):
        why = "Ling 2.5's layers without latent attention are lightning attention, with norms of groups of heads; Ling 3's are read"
        reader.refuse("group_norm_size", reader.value("group_norm_size"), why)
    model, layers, size = untied(reader, common(reader)), reader.layers(2), reader.whole("layer_group_size")
    kinds = layer_kinds(reader, [FULL if (layer + 1) % size == 0 else LINEAR for layer in range(layers)])
    mixers = lettered(reader, "layer_types", kinds, {LINEAR: "G", FULL: "A"})
    dense = listed_dense(reader, set(range(reader.whole("first_k_dense_replace", least=0))))
    letters = "".join(mixer + ("D" if layer in dense else "E") for layer, mixer in enumerate(mixers))
    reader.skip("num_key_value_heads", "first_k_dense_replace", "linear_conv_kernel_dim", "linear_num_heads")
    delta = {
        "kind": "kda",
        "num_heads": reader.whole("num_attention_heads"),
        "head_dim": reader.whole("linear_head_dim" if reader.has("linear_head_dim") else "head_dim"),  # which the class overwrites
        "full_gates": True,
        "conv_kernel": reader.whole("short_conv_kernel_size"),
    }
    if reader.flag("kda_safe_gate"):
        reader.warn("kda_safe_gate", True, f"decays are bounded by {reader.value('kda_lower_bound')} in the original, and unbounded here")
    reader.skip("kda_lower_bound")
    attention = latent_attention(reader) | {"gate": True, "gate_width": "head"}
    moe = experts(reader, count="num_local_experts", width="moe_intermediate_size") | sigmoid_choice(reader)
    moe["shared_ffn_hidden_size"] = reader.whole("n_shared_experts", least=0) * moe["ffn_hidden_size"]
    width = reader.value("moe_shared_expert_intermediate_size")  # a field of published configs that the class does not read
    reader.skip("moe_shared_expert_intermediate_size")
    if width not in (None, moe["ffn_hidden_size"]):
        detail = f"moe_shared_expert_intermediate_size = {width}, moe_intermediate_size = {moe['ffn_hidden_size']}"
        reader.contradicts("moe_shared_expert_intermediate_size", detail, "shared experts are as wide as routed ones here")
    sections = {"A": ("attention", attention), "G": ("linear_attention", delta), "E": ("moe", moe), "D": ("mlp", mlp(reader))}
    return model_of(reader, letters, model, sections)
