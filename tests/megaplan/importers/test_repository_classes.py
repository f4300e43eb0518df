"""Model types whose class is published with the weights: counts by hand, which match published totals, and refusals."""

import json
from typing import Any

import pytest

from megaplan.errors import MegaplanError
from megaplan.importers.hf import ImportedConfig, import_hf
from megaplan.importers.registry import OF_REPOSITORIES
from megaplan.importers.repository_classes import REPOSITORY_CLASSES
from megaplan.inventory.build import build_inventory
from megaplan.spec.pattern import parse_pattern

LITE: dict[str, Any] = {
    "architectures": ["BailingMoeForCausalLM"], "model_type": "bailing_moe", "first_k_dense_replace": 0, "hidden_size": 2048,
    "intermediate_size": 5632, "moe_intermediate_size": 1408, "num_experts": 64, "num_shared_experts": 2, "norm_topk_prob": True,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
    "rope_theta": 600000, "tie_word_embeddings": False, "use_bias": False, "use_qkv_bias": False, "vocab_size": 126464,
    "norm_head": False, "norm_softmax": False, "output_dropout": 0.0, "attention_dropout": 0.0, "embedding_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_bailing_moe.BailingMoeConfig"},
}  # fmt: skip
"""The sizes of Ling-lite, 16.8 billion parameters as published."""
MINI: dict[str, Any] = {
    "architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "first_k_dense_replace": 1, "head_dim": 128,
    "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512, "moe_shared_expert_intermediate_size": 512,
    "num_experts": 256, "num_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "num_attention_heads": 16,
    "num_hidden_layers": 20, "num_key_value_heads": 4, "partial_rotary_factor": 0.5, "rope_theta": 600000, "routed_scaling_factor": 2.5,
    "score_function": "sigmoid", "use_qk_norm": True, "vocab_size": 157184, "tie_word_embeddings": False, "use_bias": False,
    "use_qkv_bias": False, "norm_topk_prob": True, "moe_router_enable_expert_bias": True, "router_dtype": "fp32",
}  # fmt: skip
"""The sizes of Ling-mini-2.0, 16 billion parameters and 1.4 billion of a token as published."""


def imported(fields: dict[str, Any]) -> ImportedConfig:
    return import_hf(json.dumps(fields, indent=1), "config.json")


def parameters(fields: dict[str, Any]) -> int:
    return build_inventory(imported(fields).loaded.spec).parameters


def letters(fields: dict[str, Any]) -> str:
    model = imported(fields).loaded.spec.model
    return parse_pattern(model.pattern, model.num_layers).layers


def test_every_class_has_an_import() -> None:
    assert set(REPOSITORY_CLASSES) == set(OF_REPOSITORIES)


def test_ling_lite_by_hand() -> None:
    hidden, layers, width = 2048, 28, 1408
    attention = hidden * 128 * (16 + 2 * 4) + 16 * 128 * hidden + hidden
    fed = hidden + 64 * hidden + (64 + 2) * 3 * hidden * width
    assert parameters(LITE) == 2 * 126464 * hidden + hidden + layers * (attention + fed) == 16_801_974_272
    assert letters(LITE) == "AE" * 28


def test_ling_mini_by_hand() -> None:
    hidden, layers, width = 2048, 20, 512
    attention = hidden * 128 * (16 + 2 * 4) + 16 * 128 * hidden + hidden + 2 * 128
    dense, fed = hidden + 3 * hidden * 5120, hidden + 256 * hidden + 257 * 3 * hidden * width
    found = imported(MINI)
    inventory = build_inventory(found.loaded.spec)
    assert inventory.parameters == 2 * 157184 * hidden + hidden + layers * attention + dense + (layers - 1) * fed
    assert (round(inventory.parameters / 1e9, 1), round(inventory.active_parameters / 1e9, 1)) == (16.3, 1.4)
    assert found.family == "bailing_moe_v2"
    assert letters(MINI) == "AD" + "AE" * 19
    moe = found.loaded.spec.model.moe
    assert (moe.score, moe.num_groups, moe.top_groups, moe.routed_scale, moe.expert_bias) == ("sigmoid", 8, 4, 2.5, True)
    assert found.loaded.spec.model.attention.rotary_dim == 64


def test_the_class_decides_between_releases() -> None:
    assert imported(MINI | {"model_type": "bailing_moe_v2"}).loaded.spec.model == imported(MINI).loaded.spec.model
    assert imported(LITE).family == "bailing_moe"
    assert parameters(LITE | {"use_bias": True}) == parameters(LITE) + 28 * 2048
    assert parameters(LITE | {"use_qkv_bias": True}) == parameters(LITE) + 28 * 24 * 128
    del (biased := dict(LITE))["use_bias"]
    assert parameters(biased) == parameters(LITE) + 28 * 2048  # the class's default


