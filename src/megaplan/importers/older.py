"""Decoders of 2019 to 2024 with LayerNorm: gpt2 and its relatives, bloom, falcon, mpt, opt, stablelm, persimmon, early forms of phi."""

from collections.abc import Sequence
from typing import Any

from megaplan.importers.decoders import decoder
from megaplan.importers.parts import (
    FULL,
    SLIDING,
    SLOPES,
    TORCH_EPS,
    activation,
    biases,
    even_head_dim,
    model_of,
    positions,
    side_by_side,
    windows,
)
from megaplan.importers.reader import ConfigReader
from megaplan.importers.rotary import rope, rope_scaling

_SIDE_BY_SIDE = "attention and MLP of a layer have a norm each and read one stream; planned one after the other, with the same parameters"
_SLOPES = f"{SLOPES}; no position is rotated"
_ROTARY = ("rope_theta", "rope_parameters", "rope_scaling")
_OF_SCORES = (
    *("n_ctx", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "task_specific_params"),
    *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "runner_max_sequence_length"),
    *(f"summary_{name}" for name in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")),
)
"""Fields that only change scores, or belong to heads of other tasks."""


def gpt2(reader: ConfigReader) -> dict[str, Any]:
    """gpt2: LayerNorm, learned positions, biases everywhere, an MLP of two matrices, four times as wide where `n_inner` is null."""
    joint = reader.value("attention_head_type") == "multiquery"  # a field of SantaCoder's class, which became gpt_bigcode
    reader.skip("attention_head_type")
    return _learned(reader, 1 if joint else reader.whole("n_head"))


def gpt_bigcode(reader: ConfigReader) -> dict[str, Any]:
    """gpt_bigcode: gpt2 whose heads share one key and one value, unless `multi_query` is false."""
    reader.skip("num_key_value_heads")  # which the class writes
    return _learned(reader, 1 if reader.flag("multi_query") else reader.whole("n_head"))


def _learned(reader: ConfigReader, kv_heads: int) -> dict[str, Any]:
    if reader.flag("add_cross_attention"):
        reader.cannot("add_cross_attention", True, "crossattention is in every layer, and a spec is one stack", False)
    attention = {"num_kv_heads": kv_heads, "bias": True, "output_bias": True, **_straight(reader.layers(2, "n_layer"))}
    model = {"learned_positions": reader.whole("n_positions")}
    return _stack(reader, attention, model, ("n_embd", "n_layer", "n_head", "n_inner"))


def gpt_neo(reader: ConfigReader) -> dict[str, Any]:
    """gpt_neo: gpt2 without biases of queries, keys and values, scores without a factor, and windows of the layers called local."""
    layers, given = reader.layers(2, "num_layers"), reader.value("attention_types") or [[["global", "local"], 12]]
    reader.skip("attention_types", "attention_layers")
    groups = given if isinstance(given, list) else []
    if all(isinstance(group, list) and len(group) == 2 and isinstance(group[1], int) and isinstance(group[0], list) for group in groups):
        names = [name for kinds, times in groups for name in list(kinds) * min(times, layers)]
    else:
        names = []
    if len(names) != layers or set(names) - {"global", "local"}:
        reader.wrong("attention_types", given, f"lists of global and local, each with its number of repetitions, {layers} layers in total")
    kinds = [SLIDING if name == "local" else FULL for name in names]
    attention = {"output_bias": True, "softmax_scale": 1.0, **_straight(layers), **windows(reader, kinds, "AD" * layers, "window_size")}
    model = {"learned_positions": reader.whole("max_position_embeddings")}
    return _stack(reader, attention, model, ("hidden_size", "num_layers", "num_heads", "intermediate_size"))


def rugpt3xl(reader: ConfigReader) -> dict[str, Any]:
    """rugpt3xl: gpt2 under llama's names of fields, with a separate head; every second layer reads blocks of keys."""
    if reader.value("sparse_mode") in ("alternating", "all"):
        reader.warn("sparse_mode", reader.value("sparse_mode"), "layers read blocks of keys in the original; every key is counted")
    reader.skip("sparse_mode", *(f"sparse_{name}" for name in _SPARSE))
    attention = {"bias": True, "output_bias": True, **_straight(reader.layers(2))}
    model = {"learned_positions": reader.whole("max_position_embeddings")}
    names = "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"
    return _stack(reader, attention, model, names, act="hidden_act", eps="layer_norm_eps")


_SPARSE = "block_size", "num_local_blocks", "num_global_blocks", "num_different_global_patterns"


