"""Fields of published configs that repeat another field, or are null where the class has a neutral value."""

import json
from pathlib import Path
from typing import Any

import pytest

from megaplan.importers.hf import import_hf

SMALL: dict[str, Any] = json.loads((Path(__file__).parent / "small_models.json").read_text(encoding="utf-8"))


def model(config: dict[str, Any]) -> dict[str, Any]:
    """The section `model` of an imported config."""
    return import_hf(json.dumps(config), "config.json").loaded.spec.as_document()["model"]


@pytest.mark.parametrize(
    ("kind", "key", "same"), [("lfm2", "num_heads", "num_attention_heads"), ("mimo_v2_flash", "n_shared_experts", None)]
)
def test_a_field_that_changes_nothing(kind: str, key: str, same: str | None) -> None:
    config, _ = SMALL[kind][0]
    assert model({**config, key: None if same is None else config[same]}) == model(config)


def test_a_factor_of_null_is_none() -> None:
    config, _ = SMALL["mimo_v2_flash"][0]
    assert "routed_scale" not in model({**config, "routed_scaling_factor": None})["moe"]
