"""Text models nested or laid flat in multimodal configs of unknown types, and files next to weights that are no config."""

import json
from pathlib import Path
from typing import Any

import pytest

from megaplan.errors import MegaplanError
from megaplan.importers.defaults import class_facts
from megaplan.importers.hf import ImportedConfig, import_hf, text_fields
from megaplan.importers.structure import names_an_encoder
from megaplan.importers.towers import MULTIMODAL, TEXT
from megaplan.inventory.build import build_inventory

FOLDER = Path(__file__).parent
SMALL: dict[str, Any] = json.loads((FOLDER / "small_models.json").read_text(encoding="utf-8"))
KEYS = ("text_config", "llm_config", "language_config")
ENCODED = {"vision_config": {"hidden_size": 32}, "siglip_config": {"width": 4}, "audio_config": {"layers": 2}}


def imported(fields: dict[str, Any]) -> ImportedConfig:
    return import_hf(json.dumps(fields, indent=1), "config.json")


def model(fields: dict[str, Any]) -> dict[str, Any]:
    return imported(fields).loaded.spec.as_document()["model"]


def said(fields: dict[str, Any]) -> str:
    return "\n".join(each.detail for each in imported(fields).loaded.diagnostics if each.code == "MP820")


def refused(fields: dict[str, Any]) -> Any:
    with pytest.raises(MegaplanError) as caught:
        imported(fields)
    return caught.value.diagnostics


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "deepseek_v2", "gemma2"])
def test_a_text_model_is_read_from_the_key_that_nests_it(kind: str, key: str) -> None:
    config = SMALL[kind][0][0]
    whole = {"model_type": "own_vl", "architectures": ["OwnForConditionalGeneration"], key: config, **ENCODED}
    assert model(whole) == model(config)
    assert f"{key} = " in said(whole)
    assert text_fields(whole)["hidden_size"] == config["hidden_size"]


@pytest.mark.parametrize("key", KEYS)
def test_a_nested_model_without_a_type_has_that_of_its_class(key: str) -> None:
    config = SMALL["qwen3"][0][0]
    inner = {name: value for name, value in config.items() if name != "model_type"} | {"architectures": ["Qwen3ForCausalLM"]}
    assert model({"model_type": "own_vl", key: inner}) == model(config)
    assert [each.code for each in refused({"model_type": "own_vl", key: inner | {"architectures": ["OwnModel"]}})] == ["MP802"]


def test_deepseek_without_latents_is_its_first_version() -> None:
    """DeepSeek-OCR and the smallest DeepSeek-VL2 name the class of the second version, which then builds the blocks of the first."""
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 4}
    sizes |= {
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "first_k_dense_replace": 1,
    }
    sizes |= {"vocab_size": 90}
    absent = {"use_mla": False, "kv_lora_rank": None, "q_lora_rank": None, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0}
    whole = {"model_type": "own_vl", "language_config": sizes | absent | {"architectures": ["DeepseekV2ForCausalLM"]}}
    assert model(whole) == model(sizes | {"model_type": "deepseek"})


@pytest.mark.parametrize("key", ENCODED)
def test_an_encoder_in_a_flat_config_is_reported(key: str) -> None:
    config = SMALL["llama"][0][0]
    assert model(config | {key: ENCODED[key]}) == model(config)
    assert f"{key} = " in said(config | {key: ENCODED[key]})
    assert "mm_hidden_size = 1024: of an encoder" in said(config | {"mm_hidden_size": 1024, "mm_vision_tower": "clip"})


@pytest.mark.parametrize("whole", [name for name in MULTIMODAL if TEXT in class_facts(name).parts])
def test_the_class_of_the_whole_under_the_text_model_s_type(whole: str) -> None:
    """Pruned and quantised text models keep the architectures of the model that they come from."""
    text = class_facts(whole).parts[TEXT].type
    if text not in SMALL:
        pytest.skip("the text model's type has no small config")
    fields = SMALL[text][0][0] | {"architectures": [class_facts(whole).model_class]}
    assert model(fields) == model(SMALL[text][0][0])
    if class_facts(whole).model_class != class_facts(text).model_class:
        assert "a class with encoders" in said(fields) or "model_type decides" in said(fields)


def test_fields_of_encoders_do_not_hide_the_text_model() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 100, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False}
    sizes |= {"rope_scaling": None, "attention_bias": False}
    pictures = {
        "mm_hidden_size": 1024,
        "mm_vision_tower": "clip",
        "image_grid": [[1, 2]],
        "vision_config": {"depth": 2},
        "use_mm_proj": True,
    }
    (found,) = refused(sizes | pictures | {"model_type": "llava_own", "query_num": 96, "slice_mode": True})
    total = build_inventory(imported(sizes | {"model_type": "llama"}).loaded.spec).parameters
    assert found.hints[0].startswith('if the layers are like llama\'s, write "model_type": "llama"')
    assert found.hints[0].endswith(f"{total:,} parameters, without query_num, slice_mode, mm_hidden_size and 4 others")


@pytest.mark.parametrize(
    ("name", "encodes"), [("mm_hidden_size", True), ("img_processor", True), ("clip_qkv", False), ("v_head_dim", False), ("video", True)]
)
def test_names_of_encoders(name: str, *, encodes: bool) -> None:
    assert names_an_encoder(name) is encodes


@pytest.mark.parametrize(
    ("more", "hint"),
    [
        ({"r": 16, "lora_alpha": 32}, "megaplan import hf org/base-1B --set lora.rank=16 --set lora.alpha=32"),
        ({"r": 8}, "megaplan import hf org/base-1B --set lora.rank=8 --set lora.alpha=8"),
        ({"base_model_name_or_path": None}, "megaplan import hf config.json"),
    ],
)
def test_adapters_name_the_model_under_them(more: dict[str, Any], hint: str) -> None:
    (found,) = refused({"peft_type": "LORA", "base_model_name_or_path": "org/base-1B"} | more)
    assert (found.code, found.hints[0]) == ("MP801", hint)


@pytest.mark.parametrize("kind", ["llama", "qwen", "deepseek_v3"])
def test_a_file_with_a_type_and_no_field_of_it_is_no_config(kind: str) -> None:
    """Scales of a key cache have the type of their model; all sizes would be the class's defaults."""
    (found,) = refused({"model_type": kind, "kv_cache": {"dtype": "float8_e4m3fn"}})
    assert (found.code, found.location.key) == ("MP801", "model_type")
    assert imported({"model_type": kind, "vocab_size": 96}).family == kind


def test_padded_and_repeated_counts_are_one() -> None:
    config = {
        "model_type": "qwen",
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "kv_channels": 16,
        "vocab_size": 96,
    }
    assert model(config | {"padded_vocab_size": 96}) == model(config)
    assert refused(config | {"padded_vocab_size": 128})[0].code == "MP806"
