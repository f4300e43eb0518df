"""A field that a spec cannot express, or that is missing, is refused by its name; also a file that is not a config."""

import json
from pathlib import Path
from typing import Any

import pytest
from hf_samples import DEEPSEEK_V3, GONE, MODELS, config, text

from megaplan.errors import Diagnostic, MegaplanError
from megaplan.importers.defaults import class_facts
from megaplan.importers.hf import import_hf
from megaplan.importers.registry import ARCHITECTURES, IMPORTS, REFUSED, RENAMED
from megaplan.importers.tables import IGNORED, MUST_BE, NOT_CARRIED
from megaplan.inventory.build import build_inventory
from megaplan.spec.models import MAX_LAYERS

SMALL: dict[str, list[tuple[dict[str, Any], int]]] = json.loads((Path(__file__).parent / "small_models.json").read_text(encoding="utf-8"))
CANNOT: list[tuple[str, dict[str, Any], str]] = [
    ("Llama-3.1-8B", {"hidden_act": "relu"}, "hidden_act"),
    ("DeepSeek-V2-Lite", {"mlp_bias": True}, "mlp_bias"),
    ("Qwen3-8B", {"layer_types": ["linear_attention"] * 36}, "layer_types"),
    ("Llama-3.1-8B", {"is_encoder_decoder": True}, "is_encoder_decoder"),
    ("Llama-3.1-8B", {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    ("Mamba-Codestral-7B-v0.1", {"rms_norm": False}, "rms_norm"),
    ("Nemotron-H-8B", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
    ("Nemotron-H-8B", {"hybrid_override_pattern": "M-G*", "num_hidden_layers": 4}, "hybrid_override_pattern"),
    ("granite-4.0-h-tiny", {"position_embedding_type": "alibi"}, "position_embedding_type"),
]
MISSING = [
    ("Llama-3.2-1B", "tie_word_embeddings"),
    ("Llama-3.1-8B", "attention_bias"),
    ("Qwen3-8B", "rope_theta"),
    ("Mixtral-8x7B-v0.1", "num_experts_per_tok"),
    ("Mixtral-8x7B-v0.1", "sliding_window"),
    ("Qwen3-8B", "head_dim"),
    ("Qwen3-235B-A22B", "moe_intermediate_size"),
    ("DeepSeek-V2-Lite", "q_lora_rank"),
    ("DeepSeek-V2-Lite", "first_k_dense_replace"),
    ("Mamba-Codestral-7B-v0.1", "num_heads"),
    ("Nemotron-H-8B", "mamba_num_heads"),
    ("Nemotron-H-8B", "hybrid_override_pattern"),
    ("granite-4.0-h-tiny", "layer_types"),
    ("granite-4.0-h-tiny", "shared_intermediate_size"),
]
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("Llama-3.1-8B", {"hidden_size": "4096"}, "hidden_size"),
    ("Llama-3.1-8B", {"hidden_size": 4096.0}, "hidden_size"),
    ("Llama-3.1-8B", {"num_attention_heads": True}, "num_attention_heads"),
    ("Llama-3.1-8B", {"vocab_size": None}, "vocab_size"),
    ("Llama-3.1-8B", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ("Llama-3.1-8B", {"rms_norm_eps": 0}, "rms_norm_eps"),
    ("Llama-3.1-8B", {"tie_word_embeddings": "false"}, "tie_word_embeddings"),
    ("Qwen3-8B", {"rope_parameters": [1]}, "rope_parameters"),
    ("Qwen3-235B-A22B", {"mlp_only_layers": [94]}, "mlp_only_layers"),
    ("Nemotron-H-8B", {"hybrid_override_pattern": ""}, "hybrid_override_pattern"),
    ("granite-4.0-h-tiny", {"layer_types": "mamba"}, "layer_types"),
]
CONTRADICTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("Llama-3.1-8B", {"num_attention_heads": 24, "num_key_value_heads": 8}, "num_attention_heads"),
    ("Qwen3-8B", {"layer_types": ["sliding_attention"] * 36}, "layer_types"),
    ("DeepSeek-V2-Lite", {"num_key_value_heads": 4}, "num_key_value_heads"),
    ("Mamba-Codestral-7B-v0.1", {"expand": 3}, "expand"),
    ("Nemotron-H-8B", {"num_hidden_layers": 51}, "hybrid_override_pattern"),
    ("Nemotron-H-8B", {"attention_head_dim": 64}, "attention_head_dim"),
    ("granite-4.0-h-tiny", {"mamba_n_heads": 24}, "mamba_expand"),
]


def refused(fields: dict[str, Any], *, strict: bool = False) -> tuple[Diagnostic, ...]:
    with pytest.raises(MegaplanError) as caught:
        import_hf(text(fields), "config.json", strict=strict)
    return caught.value.diagnostics


@pytest.mark.parametrize(
    ("code", "name", "changes", "key"),
    [(code, *row) for code, rows in (("MP805", CANNOT), ("MP804", WRONG), ("MP807", CONTRADICTIONS)) for row in rows],
)
def test_refused_by_name(code: str, name: str, changes: dict[str, Any], key: str) -> None:
    (found,) = refused(config(name, **changes))
    assert (found.code, found.location.file) == (code, "config.json")
    assert key in found.detail.split(" ")
    lines = text(config(name, **changes)).splitlines()
    assert lines[(found.location.line or 0) - 1].startswith(f'  "{key}": ')


@pytest.mark.parametrize(("name", "key"), MISSING)
def test_strict_a_missing_field_is_named(name: str, key: str) -> None:
    found = {item.location.key: item for item in refused(config(name, **{key: GONE}), strict=True)}
    assert found[key].code == "MP803"
    assert f'"{key}"' in found[key].hints[0]


@pytest.mark.parametrize(("name", "key"), MISSING)
def test_a_missing_field_has_the_classs_default_and_a_note(name: str, key: str) -> None:
    """The import refuses a field where the class has one that is not null, and a field that the class has under no name."""
    facts, fields = class_facts(MODELS[name]["model_type"]), config(name, **{key: GONE})
    if facts.fields.get(key) is None:
        return
    try:
        found = import_hf(text(fields), "config.json").loaded.diagnostics
    except MegaplanError as error:
        assert [item.code for item in error.diagnostics] == ["MP807"]  # noqa: PT017  (the default contradicts the other fields)
        return
    (note,) = [item for item in found if item.code == "MP822"]
    assert f"{key} = {json.dumps(facts.fields[key])}" in note.detail
    assert facts.version in note.detail


def test_a_missing_field_without_a_default_is_refused() -> None:
    (found,) = refused(config("Nemotron-H-8B", hybrid_override_pattern=GONE))
    assert (found.code, found.location.key) == ("MP803", "hybrid_override_pattern")


@pytest.mark.parametrize("name", MODELS)
def test_an_unknown_field_is_a_note_and_refused_where_strict(name: str) -> None:
    fields = config(name, num_registers=4)
    notes = [item for item in import_hf(text(fields), "config.json").loaded.diagnostics if item.code == "MP823"]
    assert [item.location.key for item in notes] == ["num_registers"]
    found = [item for item in refused(fields, strict=True) if item.code == "MP806"]
    assert [item.location.key for item in found] == ["num_registers"]
    assert found[0].detail.startswith("num_registers = 4")


def test_a_field_of_the_class_that_the_import_does_not_read_is_refused() -> None:
    (found,) = refused(config("Mamba-Codestral-7B-v0.1", rescale_prenorm_residual=True, residual_in_fp32=True, is_encoder_decoder=True))
    assert (found.code, found.location.key) == ("MP805", "is_encoder_decoder")


def test_everything_wrong_is_told_at_once() -> None:
    found = refused(config("Llama-3.1-8B", vocab_size=GONE, hidden_size="x", hidden_act="relu", num_registers=4), strict=True)
    assert {item.code for item in found} == {"MP803", "MP804", "MP805", "MP806"}


def test_a_prediction_module_is_told_and_not_counted() -> None:
    found = import_hf(text({**DEEPSEEK_V3, "num_nextn_predict_layers": 1}), "config.json").loaded.diagnostics
    assert "num_nextn_predict_layers = 1: transformers builds no prediction module" in found[0].detail


@pytest.mark.parametrize("family", REFUSED)
def test_blocks_without_a_letter_are_named_by_their_field(family: str) -> None:
    key = REFUSED[family][0]
    (found,) = refused({"model_type": family, key: 1})
    assert (found.code, found.location.key, found.location.line) == ("MP805", key, 3)
    assert key in found.detail


def test_another_model_type_is_refused_without_a_guess() -> None:
    (found,) = refused({"model_type": "qwen3moe"})
    assert found.code == "MP802"
    assert found.hints == ("megaplan new list", "megaplan explain MP802")


def test_model_types_under_other_names_are_read() -> None:
    assert set(RENAMED.values()) <= set(IMPORTS)
    assert not set(RENAMED) & {*ARCHITECTURES, *REFUSED}


def test_a_refused_model_type_is_refused_though_its_text_model_is_read() -> None:
    """Models that read the keys of another one, or mix residual streams outside their text model."""
    text = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2}
    for family in REFUSED:
        (found,) = refused({"model_type": family, "text_config": text})
        assert (found.code, found.location.line) == ("MP805", 3 if REFUSED[family][0] == "text_config" else 2)


CLASSES = sorted({class_facts(one).model_class: one for one in ARCHITECTURES if class_facts(one).model_class}.items())


@pytest.mark.parametrize(("name", "family"), CLASSES)
def test_an_unknown_model_type_is_read_as_the_class_that_it_names(name: str, family: str) -> None:
    """Conversions for inference write their own model type, and the class of transformers."""
    fields = SMALL[family][0][0] | {"architectures": [name]}
    with_class = import_hf(text(fields | {"model_type": "anew"}), "config.json")
    alike = [one for one in ARCHITECTURES if class_facts(one).model_class == name]
    assert with_class.family == {"LlamaForCausalLM": "llama"}.get(name, alike[0])
    if alike == [family]:
        assert with_class.loaded.spec.model == import_hf(text(fields), "config.json").loaded.spec.model
    (found,) = refused(fields | {"model_type": "anew", "auto_map": {"AutoModelForCausalLM": f"modeling_anew.{name}"}})
    assert found.code == "MP802"


@pytest.mark.parametrize("family", ["minimax_m2", "minimax_m3_vl_text", "mixtral", "gpt_oss"])
def test_a_width_may_be_repeated_under_the_name_of_another_class(family: str) -> None:
    fields, total = SMALL[family][0]
    repeated = import_hf(text(fields | {"moe_intermediate_size": fields["intermediate_size"]}), "config.json")
    assert build_inventory(repeated.loaded.spec).parameters == total
    (found,) = refused(fields | {"moe_intermediate_size": fields["intermediate_size"] + 8})
    assert (found.code, found.location.key) == ("MP806", "moe_intermediate_size")


def test_the_dense_width_that_minimax_m2_publishes_makes_no_tensor() -> None:
    fields, total = SMALL["minimax_m2"][0]
    published = import_hf(text(fields | {"mlp_intermediate_size": 8 * fields["intermediate_size"]}), "config.json")
    assert build_inventory(published.loaded.spec).parameters == total


def test_an_unread_field_that_decides_a_tensor_is_an_error() -> None:
    """The latent attention of a relative is not dropped with a note."""
    config = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    found = refused(config | {"vocab_size": 97, "kv_lora_rank": 16, "q_lora_rank": 24, "rope_interleaves": 7, "num_experts": 1})
    assert [(each.code, each.location.key) for each in found] == [("MP806", "kv_lora_rank"), ("MP806", "q_lora_rank")]


OWN_CODE: list[tuple[str, Any]] = [
    ("headwise_attn_output_gate", True), ("use_qk_norm", True), ("embed_layernorm", True), ("use_bias", True),
    ("add_qkv_bias", True), ("layer_sharing", True),
    ("attn_res_num_blocks", 4), ("use_canon", True), ("norm_type", "layernorm"), ("position_embedding_type", "learned_absolute"),
]  # fmt: skip
"""Switches and modes of published classes that come with the weights of a model with the type of another one."""
PARTS: list[tuple[str, Any]] = [
    ("moe_config", {"num_experts": 8, "moe_intermediate_size": 96}), ("num_key_value_heads_per_layer", [4, 2]), ("ffn_sizes", [96, 48]),
    ("block_configs", [{"block_type": "moe", "moe_intermediate_size": 64}, {"block_type": "moe", "moe_intermediate_size": 32}]),
]  # fmt: skip
PLAIN: list[tuple[str, Any]] = [
    ("use_flash_attn", True), ("norm_type", "rmsnorm"), ("layer_ids", [0, 1]), ("quantization", {"group_size": 64, "bits": 4}),
    ("attention_type", "gqa"), ("norm_topk_prob", True), ("rope_config", {"head_dim": 16}), ("no_bias", True), ("moe_loads", [1, 1]),
    ("use_rmsnorm", True), ("fuse_rms_norm", True), ("need_fp32_gate", True), ("use_moe_router_bias", True), ("use_routing_bias", True),
    ("use_mixed_mlp_moe", True), ("e_score_correction_bias", True), ("weight_share_add_bias", True),
]  # fmt: skip
_SMALL_LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
_OWN = {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}


@pytest.mark.parametrize(("key", "value"), OWN_CODE + PARTS)
def test_a_switch_that_own_code_may_read_is_refused(key: str, value: Any) -> None:
    """A class of transformers drops such a field, which stays a note, unless it has sizes of single layers or parts."""
    (found,) = refused(_SMALL_LLAMA | _OWN | {key: value})
    assert (found.code, found.location.key) == ("MP806", key)
    assert (key, value) in PARTS or import_hf(text(_SMALL_LLAMA | {key: value}), "config.json")


@pytest.mark.parametrize(("key", "value"), PLAIN)
def test_a_switch_without_a_tensor_stays_a_note(key: str, value: Any) -> None:
    for named in ({}, _OWN):
        assert import_hf(text(_SMALL_LLAMA | named | {key: value}), "config.json").loaded.spec.model.num_layers == 4


@pytest.mark.parametrize(
    ("family", "key"), [("qwen2", "attention_bias"), ("qwen3", "use_qk_norm"), ("gpt_oss", "attention_sink"), ("mixtral", "use_moe")]
)
def test_a_switch_of_a_part_that_is_always_built_says_nothing_new(family: str, key: str) -> None:
    fields, total = SMALL[family][0]
    found = import_hf(text(fields | _OWN | {key: True}), "config.json")
    assert build_inventory(found.loaded.spec).parameters == total


def test_switches_that_minimax_m3_publishes_are_of_what_is_built() -> None:
    fields, total = SMALL["minimax_m3_vl_text"][0]
    named = {"qk_norm_type": "per_head", "use_gemma_norm": True}
    assert build_inventory(import_hf(text(fields | _OWN | named), "config.json").loaded.spec).parameters == total


def test_a_switch_inside_a_mapping_that_is_read_is_refused() -> None:
    fields = SMALL["kimi_linear"][0][0]
    inside = {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4, "use_full_rank_gate": True}
    found = refused(fields | _OWN | {"linear_attn_config": inside})
    assert [(each.code, each.location.key) for each in found] == [("MP806", "linear_attn_config.use_full_rank_gate")]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True, "d_model": 64}, "is_encoder_decoder"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 64}, "BertForMaskedLM"),
        ({"model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"], "hidden_size": 64}, "XLMRobertaModel"),
    ],
)
def test_a_class_of_another_task_is_named_as_one(fields: dict[str, Any], word: str) -> None:
    (found,) = (each for each in refused(fields) if each.code == "MP802")
    assert word in found.detail
    assert not any("if the layers are" in hint for hint in found.hints)


