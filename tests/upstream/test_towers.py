"""Multimodal configs have as many parameters as transformers builds: text, encoders and projections, in three spellings."""

from __future__ import annotations

import json

import pytest

transformers = pytest.importorskip("transformers")

from hf_towers import MULTIMODAL, random_towers  # noqa: E402
from test_imports import built, imported  # noqa: E402

COUNT = 6


@pytest.mark.parametrize("model_type", MULTIMODAL)
@pytest.mark.parametrize("seed", range(COUNT))
def test_parameters_are_those_that_transformers_builds(model_type: str, seed: int) -> None:
    config = random_towers(model_type, seed)
    made, total = built(config)
    assert imported(config) == total
    assert imported(json.loads(made.to_json_string(use_diff=True))) == total
    assert imported(json.loads(made.to_json_string(use_diff=False))) == total
