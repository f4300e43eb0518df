"""Dense decoders whose class comes with the weights, and deepseek: counts by hand over drawn sizes, and published totals."""

import json
from random import Random
from typing import Any

import pytest

from megaplan.errors import MegaplanError
from megaplan.importers.hf import ImportedConfig, import_hf
from megaplan.inventory.build import build_inventory

KINDS = ("internlm", "internlm2", "baichuan", "minicpm", "qwen", "chatglm", "deepseek")
_CHATGLM = {"model_type": "chatglm", "architectures": ["ChatGLMModel"], "hidden_size": 4096, "num_layers": 28}
PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    "internlm2-7b": (
        {"model_type": "internlm2", "bias": False, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 92544},
        7.74,
    ),
    "Baichuan2-7B": ({"model_type": "baichuan"}, 7.51),
    "MiniCPM-2B": (
        {"model_type": "minicpm", "hidden_size": 2304, "intermediate_size": 5760, "num_attention_heads": 36, "num_hidden_layers": 40,
         "num_key_value_heads": 36, "vocab_size": 122753, "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4},
        2.72,
    ),
    "Qwen-1_8B": (
        {"model_type": "qwen", "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "num_hidden_layers": 24},
        1.84,
    ),
    "chatglm3-6b": (_CHATGLM | {"add_qkv_bias": True, "multi_query_attention": True, "multi_query_group_num": 2}, 6.24),
    "Telechat3-36B": (
        {"model_type": "telechat3", "head_dim": 128, "hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 48,
         "num_hidden_layers": 64, "num_key_value_heads": 8, "vocab_size": 131072},
        36.24,
    ),
    "Orion-14B": (
        {"model_type": "orion", "hidden_size": 5120, "intermediate_size": 15360, "num_attention_heads": 40, "num_hidden_layers": 40,
         "num_key_value_heads": 40, "vocab_size": 84608},
        14.5,
    ),
    "LLaDA-8B": (
        {"model_type": "llada", "block_type": "llama", "layer_norm_type": "rms", "rope": True, "d_model": 4096, "n_heads": 32,
         "n_kv_heads": 32, "n_layers": 32, "mlp_hidden_size": 12288, "embedding_size": 126464, "vocab_size": 126464},
        8.02,
    ),
    "OLMo-7B": (
        {"model_type": "hf_olmo", "d_model": 4096, "n_heads": 32, "n_layers": 32, "mlp_hidden_size": 22016, "layer_norm_with_affine": False,
         "include_bias": False, "rope": True, "weight_tying": False, "tie_word_embeddings": False, "vocab_size": 50280},
        6.89,
    ),
    "OpenELM-1.1B": (
        {"model_type": "openelm", "model_dim": 2048, "head_dim": 64, "num_transformer_layers": 28, "normalize_qk_projections": True,
         "ffn_multipliers": [round(0.5 + 3.5 * layer / 27, 2) for layer in range(28)],
         "num_query_heads": [16] * 3 + [20] * 7 + [24] * 8 + [28] * 6 + [32] * 4,
         "num_kv_heads": [4] * 3 + [5] * 7 + [6] * 8 + [7] * 6 + [8] * 4},
        1.08,
    ),
    "openPangu-Embedded-7B": (
        {"model_type": "PanguEmbedded", "bias": True, "hidden_size": 4096, "intermediate_size": 12800, "num_attention_heads": 32,
         "num_hidden_layers": 34, "num_key_value_heads": 8, "vocab_size": 153376},
        8.03,
    ),
    "Dream-7B": (
        {"model_type": "Dream", "architectures": ["DreamModel"], "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
         "num_hidden_layers": 28, "num_key_value_heads": 4, "vocab_size": 152064, "mask_token_id": 151666},
        7.62,
    ),
    "deepseek-moe-16b": (
        {"model_type": "deepseek", "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64,
         "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "num_attention_heads": 16, "num_key_value_heads": 16,
         "num_hidden_layers": 28},
        16.38,
    ),
}  # fmt: skip
"""Fields that are not the class's default, and billions of parameters of the model card."""


def imported(fields: dict[str, Any]) -> ImportedConfig:
    return import_hf(json.dumps(fields, indent=1), "config.json")


def parameters(fields: dict[str, Any]) -> int:
    return build_inventory(imported(fields).loaded.spec).parameters


def test_the_class_that_auto_map_has_for_another_head() -> None:
    """ChatGLM's class with a head has the name of an encoder-decoder's."""
    name = "ChatGLMForConditionalGeneration"
    code = {"AutoModel": f"modeling_chatglm.{name}", "AutoModelForSeq2SeqLM": f"modeling_chatglm.{name}"}
    assert parameters(_CHATGLM | {"architectures": [name], "auto_map": code}) == parameters(_CHATGLM)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_totals(name: str) -> None:
    fields, billions = PUBLISHED[name]
    assert round(parameters(fields) / 1e9, 2) == billions


def drawn(kind: str, draw: Random) -> tuple[dict[str, Any], int]:
    """A small config of a kind, and its parameters by the constructors of the class."""
    heads, head_dim, layers, vocab = draw.choice([2, 4]), draw.choice([8, 12]), draw.randint(1, 5), draw.randint(50, 99)
    hidden, inner, tied = heads * head_dim, 2 * draw.randint(5, 40), draw.random() < 0.5
    groups, joint, out = draw.choice([1, 2]), draw.random() < 0.5, draw.random() < 0.5
    fields = {
        "model_type": kind, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": inner,
        "vocab_size": vocab, "tie_word_embeddings": tied, "num_key_value_heads": groups,
    }  # fmt: skip
    width = fed = inner
    if kind in ("internlm", "baichuan"):
        del fields["num_key_value_heads"]
        groups = heads
    if kind in ("internlm", "internlm2", "minicpm", "deepseek"):
        fields["bias" if kind.startswith("internlm") else "attention_bias"] = out = joint
    if kind == "baichuan":
        joint = out = False
    if kind == "qwen":
        del fields["num_key_value_heads"]
        fields |= {"kv_channels": head_dim, "no_bias": not out, "intermediate_size": 2 * inner}
        groups, joint = heads, True
    mlp_bias = kind in ("qwen", "chatglm") and out
    if kind == "chatglm":
        fields = {key: value for key, value in fields.items() if not key.startswith(("num_key", "vocab", "intermediate", "num_hidden"))}
        fields |= {"num_layers": layers, "padded_vocab_size": vocab, "ffn_hidden_size": inner, "kv_channels": head_dim}
        fields |= {"add_qkv_bias": joint, "add_bias_linear": out, "multi_query_attention": groups == 1, "multi_query_group_num": 1}
        groups, joint = 1 if groups == 1 else heads, joint or out
    joined = (heads + 2 * groups) * head_dim
    attention = hidden * joined + joined * joint + heads * head_dim * hidden + hidden * out
    mlp = 3 * hidden * fed + (2 * width + hidden) * mlp_bias
    total = vocab * hidden * (1 if tied else 2) + hidden + layers * (attention + mlp + 2 * hidden)
    if kind == "minicpm" and draw.random() < 0.5:
        experts = draw.randint(2, 5)
        fields |= {"num_experts": experts, "num_experts_per_tok": 1, "scale_depth": 1.4}
        total += layers * (hidden * experts + mlp * (experts - 1))
    if kind == "deepseek":
        experts, shared, first, step = draw.randint(2, 5), draw.randint(0, 2), draw.randint(0, 2), draw.randint(1, 2)
        fields |= {"n_routed_experts": experts, "n_shared_experts": shared, "num_experts_per_tok": 1, "moe_intermediate_size": 6}
        fields |= {"first_k_dense_replace": first, "moe_layer_freq": step}
        routed = sum(layer >= first and layer % step == 0 for layer in range(layers))
        total += routed * (hidden * experts + 3 * hidden * 6 * (experts + shared) - mlp)
    return fields, total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(12))