@pytest.mark.parametrize(
    ("written", "code"),
    [
        ("[]", "MP801"), ("3", "MP801"), ("{}", "MP801"), ('{"model_type": 3}', "MP801"), ('{"hidden_size": 4096}', "MP801"),
        ("model_type: llama", "MP109"), ('{"model_type": "llama",}', "MP109"), ('{"model_type": "llama"', "MP109"),
        ('{"model_type": "llama", "model_type": "llama"}', "MP110"), ("[" * 50 + "]" * 50, "MP117"), ("[" * 200_000, "MP117"),
    ],
)  # fmt: skip
def test_what_is_no_config(written: str, code: str) -> None:
    with pytest.raises(MegaplanError) as caught:
        import_hf(written, "config.json")
    (found,) = caught.value.diagnostics
    assert (found.code, found.location.file) == (code, "config.json")


def test_a_spec_that_results_is_held_to_the_specs_rules() -> None:
    (found,) = refused(config("Llama-3.1-8B", num_key_value_heads=5))
    assert found.code == "MP701"


def test_no_field_stands_in_two_tables() -> None:
    assert not set(IGNORED) & set(NOT_CARRIED)
    assert not set(IGNORED) & set(MUST_BE)
    assert not set(NOT_CARRIED) & set(MUST_BE)


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Mixtral-8x7B-v0.1"])
def test_a_decoder_layer_of_two_blocks_counts_as_two(name: str) -> None:
    fields = DEEPSEEK_V3 if name == "DeepSeek-V3" else config(name)
    most = MAX_LAYERS // 2
    assert import_hf(text({**fields, "num_hidden_layers": most}), "config.json").loaded.spec.model.num_layers == 2 * most
    with pytest.raises(MegaplanError, match=f"at most {most:,}"):
        import_hf(text({**fields, "num_hidden_layers": most + 1}), "config.json")
