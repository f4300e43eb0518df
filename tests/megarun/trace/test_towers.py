"""An encoder of images on the first stage: the estimate of every column is what the runtime allocates, trained and frozen."""

from typing import Any

import pytest
from trace_checks import compare_distinct_ranks

pytestmark = pytest.mark.runtime
ENCODER: dict[str, Any] = {
    **{"num_layers": 3, "hidden_size": 40, "num_heads": 4, "head_dim": 8, "ffn_hidden_size": 56},
    **{"patch_values": 12, "patches": 16, "positions": 20, "first_norm": True, "norm": "rmsnorm"},
}
WINDOWS = {"window_patches": 8, "full_layers": [2], "qk_norm": True, "num_kv_heads": 2, "activation": "swiglu", "positions": 16}
PROJECTION = {"widths": [80, 36, 32], "joined_patches": 2, "norm": "rmsnorm"}
ROTARY, SMALL_WINDOWS = {"rotary": True, "grid": [4, 4]}, WINDOWS | {"window_patches": 4}
POOLED = {"widths": [80, 32], "joined_patches": 2, "pooled_patches": 2, "norm": "rmsnorm", "norms_joined": True}


def images(vision: bool, projector: bool, encoder: Any = None, projection: Any = None) -> dict[str, Any]:
    parts = {"encoder": ENCODER | (encoder or {})}, {"projection": projection or PROJECTION}
    towers = {"vision": {"trained": vision, **parts[0]}, "projector": {"trained": projector, **parts[1]}}
    batch = {"micro_batch_size": 2, "seq_length": 24, "images": 2}
    return {"model.pattern": "AD", "model.num_layers": 4, "model.towers": towers, "batch": batch}


FOURS = {"widths": [80, 32], "joined_patches": 2}
SPLIT = {"mesh": {"tp": 2, "towers": "split"}}
FOUR = {"kind": "1f1b", "num_microbatches": 4}
INTERLEAVED = {"mesh": {"pp": 2, "vpp": 2}, "schedule": {**FOUR, "kind": "interleaved_1f1b"}}
ZERO_BUBBLE = {"mesh": {"pp": 2, "vpp": 2}, "schedule": {**FOUR, "kind": "interleaved_zero_bubble"}}
BF16 = {"precision": {"params": "bf16"}}


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(images(True, True) | {"mesh.dp_replicate": 2}, id="trained"),
        pytest.param(images(False, True) | BF16 | {"mesh.pp": 2, "schedule": FOUR}, id="frozen-encoder-pp2"),
        pytest.param(images(True, False, WINDOWS) | {"recompute.towers": "selective"}, id="frozen-projector-selective"),
        pytest.param(
            images(True, True, WINDOWS, POOLED) | BF16 | {"recompute.towers": "full", "schedule": FOUR}, id="full", marks=pytest.mark.slow
        ),
        pytest.param(
            images(True, True, {"norm": "layernorm"}, FOURS) | BF16 | {"mesh.pp": 2, "schedule": FOUR},
            id="layer-norms-pp2",
            marks=pytest.mark.slow,
        ),
        pytest.param(images(True, True) | ZERO_BUBBLE, id="peak-in-the-projector"),
        pytest.param(
            images(True, True, WINDOWS | ROTARY | {"window_patches": 4}) | {"recompute.towers": "selective"}, id="rotary-selective"
        ),
        pytest.param(
            images(False, True, ROTARY | {"patches": 256, "grid": [8, 32], "positions": None}, POOLED | {"pooled_patches": 16})
            | BF16
            | {"mesh.pp": 2, "schedule": FOUR},
            id="rotary-frozen-pp2",
        ),
        pytest.param(images(True, True) | {"mesh": {"tp": 2}}, id="tp2"),
        pytest.param(images(True, True, projection=FOURS) | SPLIT | {"mesh.pp": 2, "schedule": FOUR}, id="split-tp2-pp2"),
        pytest.param(images(False, True, WINDOWS) | SPLIT | BF16, id="split-tp2-frozen-encoder"),
        pytest.param(
            images(True, False, ROTARY | SMALL_WINDOWS, POOLED) | SPLIT | {"recompute.towers": "full"},
            id="split-tp2-full",
            marks=pytest.mark.slow,
        ),
        pytest.param(images(True, True) | SPLIT | {"recompute.towers": "selective", "mesh.cp": 2}, id="split-tp2-cp2-selective"),
        pytest.param(images(False, False) | SPLIT | {"lora": {"rank": 3, "alpha": 6.0}}, id="split-tp2-lora"),
        pytest.param(images(True, True) | {"mesh": {"cp": 2}} | BF16, id="cp2"),
        pytest.param(images(False, False) | {"lora": {"rank": 3, "alpha": 6.0}}, id="lora", marks=pytest.mark.slow),
        pytest.param(images(True, True) | INTERLEAVED, id="interleaved", marks=pytest.mark.slow),
        pytest.param(images(True, True) | {"sharding.mode": "ddp", "mesh.dp_shard": 2} | BF16, id="ddp", marks=pytest.mark.slow),
    ],
)
def test_estimate_of_an_encoder_is_what_is_allocated(overrides: dict[str, Any], job_with: Any) -> None:
    """Every column of forward and backward to the byte, and every kept tensor by name."""
    compare_distinct_ranks(job_with(overrides))