def test_parameters_by_hand(kind: str, seed: int) -> None:
    fields, total = drawn(kind, Random(f"{kind} {seed}"))
    assert parameters(fields) == total


@pytest.mark.parametrize(("kind", "heads"), [("multiquery_attention", 1), ("grouped_query_attention", 2), ("multihead_attention", 4)])
def test_heads_of_mpt_share_keys_as_its_own_class_says(kind: str, heads: int) -> None:
    fields = {"model_type": "mpt", "d_model": 32, "n_heads": 4, "n_layers": 1, "vocab_size": 50, "tie_word_embeddings": True}
    attention = {"attn_type": kind, "kv_n_heads": 2}
    assert parameters(fields | {"attn_config": attention}) == 50 * 32 + 3 * 32 + 2 * 32 * 32 + 2 * 32 * 8 * heads + 8 * 32 * 32


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"model_type": "qwen", "visual": {"width": 1664}}, "visual"),
        ({"model_type": "chatglm", "position_encoding_2d": True, "inner_hidden_size": 16384}, "model_type"),
        ({"model_type": "chatglm", "vision_config": {"hidden_size": 1792}}, "vision_config"),
        ({"model_type": "chatglm", "post_layer_norm": False}, "post_layer_norm"),
        ({"model_type": "openelm"} | PUBLISHED["OpenELM-1.1B"][0] | {"ffn_with_glu": False}, "ffn_with_glu"),
        ({"model_type": "llada"} | PUBLISHED["LLaDA-8B"][0] | {"block_type": "sequential"}, "block_type"),
    ],
)
def test_what_the_class_has_beyond_is_refused(fields: dict[str, Any], key: str) -> None:
    with pytest.raises(MegaplanError) as caught:
        imported(fields)
    (found,) = caught.value.diagnostics
    assert (found.code, found.location.key) == ("MP805", key)


@pytest.mark.parametrize("name", ["ChatGLMForConditionalGeneration", "OwnHeadModel"])
def test_auto_map_says_that_a_class_has_a_head(name: str) -> None:
    fields = _CHATGLM | {"architectures": [name]}
    assert imported(fields | {"auto_map": {"AutoModelForCausalLM": f"modeling_chatglm.{name}"}}).family == "chatglm"
    with pytest.raises(MegaplanError, match="a head over the vocabulary"):
        imported(fields | {"auto_map": {"AutoModel": f"modeling_chatglm.{name}"}})


def test_factors_of_minicpm_are_keys_of_the_spec() -> None:
    spec = imported(PUBLISHED["MiniCPM-2B"][0]).loaded.spec.model
    assert (spec.embedding_multiplier, spec.logits_multiplier) == (12, 256 / 2304)
    assert spec.attention.output_multiplier == spec.mlp.output_multiplier == 1.4 / 40**0.5


@pytest.mark.parametrize("name", ["LLaDA-8B", "Dream-7B"])
def test_masked_tokens_are_predicted_from_both_sides(name: str) -> None:
    found = imported(PUBLISHED[name][0] | {"mask_token_id": 126336}).loaded.diagnostics
    assert any(each.code == "MP820" and "counted as causal" in each.detail for each in found)
