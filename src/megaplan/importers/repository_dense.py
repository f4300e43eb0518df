"""Decoders whose class is published with the weights: internlm(2), baichuan, llada, hf_olmo, minicpm, minimind, orion, qwen, chatglm."""

from typing import Any

from megaplan.importers.decoders import decoder
from megaplan.importers.experts import decoder as experts_decoder
from megaplan.importers.parts import (
    GATED_ACTIVATIONS,
    SLOPES,
    TORCH_EPS,
    activation,
    biases,
    even_head_dim,
    experts,
    minicpm_factors,
    model_of,
)
from megaplan.importers.reader import ConfigReader
from megaplan.importers.rotary import rotary_width


def internlm(reader: ConfigReader) -> dict[str, Any]:
    """internlm, internlm2: llama with a field of another name for the biases of attention, and none of the MLP."""
    reader.skip("rotary")
    return decoder(reader, biases(reader, "bias"))


def baichuan(reader: ConfigReader) -> dict[str, Any]:
    """baichuan: llama; the larger models have slopes in the place of angles."""
    if not reader.has("max_position_embeddings"):
        reader.warn("model_type", "baichuan", f"{SLOPES}; angles are planned")
    return decoder(reader, {})


def orion(reader: ConfigReader) -> dict[str, Any]:
    """orion: llama with LayerNorm, under the name of the field of RMSNorm's epsilon."""
    return decoder(reader, {}, model={"norm": "layernorm"})


def llada(reader: ConfigReader) -> dict[str, Any]:
    """llada: llama under the names of AI2's OLMo; a masked token is predicted from those on both sides."""
    for key, built, why in (
        ("block_type", "llama", "layers have other blocks"),
        ("layer_norm_type", "rms", "norms are RMSNorms"),
        ("bias_for_layer_norm", False, "RMSNorms have no bias"),
        ("multi_query_attention", None, "n_kv_heads counts the heads of keys"),
    ):
        reader.only(key, (built, None), why)
    return _of_olmo(reader, reader.whole("mlp_hidden_size"), {"norm_eps": reader.number("rms_norm_eps")})


