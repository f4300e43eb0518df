"""Fields that a config states twice, text models under their outer names, and fields whose keys the page names."""

import json
from pathlib import Path
from typing import Any

import pytest

from megaplan.errors import MegaplanError
from megaplan.importers.hf import import_hf
from megaplan.importers.registry import ARCHITECTURES, REFUSED
from megaplan.importers.towers import MULTIMODAL

SMALL = json.loads(Path(__file__).with_name("small_models.json").read_text(encoding="utf-8"))
PAGE = Path(__file__).parents[3] / "docs/reference/hf-import.md"


def small(family: str) -> dict[str, Any]:
    """The first small config of a family."""
    return dict(SMALL[family][0][0])


def model_of(config: dict[str, Any]) -> Any:
    return import_hf(json.dumps(config), "config.json").loaded.spec.model


@pytest.mark.parametrize(
    ("family", "name", "other"),
    [
        ("deepseek_v3", "num_experts", "n_routed_experts"),
        ("deepseek_v3", "moe_num_experts", "n_routed_experts"),
        ("deepseek_v3", "num_layers", "num_hidden_layers"),
        ("qwen3_moe", "n_routed_experts", "num_experts"),
        ("qwen3", "n_heads", "num_attention_heads"),
        ("qwen3", "num_kv_heads", "num_key_value_heads"),
    ],
)
def test_a_count_is_read_once_under_two_names(family: str, name: str, other: str) -> None:
    config = small(family)
    assert model_of(config | {name: config[other]}) == model_of(config)
    with pytest.raises(MegaplanError) as caught:
        model_of(config | {name: config[other] + 1})
    assert [found.code for found in caught.value.diagnostics] == ["MP806"]


OUTER = [
    ("minimax_m3_vl_text", "minimax_m3"),
    *(
        (family, outer)
        for family in SMALL
        if family.endswith("_text") and (outer := family.removesuffix("_text")) not in {*ARCHITECTURES, *REFUSED, *MULTIMODAL}
    ),
]


@pytest.mark.parametrize(("family", "outer"), OUTER)
def test_a_text_model_is_read_under_its_outer_name(family: str, outer: str) -> None:
    config = small(family)
    fields = {key: value for key, value in config.items() if key != "model_type"}
    expected = model_of(config)
    assert model_of(fields | {"model_type": outer}) == expected
    assert model_of({"model_type": outer, "text_config": fields | {"model_type": outer}}) == expected
    assert model_of({"model_type": outer, "text_config": fields}) == expected


@pytest.mark.skipif(not PAGE.is_file(), reason="runs beside the sources")
@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"hidden_size_per_layer_input": 2}, "model.features.layer_embeddings"),
        ({"num_kv_shared_layers": 3}, "model.attention.shared_keys"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}, "model.moe.own_norms"),
    ],
)
def test_a_field_of_gemma_4_becomes_the_key_that_the_page_names(fields: dict[str, Any], key: str) -> None:
    found = model_of(small("gemma4_text") | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0} | fields)
    for step in key.split(".")[1:]:
        found = getattr(found, step)
    assert found
    (row,) = [line for line in PAGE.read_text(encoding="utf-8").split("\n- ") if f"`{next(iter(fields))}`" in line]
    assert f"`{key}`" in row
