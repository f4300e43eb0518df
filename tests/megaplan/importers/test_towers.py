"""Multimodal configs: encoders and projections are counted in the first stage. `tests/upstream/test_towers.py` checks the totals."""

import json
from pathlib import Path
from typing import Any

import pytest

from megaplan import estimate
from megaplan.budget.values import RankBudget
from megaplan.columns import Column, Phase
from megaplan.errors import MegaplanError
from megaplan.importers.hf import ImportedConfig, import_hf
from megaplan.importers.towers import MULTIMODAL
from megaplan.inventory.build import build_inventory
from megaplan.inventory.towers import tower_parameters

SMALL: dict[str, list[tuple[dict[str, Any], int]]] = json.loads((Path(__file__).parent / "small_towers.json").read_text(encoding="utf-8"))
"""A small config a model type, with transformers' number of parameters."""


def imported(fields: dict[str, Any], *changes: str) -> ImportedConfig:
    return import_hf(json.dumps(fields, indent=1), "config.json", changes)


@pytest.mark.parametrize("model_type", MULTIMODAL)
def test_parameters(model_type: str) -> None:
    ((fields, total),) = SMALL[model_type]
    assert build_inventory(imported(fields).loaded.spec).parameters == total


GEMMA: dict[str, Any] = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}}
"""The class's own encoder: transformers 5.24 builds 92,884,224 parameters of it, and 49,920 of its projection."""


@pytest.mark.parametrize("absent", ["vision_config", "audio_config"])
def test_parts_that_a_config_lacks_are_not_counted(absent: str) -> None:
    ((fields, total),) = SMALL["gemma4"]
    without = imported({key: value for key, value in fields.items() if key != absent}).loaded.spec
    assert without.model.towers is not None
    assert absent.removesuffix("_config") not in tower_parameters(without.model.towers)
    assert build_inventory(without).parameters < total


@pytest.mark.parametrize("family", ["gemma4", "gemma4_unified"])
def test_a_config_without_encoders_is_its_text_model(family: str) -> None:
    ((fields, _),) = SMALL[family]
    spec = imported({key: value for key, value in fields.items() if key not in ("vision_config", "audio_config")}).loaded.spec
    text = imported(fields["text_config"] | {"tie_word_embeddings": spec.model.tie_embeddings}).loaded.spec
    assert spec.model.towers is None
    assert build_inventory(spec).parameters == build_inventory(text).parameters


def test_of_a_config_of_several_models_the_one_that_reads_and_writes_text_is_read() -> None:
    ((fields, total),) = SMALL["qwen3_omni_moe_thinker"]
    whole = {"model_type": "qwen3_omni_moe", "architectures": ["Qwen3OmniMoeForConditionalGeneration"], "talker_config": {"a": 1}}
    found = imported(whole | {"thinker_config": {key: value for key, value in fields.items() if key != "model_type"}})
    assert build_inventory(found.loaded.spec).parameters == total
    assert any("talker_config" in each.detail for each in found.loaded.diagnostics)


def test_layers_of_a_saved_config_are_numbered_with_zeros_in_front() -> None:
    """transformers writes layer 5 of 30 as 05."""
    text = {"model_type": "gemma4_unified_text", "num_hidden_layers": 12, "hidden_size": 64, "intermediate_size": 96}
    saved = {f"{layer:02}": {"head_dim": 512} for layer in (5, 11)}
    totals = {build_inventory(imported({**text, **more}).loaded.spec).parameters for more in ({}, {"per_layer_config": saved})}
    assert len(totals) == 1


def test_a_flat_config_of_an_earlier_release_is_the_nested_one() -> None:
    ((nested, total),) = SMALL["qwen2_vl"]
    text = {key: value for key, value in nested["text_config"].items() if key != "model_type"}
    flat = {key: value for key, value in nested.items() if key != "text_config"} | text
    assert build_inventory(imported(flat).loaded.spec).parameters == total


