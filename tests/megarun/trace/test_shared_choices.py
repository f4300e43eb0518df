"""Layers that attend to the keys that an earlier layer chose: the trace counts what the estimate does, whoever holds the choice."""

from typing import Any

import pytest
from trace_checks import BF16, compare_distinct_ranks

pytestmark = [pytest.mark.runtime, pytest.mark.requirement("R-58")]
TWO = {"schedule.num_microbatches": 2}
HEADS = {
    "kind": "mla",
    "num_heads": 4,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
}
LONG = {"micro_batch_size": 2, "seq_length": 512}
"""Positions with which a choice is the largest storage of these layers."""


def choosing(layers: list[int], shared: list[int], **more: Any) -> dict[str, Any]:
    indexer = {"num_heads": 2, "head_dim": 8, "top_k": 16, "layers": layers, "shared_layers": shared}
    return {"model.attention": {**HEADS, "indexer": indexer, **more}}


GROUP = choosing([0], [2, 4])
SINKS = choosing([0], [2, 4], sinks=True) | {"batch": LONG}
KERNELS = {"host.kernels": "triton", "precision": BF16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "adjacent": ("AAA", choosing([0], [1, 2])),
    "with layers between": ("ADADAD", GROUP),
    "two groups": ("AADADAADA", choosing([0, 3], [1, 5, 6, 8])),
    "selective": ("ADADAD", GROUP | {"recompute": {"default": "selective"}, "batch": LONG}),
    "full": ("ADADADD", GROUP | {"recompute": {"default": "full"}, "batch": LONG}),
    "full between alone": ("ADADADD", GROUP | {"recompute": {"blocks": {"D": "full"}}, "batch": LONG}),
    "full of attention alone": ("ADADADD", GROUP | {"recompute": {"blocks": {"A": "full"}}, "batch": LONG}),
    "the last layer": ("ADADA", GROUP | {"recompute": {"default": "full"}, "batch": LONG}),
    "kernels": ("ADADAD", GROUP | {"host.kernels": "triton", "precision": BF16, "batch": LONG}),
    "kernels, selective": (
        "ADADAD",
        GROUP | {"host.kernels": "triton", "precision": BF16, "batch": LONG, "recompute": {"default": "selective"}},
    ),
    "kernels, cp, packed": (
        "ADADAD",
        GROUP | {"host.kernels": "triton", "precision": BF16, "batch": LONG, "mesh": {"cp": 2}, "data.packing": "documents"},
    ),
    "tp": ("ADADAD", GROUP | {"mesh": {"tp": 2}, "batch": LONG}),
    "tp, cp, selective": ("ADADAD", GROUP | {"mesh": {"tp": 2, "cp": 2}, "batch": LONG, "recompute": {"default": "selective"}}),
    "tp, cp, full, kernels": (
        "ADADADD",
        GROUP | {"mesh": {"tp": 2, "cp": 2}, "batch": LONG, "recompute": {"default": "full"}, "host.kernels": "triton", "precision": BF16},
    ),
    "experts between": (
        "AEAEAE",
        GROUP | {"mesh": {"ep": 2, "dp_shard": 2}, "sharding.reshard_after_forward": True, "precision": BF16, "batch": LONG},
    ),
    "experts between, selective": ("AEAEAE", GROUP | TWO | {"batch": LONG, "recompute": {"blocks": {"A": "full", "E": "selective"}}}),
    "reshard": ("ADADAD", GROUP | {"mesh": {"dp_shard": 2}, "sharding.reshard_after_forward": True, "precision": BF16, "batch": LONG}),
    "stages": ("ADADADADADAD", choosing([0, 6], [2, 4, 8, 10]) | TWO | {"mesh": {"pp": 2}, "batch": LONG}),
    "stages, bf16, full": (
        "ADADADADADAD",
        choosing([0, 6], [2, 4, 8, 10]) | TWO | {"mesh": {"pp": 2}, "precision": BF16, "batch": LONG, "recompute": {"default": "full"}},
    ),
    "zero bubble": (
        "ADADADAD" * 2,
        choosing([0, 4, 8, 12], [2, 6, 10, 14])
        | {"mesh": {"pp": 2, "vpp": 2}, "schedule": {"kind": "zbv", "num_microbatches": 4}, "batch": LONG},
    ),
    "further tokens": ("ADADAD", GROUP | {"model.features": {"mtp": {"depth": 1, "ffn_hidden_size": 64}}, "batch": LONG}),
    "a window": (
        "ADADAAD",
        {
            "model.attention": {
                **choosing([0, 4], [2, 5])["model.attention"],
                **{"window_size": 20, "full_layers": [0, 2], "nope_layers": [2, 5]},
            }
        },
    ),
    "shared norms": ("ADADAD", GROUP | {"model.parallel_layers": [1, 3, 5], "batch": LONG}),
    "norms behind": ("ADADAD", GROUP | {"model.norm_placement": "post", "batch": LONG}),
    "eight bits": ("ADADAD", GROUP | {"precision": {**BF16, "recipe": {"name": "fp8_rowwise"}}, "batch": LONG}),
    "sinks, cp, tp": ("ADADAD", SINKS | {"mesh": {"cp": 2, "tp": 2}}),
    "sinks, kernels": ("ADADAD", SINKS | KERNELS),
    "sinks, kernels, tp, selective": ("ADADAD", SINKS | KERNELS | {"mesh": {"tp": 2}, "recompute": {"default": "selective"}}),
    "sinks, kernels, cp, packed, full": (
        "ADADADD",
        SINKS | KERNELS | {"mesh": {"cp": 2}, "recompute": {"default": "full"}, "data.packing": "documents"},
    ),
    "long": ("ADADAD", GROUP | {"batch": LONG}),
    "long, wide layers between": ("ADDADAD", choosing([0], [3, 5]) | {"batch": LONG, "model.mlp.ffn_hidden_size": 512}),
}


QUICK = ("kernels, cp, packed", "tp, cp, selective")
"""Cases that CI traces."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES])
def test_a_choice_is_counted_once(job_with: Any, name: str) -> None:
    pattern, settings = CASES[name]
    compare_distinct_ranks(job_with({"model.pattern": pattern, "model.num_layers": len(pattern), **settings}))
