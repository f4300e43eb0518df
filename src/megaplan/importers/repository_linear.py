"""Decoders of flash-linear-attention, whose classes come with that library: gated_deltanet and transformer.

Sources: `models/gated_deltanet`, `models/transformer`, `models/hybrid.py`, `layers/gated_deltanet.py`, `layers/attn.py` and
`modules/mlp.py` of fla-org/flash-linear-attention.
"""

from collections.abc import Mapping
from typing import Any

from megaplan.importers.parts import activation, common, even_head_dim, model_of
from megaplan.importers.reader import ConfigReader

_WIDTH_STEP = 256
"""Multiple of the inner widths that are not stated."""
_OF_KERNELS = ("attn_mode", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp")
_ATTENTION = {"layers", "num_heads", "num_kv_heads", "qkv_bias", "window_size", "rope_theta"}
"""Keys of `attn` of a hybrid."""


def transformer(reader: ConfigReader) -> dict[str, Any]:
    """transformer: llama with a norm of queries and keys, biases of these and of values, and a window, each by its field."""
    model, dense = _ends(reader)
    reader.only("elementwise_affine", (True, None), "norms have no weight")
    given = {name: reader.value(name) for name in ("num_heads", "num_kv_heads", "qkv_bias", "window_size", "rope_theta")}
    attention = _attention(reader, given, "num_heads", model["hidden_size"]) | ({"qk_norm": True} if reader.flag("qk_norm") else {})
    reader.skip(*given)
    return model_of(reader, "AD" * reader.layers(2), model, {"A": ("attention", attention), "D": ("mlp", dense)})


def gated_deltanet(reader: ConfigReader) -> dict[str, Any]:
    """gated_deltanet: gated delta nets, and attention in the layers that `attn` lists."""
    (model, dense), layers = _ends(reader), reader.layers(2)
    for key, what in (("use_gate", "a gate of the output"), ("use_short_conv", "convolutions of queries, keys and values")):
        reader.only(key, (True,), f"a G block has {what}")
    heads, width, factor = reader.whole("num_heads"), reader.whole("head_dim"), reader.number("expand_v")
    if width * factor % 1:
        reader.contradicts("expand_v", f"head_dim · expand_v = {width} · {factor} is not a whole number", "correct the one that is wrong")
    delta = {
        "kind": "gated_delta",
        "num_key_heads": heads,
        "num_value_heads": reader.whole_or_null("num_v_heads") or heads,
        "key_dim": width,
        "value_dim": max(1, int(width * factor)),
        "conv_kernel": reader.whole("conv_size"),
        **({"negative_eigenvalues": True} if reader.flag("allow_neg_eigval") else {}),
    }
    given = reader.value("attn")
    reader.skip("attn")
    inside = reader.mapping("attn") if not isinstance(given, list) else {}
    attends = inside.get("layers", [])
    if isinstance(given, list) or set(inside) - _ATTENTION or not (isinstance(attends, list) and set(attends) <= set(range(layers))):
        reader.cannot("attn", given, f"it is one mapping of {', '.join(sorted(_ATTENTION))}, with layers from 0 to {layers - 1}", None)
        inside, attends = {}, []
    letters = "".join("AD" if layer in attends else "GD" for layer in range(layers))
    sections = {"G": ("linear_attention", delta), "D": ("mlp", dense)}
    if attends:
        sections["A"] = ("attention", _attention(reader, inside, "attn", model["hidden_size"]))
    return model_of(reader, letters, model, sections)


def _ends(reader: ConfigReader) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keys of `model`, and the MLP, whose width follows from a ratio if it is not stated."""
    reader.skip(*_OF_KERNELS)
    reader.only("attnres_block_size", (None,), "layers attend to the outputs of earlier ones")
    model = common(reader, "norm_eps")
    ratio, stated = reader.factor("hidden_ratio") or 4, reader.whole_or_null("intermediate_size")
    width = stated or -(-int(model["hidden_size"] * ratio * 2 / 3) // _WIDTH_STEP) * _WIDTH_STEP
    return model, {"ffn_hidden_size": width, "activation": activation(reader)}


def _attention(reader: ConfigReader, given: Mapping[str, Any], key: str, hidden: int) -> dict[str, Any]:
    """The section of attention, from fields that `key` has or is one of."""
    counts: list[int] = [given.get("num_heads") or 0, given.get("num_kv_heads") or given.get("num_heads") or 0]
    if any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in counts):
        reader.wrong(key, counts, "counts of heads of at least 1")
        counts = [1, 1]
    window, base = given.get("window_size"), given.get("rope_theta", 10_000.0)
    section: dict[str, Any] = {
        "kind": "gqa", "num_heads": counts[0], "num_kv_heads": counts[1], "head_dim": even_head_dim(reader, hidden, counts[0], None),
        **({"bias": True} if given.get("qkv_bias") else {}), **({"window_size": window} if window is not None else {}),
    }  # fmt: skip
    if base is None:
        reader.cannot(key, base, "rotary angles have a base", 10_000.0)
    return section | {"rope_theta": float(base or 10_000.0)}
