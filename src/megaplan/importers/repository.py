"""Decoders whose class is published with the weights: bailing_moe and bailing_moe_v2 (Ling and Ring), deepseek, openelm, nemotron-nas."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from megaplan.importers.decoders import decoder as dense_decoder
from megaplan.importers.experts import decoder, sigmoid_choice
from megaplan.importers.parts import activation, biases, common, experts, heads, mlp, model_of
from megaplan.importers.reader import ConfigReader
from megaplan.importers.rotary import rope

_WIDTH_STEP = 256
"""Multiple of the inner widths that nemotron-nas rounds up to."""
_OPENELM_EPS = 1e-6
"""Epsilon of openelm's norms, for which its class has no field."""
_OTHER_ATTENTION = ("replace_with_linear", "sparsify", "llama4", "mamba", "num_sink_tokens")
_OTHER_FFN = ("replace_with_linear", "sparsify", "moe")


def bailing_moe(reader: ConfigReader) -> dict[str, Any]:
    """bailing_moe: softmax scores and a shared expert of several routed experts' width; queries and keys are not normed."""
    reader.only("use_sliding_window", (False,), "the class's eager attention has no window")
    reader.skip("sliding_window", "max_window_layers")
    if reader.flag("norm_head"):
        reader.warn("norm_head", True, "rows of the head are normed in the original; shapes are the same")
    return _ling(reader, {}, experts(reader, count="num_experts", width="moe_intermediate_size"))


def bailing_moe_v2(reader: ConfigReader) -> dict[str, Any]:
    """bailing_moe_v2: a norm over each query and key head, corrected sigmoid scores in groups, whose chosen weights sum to 1."""
    attention = {"qk_norm": True} if reader.flag("use_qk_norm") else {}
    moe = experts(reader, count="num_experts", width="moe_intermediate_size", normalize=True) | sigmoid_choice(reader)
    reader.skip("norm_topk_prob", "score_function", "moe_router_enable_expert_bias", "max_window_layers", "router_dtype")
    if reader.value("num_nextn_predict_layers"):
        reader.warn("num_nextn_predict_layers", reader.value("num_nextn_predict_layers"), "prediction modules are not counted")
    reader.skip("num_nextn_predict_layers")
    return _ling(reader, attention, moe)


def _ling(reader: ConfigReader, attention: dict[str, Any], moe: dict[str, Any]) -> dict[str, Any]:
    """The section `model`: a bias of queries, keys and values and one of the output, each with its own field; dense layers first."""
    attention |= biases(reader, "use_qkv_bias", output=False)
    attention |= {"output_bias": True} if reader.flag("use_bias") else {}
    moe["shared_ffn_hidden_size"] = (reader.whole_or_null("num_shared_experts", least=0) or 0) * moe["ffn_hidden_size"]
    width = reader.value("moe_shared_expert_intermediate_size")  # a field of published configs that the class does not read
    reader.skip("moe_shared_expert_intermediate_size")
    if width not in (None, moe["ffn_hidden_size"], moe["shared_ffn_hidden_size"]):
        detail = f"moe_shared_expert_intermediate_size = {width}, and shared experts are {moe['shared_ffn_hidden_size']} wide"
        reader.contradicts("moe_shared_expert_intermediate_size", detail, "correct the one that is wrong")
    first = reader.whole("first_k_dense_replace", least=0)
    reader.skip("output_dropout", "multi_gate", "intermediate_size" if not first else "first_k_dense_replace")
    return decoder(reader, attention, moe, dense=set(range(min(first, reader.layers(2)))) if first else None)