def gptj(reader: ConfigReader) -> dict[str, Any]:
    """gptj, codegen: attention without biases and an MLP with them read one LayerNorm; the head has a bias; part of a head rotates."""
    rotated = reader.whole_or_null("rotary_dim")
    reader.skip("n_positions", *_ROTARY)  # angles with a fixed base, one per token position
    attention = {"rope_theta": 10_000.0, **({} if rotated is None else {"rotary_dim": rotated})}
    return _stack(reader, attention, {"head_bias": True}, ("n_embd", "n_layer", "n_head", "n_inner"), parallel=True)


def gpt_neox(reader: ConfigReader) -> dict[str, Any]:
    """gpt_neox: two LayerNorms per layer, biases, an MLP of two matrices, a quarter of each head rotated."""
    share, base = reader.value("rotary_pct"), reader.value("rotary_emb_base")
    reader.skip("classifier_dropout", "is_decoder", "rotary_pct", "rotary_emb_base")
    if reader.flag("use_parallel_residual"):
        reader.warn("use_parallel_residual", True, _SIDE_BY_SIDE)
    head_dim = even_head_dim(reader, reader.whole("hidden_size"), reader.whole("num_attention_heads"), None)
    turned = rope(reader, head_dim, partial=share if isinstance(share, float | int) else 0.25)
    turned |= {"rope_theta": float(base)} if isinstance(base, float | int) else {}
    return decoder(
        reader,
        {**biases(reader), **turned},
        mlp_bias=True,
        model={"norm": "layernorm"},
        eps="layer_norm_eps",
        gated=False,
        head_dim=None,
        rotates=False,
    )


def stablelm(reader: ConfigReader) -> dict[str, Any]:
    """stablelm: LayerNorm, an MLP of three matrices, a quarter of each head rotated; attention and MLP may read one norm."""
    if reader.flag("qk_layernorm"):
        reader.cannot("qk_layernorm", True, "every head has its own LayerNorm (q_layernorm.norms), but qk_norm is one for all heads", False)
    return decoder(
        reader,
        {"bias": True} if reader.flag("use_qkv_bias") else {},
        model={"norm": "layernorm"},
        eps="layer_norm_eps",
        partial=0.25,
        parallel=reader.flag("use_parallel_residual"),
        head_dim=None,
    )


def persimmon(reader: ConfigReader) -> dict[str, Any]:
    """persimmon: LayerNorm, biases except on the head, an MLP of two matrices, half of each head rotated."""
    if reader.flag("qk_layernorm"):
        reader.cannot("qk_layernorm", True, "q_layernorm and k_layernorm are LayerNorms with a bias, and qk_norm is RMSNorm", False)
    layer_norm = {"norm": "layernorm"}
    return decoder(
        reader, biases(reader, None), mlp_bias=True, model=layer_norm, eps="layer_norm_eps", gated=False, partial=0.5, head_dim=None
    )


def phi_msft(reader: ConfigReader) -> dict[str, Any]:
    """phi-msft, mixformer-sequential: phi under GPT-2's names of fields."""
    built = reader.value("architecture") or {}
    if not isinstance(built, dict) or built.get("block_cls", "parallel") != "parallel":
        reader.cannot("architecture", built, "attention and MLP read one norm", None)
    reader.skip("architecture", "flash_attn", "flash_rotary", "fused_dense")
    rotated, heads = reader.whole_or_null("rotary_dim"), reader.whole("n_head")
    attention: dict[str, Any] = {"num_kv_heads": reader.whole_or_null("n_head_kv") or heads, "bias": True, "output_bias": True}
    attention |= {"rope_theta": 10_000.0, **({} if rotated is None else {"rotary_dim": rotated})}
    reader.skip("n_positions")
    return _stack(reader, attention, {"head_bias": True}, ("n_embd", "n_layer", "n_head", "n_inner"), parallel=True)


def codeshell(reader: ConfigReader) -> dict[str, Any]:
    """codeshell: gpt2 with groups of heads that share keys and values, and with angles in the place of learned positions."""
    reader.only("position_embedding_type", ("rope",), "positions are angles here")
    groups = reader.whole("num_query_groups") if reader.flag("group_query_attention") else reader.whole("n_head")
    reader.skip("num_query_groups", "n_positions")
    attention = {"num_kv_heads": groups, "bias": True, "output_bias": True, "rope_theta": 10_000.0}
    return _stack(reader, attention | rope_scaling(reader, reader.mapping("rope_scaling")), {}, ("n_embd", "n_layer", "n_head", "n_inner"))


