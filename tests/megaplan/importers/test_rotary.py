"""Rotary parameters of a config: scaled frequencies, and the scale of the scores that comes with them."""

import json
import math
from typing import Any

import pytest
from hf_samples import config

from megaplan.errors import MegaplanError
from megaplan.importers.hf import import_hf


def imported(name: str, **changes: Any) -> tuple[Any, str]:
    """`model.attention` of a config, and the import's messages."""
    found = import_hf(json.dumps(config(name) | changes), "config.json").loaded
    return found.spec.model.attention, "\n".join(item.detail for item in found.diagnostics)


def test_llama_3_1_scales_its_frequencies() -> None:
    attention, told = imported("Llama-3.1-8B")
    assert attention.rope_scaling.model_dump() == {
        **{"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_seq_length": 8192}
    }
    assert attention.softmax_scale is None
    assert "rope_scaling" not in told


@pytest.mark.parametrize("ends", [1.0, 4.0])
def test_equal_factors_of_llama3_are_read(ends: float) -> None:
    """Llama-4-Scout has 1 and 1."""
    given = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": ends, "high_freq_factor": ends}
    scaling = imported("Llama-3.1-8B", rope_scaling=given | {"original_max_position_embeddings": 8192})[0].rope_scaling
    assert (scaling.low_freq_factor, scaling.high_freq_factor) == (ends, ends)


def test_yarn_of_latent_attention_scales_the_scores_too() -> None:
    attention, told = imported("DeepSeek-V2-Lite")
    scaling = attention.rope_scaling
    assert (scaling.kind, scaling.factor, scaling.original_seq_length, scaling.attention_factor) == ("yarn", 40.0, 4096, 1.0)
    weighed = 0.1 * 0.707 * math.log(40) + 1  # DeepSeek-V2-Lite, modeling_deepseek.py
    assert attention.softmax_scale == pytest.approx(weighed**2 / math.sqrt(128 + 64))
    assert "rope_scaling" not in told


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, {"kind": "linear", "factor": 4.0}),
        ({"rope_type": "default", "mrope_section": [8, 12, 12]}, None),
        ({"type": "mrope", "mrope_section": [8, 12, 12]}, None),
    ],
)
def test_older_and_neutral_words(given: dict[str, Any], expected: dict[str, Any] | None) -> None:
    attention, told = imported("Qwen3-8B", rope_scaling=given)
    assert (attention.rope_scaling.model_dump() if attention.rope_scaling else None) == expected
    assert "rope_scaling" not in told


def test_a_length_outside_the_rotary_parameters_is_the_original_one() -> None:
    given = {"rope_type": "yarn", "factor": 4.0}
    assert imported("Qwen3-8B", rope_scaling=given, max_position_embeddings=40_960)[0].rope_scaling.original_seq_length == 40_960
    named = imported("Qwen3-8B", rope_scaling=given, original_max_position_embeddings=32_768)[0]
    assert named.rope_scaling.original_seq_length == 32_768


def test_yarn_whose_ends_meet_is_a_ramp_of_one_step() -> None:
    """Kimi-K2's config has beta_fast = beta_slow = 1."""
    given = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "beta_slow": 1.0}
    scaling = imported("Qwen3-8B", rope_scaling=given)[0].rope_scaling
    assert (scaling.beta_fast, scaling.beta_slow) == (1.0, 1.0)
    with pytest.raises(MegaplanError) as caught:
        imported("Qwen3-8B", rope_scaling={**given, "beta_fast": 0.5})
    assert [item.detail.rpartition(", and ")[2] for item in caught.value.diagnostics if item.code == "MP715"] == ["0.5 < 1"]


def test_a_rule_that_a_spec_does_not_have_is_told() -> None:
    attention, told = imported("Qwen3-8B", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert attention.rope_scaling is None
    assert "rope_scaling" in told


def test_scores_of_granite_have_a_factor_of_their_own() -> None:
    attention, told = imported("granite-4.0-h-tiny")
    assert attention.softmax_scale == 0.0078125
    assert "attention_multiplier" not in told