def deepseek(reader: ConfigReader) -> dict[str, Any]:
    """deepseek: heads as in llama; after the first dense layers experts in every `moe_layer_freq`-th layer, by softmax scores."""
    layers, first, step = reader.layers(2), reader.whole("first_k_dense_replace", least=0), reader.whole("moe_layer_freq")
    if reader.value("n_routed_experts") is None:
        reader.skip("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
        return dense_decoder(reader, biases(reader))
    moe = experts(reader, count="n_routed_experts", width="moe_intermediate_size")
    moe["shared_ffn_hidden_size"] = (reader.whole_or_null("n_shared_experts", least=0) or 0) * moe["ffn_hidden_size"]
    dense = {layer for layer in range(layers) if layer < first or layer % step}
    return decoder(reader, biases(reader), moe, dense=dense)


def openelm(reader: ConfigReader) -> dict[str, Any]:
    """openelm: heads of queries and of keys, and inner widths, differ by layer."""
    layers, hidden = reader.layers(2, "num_transformer_layers"), reader.whole("model_dim")
    counts = [reader.items(key) for key in ("num_query_heads", "num_kv_heads")]
    factors, step = reader.items("ffn_multipliers"), reader.whole("ffn_dim_divisor")
    for key, values in zip(("num_query_heads", "num_kv_heads", "ffn_multipliers"), (*counts, factors), strict=True):
        if len(values) != layers or not all(isinstance(one, int | float) and one > 0 for one in values):
            reader.wrong(key, list(values), f"a list of {layers} positive numbers, one per layer")
    reader.only("normalization_layer_name", ("rms_norm",), "norms are RMSNorms")
    reader.only("ffn_with_glu", (True,), "MLPs have three matrices")
    reader.skip("qkv_multipliers", "num_gqa_groups", "max_context_length", "rope_max_length")  # from which the lists follow
    reader.stop_if_wrong()
    pairs, widths = list(zip(*counts, strict=True)), [_rounded(factor * hidden, step) for factor in factors]
    usual, usual_width = Counter(pairs).most_common(1)[0][0], Counter(widths).most_common(1)[0][0]
    own = [pair for pair in dict.fromkeys(pairs) if pair != usual]
    others = [
        {"layers": [2 * layer for layer, one in enumerate(pairs) if one == pair], "num_heads": pair[0], "num_kv_heads": pair[1]}
        for pair in own
    ]
    section: dict[str, Any] = {
        "kind": "gqa", "num_heads": usual[0], "num_kv_heads": usual[1], "head_dim": reader.whole("head_dim"),
        "rope_theta": float(reader.number("rope_freq_constant")), **({"layer_heads": others} if others else {}),
        **({"qk_norm": True} if reader.flag("normalize_qk_projections") else {}),
    }  # fmt: skip
    dense = {"ffn_hidden_size": usual_width, "activation": activation(reader, "activation_fn_name")}
    dense |= _listed("layer_widths", "ffn_hidden_size", {2 * layer + 1: width for layer, width in enumerate(widths)}, usual_width)
    keys = {
        "hidden_size": hidden,
        "vocab_size": reader.whole("vocab_size"),
        "tie_embeddings": reader.flag("share_input_output_layers"),
        "norm_eps": _OPENELM_EPS,
    }
    return model_of(reader, "AD" * layers, keys, {"A": ("attention", section), "D": ("mlp", dense)})


def _rounded(value: float, step: int) -> int:
    """The multiple of a step next to a width, and not a tenth below it."""
    nearest = max(step, int(value + step / 2) // step * step)
    return nearest + step if nearest < 0.9 * value else nearest


def nemotron_nas(reader: ConfigReader) -> dict[str, Any]:
    """nemotron-nas: llama whose layers have other groups of heads and inner widths, and of which some lack attention or the MLP."""
    layers, key = reader.layers(2), "block_configs"
    if reader.value("num_key_value_heads_per_layer"):  # a field of the first models with this class
        key, width = "num_key_value_heads_per_layer", reader.whole("intermediate_size")
        blocks = [{"attention": {"num_key_value_heads": count}, "ffn": {"intermediate_size": width}} for count in reader.items(key)]
    else:
        blocks = list(reader.items(key))
    if len(blocks) != layers:
        reader.contradicts(key, f"{key} has {len(blocks)} layers, and num_hidden_layers = {layers}", "correct one")
    keys = common(reader)
    section = heads(reader, keys["hidden_size"]) | biases(reader)
    section |= rope(reader, section["head_dim"])
    letters, groups, widths, seen = "", dict[int, int](), dict[int, int](), dict[int, int]()
    for index, block in enumerate(blocks):
        attention, feed = (_part(reader, index, block, key, other) for key, other in (("attention", _OTHER_ATTENTION), ("ffn", _OTHER_FFN)))
        if attention is not None:
            groups[len(letters)] = _kv_heads(reader, index, attention, section["num_heads"])
            if isinstance(attention.get("window_length"), int):
                seen[len(letters)] = attention["window_length"]
            letters += "A"
        if feed is not None:
            widths[len(letters)] = _width(reader, index, feed, keys["hidden_size"])
            letters += "D"
    reader.skip("intermediate_size", "num_key_value_heads", "block_configs")
    reader.stop_if_wrong()
    usual_groups, usual_width = (Counter(each.values()).most_common(1)[0][0] if each else 1 for each in (groups, widths))
    section["num_kv_heads"] = usual_groups
    section |= _listed("layer_heads", "num_kv_heads", groups, usual_groups) | _listed("windows", "size", seen, None)
    dense = mlp(reader, "hidden_size", bias=reader.flag("mlp_bias")) | {"ffn_hidden_size": usual_width}
    dense |= _listed("layer_widths", "ffn_hidden_size", widths, usual_width)
    return model_of(reader, letters or "D", keys, {"A": ("attention", section), "D": ("mlp", dense)})


def _part(reader: ConfigReader, index: int, block: Any, key: str, other: Sequence[str]) -> Mapping[str, Any] | None:
    """The fields of a layer's attention or MLP; None for a layer without it."""
    part = block.get(key) if isinstance(block, dict) else None
    if not isinstance(part, dict):
        reader.wrong("block_configs", block, f"a list of layers with attention and ffn, and layer {index} is none")
        return None
    if part.get("no_op") is True:
        return None
    found = next((name for name in other if part.get(name) not in (None, False)), None)
    if found is not None:
        reader.cannot("block_configs", {found: part[found]}, f"{key} of layer {index} is another block", None)
    return part


def _kv_heads(reader: ConfigReader, index: int, attention: Mapping[str, Any], heads_of_queries: int) -> int:
    """Key heads of a layer: stated, or from the number of query heads per group."""
    stated, size = attention.get("num_key_value_heads"), attention.get("n_heads_in_group")
    if isinstance(stated, int) and stated > 0:
        return stated
    if isinstance(size, int) and size > 0 and heads_of_queries % size == 0:
        return heads_of_queries // size
    reader.wrong("block_configs", {"n_heads_in_group": size}, f"a divisor of {heads_of_queries} heads in layer {index}")
    return 1


def _width(reader: ConfigReader, index: int, feed: Mapping[str, Any], hidden_size: int) -> int:
    """Inner width of a layer: stated, or two thirds of a multiple of the stream's, rounded up to a multiple of 256."""
    stated, factor = feed.get("intermediate_size"), feed.get("ffn_mult")
    if isinstance(stated, int) and stated > 0:
        return stated
    if isinstance(factor, int | float) and not isinstance(factor, bool) and 0 < factor < hidden_size:
        return max(1, -(-int(2 * factor * hidden_size / 3) // _WIDTH_STEP)) * _WIDTH_STEP
    reader.wrong("block_configs", {"ffn_mult": factor}, f"a positive number in layer {index}")
    return 1


def _listed(key: str, name: str, values: Mapping[int, int], usual: int | None) -> dict[str, Any]:
    """Values of layers that differ from the section's default, as a key of the section."""
    own = [value for value in dict.fromkeys(values.values()) if value != usual]
    found = [{"layers": [layer for layer, one in values.items() if one == value], name: value} for value in own]
    return {key: found} if found else {}