def phi3_small(reader: ConfigReader) -> dict[str, Any]:
    """phi3small: LayerNorm, biases, a gated MLP; a factor each for embeddings, scores and logits; block-sparse keys are not expressed."""
    reader.only("ff_dim_multiplier", (None,), "the MLP's width is a separate field")
    every = reader.value("dense_attention_every_n_layers")
    reader.warn("dense_attention_every_n_layers", every, "other layers attend to some blocks of keys in the original; every key is counted")
    reader.skip("dense_attention_every_n_layers", *(f"blocksparse_{name}" for name in _BLOCKS), "ff_dim_multiplier")
    width = reader.whole("hidden_size") // reader.whole("num_attention_heads")
    attention = biases(reader, None) | {"rope_theta": reader.number("rope_embedding_base")}
    attention |= {"softmax_scale": reader.number("mup_attn_multiplier") / width} if reader.flag("mup_use_scaling") else {}
    factors = {
        "embedding_multiplier": reader.number("mup_embedding_multiplier"),
        "logits_multiplier": 1 / reader.number("mup_width_multiplier"),
    }
    reader.skip("mup_attn_multiplier")
    return decoder(
        reader, attention, mlp_bias=True, model={"norm": "layernorm"} | factors, eps="layer_norm_eps", head_dim=None, rotates=False
    )


_BLOCKS = ("block_size", "homo_head_pattern", "num_local_blocks", "triton_kernel_block_size", "vert_stride")


def bloom(reader: ConfigReader) -> dict[str, Any]:
    """bloom: gpt2 with a norm on the embedding, and slopes in the place of positions."""
    if reader.flag("apply_residual_connection_post_layernorm"):
        reader.cannot("apply_residual_connection_post_layernorm", True, "the stream is added after the norm", False)
    reader.skip(
        "slow_but_exact", "n_inner", "seq_length", "offset_alibi", "skip_bias_add", "skip_bias_add_qkv", "attention_softmax_in_fp32"
    )
    reader.warn("model_type", reader.family, _SLOPES)
    layers = reader.layers(2, "n_layer")
    attention = {"bias": True, "output_bias": True, **_straight(layers)}
    return _stack(reader, attention, {"embedding_norm": True}, (_width(reader), "n_layer", "n_head", ""), act=None)


def _width(reader: ConfigReader) -> str:
    """Field of the stream's width: `n_embed` of early configs before `hidden_size`, as in the classes."""
    reader.skip("hidden_size")
    return "hidden_size" if reader.value("n_embed") is None else "n_embed"


def opt(reader: ConfigReader) -> dict[str, Any]:
    """opt: learned positions of which the first two are for padding, and gpt2's blocks with biases everywhere or nowhere."""
    hidden = reader.whole("hidden_size")
    for key, built, why in (
        ("do_layer_norm_before", True, "norms are applied to a block's output, and the last norm is absent"),
        ("_remove_final_layer_norm", False, "a spec has a norm before the head"),
        ("layer_norm_elementwise_affine", True, "norms have neither a weight nor a bias"),
    ):
        reader.only(key, (built, None), why)
    reader.only("word_embed_proj_dim", (hidden, None), "embeddings of another width have projections (project_in, project_out)")
    reader.skip("dropout", "layerdrop", "init_std", "activation_dropout", "prefix")
    biased, act = reader.flag("enable_bias"), reader.text("activation_function")
    attention = {**({"bias": True, "output_bias": True} if biased else {}), **_straight(reader.layers(2))}
    positions = {"learned_positions": reader.whole("max_position_embeddings") + _PADDING_POSITIONS}
    if act == "relu":
        reader.warn("activation_function", act, "planned as its square, which keeps the same values for backward")
        reader.skip("activation_function")
    names = "hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim"
    model = _stack(reader, attention, positions, names, act=None if act == "relu" else "activation_function", bias=biased, eps=TORCH_EPS)
    return model | {"mlp": model["mlp"] | {"activation": "relu2"}} if act == "relu" else model


_PADDING_POSITIONS = 2
"""Rows of opt's table of positions that no token of a text has."""