def test_a_text_config_may_repeat_the_class_of_the_whole_model() -> None:
    ((fields, total),) = SMALL["qwen2_5_vl"]
    named = {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    repeated = {**fields, **named, "text_config": fields["text_config"] | named}
    assert build_inventory(imported(repeated).loaded.spec).parameters == total
    other = {**fields, **named, "text_config": fields["text_config"] | {"architectures": ["Qwen2Model"]}}
    with pytest.raises(MegaplanError, match="MP805"):
        imported(other)


def test_towers_are_frozen_until_set_and_named_in_one_note() -> None:
    found = imported(GEMMA)
    towers = found.loaded.spec.model.towers
    assert towers is not None
    assert tower_parameters(towers) == {"vision": 92_884_224, "projector": 49_920}
    assert towers.counted == {"vision": 7_087_104}  # the head that pools, which no token of text reads
    (note,) = [item for item in found.loaded.diagnostics if item.code == "MP225"]
    assert note.hints[:-1] == ("--set model.towers.vision.trained=true", "--set model.towers.projector.trained=true")
    (trained,) = [item for item in imported(GEMMA, "model.towers.projector.trained=true").loaded.diagnostics if item.code == "MP225"]
    assert trained.hints[:-1] == ("--set model.towers.vision.trained=true",)
    assert "model.towers" in "".join(item.detail for item in found.loaded.diagnostics if item.code == "MP790")


def test_an_unread_field_that_names_a_tensor_is_refused() -> None:
    with pytest.raises(MegaplanError) as refused:
        imported(GEMMA | {"vision_config": {"model_type": "siglip_vision_model", "expert_hidden_size": 12}})
    assert [(item.code, item.location.key) for item in refused.value.diagnostics] == [("MP806", "expert_hidden_size")]


def test_fields_of_an_earlier_release_that_repeat_what_the_class_builds() -> None:
    """Kimi-K2.5's published config names its encoder's fields with a prefix that transformers does not read: 416,866,032 parameters."""
    ((fields, _),) = SMALL["kimi_k25"]
    old = {"vt_hidden_size": 1152, "vt_num_hidden_layers": 27, "vt_intermediate_size": 4304, "text_hidden_size": 7168}
    found = imported({**fields, "projection_hidden_size": 1152, "vision_config": old})
    towers = found.loaded.spec.model.towers
    assert towers is not None
    assert tower_parameters(towers)["vision"] == 416_866_032
    with pytest.raises(MegaplanError) as refused:
        imported({**fields, "vision_config": {**old, "vt_hidden_size": 128}})
    assert [(item.code, item.location.key) for item in refused.value.diagnostics] == [("MP806", "vt_hidden_size")]


def test_an_encoder_without_a_structure_is_refused_by_its_type() -> None:
    with pytest.raises(MegaplanError) as refused:
        imported(GEMMA | {"vision_config": {"model_type": "dinov2"}})
    assert [item.code for item in refused.value.diagnostics] == ["MP805"]
    assert "vision_config.model_type = dinov2" in refused.value.diagnostics[0].detail


def test_towers_are_state_of_the_first_stage() -> None:
    """2 bytes an element of a frozen part; a trained one also has a gradient and two moments of 4 bytes, over the ranks that share them."""
    attention, mlp = {"kind": "gqa", "num_heads": 4, "num_kv_heads": 4, "head_dim": 16}, {"ffn_hidden_size": 128}
    model: dict[str, Any] = {"pattern": "AD", "num_layers": 4, "hidden_size": 64, "vocab_size": 256, "attention": attention, "mlp": mlp}
    document: dict[str, Any] = {"format": "megaplan.spec/1", "name": "small", "model": model, "mesh": {"pp": 2, "dp_shard": 4}}
    document |= {"schedule": {"num_microbatches": 4}, "batch": {"micro_batch_size": 1, "seq_length": 64}}
    plain = estimate(document)
    size = 4 * 10**6
    changed: dict[bool, Any] = {}
    for trained in (False, True):
        model["towers"] = {"vision": {"parameters": size, "trained": trained}}
        changed[trained] = estimate(document)

    def more(trained: bool, rank: int) -> dict[Column, int]:
        before, after = (_of(found.budget.ranks, rank) for found in (plain, changed[trained]))
        return {column: after[column] - before[column] for column in Column}

    assert more(False, 0)[Column.REPLICATED_PARAMS] == size // 4 * 2
    assert more(True, 0)[Column.OTHER_OPTIMIZER] == size // 4 * 8 + 4
    assert more(True, 0)[Column.GRADIENTS] >= size // 4 * 4
    assert not any(more(True, 7).values())
    assert changed[False].parameters == plain.parameters + size
    assert changed[True].active_parameters == plain.active_parameters
    assert changed[True].to_dict()["totals"]["towers"] == {"vision": {"parameters": size, "trained": True, "priced": False}}


def _of(ranks: tuple[RankBudget, ...], rank: int) -> dict[Column, int]:
    (found,) = [each for each in ranks if rank in each.ranks]
    return dict(found.cells[Phase.OPTIMIZER])


def test_thinkers_are_read_and_the_other_models_reported() -> None:
    ((fields, total),) = SMALL["qwen2_5_omni_thinker"]
    whole = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"], "thinker_config": fields, "talker_config": {"a": 1}}
    found = import_hf(json.dumps(whole), "config.json")
    assert build_inventory(found.loaded.spec).parameters == total
    assert any("talker_config: not imported" in each.detail for each in found.loaded.diagnostics)


def test_flat_fields_of_step_are_the_text_models() -> None:
    ((fields, total),) = SMALL["step3p7"]
    flat = {**fields, **fields["text_config"], "model_type": "step3p7"}
    del flat["text_config"]
    assert build_inventory(import_hf(json.dumps(flat), "config.json").loaded.spec).parameters == total


@pytest.mark.parametrize(("whole", "text", "said"), [(False, True, True), (True, False, True), (True, True, False), (False, False, False)])
def test_a_tie_of_the_text_model_alone_is_reported(whole: bool, text: bool, said: bool) -> None:
    ((fields, _),) = SMALL["qwen3_vl"]
    changed = fields | {"tie_word_embeddings": whole, "text_config": fields["text_config"] | {"tie_word_embeddings": text}}
    found = import_hf(json.dumps(changed), "config.json").loaded
    assert found.spec.model.tie_embeddings is whole
    assert any("text_config has" in each.detail for each in found.diagnostics) is said
