"""Classes of flash-linear-attention: counts of its constructors by hand, its published config, and refusals."""

import json
from random import Random
from typing import Any

import pytest

from megaplan.errors import MegaplanError
from megaplan.importers.hf import import_hf
from megaplan.inventory.build import build_inventory
from megaplan.spec.architecture import Model

DELTA = {"model_type": "gated_deltanet", "hidden_size": 64, "num_heads": 2, "head_dim": 16, "num_hidden_layers": 3, "vocab_size": 100}


def model(fields: dict[str, Any]) -> Model:
    return import_hf(json.dumps(fields), "config.json").loaded.spec.model


def parameters(fields: dict[str, Any]) -> int:
    return build_inventory(import_hf(json.dumps(fields), "config.json").loaded.spec).parameters


def test_the_published_transformer_of_340m() -> None:
    """configs/transformer_340M.json of fla-org/flash-linear-attention, with 341,099,520 parameters in its class."""
    fields = {"model_type": "transformer", "hidden_size": 1024, "num_heads": 16, "num_hidden_layers": 24, "tie_word_embeddings": True}
    assert parameters(fields | {"vocab_size": 32000, "hidden_act": "swish", "norm_eps": 1e-6, "attention_bias": False}) == 341_099_520


@pytest.mark.parametrize("seed", range(8))
def test_gated_delta_nets_by_hand(seed: int) -> None:
    draw = Random(seed)
    hidden, layers, heads, width, taps = draw.choice([64, 96]), draw.randint(2, 5), draw.randint(1, 3), 16, draw.choice([3, 4])
    values, factor, inner = heads * draw.choice([1, 2]), draw.choice([1, 1.5, 2.0]), draw.choice([None, 80])
    attends = [0, layers - 1][: draw.randint(0, 2)]
    keys, outputs, fed = heads * width, values * int(width * factor), inner or 256
    delta = hidden * (2 * keys + 2 * outputs + 2 * values) + outputs * hidden + taps * (2 * keys + outputs)
    delta += 2 * values + int(width * factor)  # decays, their biases, and the norm of a head's values
    attention = hidden * (hidden + 2 * hidden // 2) + hidden * hidden
    total = 2 * 100 * hidden + hidden + layers * (2 * hidden + 3 * hidden * fed)
    fields = DELTA | {"hidden_size": hidden, "num_hidden_layers": layers, "num_heads": heads, "num_v_heads": values, "head_dim": width}
    fields |= {"expand_v": factor, "conv_size": taps, "intermediate_size": inner}
    fields |= {"attn": {"layers": attends, "num_heads": 4, "num_kv_heads": 2}} if attends else {}
    assert parameters(fields) == total + len(attends) * attention + (layers - len(attends)) * delta


def test_listed_layers_attend() -> None:
    read = model(
        DELTA
        | {"num_hidden_layers": 2, "allow_neg_eigval": True, "attn": {"layers": [1], "num_heads": 4, "window_size": 32, "rope_theta": 5e5}}
    )
    assert (read.pattern, read.attention.window_size, read.attention.rope_theta) == ("GDAD", 32, 5e5)
    assert (read.linear_attention.value_dim, read.linear_attention.negative_eigenvalues) == (32, True)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"use_gate": False}, "use_gate"),
        ({"use_short_conv": False}, "use_short_conv"),
        ({"attnres_block_size": 2}, "attnres_block_size"),
        ({"attn": {"layers": [3], "num_heads": 4}}, "attn"),
        ({"attn": [{"layers": [0], "num_heads": 4}]}, "attn"),
        ({"attn": {"layers": [0], "num_heads": 4, "kind": "nsa"}}, "attn"),
        ({"expand_v": 1.3}, "expand_v"),
    ],
)
def test_what_no_block_has_is_refused(change: dict[str, Any], key: str) -> None:
    with pytest.raises(MegaplanError) as caught:
        model(DELTA | change)
    assert [found.location.key for found in caught.value.diagnostics] == [key]
