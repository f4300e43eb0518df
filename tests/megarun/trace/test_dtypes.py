"""Layers in their own dtypes, and fp16: the trace counts what the estimate does, with the casts of the stream."""

from collections.abc import Callable
from typing import Any

import pytest
from trace_checks import BF16, compare_distinct_ranks

pytestmark = pytest.mark.runtime
WIDE = {"precision": BF16 | {"families": {"M": "fp32", "E": "fp32"}}}
NARROW = {"precision": BF16 | {"params": "fp32", "families": {"A": "bf16", "E": "bf16"}}}
FP16 = {"precision": BF16 | {"params": "fp16"}}
LAYER_NORMS = {"precision": BF16, "model.norm": "layernorm"}
"""torch keeps their statistics in fp32 on a GPU, and in bf16 on a CPU."""
SMALL = {"model.pattern": "AEMD", "model.num_layers": 4}
PIPELINED = {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": {"kind": "1f1b", "num_microbatches": 3}}
IN_V = {"mesh": {"pp": 2, "vpp": 2}, "schedule": {"kind": "zbv", "num_microbatches": 3}}
LOW, PACKING = {"recipe": {"name": "fp8_current"}}, {"recipe": {"name": "fp8_rowwise", "param_gather": True}}
WIDTHS = {"model.moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 48, "shared_ffn_hidden_size": 16}}
SHARED = {
    "model.pattern": "AD",
    "model.num_layers": 8,
    "model.parallel_layers": [1, 3, 5, 7],
    "batch": {"micro_batch_size": 2, "seq_length": 96},
}
CASES: dict[str, dict[str, Any]] = {
    "wide-pp": WIDE | PIPELINED,
    "wide-zbv": WIDE | IN_V,
    "narrow-zbv": NARROW | IN_V,
    "narrow-dp-reshard": NARROW | {"mesh": {"dp_shard": 2}, "sharding.reshard_after_forward": True},
    "fp16-router-losses": FP16 | PIPELINED | {"model.moe.balance_loss_coefficient": 0.01},
    "fp16-router-backward": {  # its scratch is the peak: products of fp16 have the gradient of the logits in one part of fp32
        "model.pattern": "E",
        "model.num_layers": 1,
        "model.hidden_size": 1024,
        "model.moe": {"num_experts": 32, "top_k": 1, "ffn_hidden_size": 16},
        "host": {"kernels": "triton"},
        "batch": {"micro_batch_size": 1, "seq_length": 1024},
        "schedule.num_microbatches": 1,
    }
    | FP16,
    "wide-tp-recompute": WIDE | {"mesh": {"tp": 2}, "recompute": {"default": "selective"}},
    "wide-gathers": {  # a layer's gather is the peak, before the gradient of its output is cast
        "model.pattern": "MM",
        "model.num_layers": 2,
        "model.hidden_size": 512,
        "batch": {"micro_batch_size": 1, "seq_length": 16},
        "sharding.reshard_after_forward": True,
    }
    | WIDE
    | PIPELINED,
    "layer-norms-pp": LAYER_NORMS | PIPELINED | {"model.embedding_norm": True},
    "layer-norms-recompute": LAYER_NORMS | {"mesh": {"dp_shard": 2}, "recompute": {"default": "selective"}},
    "recipe-pp": {"precision": WIDE["precision"] | LOW} | PIPELINED | WIDTHS,
    "recipe-narrow-packed": {"precision": NARROW["precision"] | PACKING, "mesh": {"dp_shard": 2}, "sharding.reshard_after_forward": True}
    | WIDTHS,
    "shared-norm-full": SHARED | {"precision": BF16 | {"families": {"A": "fp32"}}, "recompute": {"default": "full"}},
    "shared-norm-zbv": SHARED | IN_V | {"precision": BF16 | {"families": {"D": "fp32"}}},
    "shared-norm-recipe": SHARED | {"precision": BF16 | {"families": {"D": "fp32"}} | LOW},
    "shared-norm-of-three": {
        **WIDTHS,
        "model.pattern": "MADEMADE",
        "model.num_layers": 8,
        "model.parallel_layers": [1, 2, 3, 5, 6, 7],
        "precision": BF16 | {"families": {"M": "fp32", "D": "fp32"}},
    },
    "wide-one": WIDE | {"schedule.num_microbatches": 2},
}
SLOW = (
    *("layer-norms-recompute", "wide-tp-recompute", "wide-one", "narrow-zbv", "wide-pp", "fp16-router-losses", "recipe-pp"),
    *("recipe-narrow-packed", "shared-norm-zbv", "shared-norm-recipe", "shared-norm-of-three"),
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES])
def test_traces_have_the_estimated_bytes(name: str, job_with: Callable[..., Any]) -> None:
    compare_distinct_ranks(job_with({**SMALL, **CASES[name]}))
