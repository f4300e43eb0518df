"""`architectures` against `model_type`: text models of multimodal types, classes of other types, classes that draft for another model."""

import json
from pathlib import Path
from typing import Any

import pytest

from megaplan.errors import MegaplanError
from megaplan.importers.defaults import class_facts
from megaplan.importers.hf import ImportedConfig, import_hf
from megaplan.importers.registry import ARCHITECTURES
from megaplan.importers.towers import FLAT, MULTIMODAL, TEXT
from megaplan.inventory.build import build_inventory

FOLDER = Path(__file__).parent
TOWERS: dict[str, Any] = json.loads((FOLDER / "small_towers.json").read_text(encoding="utf-8"))
SMALL: dict[str, Any] = json.loads((FOLDER / "small_models.json").read_text(encoding="utf-8"))
NESTING = [name for name in MULTIMODAL if name not in FLAT and TEXT in class_facts(name).parts]


def imported(fields: dict[str, Any]) -> ImportedConfig:
    return import_hf(json.dumps(fields, indent=1), "config.json")


def model(fields: dict[str, Any]) -> dict[str, Any]:
    return imported(fields).loaded.spec.as_document()["model"]


def refused(fields: dict[str, Any]) -> Any:
    with pytest.raises(MegaplanError) as caught:
        imported(fields)
    return caught.value.diagnostics


def text_of(kind: str) -> dict[str, Any]:
    """The fields of the text model of a small multimodal config, with its type and the head that the whole has."""
    whole = TOWERS[kind][0][0]
    tied = whole.get("tie_word_embeddings", class_facts(kind).fields.get("tie_word_embeddings"))
    own = {} if tied is None else {"tie_word_embeddings": tied}
    return {"model_type": class_facts(kind).parts[TEXT].type, **whole[TEXT], **own}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "kind", [name for name in NESTING if class_facts(class_facts(name).parts[TEXT].type).model_class.endswith("ForCausalLM")]
)
def test_the_class_of_the_text_model_alone_has_no_encoder(kind: str, *, nested: bool) -> None:
    """Published text models keep the type of the whole: Gemma 3's smallest, and conversions of Qwen3.5."""
    if not isinstance(TOWERS[kind][0][0].get(TEXT), dict):
        pytest.skip("the small config nests no text model")
    text = text_of(kind)
    named = {"architectures": [class_facts(text["model_type"]).model_class], "model_type": kind}
    fields = text | named if not nested else {**named, TEXT: text, "tie_word_embeddings": text.get("tie_word_embeddings", False)}
    if not nested and text["model_type"] != class_facts(kind).parts[TEXT].type:
        pytest.skip("a flat config cannot say which text model it is")
    found = imported(fields)
    assert "towers" not in found.document["model"]
    assert model(fields) == model(text)
    assert any(each.detail.startswith(f'model_type = "{kind}": read as') for each in found.loaded.diagnostics)
    if not nested:
        del fields["architectures"]
        assert model(fields) == model(text)


@pytest.mark.parametrize("kind", [name for name in NESTING if isinstance(TOWERS[name][0][0].get(TEXT), dict)])
def test_a_class_with_encoders_is_read_under_the_text_model_s_type(kind: str) -> None:
    whole = TOWERS[kind][0][0] | {"architectures": [class_facts(kind).model_class]}
    if next(name for name in MULTIMODAL if class_facts(name).model_class == whole["architectures"][0]) != kind:
        pytest.skip("another type has the class, too")
    assert model(whole | {"model_type": text_of(kind)["model_type"]}) == model(whole)


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLMEagle3", "DFlashDraftModel", "Eagle3DeepseekV2ForCausalLM", "MedusaModel", "Eagle3Speculator"]
)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "deepseek_v3"])
def test_a_draft_model_is_refused_as_one(kind: str, name: str) -> None:
    """One error, whatever else of the config is of drafts."""
    (found,) = refused(SMALL[kind][0][0] | {"architectures": [name], "draft_vocab_size": 32000, "num_target_layers": 36})
    assert (found.code, found.location.key) == ("MP805", "architectures")
    assert "draft" in found.detail


@pytest.mark.parametrize(("kind", "other"), [("qwen2", "qwen3"), ("mixtral", "llama"), ("glm", "glm4_moe"), ("llama", "deepseek_v3")])
def test_the_class_of_another_type_is_a_warning(kind: str, other: str) -> None:
    fields = SMALL[kind][0][0] | {"architectures": [class_facts(other).model_class]}
    assert model(fields) == model(SMALL[kind][0][0])
    said = "\n".join(each.detail for each in imported(fields).loaded.diagnostics if each.code == "MP820")
    assert f"the class of {other}, but model_type decides" in said


