"""Configs of flash-linear-attention have the parameters of its own classes."""

import json
from random import Random
from typing import Any

import pytest
import torch

models = pytest.importorskip("fla.models")
from fla.layers import attn as attention_layer  # noqa: E402

from megaplan.importers.hf import import_hf  # noqa: E402
from megaplan.inventory.build import build_inventory  # noqa: E402

CLASSES = {
    "gated_deltanet": (models.GatedDeltaNetConfig, models.GatedDeltaNetForCausalLM),
    "transformer": (models.TransformerConfig, models.TransformerForCausalLM),
}


def drawn(kind: str, draw: Random) -> dict[str, Any]:
    fields = {"hidden_size": draw.choice([64, 96]), "num_hidden_layers": draw.randint(1, 5), "vocab_size": 100}
    fields |= {
        "tie_word_embeddings": draw.random() < 0.5,
        "intermediate_size": draw.choice([None, 80]),
        "hidden_ratio": draw.choice([2, 4]),
    }
    heads = {"num_heads": 4, "num_kv_heads": draw.choice([1, 2]), "qkv_bias": draw.random() < 0.5}
    if kind == "transformer":
        return fields | heads | {"qk_norm": draw.random() < 0.5}
    count = draw.randint(1, 3)
    fields |= {"num_heads": count, "num_v_heads": draw.choice([None, 2 * count]), "head_dim": 16, "expand_v": draw.choice([1, 1.5, 2.0])}
    return fields | ({"attn": {"layers": [0], **heads}} if draw.random() < 0.5 else {})


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("seed", range(10))
def test_parameters(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_layer, "flash_attn_func", print)  # which the constructor asks for, and a count does not call
    fields, (config, build) = drawn(kind, Random(seed)), CLASSES[kind]
    with torch.device("meta"):
        built = build(config(**fields))
    spec = import_hf(json.dumps(fields | {"model_type": kind}), "config.json").loaded.spec
    assert build_inventory(spec).parameters == sum(tensor.numel() for tensor in built.parameters())
