"""Every model type imports with the parameters that transformers builds; totals are facts that `tests/upstream/test_imports.py` checks."""

import json
from pathlib import Path
from typing import Any

import pytest

from megaplan import split
from megaplan.errors import MegaplanError
from megaplan.importers.defaults import class_facts
from megaplan.importers.hf import ImportedConfig, import_hf
from megaplan.importers.registry import ARCHITECTURES, REFUSED
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import cuts_of
from megaplan.spec.not_built_yet import BUILT_OPTIONS
from megaplan.spec.settings import given_options

SMALL: dict[str, list[tuple[dict[str, Any], int]]] = json.loads((Path(__file__).parent / "small_models.json").read_text(encoding="utf-8"))
"""Two small configs a model type, each with transformers' number of parameters."""


def imported(fields: dict[str, Any], *changes: str) -> ImportedConfig:
    return import_hf(json.dumps(fields, indent=1), "config.json", changes)


def parameters(fields: dict[str, Any]) -> int:
    return build_inventory(imported(fields).loaded.spec).parameters


@pytest.mark.parametrize("model_type", SMALL)
def test_parameters(model_type: str) -> None:
    for fields, total in SMALL[model_type]:
        assert parameters(fields) == total


def test_every_model_type_has_defaults_and_small_models() -> None:
    assert set(SMALL) == set(ARCHITECTURES)
    assert {model_type for model_type in ARCHITECTURES if not class_facts(model_type).fields} == set()
    assert not set(ARCHITECTURES) & set(REFUSED)


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_refusal_names_a_field_and_what_is_missing(model_type: str) -> None:
    with pytest.raises(MegaplanError) as refused:
        imported({"model_type": model_type})
    (found,) = refused.value.diagnostics
    assert found.code == "MP805"
    assert found.detail.startswith(f"model_type = {model_type}, {REFUSED[model_type][0]}: ")


OPTIONS: list[tuple[dict[str, Any], set[str]]] = [
    ({"model_type": "olmo2"}, {"model.norm_placement", "model.attention.qk_norm_width"}),
    ({"model_type": "gemma2"}, {
        "model.norm_placement", "model.mlp.activation", "model.zero_centered_norm", "model.embedding_multiplier", "model.logits_cap",
        "model.attention.score_cap",
    }),
    ({"model_type": "olmo_hybrid", "num_hidden_layers": 4, "rms_norm_eps": 1e-6}, {
        "model.post_norm_layers", "model.attention.qk_norm_width", "model.linear_attention.gated_norm_eps",
    }),
    ({"model_type": "gpt_oss"}, {
        "model.attention.output_bias", "model.attention.sinks", "model.moe.bias", "model.moe.router_bias", "model.moe.swiglu_limit",
    }),
    ({"model_type": "qwen2_moe"}, {"model.moe.shared_gate"}),
    ({"model_type": "phi", "num_key_value_heads": 32}, {
        "model.head_bias", "model.norm", "model.parallel_layers", "model.attention.output_bias", "model.attention.rotary_dim",
        "model.mlp.bias",
    }),
    ({"model_type": "falcon_h1"}, {"model.parallel_layers", "model.mamba.gated_norm"}),
    ({"model_type": "ernie4_5_moe"}, {"model.moe.score_correction"}),
    ({"model_type": "deepseek_v3"}, {f"model.moe.{key}" for key in ("score", "expert_bias", "num_groups", "top_groups", "routed_scale")}),
    ({"model_type": "nemotron_h", "hybrid_override_pattern": "ME", "moe_latent_size": 64}, {
        "model.moe.latent_size", "model.moe.score", "model.moe.expert_bias",
    }),
    ({"model_type": "qwen3_next"}, {
        "model.attention.gate", "model.attention.rotary_dim", "model.moe.shared_gate", "model.zero_centered_norm",
    }),
    ({"model_type": "jamba"}, {"model.mamba.inner_norm"}),
    ({"model_type": "lfm2", "full_attn_idxs": [0]}, set()),
    ({"model_type": "llama"}, set()),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "options"), OPTIONS)
def test_options_and_the_note_that_names_them(fields: dict[str, Any], options: set[str]) -> None:
    """The import's note names each that megarun does not build; kinds and families are not options."""
    loaded = imported(fields).loaded
    assert {option.key for option in given_options(loaded.spec.model)} == options
    notes = [item.detail for item in loaded.diagnostics if item.code == "MP790"]
    assert {line.partition(" = ")[0] for detail in notes for line in detail.splitlines()} == options - BUILT_OPTIONS


def test_windows_of_every_second_layer() -> None:
    attention = imported({"model_type": "gemma2", "num_hidden_layers": 4}).loaded.spec.model.attention
    assert (attention.window_size, attention.full_layers) == (4096, (2, 6))


