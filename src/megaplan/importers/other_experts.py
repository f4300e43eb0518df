"""Decoders of experts whose fields have their own names: dbrx, hunyuan (the Large model), step3_text, grok-1 and grok-2."""

from collections.abc import Mapping
from typing import Any

from megaplan.importers.experts import decoder
from megaplan.importers.layer_heads import listed_dense
from megaplan.importers.parts import TORCH_EPS, biases, even_head_dim, experts, model_of, uniform
from megaplan.importers.reader import ConfigReader
from megaplan.importers.rotary import rope


def dbrx(reader: ConfigReader) -> dict[str, Any]:
    """dbrx: LayerNorms without a bias; fields of attention and of the experts are nested."""
    hidden, layers, heads = reader.whole("d_model"), reader.layers(2, "n_layers"), reader.whole("n_heads")
    inside, feed = reader.mapping("attn_config"), reader.mapping("ffn_config")
    width = even_head_dim(reader, hidden, heads, None)
    attention = {
        "kind": "gqa",
        "num_heads": heads,
        "num_kv_heads": _nested(reader, "attn_config", inside, "kv_n_heads", 1),
        "head_dim": width,
    }
    reader.published("num_key_value_heads", attention["num_kv_heads"], "the class builds attn_config.kv_n_heads")
    base = inside.get("rope_theta")  # a field of published configs; the class has the same base as every other class
    attention |= {"rope_theta": float(base)} if isinstance(base, int | float) and base > 0 else rope(reader, width)
    if inside.get("clip_qkv") is not None:
        reader.warn("attn_config", {"clip_qkv": inside["clip_qkv"]}, "queries, keys and values are clamped; shapes are the same")
    act = feed.get("ffn_act_fn")
    if isinstance(act, dict) and act.get("name") != "silu":
        reader.cannot("ffn_config", {"ffn_act_fn": act}, "experts are swiglu here", None)
    order = feed.get("moe_normalize_expert_weights", 1.0)
    if order not in (1, None):
        reader.warn("ffn_config", {"moe_normalize_expert_weights": order}, "weights of chosen experts have another norm than their sum")
    names = {"num_experts": ("moe_num_experts", 4), "top_k": ("moe_top_k", 1), "ffn_hidden_size": ("ffn_hidden_size", 3584)}
    moe: dict[str, Any] = {key: _nested(reader, "ffn_config", feed, *name) for key, name in names.items()}
    moe |= {"activation": "swiglu", "normalize_top_k": order is not None}
    reader.skip("max_seq_len", "emb_pdrop", "rope_theta", "rope_parameters")
    reader.only("tie_word_embeddings", (False,), "the class has a head that is not tied")
    keys = {"hidden_size": hidden, "vocab_size": reader.whole("vocab_size"), "norm_eps": TORCH_EPS, "norm": "layernorm_no_bias"}
    return model_of(reader, "AE" * layers, keys, {"A": ("attention", attention), "E": ("moe", moe)})


def _nested(reader: ConfigReader, key: str, inside: Mapping[str, Any], name: str, default: int) -> int:
    """A count in a nested mapping, or its default."""
    value = inside.get(name, default)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    reader.wrong(key, {name: value}, f"a mapping with {name}, an integer of at least 1")
    return 1


def hunyuan(reader: ConfigReader) -> dict[str, Any]:
    """hunyuan: experts and shared ones in every layer; some layers read the keys and values of the layer before (arXiv:2405.12981)."""
    reader.only("use_mla", (False, None), "latent attention of this class is not read")
    reader.only("mlp_bias", (False,), "the shared expert has biases, the routed experts none")
    layers = reader.layers(2)
    attention = biases(reader) | ({"qk_norm": True} if reader.flag("use_qk_norm") else {})
    share = reader.whole("cla_share_factor") if reader.flag("use_cla") else 1
    reader.skip("cla_share_factor")
    readers = {first: range(first + 1, min(first + share, layers)) for first in range(0, layers, share)}
    shared = [{"source": 2 * first, "layers": [2 * layer for layer in own]} for first, own in readers.items() if own]
    attention |= {"shared_keys": shared} if shared else {}
    width = uniform(reader, "moe_intermediate_size" if reader.value("moe_intermediate_size") else "intermediate_size")
    reader.skip("moe_intermediate_size", "intermediate_size")
    moe: dict[str, Any] = {"num_experts": uniform(reader, "num_experts"), "top_k": uniform(reader, "moe_topk"), "ffn_hidden_size": width}
    together = uniform(reader, "num_shared_expert") * width if reader.value("use_mixed_mlp_moe") else 0
    reader.skip("num_shared_expert", "use_mixed_mlp_moe")
    reader.only("hidden_act", ("silu",), "a gated MLP is swiglu here")
    moe |= {"shared_ffn_hidden_size": together, "activation": "swiglu", "normalize_top_k": True}
    return decoder(reader, attention, moe)


def step3(reader: ConfigReader) -> dict[str, Any]:
    """step3_text: queries come from a latent with a norm, heads share keys and values; a shared expert in the layers with experts."""
    dense = listed_dense(reader, {0})
    attention = {"num_kv_heads": reader.whole("num_attention_groups"), "query_rank": reader.whole("share_q_dim")}
    moe = experts(
        reader, count="moe_num_experts", width="moe_intermediate_size", top_k="moe_top_k", normalize="norm_expert_weight"
    )  # fmt: skip
    return decoder(reader, attention, moe | {"shared_ffn_hidden_size": reader.whole("share_expert_dim")}, dense=dense)


def grok(reader: ConfigReader) -> dict[str, Any]:
    """grok-1, grok-2: norms before and after each block; in grok-2 every token takes an MLP in addition to its experts."""
    further = reader.has("residual_moe") and reader.flag("residual_moe")
    moe: dict[str, Any] = {
        "num_experts": reader.whole(reader.same("num_experts", "num_local_experts")),
        "top_k": reader.whole("num_experts_per_tok"),
        "ffn_hidden_size": reader.whole("moe_intermediate_size" if further else "intermediate_size"),
        "activation": "geglu",
        "normalize_top_k": False,
    }
    moe |= {"shared_ffn_hidden_size": reader.whole("intermediate_size")} if further else {}
    score = reader.factor("attn_output_multiplier")
    attention = {} if score is None else {"softmax_scale": score}
    cap = reader.factor(reader.same("max_attn_value", "attn_logit_softcapping"))
    attention |= {} if cap is None else {"score_cap": cap}
    logits = reader.factor("final_logit_softcapping")
    model = {
        "norm_placement": "both",
        "embedding_multiplier": reader.number("embedding_multiplier_scale"),
        "logits_multiplier": reader.number("output_multiplier_scale"),
        **({} if logits is None else {"logits_cap": logits}),
    }
    for key in ("router_logit_softcapping", "attn_temperature_len"):
        if reader.value(key):
            reader.warn(key, reader.value(key), "values of scores that a spec does not have; shapes are the same")
    reader.skip("router_logit_softcapping", "attn_temperature_len", "hidden_act")
    reader.only("sliding_window_size", (-1, None), "layers see all positions before them")
    reader.only("global_attn_every_n", (1, None), "layers see all positions before them")
    return decoder(reader, attention, moe, model=model)
