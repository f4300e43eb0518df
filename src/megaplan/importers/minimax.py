"""MiniMax: lightning attention in most layers (minimax), and grouped-query attention that chooses blocks of keys (minimax_m3_vl_text)."""

from typing import Any

from megaplan.importers.experts import decoder, sigmoid_choice
from megaplan.importers.layer_heads import listed_dense
from megaplan.importers.parts import FULL, LINEAR, common, experts, heads, layer_kinds, lettered, model_of
from megaplan.importers.reader import ConfigReader
from megaplan.importers.rotary import rope

BLOCK_SPARSE = "minimax_m3_sparse"
_LEGACY = {"num_heads": "num_index_heads", "head_dim": "index_dim", "block_size": "block_size", "top_blocks": "topk_blocks"}
_FIELDS = {"num_heads": "index_n_heads", "head_dim": "index_head_dim", "block_size": "index_block_size", "top_blocks": "index_topk_blocks"}
_GATED_EPS = 1e-6
"""Epsilon of the norm of lightning attention, which no field states."""


def minimax(reader: ConfigReader) -> dict[str, Any]:
    """minimax: every layer has experts; linear attention has a decaying state per head."""
    keys, layers = common(reader), reader.layers(2)
    marks, width = reader.value("attn_type_list"), reader.value("rotary_dim")  # fields of the class that is published with the weights
    reader.skip("attn_type_list", "rotary_dim", "postnorm", "shared_moe_mode")
    marks = marks if isinstance(marks, list) and len(marks) == layers else [not layer % 2 for layer in range(layers)]
    kinds = layer_kinds(reader, [FULL if mark else LINEAR for mark in marks])
    reader.published("shared_intermediate_size", 0, "shared experts are not a part of the class")
    letters = "".join(letter + "E" for letter in lettered(reader, "layer_types", kinds, {LINEAR: "G", FULL: "A"}))
    attention = heads(reader, keys["hidden_size"])
    attention |= rope(reader, attention["head_dim"], partial=width / attention["head_dim"] if isinstance(width, int) and width > 0 else 1.0)
    window = reader.whole_or_null("sliding_window", least=0)
    attention |= {"window_size": window} if window else {}
    lightning = {"kind": "lightning", "num_heads": attention["num_heads"], "head_dim": attention["head_dim"]}
    lightning["chunk_size"] = reader.whole("block_size")
    lightning |= {"gated_norm_eps": _GATED_EPS} if keys["norm_eps"] != _GATED_EPS else {}
    moe = experts(reader, count="num_local_experts", width="intermediate_size", normalize=True)
    for name in ("full_attn", "linear_attn", "mlp"):
        for part, of in (("alpha", "the stream"), ("beta", "what a block adds")):
            factor = reader.number(f"{name}_{part}_factor")
            if factor != 1:
                reader.warn(f"{name}_{part}_factor", factor, f"a factor of {of} in the original; shapes are the same")
    sections = {"A": ("attention", attention), "G": ("linear_attention", lightning), "E": ("moe", moe)}
    return model_of(reader, letters, keys, sections)


def minimax_m3(reader: ConfigReader) -> dict[str, Any]:
    """minimax_m3_vl_text: norms of 1 + weight, a shared expert, and an indexer of blocks in the layers that the config marks."""
    layers, older = reader.layers(2), reader.mapping("sparse_attention_config")
    marks = older.get("sparse_attention_freq")
    kinds = [BLOCK_SPARSE if mark else FULL for mark in marks[:layers]] if isinstance(marks, list) else [FULL] * layers
    kinds = list(layer_kinds(reader, kinds))
    sparse = [2 * layer for layer, kind in enumerate(kinds) if kind == BLOCK_SPARSE]
    wrong = [kind for kind in kinds if kind not in (BLOCK_SPARSE, FULL)]
    if wrong:
        reader.cannot("layer_types", wrong[0], f"a layer is {FULL} or {BLOCK_SPARSE}", FULL)
    sizes = {key: older.get(f"sparse_{name}") or reader.whole(_FIELDS[key]) for key, name in _LEGACY.items()}
    reader.skip("index_local_blocks", *_FIELDS.values())
    attention = {"qk_norm": True} | ({"block_indexer": {**sizes, "layers": sparse}} if sparse else {})
    moe = experts(reader, count="num_local_experts", width="intermediate_size", normalize=True) | sigmoid_choice(reader, grouped=False)
    moe["shared_ffn_hidden_size"] = reader.whole("shared_intermediate_size")
    scale = reader.number("routed_scaling_factor")
    moe |= {"swiglu_limit": reader.number("swiglu_limit")} | ({"routed_scale": scale} if scale != 1 else {})
    reader.warn("swiglu_alpha", reader.value("swiglu_alpha"), "dense MLPs and shared experts have plain swiglu here; shapes are the same")
    reader.skip("hidden_act", "n_shared_experts")
    reader.published("qk_norm_type", "per_head", "a norm over each query and key head")
    reader.published("use_gemma_norm", True, "norms scale by 1 + weight")
    dense, width = listed_dense(reader, set()), reader.whole("head_dim")
    turned = reader.whole("rotary_dim")
    return decoder(
        reader,
        attention,
        moe,
        model={"zero_centered_norm": True},
        windowed=(FULL,) * layers,
        dense=dense,
        partial=turned / width,
        wide="dense_intermediate_size",
    )
