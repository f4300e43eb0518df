"""Fields of published configs that repeat another field, or are null where the class has a neutral value."""

import json
from pathlib import Path
from typing import Any

import pytest

from megaplan.errors import MegaplanError
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


BUILT = {
    "mimo_v2_flash": {
        "n_shared_experts": (0, 1), "swa_num_attention_heads": (None, 64), "swa_head_dim": (None, 7), "swa_v_head_dim": (None, 9),
        "add_swa_attention_sink_bias": (True, False), "add_full_attention_sink_bias": (False, True),
    },
    "minimax_m2": {"use_qk_norm": (True, False)},
}  # fmt: skip
"""Fields of published configs that the class does not read: the value that is built, and another one."""


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind, keys in BUILT.items() for key in keys])
def test_a_field_beyond_the_class_says_what_is_built_or_is_refused(kind: str, key: str) -> None:
    config, _ = SMALL[kind][0]
    built, other = BUILT[kind][key]
    assert model({**config, key: built}) == model(config)
    with pytest.raises(MegaplanError) as caught:
        model({**config, key: other})
    assert [(found.code, found.location.key) for found in caught.value.diagnostics] == [("MP805", key)]


def test_the_published_window_counts_the_tokens_before_the_query() -> None:
    config, _ = SMALL["mimo_v2_flash"][0]
    config = {**config, "num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 6}
    assert model({**config, "sliding_window_size": 32})["attention"]["window_size"] == 33