def mpt(reader: ConfigReader) -> dict[str, Any]:
    """mpt: bloom without a bias anywhere and without a norm on the embedding."""
    reader.warn("model_type", "mpt", _SLOPES)
    inside = reader.mapping("attn_config")
    if inside.get("qk_ln"):
        reader.cannot("attn_config", {"qk_ln": True}, "it norms queries and keys outside transformers' class", None)
    shared = {"multiquery_attention": 1, "grouped_query_attention": inside.get("kv_n_heads")}.get(inside.get("attn_type", ""))
    if shared is not None:
        reader.warn(
            "attn_config",
            {"attn_type": inside["attn_type"]},
            "a class that is published with the weights; the class of transformers shares no keys",
        )
    if inside.get("clip_qkv") is not None:
        reader.warn("attn_config", {"clip_qkv": inside["clip_qkv"]}, "queries, keys and values are clamped; shapes are the same")
    reader.only("no_bias", (True, None), "transformers' class has no bias")
    reader.only("expansion_ratio", (4, None), "the MLP of transformers' class is four times as wide as the stream")
    reader.skip(
        "attn_config", "max_seq_len", "emb_pdrop", "learned_pos_emb", "embedding_fraction", "norm_type", "init_device", "init_config"
    )
    names = "d_model", "n_layers", "n_heads", ""
    attention = _straight(reader.layers(2, "n_layers")) | ({} if shared is None else {"num_kv_heads": shared})
    return _stack(reader, attention, {"norm": "layernorm_no_bias"}, names, act=None, bias=False)


def falcon(reader: ConfigReader) -> dict[str, Any]:
    """falcon: heads share one key and value, or some; attention and MLP read one LayerNorm, or one each; slopes or angles."""
    heads, layers, newer = reader.whole("num_attention_heads"), reader.layers(2), reader.flag("new_decoder_architecture")
    shared = reader.whole_or_null("num_kv_heads") or heads if newer else 1 if reader.flag("multi_query") else heads
    reader.skip("num_kv_heads", "multi_query")
    side, norms = reader.flag("parallel_attn"), reader.whole_or_null("num_ln_in_parallel_attn") or (2 if newer else 1)
    if side and norms == 2:
        reader.warn("num_ln_in_parallel_attn", norms, _SIDE_BY_SIDE)
    bias, width = reader.flag("bias"), _width(reader)
    attention: dict[str, Any] = {"num_kv_heads": shared, **({"bias": True, "output_bias": True} if bias else {})}
    if reader.flag("alibi"):
        reader.warn("alibi", True, _SLOPES)
        attention |= _straight(layers)
    else:
        attention |= rope(reader, even_head_dim(reader, reader.whole(width), heads, None))
    names = width, "num_hidden_layers", "num_attention_heads", "ffn_hidden_size"
    return _stack(reader, attention, {}, names, act="activation", bias=bias, parallel=side and norms != 2)


def _straight(layers: int) -> dict[str, Any]:
    """Layers whose queries and keys do not rotate: all."""
    return {"nope_layers": positions("AD" * layers, "A")}


def _stack(
    reader: ConfigReader,
    attention: dict[str, Any],
    model: dict[str, Any],
    names: Sequence[str],
    *,
    act: str | None = "activation_function",
    bias: bool = True,
    parallel: bool = False,
    eps: str | float = "layer_norm_epsilon",
) -> dict[str, Any]:
    """The section `model` of a decoder with LayerNorm and an MLP of two matrices.

    Args:
        reader: Reader of the config.
        attention: Keys of attention in addition to counts and widths.
        model: Keys of `model` in addition to the common ones.
        names: Fields of the stream's width, layers, heads, and the MLP's inner width, which is four times the stream's if it is null.
        act: Field of the activation; None for a class that has GELU.
        bias: Biases of the MLP.
        parallel: Attention and MLP read one norm.
        eps: Field of the norms' epsilon, or the epsilon of a class without a field for it.
    """
    hidden, layers, heads = (reader.whole(name) for name in names[:3])
    inner = reader.whole_or_null(names[3]) if names[3] else None
    reader.layers(2, names[1])
    reader.skip(*_OF_SCORES, "classifier_dropout", *(_ROTARY if "nope_layers" in attention else ()))
    letters = "AD" * layers
    keys = {
        "hidden_size": hidden,
        "vocab_size": reader.whole("vocab_size"),
        "tie_embeddings": reader.flag("tie_word_embeddings"),
        "norm_eps": reader.number(eps) if isinstance(eps, str) else eps,
        "norm": "layernorm",
    }
    side = side_by_side(layers) if parallel else {}
    counts = {"kind": "gqa", "num_heads": heads, "num_kv_heads": heads, "head_dim": even_head_dim(reader, hidden, heads, None)}
    dense: dict[str, Any] = {
        "ffn_hidden_size": 4 * hidden if inner is None else inner,
        "activation": "gelu" if act is None else activation(reader, act, gated=False),
        **({"bias": True} if bias else {}),
    }
    return model_of(reader, letters, keys | model | side, {"A": ("attention", counts | attention), "D": ("mlp", dense)})