def hf_olmo(reader: ConfigReader) -> dict[str, Any]:
    """hf_olmo: OLMo's first class, whose `mlp_hidden_size` is of the gate and the inner values together; LayerNorms without a scale."""
    reader.only("block_type", ("sequential", None), "layers have other blocks")
    reader.only("activation_type", ("swiglu",), "the gate is SiLU")
    reader.only("layer_norm_type", ("default", "low_precision", "rms"), "norms are LayerNorms or RMSNorms")
    reader.only("layer_norm_with_affine", (False,), "norms have neither a scale nor a bias")
    reader.skip("bias_for_layer_norm")
    if reader.value("layer_norm_type") != "rms":
        reader.warn("layer_norm_type", reader.value("layer_norm_type"), "norms subtract the mean; RMSNorm without a scale is planned")
    inner = reader.whole_or_null("mlp_hidden_size") or reader.whole("mlp_ratio") * reader.whole("d_model")
    return _of_olmo(reader, inner // 2, {"norm_eps": TORCH_EPS, "norm": "rmsnorm_no_scale"})


def _of_olmo(reader: ConfigReader, inner: int, norms: dict[str, Any]) -> dict[str, Any]:
    """The section `model` of classes with the names of AI2's OLMo.

    Args:
        reader: Reader of the config.
        inner: Inner width of the MLP.
        norms: Keys of `model` for the norms.
    """
    for key, built, why in (
        ("rope", True, "positions are rotary angles"),
        ("alibi", False, SLOPES),
        ("input_emb_norm", False, "embeddings have no norm"),
        ("embedding_layer_norm", False, "embeddings have no norm"),
        ("attention_layer_norm", False, "a norm over all queries and all keys"),
        ("scale_logits", False, "logits have no factor of the width"),
    ):
        reader.only(key, (built, None), why)
    reader.skip(*_OLMO_OTHER)
    hidden, layers, heads = reader.whole("d_model"), reader.layers(2, "n_layers"), reader.whole("n_heads")
    bias, joint = reader.flag("include_bias"), reader.value("multi_query_attention") is True
    reader.skip("multi_query_attention")
    section: dict[str, Any] = {
        "kind": "gqa", "num_heads": heads, "num_kv_heads": 1 if joint else reader.whole_or_null("n_kv_heads") or heads,
        "head_dim": even_head_dim(reader, hidden, heads, None), "rope_theta": float(reader.number("rope_theta")),
        **({"bias": True} if bias or reader.flag("include_qkv_bias") else {}), **({"output_bias": True} if bias else {}),
    }  # fmt: skip
    known = GATED_ACTIVATIONS | {"swiglu": "swiglu"}
    dense = {"ffn_hidden_size": inner, "activation": activation(reader, "activation_type", known=known), **({"bias": True} if bias else {})}
    rows = reader.whole_or_null("embedding_size") or reader.whole("vocab_size")
    reader.skip("vocab_size", "tie_word_embeddings")
    keys = {"hidden_size": hidden, "vocab_size": rows, "tie_embeddings": reader.flag("weight_tying"), **norms}
    return model_of(reader, "AD" * layers, keys, {"A": ("attention", section), "D": ("mlp", dense)})


_OLMO_OTHER = (
    *("mlp_ratio", "attention_layer_norm_with_affine", "layer_norm_with_affine", "rope_full_precision", "flash_attention", "init_device"),
    *("block_group_size", "init_cutoff_factor", "init_fn", "init_std", "precision", "mask_token_id"),
)


def minicpm(reader: ConfigReader) -> dict[str, Any]:
    """minicpm: llama with a factor each for embeddings, a block's output and the head's input; experts in every layer, or none."""
    if reader.value("sparse_config"):
        reader.warn("sparse_config", "given", "blocks of keys are chosen in the original; every key is counted")
    reader.skip("sparse_config", "mup_denominator")
    model, added = minicpm_factors(reader, reader.whole("hidden_size"), reader.layers(2))
    if reader.value("num_experts"):
        moe = experts(reader, count="num_experts", width="intermediate_size", normalize=True)
        moe |= {"routed_scale": added["output_multiplier"]} if added else {}
        return experts_decoder(reader, biases(reader) | added, moe, model=model)
    reader.skip("num_experts", "num_experts_per_tok")
    return decoder(reader, biases(reader) | added, model=model, dense=added)


def qwen(reader: ConfigReader) -> dict[str, Any]:
    """qwen: biases on queries, keys and values; the two halves of `intermediate_size` are the gate and the inner values."""
    hidden, layers, heads = reader.whole("hidden_size"), reader.layers(2), reader.whole("num_attention_heads")
    bare = reader.flag("no_bias")
    section: dict[str, Any] = {
        "kind": "gqa", "num_heads": heads, "num_kv_heads": heads, "head_dim": reader.whole("kv_channels"), "bias": True,
        **({} if bare else {"output_bias": True}),
    }  # fmt: skip
    rotated = rotary_width(section["head_dim"], reader.number("rotary_pct"))
    section |= {"rope_theta": reader.number("rotary_emb_base"), **({"rotary_dim": rotated} if rotated != section["head_dim"] else {})}
    reader.skip("seq_length", "rope_scaling", "use_dynamic_ntk", "use_logn_attn", "scale_attn_weights", "softmax_in_fp32", "onnx_safe")
    reader.skip("use_flash_attn", "use_cache_quantization", "use_cache_kernel", "fp32", "bf16", "fp16", "visual")
    if reader.value("visual"):
        reader.cannot("visual", "given", "the tensors of this encoder are not known", None)
    dense = {"ffn_hidden_size": reader.whole("intermediate_size") // 2, "activation": "swiglu", **({} if bare else {"bias": True})}
    keys = _keys(reader, hidden, "vocab_size", "layer_norm_epsilon")
    return model_of(reader, "AD" * layers, keys, {"A": ("attention", section), "D": ("mlp", dense)})


def chatglm(reader: ConfigReader) -> dict[str, Any]:
    """chatglm, from its second version on: keys and values of groups, biases on queries, keys and values, half of each head rotated."""
    if reader.value("position_encoding_2d") is not None or reader.value("inner_hidden_size") is not None:
        reader.refuse("model_type", "chatglm", "the first ChatGLM rotates by two positions and adds the normed input to a block's output")
    if reader.flag("apply_residual_connection_post_layernorm") or not reader.flag("post_layer_norm"):
        reader.refuse("post_layer_norm", reader.value("post_layer_norm"), "the last norm, and norms before blocks, are always there")
    hidden, layers, heads = reader.whole("hidden_size"), reader.layers(2, "num_layers"), reader.whole("num_attention_heads")
    everywhere, joint = reader.flag("add_bias_linear"), reader.flag("add_qkv_bias")
    shared = reader.whole("multi_query_group_num") if reader.flag("multi_query_attention") else heads
    reader.skip(
        "multi_query_group_num", "num_hidden_layers", "position_encoding_2d", "inner_hidden_size", "classifier_dropout", "pre_seq_len"
    )
    reader.skip(
        "apply_query_key_layer_scaling", "attention_softmax_in_fp32", "bias_dropout_fusion", "fp32_residual_connection", "seq_length"
    )
    reader.skip("prefix_projection", "quantization_bit", "original_rope", "interleaved_qkv", "rope_ratio", "vocab_size")
    section: dict[str, Any] = {
        "kind": "gqa", "num_heads": heads, "num_kv_heads": shared, "head_dim": reader.whole("kv_channels"),
        **({"bias": True} if everywhere or joint else {}), **({"output_bias": True} if everywhere else {}),
    }  # fmt: skip
    ratio = reader.value("rope_ratio")
    section |= {"rotary_dim": section["head_dim"] // 2, "rope_theta": 10_000.0 * (ratio if isinstance(ratio, int | float) else 1)}
    dense = {"ffn_hidden_size": reader.whole("ffn_hidden_size"), "activation": "swiglu", **({"bias": True} if everywhere else {})}
    keys = _keys(reader, hidden, "padded_vocab_size", "layernorm_epsilon")
    keys |= {} if reader.flag("rmsnorm") else {"norm": "layernorm"}
    if reader.value("vision_config"):
        reader.cannot("vision_config", "given", "the tensors of this encoder are not known", None)
    return model_of(reader, "AD" * layers, keys, {"A": ("attention", section), "D": ("mlp", dense)})


def minimind(reader: ConfigReader) -> dict[str, Any]:
    """minimind: llama with a norm over each query and key head since 2026; none in earlier configs, with `n_routed_experts`."""
    early = reader.has("n_routed_experts")
    attention: dict[str, Any] = {} if early else {"qk_norm": True}
    reader.skip("inference_rope_scaling", "flash_attn", "seq_aux", "aux_loss_alpha", "router_aux_loss_coef", "max_seq_len", "multiple_of")
    if early:
        reader.skip("num_experts", "moe_intermediate_size")
    if not reader.flag("use_moe"):
        reader.skip("n_routed_experts", "n_shared_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
        reader.skip("scoring_func")
        return decoder(reader, attention)
    reader.only("scoring_func", ("softmax", None), "scores of experts are a softmax")
    wide = "intermediate_size" if early or reader.value("moe_intermediate_size") is None else "moe_intermediate_size"
    moe = experts(reader, count="n_routed_experts" if early else "num_experts", width=wide)
    if early:
        moe["shared_ffn_hidden_size"] = int(reader.value("n_shared_experts") or 0) * moe["ffn_hidden_size"]
    else:
        reader.skip("intermediate_size", "n_shared_experts")
    return experts_decoder(reader, attention, moe)


def _keys(reader: ConfigReader, hidden: int, vocabulary: str, eps: str) -> dict[str, Any]:
    """Keys of `model` of classes with their own names."""
    even_head_dim(reader, hidden, reader.whole("num_attention_heads"), None)
    return {
        "hidden_size": hidden,
        "vocab_size": reader.whole(vocabulary),
        "tie_embeddings": reader.flag("tie_word_embeddings"),
        "norm_eps": reader.number(eps),
    }