@pytest.mark.parametrize("names", [["Own1ForCausalLM"], ["OwnForCausalLM", "LlamaForCausalLM"]])
def test_a_class_that_is_not_known_is_a_warning(names: list[str]) -> None:
    fields = SMALL["llama"][0][0] | {"architectures": names}
    assert model(fields) == model(SMALL["llama"][0][0])
    said = [each.detail for each in imported(fields).loaded.diagnostics if each.code == "MP820"]
    assert any(f"{names[0]}" in each and "may build other tensors" in each for each in said)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_class_of_a_type_is_no_warning(kind: str) -> None:
    fields = SMALL[kind][0][0] | {"architectures": [class_facts(kind).model_class]}
    said = [each.detail for each in imported(fields).loaded.diagnostics]
    assert not any("model_type decides" in each or "may build other tensors" in each for each in said)


@pytest.mark.parametrize(("kind", "key"), [("glm", "n_routed_experts"), ("llama", "kv_lora_rank"), ("qwen3", "num_experts")])
def test_a_field_of_the_named_class_is_the_hint(kind: str, key: str) -> None:
    other = next(one for one in ("glm4_moe", "deepseek_v3", "qwen3_moe") if key in class_facts(one).fields)
    (found,) = refused(SMALL[kind][0][0] | {"architectures": [class_facts(other).model_class], key: 24})
    assert (found.code, found.hints[0].partition(" in ")[0]) == ("MP806", f'write "model_type": "{other}"')


@pytest.mark.parametrize(("kind", "key"), [("deepseek_v2", "num_experts_per_tok"), ("dots1", "n_routed_experts")])
def test_an_absent_field_whose_default_builds_nothing_is_missing(kind: str, key: str) -> None:
    fields = {name: value for name, value in SMALL[kind][0][0].items() if class_facts(kind).renamed.get(name, name) != key}
    found = {each.location.key: each for each in refused(fields)}
    assert found[key].code == "MP803"
    assert f'add "{key}"' in found[key].hints[0]


@pytest.mark.parametrize(
    ("kind", "absent", "fix"),
    [("mamba2", "num_heads", 'add "num_heads": 4'), ("falcon_h1", "mamba_d_ssm", 'add "mamba_d_ssm": 24')],
)
def test_the_hint_repairs_the_width_that_is_not_stated(kind: str, absent: str, fix: str) -> None:
    more = {
        "mamba2": {"hidden_size": 64, "expand": 2, "head_dim": 32},
        "falcon_h1": {"mamba_n_heads": 6, "mamba_d_head": 4},
    }
    fields = {name: value for name, value in (SMALL[kind][0][0] | more[kind]).items() if name != absent}
    (found,) = refused(fields)
    assert (found.code, found.hints[0]) == ("MP807", fix)
    assert f"{absent} is the class's default" in found.detail
    assert imported(fields | {absent: int(fix.rpartition(" ")[2])}).family == kind


def test_defaults_stand_next_to_the_error_that_they_may_cause() -> None:
    fields = {name: value for name, value in SMALL["qwen2"][0][0].items() if name != "num_key_value_heads"} | {"num_attention_heads": 3}
    fields["hidden_size"] = 3 * 16
    assert [each.code for each in refused(fields)] == ["MP701", "MP822"]
    with pytest.raises(MegaplanError) as caught:
        import_hf(json.dumps(SMALL["qwen2"][0][0]), "config.json", ("mesh.bogus=2",))
    assert "MP822" not in [each.code for each in caught.value.diagnostics]


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gemma3"])
def test_a_config_without_a_type_has_that_of_its_class(kind: str) -> None:
    given = (TOWERS if kind in TOWERS else SMALL)[kind][0][0]
    fields = {key: value for key, value in given.items() if key != "model_type"} | {"architectures": [class_facts(kind).model_class]}
    assert model(fields) == model(given)
    assert any(each.code == "MP820" and "model_type" in each.detail for each in imported(fields).loaded.diagnostics)
    assert refused(fields | {"architectures": ["OwnForCausalLM"]})[0].code == "MP801"
    assert refused(fields | {"model_type": None})[0].code == "MP801"


@pytest.mark.parametrize(("kind", "fields"), [("llama", {}), ("qwen2", {"use_sliding_window": False, "max_window_layers": 28})])
def test_an_unknown_type_is_told_the_class_that_has_its_fields(kind: str, fields: dict[str, Any]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 100, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False} | fields
    (found,) = refused(sizes | {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}, "loops": 3})
    total = build_inventory(import_hf(json.dumps(sizes | {"model_type": kind}), "config.json").loaded.spec).parameters
    assert found.code == "MP802"
    assert found.hints[0].startswith(f'if the layers are like {kind}\'s, write "model_type": "{kind}"')
    assert found.hints[0].endswith(f"{total:,} parameters, without loops")


@pytest.mark.parametrize("more", [{"kv_lora_rank": 8}, {"ffn_config": {"width": 8}}, {"a": 1, "b": 2, "c": 3, "d": 4}])
def test_a_class_that_has_not_the_fields_is_no_hint(more: dict[str, Any]) -> None:
    (found,) = refused(SMALL["llama"][0][0] | {"model_type": "own"} | more)
    assert not any("if the layers" in hint for hint in found.hints)