def test_prediction_modules_and_unknown_fields_of_ling() -> None:
    said = "\n".join(each.detail for each in imported(MINI | {"num_nextn_predict_layers": 1}).loaded.diagnostics)
    assert "num_nextn_predict_layers = 1: prediction modules are not counted" in said
    with pytest.raises(MegaplanError, match="MP806"):
        imported(MINI | {"expert_lora_rank": 8})
    with pytest.raises(MegaplanError, match="moe_shared_expert_intermediate_size"):
        imported(MINI | {"moe_shared_expert_intermediate_size": 1024})


def block(groups: int | None = 2, factor: float | None = 1.5, **attention: Any) -> dict[str, Any]:
    return {
        "attention": {
            "n_heads_in_group": groups,
            "no_op": groups is None,
            "replace_with_linear": False,
            "window_length": None,
            **attention,
        },
        "ffn": {"ffn_mult": factor, "no_op": factor is None, "replace_with_linear": False, "sparsify": None},
    }


def nas(*blocks: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas", "block_configs": list(blocks), "hidden_size": 256,
        "num_attention_heads": 8, "num_hidden_layers": len(blocks), "vocab_size": 512, "intermediate_size": None,
        "num_key_value_heads": None, "tie_word_embeddings": False, **more,
    }  # fmt: skip


def test_layers_without_a_block_and_with_sizes_of_their_own() -> None:
    fields = nas(block(), block(4, 3.0), block(None, 1.5), block(2, None), block(2, 1.5))
    hidden, dim = 256, 32

    def attends(groups: int) -> int:
        return hidden + 2 * hidden * hidden + 2 * hidden * dim * (8 // groups)

    def fed(width: int) -> int:
        return hidden + 3 * hidden * width

    blocks = attends(2) + fed(256) + attends(4) + fed(512) + fed(256) + attends(2) + attends(2) + fed(256)
    assert parameters(fields) == 2 * 512 * hidden + hidden + blocks
    assert letters(fields) == "ADADDAAD"
    model = imported(fields).loaded.spec.model
    assert [(own.layers, own.num_kv_heads) for own in model.attention.layer_heads] == [((2,), 2)]
    assert [(own.layers, own.ffn_hidden_size) for own in model.mlp.layer_widths] == [((3,), 512)]


def test_a_width_is_two_thirds_rounded_up() -> None:
    spec = imported(nas(block(2, 2.625), hidden_size=8192, num_attention_heads=64)).loaded.spec
    assert spec.model.mlp.ffn_hidden_size == 14336
    stated = block()
    stated["ffn"]["intermediate_size"] = 320
    stated["attention"]["num_key_value_heads"] = 1
    spec = imported(nas(stated)).loaded.spec
    assert (spec.model.mlp.ffn_hidden_size, spec.model.attention.num_kv_heads) == (320, 1)


def test_heads_of_keys_by_layer_alone() -> None:
    """The first models with the class state a list of them, and one width."""
    fields = {
        "architectures": ["DeciLMForCausalLM"],
        "model_type": "deci",
        "auto_map": {"AutoModelForCausalLM": "modeling_decilm.DeciLMForCausalLM"},
    }
    fields |= {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 3, "vocab_size": 90, "intermediate_size": 96}
    hidden, dim, heads = 64, 8, [4, 2, 4]
    layers = sum(2 * hidden + 2 * hidden * hidden + 2 * hidden * dim * each + 3 * hidden * 96 for each in heads)
    assert parameters(fields | {"num_key_value_heads_per_layer": heads}) == 2 * 90 * hidden + hidden + layers


def test_windows_of_single_layers() -> None:
    model = imported(nas(block(), block(window_length=128))).loaded.spec.model
    assert [model.attention.window(layer) for layer in (0, 2)] == [None, 128]


@pytest.mark.parametrize(
    ("blocks", "code"),
    [
        ([block(replace_with_linear=True)], "MP805"),
        ([block(num_sink_tokens=4)], "MP805"),
        ([block(3)], "MP804"),
        ([block(2, -1.0)], "MP804"),
        ([{"attention": None}], "MP804"),
        ([block(), block()], "MP807"),
    ],
)
def test_other_blocks_are_refused(blocks: list[dict[str, Any]], code: str) -> None:
    with pytest.raises(MegaplanError, match=code):
        imported(nas(*blocks) | {"num_hidden_layers": 1})
