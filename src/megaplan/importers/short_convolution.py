"""Models with short convolutions: lfm2, lfm2_moe, lfm3. A decoder layer is `C` or `A`, then `D` or `E`."""

from collections.abc import Sequence
from typing import Any

from megaplan.importers.layer_heads import by_window
from megaplan.importers.parts import FULL, SLIDING, biases, common, heads, layer_kinds, lettered, model_of, windows
from megaplan.importers.reader import ConfigReader
from megaplan.importers.rotary import rope

CONV = "conv"


def lfm2(reader: ConfigReader) -> dict[str, Any]:
    """lfm2: dense MLPs, whose width the class rounds up from two thirds of `intermediate_size` (older: `block_ff_dim`)."""
    layers = reader.layers(2)
    given = reader.value("full_attn_idxs") is not None
    attends = reader.items("full_attn_idxs") if given else range(layers)
    reader.skip("full_attn_idxs")
    derived = [FULL if layer in attends else CONV for layer in range(layers)]
    dense = {"ffn_hidden_size": _adjusted(reader), "activation": "swiglu"}
    return _decoder(reader, derived, "D" * layers, {"D": ("mlp", dense)})


def lfm2_moe(reader: ConfigReader) -> dict[str, Any]:
    """lfm2_moe: dense layers first, then experts, chosen by corrected sigmoid scores."""
    layers, first = reader.layers(2), reader.whole("num_dense_layers", least=0)
    if reader.value("layer_types") is None:
        reader.items("layer_types")
        reader.wrong("layer_types", None, f"a list of {layers} of {CONV} and {FULL}")
    moe = {
        "num_experts": reader.whole("num_experts"),
        "top_k": reader.whole("num_experts_per_tok"),
        "ffn_hidden_size": reader.whole("moe_intermediate_size"),
        "activation": "swiglu",
        "normalize_top_k": reader.flag("norm_topk_prob"),
    }
    scale = reader.number("routed_scaling_factor")
    moe |= {"score": "sigmoid", **({"expert_bias": True} if reader.flag("use_expert_bias") else {})}
    moe |= {"routed_scale": scale} if scale != 1 else {}
    dense = _mlp(reader)
    feeds = "".join("D" if layer < first else "E" for layer in range(layers))
    return _decoder(reader, (FULL,) * layers, feeds, {"D": ("mlp", dense), "E": ("moe", moe)})


def lfm3(reader: ConfigReader) -> dict[str, Any]:
    """lfm3: windows of every fourth layer, with their own base; gates of one value a head, norms before and after each block."""
    layers = reader.layers(2)
    model = common(reader, "norm_eps") | ({"norm_placement": "both"} if reader.flag("use_sandwich_norm") else {})
    kinds = layer_kinds(reader, [FULL if layer % 4 == 2 else CONV if layer % 4 or not layer else SLIDING for layer in range(layers)])
    mixers = lettered(reader, "layer_types", kinds, {FULL: "A", SLIDING: "A", CONV: "C"})
    letters = "".join(f"{mixer}D" for mixer in mixers)
    attention = heads(reader, model["hidden_size"]) | biases(reader) | {"qk_norm": True}
    attention |= {"gate": True, "gate_width": "head"} if reader.flag("use_attention_gate") else {}
    attention |= by_window(reader, attention["head_dim"], (1_000_000.0, 0.5), (10_000.0, 1.0))
    attention |= windows(reader, [kind for kind in kinds if kind != CONV], letters)
    sections = {"A": ("attention", attention), "C": ("short_convolution", _convolution(reader)), "D": ("mlp", _mlp(reader))}
    return model_of(reader, letters, model, sections)


def _mlp(reader: ConfigReader) -> dict[str, Any]:
    """The MLP of a class that states no activation."""
    return {"ffn_hidden_size": reader.whole("intermediate_size"), "activation": "swiglu"}


def _convolution(reader: ConfigReader) -> dict[str, Any]:
    return {"conv_kernel": reader.whole("conv_L_cache"), **({"bias": True} if reader.flag("conv_bias") else {})}


def _decoder(reader: ConfigReader, derived: Sequence[str], feeds: str, sections: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    model = common(reader, "norm_eps")
    if reader.has("tie_embedding"):  # the older name, which the class reads first
        model["tie_embeddings"] = reader.flag("tie_embedding")
    mixers = lettered(reader, "layer_types", layer_kinds(reader, derived), {FULL: "A", CONV: "C"})
    letters = "".join(mixer + feed for mixer, feed in zip(mixers, feeds, strict=False)) or "CD"
    attention = heads(reader, model["hidden_size"]) | {"qk_norm": True}
    attention |= rope(reader, attention["head_dim"])
    return model_of(reader, letters, model, {"A": ("attention", attention), "C": ("short_convolution", _convolution(reader)), **sections})


def _adjusted(reader: ConfigReader) -> int:
    """The MLP's width: as given, or two thirds of the given width times a factor, rounded up to a multiple."""
    key = "block_ff_dim" if reader.has("block_ff_dim") else "intermediate_size"
    reader.skip("intermediate_size")
    width, multiple = reader.whole(key), reader.whole("block_multiple_of")
    adjusts, factor = reader.flag("block_auto_adjust_ff_dim"), reader.factor("block_ffn_dim_multiplier")
    if not adjusts:
        return width
    width = int(2 * width / 3)
    if factor is None:
        return width
    return multiple * -(-int(factor * width) // multiple)