def test_old_and_new_names_of_layers_are_one() -> None:
    names = {"mamba": "linear_attention", "attention": "full_attention"}
    old = {"model_type": "granitemoehybrid", "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]}
    new = old | {"layer_types": [names[name] for name in old["layer_types"]]}
    assert imported(old).document == imported(new).document


def test_other_names_of_a_field() -> None:
    """`attribute_map` of the class: one value under either name."""
    assert parameters({"model_type": "olmoe", "num_experts": 16}) == parameters({"model_type": "olmoe", "num_local_experts": 16})


def test_layers_of_hybrids() -> None:
    """Full attention every fourth layer, every fourth after the first, at an offset of eight, or where a list says so."""
    listed = {"full_attn_layers": [2], "kda_layers": [1, 3]}
    for fields, pattern in (
        ({"model_type": "qwen3_next", "num_hidden_layers": 4}, "GEGEGEAE"),
        ({"model_type": "qwen3_5_text", "full_attention_interval": 2, "num_hidden_layers": 4}, "GDAD"),
        ({"model_type": "olmo_hybrid", "num_hidden_layers": 3}, "GDGDAD"),
        ({"model_type": "kimi_linear", "num_hidden_layers": 5}, "GDGEGEGEAE"),
        ({"model_type": "kimi_linear", "num_hidden_layers": 3, "linear_attn_config": listed}, "GDAEGE"),
        ({"model_type": "jamba", "num_hidden_layers": 6}, "MDMEMDMEADME"),
        ({"model_type": "lfm2", "num_hidden_layers": 3, "full_attn_idxs": [1]}, "CDAD"),
    ):  # fmt: skip
        assert imported(fields).loaded.spec.model.pattern == pattern


def test_layers_of_kimi_linear_are_each_listed_once() -> None:
    with pytest.raises(MegaplanError) as refused:
        imported({"model_type": "kimi_linear", "num_hidden_layers": 3, "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1]}})
    assert [item.code for item in refused.value.diagnostics] == ["MP807"]


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("lfm2", "full_attn_idxs", "zz"),
        ("lfm2", "full_attn_idxs", 2),
        ("deepseek_v32", "layer_types", [["indexed_attention"]]),
        ("glm_moe_dsa", "indexer_types", [["full"]]),
    ],
)
def test_a_list_of_layers_that_is_none_is_refused_by_its_name(model_type: str, key: str, value: Any) -> None:
    with pytest.raises(MegaplanError) as refused:
        imported({"model_type": model_type, "num_hidden_layers": 2, key: value})
    assert key in {item.location.key for item in refused.value.diagnostics}


def test_the_end_of_a_documents_token_is_the_tokenizers() -> None:
    found = imported({"model_type": "hunyuan_v1_dense", "num_hidden_layers": 2, "eod_token_id": 127967})
    assert "eod_token_id" not in "".join(item.detail for item in found.loaded.diagnostics)


def test_a_nested_text_model() -> None:
    inner = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}
    whole = {"model_type": "gemma3", "text_config": inner, "vision_config": {}, "tie_word_embeddings": True}
    nested = imported(whole, "model.towers=null")
    plain = imported({"model_type": "gemma3_text", **inner, "tie_word_embeddings": True})
    assert nested.document["model"] == plain.document["model"] | {"towers": None}
    assert "MP225" not in {item.code for item in nested.loaded.diagnostics}
    with pytest.raises(MegaplanError) as refused:
        imported({"model_type": "gemma3", "text_config": {**inner, "hidden_size": "wide"}})
    assert refused.value.diagnostics[0].location.line is not None


def test_half_of_each_head_is_rotated() -> None:
    spec = imported({"model_type": "glm4", "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}).loaded.spec
    assert spec.model.attention.rotary_dim == 32


def test_parallel_layers_are_never_parted() -> None:
    fields = {"model_type": "phi", "num_hidden_layers": 3, "num_key_value_heads": 32}
    spec = imported(fields, "mesh.pp=3", "schedule.num_microbatches=4", "split.mode=equal").loaded.spec
    assert spec.model.parallel_layers == (1, 3, 5)
    with pytest.raises(MegaplanError) as refused:
        imported(fields, "mesh.pp=2", "schedule.num_microbatches=4", "split.mode=manual", "split.reason=x", "split.spans=[[0, 3], [3, 6]]")
    assert "cut 3 parts layer 3 of model.parallel_layers" in refused.value.diagnostics[0].detail


def test_layers_that_share_a_choice_may_be_parted() -> None:
    """Every fourth of the class's 78 layers has an indexer, from the second on; transformers builds as many parameters."""
    fields = {"model_type": "glm_moe_dsa", "index_topk_freq": 4}
    loaded = imported(fields).loaded
    assert build_inventory(loaded.spec).parameters == 743_377_000_704
    assert [item for item in loaded.diagnostics if item.code == "MP820"] == []
    indexer = loaded.spec.model.attention.indexer
    assert indexer.layers[:4] == (0, 2, 10, 18)
    assert indexer.shared_layers[:7] == (4, 6, 8, 12, 14, 16, 20)
    small = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_hidden_layers": 18}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256, "q_lora_rank": 16, "kv_lora_rank": 16}
    four = "mesh.pp=4", "schedule.num_microbatches=8"
    cuts = cuts_of(split(imported(fields | small, *four, "split.mode=equal").loaded.spec.as_document()).plan.spans)
    assert cuts == (9, 18, 27)  # the last two part readers of a choice, which stages pass on
    manual = "mesh.pp=2", "schedule.num_microbatches=4", "split.mode=manual", "split.reason=x"
    assert imported(fields, *manual, "split.spans=[[0, 12], [12, 156]]").loaded.spec.split.spans == ((0, 12), (12, 156))


def test_learned_positions_bound_the_batch() -> None:
    """GPT-2 has 1,024 positions: the batch that no config states is as long, and a longer one is refused."""
    fields = {"model_type": "gpt2"}
    loaded = imported(fields).loaded
    assert build_inventory(loaded.spec).parameters == 124_439_808
    assert loaded.spec.batch.seq_length == 1024
    with pytest.raises(MegaplanError) as refused:
        imported(fields, "batch.seq_length=2048")
    assert [item.code for item in refused.value.diagnostics if item.code == "MP715"] == ["MP715"]
