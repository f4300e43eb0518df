"""Multimodal configs have as many parameters as transformers builds: text, encoders and projections, in three spellings."""

import json

import pytest

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from hf_towers import MULTIMODAL, random_towers  # noqa: E402
from test_imports import built, imported, model_class  # noqa: E402

from megaplan.importers.hf import import_hf  # noqa: E402
from megaplan.inventory.towers import tower_parameters  # noqa: E402

COUNT = 6


@pytest.mark.parametrize("model_type", MULTIMODAL)
@pytest.mark.parametrize("seed", range(COUNT))
def test_parameters_are_those_that_transformers_builds(model_type: str, seed: int) -> None:
    config = random_towers(model_type, seed)
    made, total = built(config)
    assert imported(config) == total
    assert imported(json.loads(made.to_json_string(use_diff=True))) == total
    assert imported(json.loads(made.to_json_string(use_diff=False))) == total


STATED = (
    *("gemma3", "idefics3", "internvl", "lfm2_vl", "llama4", "llava", "mistral3", "paddleocr_vl", "paligemma"),
    *("qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_vl", "qwen3_vl_moe", "smolvlm"),
)
TEXT = ("language_model", "text_model.", "lm_head")
WIDTHS: dict[str, dict[str, int]] = {
    "llama4": {"hidden_size": 1408, "vision_output_dim": 4096},
    "qwen2_vl": {"hidden_size": 8192},
    "qwen2_5_vl": {"out_hidden_size": 8192},
    "qwen3_5": {"out_hidden_size": 4096},
    "qwen3_vl": {"out_hidden_size": 4096},
    "qwen3_vl_moe": {"out_hidden_size": 2048},
}
"""Fields of encoders whose class has a default that does not fit its own text model, or its own adapter."""


@pytest.mark.parametrize("model_type", STATED)
def test_a_published_class_splits_into_text_and_stated_towers(model_type: str) -> None:
    """The text model, and the encoder with its projection: little of these is outside what is stated."""
    made = transformers.CONFIG_MAPPING[model_type](vision_config=WIDTHS.get(model_type))
    with torch.device("meta"):
        model = model_class(model_type)(made)
    sizes = {name: each.numel() for name, each in model.named_parameters()}
    text = sum(size for name, size in sizes.items() if any(word in name for word in TEXT))
    config = json.loads(made.to_json_string(use_diff=False))
    towers = import_hf(json.dumps(config), "config.json").loaded.spec.model.towers
    assert towers is not None
    assert towers.stated is not None
    parts = tower_parameters(towers)
    assert sum(parts.values()) == sum(sizes.values()) - text
    assert imported(config) == sum(sizes.values())
    assert sum(towers.counted.values()) < sum(parts.values()) / 4
