"""Depths of multi-token prediction of other blocks than the plain ones: the trace counts what the estimate does."""

from collections.abc import Callable
from typing import Any

import pytest
from trace_checks import BF16, compare_distinct_ranks

pytestmark = [pytest.mark.runtime, pytest.mark.requirement("R-10")]
TWO = {"schedule.num_microbatches": 2}
KERNELS = {"host.kernels": "triton"}
MLA = {"num_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
DEEPSEEK = {
    "model.attention": {"kind": "mla", **MLA},
    "model.moe": {
        "num_experts": 8,
        "top_k": 2,
        "ffn_hidden_size": 24,
        "shared_ffn_hidden_size": 16,
        "score": "sigmoid",
        "expert_bias": True,
        "expert_bias_rate": 0.001,
        "num_groups": 4,
        "top_groups": 2,
        "routed_scale": 2.5,
    },
}

DELTA_NET = {
    "kind": "gated_delta",
    "num_key_heads": 4,
    "num_value_heads": 8,
    "key_dim": 4,
    "value_dim": 4,
    "chunk_size": 4,
    "save_every": 8,
}
DELTA = {"model.linear_attention": DELTA_NET}
MAMBA3 = {
    "model.mamba": {"kind": "mamba3", "expand": 4, "head_dim": 32, "state_dim": 64, "num_groups": 8, "chunk_size": 8, "save_every": 16}
}

RECURRENT = {"model.recurrent": {"kind": "m2rnn", "num_heads": 4, "key_dim": 4, "value_dim": 4, "save_every": 8}}


def _depths(depth: int = 1, **more: Any) -> dict[str, Any]:
    return {"model.features.mtp": {"depth": depth, "ffn_hidden_size": 40, **more}}


CASES = {
    "swiglu": ("AD", _depths(2, activation="swiglu")),
    "gelu-bias-tp-vocabulary": ("AD", _depths(activation="gelu", bias=True) | {"mesh": {"tp": 2, "vocab_parallel": True}}),
    "swiglu-bias-pp-bf16": ("AD", TWO | _depths(2, activation="swiglu", bias=True) | {"mesh": {"pp": 2}, "precision": BF16}),
    "swiglu-bias-cp-tp-tied": ("AD", _depths(activation="swiglu", bias=True) | {"mesh": {"cp": 2, "tp": 2}, "model.tie_embeddings": True}),
    "experts": ("AE", _depths(2, experts=True)),
    "experts-shard-reshard": ("AE", _depths(2, experts=True) | {"mesh": {"dp_shard": 2}, "sharding.reshard_after_forward": True}),
    "experts-ep-reshard": ("AE", _depths(experts=True) | {"mesh": {"dp_shard": 2, "ep": 2}, "sharding.reshard_after_forward": True}),
    "experts-ep-shard-bf16": ("AE", _depths(2, experts=True) | {"mesh": {"dp_shard": 4, "ep": 2}, "precision": BF16}),
    "experts-pp-ep-bf16": (
        "AE",
        TWO | _depths(2, experts=True) | {"mesh": {"pp": 2, "dp_shard": 2, "ep": 2}, "precision": BF16},
    ),
    "experts-pp-ep-tp-reshard": (
        "AE",
        TWO | _depths(2, experts=True) | {"mesh": {"pp": 2, "dp_shard": 2, "ep": 2, "tp": 2}, "sharding.reshard_after_forward": True},
    ),
    "latent-experts-zbv-kernels": (
        "AEAE",
        TWO
        | DEEPSEEK
        | _depths(2, experts=True)
        | {"mesh": {"pp": 2, "vpp": 2, "dp_shard": 2, "ep": 2}, "schedule.kind": "zbv", **KERNELS},
    ),
    "latent-experts-interleaved-grads-bf16-tied": (
        "AEAE",
        {"schedule.num_microbatches": 4, "model.tie_embeddings": True, "precision": {**BF16, "grads": "bf16", "reduce": "bf16"}}
        | DEEPSEEK
        | _depths(2, experts=True)
        | {"mesh": {"pp": 2, "vpp": 2, "dp_shard": 2}, "schedule.kind": "interleaved_1f1b", "sharding.reshard_after_forward": True},
    ),
    "latent-experts-cp-tp-vocabulary-losses": (
        "AE",
        DEEPSEEK
        | _depths(2, experts=True)
        | {"mesh": {"cp": 2, "tp": 2, "ep": 2, "vocab_parallel": True}, "model.moe.balance_loss_coefficient": 0.1},
    ),
    "experts-sides-replicas-adamw-bf16-kernels": (
        "AE",
        _depths(2, experts=True, side_embeddings=True)
        | {"model.features.structure": {"num_categories": 7, "bottleneck": 6}, "optimizer.matrix": "adamw"}
        | {"mesh": {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, "precision": BF16, **KERNELS},
    ),
    "state-spaces-and-mlp-pp": ("MD", TWO | _depths(2, pattern="MD") | {"mesh": {"pp": 2}, "precision": BF16}),
    "recurrence-and-experts-ep-tp": ("RE", RECURRENT | _depths(2, pattern="RE") | {"mesh": {"dp_shard": 2, "ep": 2, "tp": 2}}),
    "delta-net-experts-attention-cp-bf16": (
        "GEA",
        DELTA | _depths(2, pattern="GEA") | {"mesh": {"cp": 2, "dp_shard": 2, "ep": 2}, "precision": BF16},
    ),
    "state-spaces-alone-cp-reshard-kernels": (
        "MA",
        MAMBA3 | _depths(pattern="MM") | {"mesh": {"cp": 2, "dp_shard": 2}, "sharding.reshard_after_forward": True, **KERNELS},
    ),
    "convolution-zbv-tp": (
        "CDCD",
        TWO
        | {"model.short_convolution": {"conv_kernel": 3}}
        | _depths(2, pattern="CD")
        | {"mesh": {"pp": 2, "vpp": 2, "tp": 2}, "schedule.kind": "zbv"},
    ),
    "experts-uneven-pp-bf16-selective": (
        "AE",
        TWO
        | _depths(2, experts=True)
        | {"mesh": {"pp": 2, "dp_shard": 3}, "precision": BF16, "recompute": {"default": "selective"}, "model.moe.ffn_hidden_size": 31},
    ),
}


QUICK = {
    "swiglu-bias-pp-bf16": True,
    "latent-experts-cp-tp-vocabulary-losses": True,
    "experts-sides-replicas-adamw-bf16-kernels": False,
}
"""Cases that CI traces, by whether the depths read hidden states after a norm."""


PARAMS = [
    pytest.param(*case, normed, id=f"{name}{'-normed' if normed else ''}", marks=() if QUICK.get(name) is normed else pytest.mark.slow)
    for name, case in CASES.items()
    for normed in (False, True)
]


@pytest.mark.parametrize(("pattern", "settings", "normed"), PARAMS)
def test_estimate_is_what_the_runtime_allocates(job_with: Callable[..., Any], pattern: str, settings: dict[str, Any], normed: bool) -> None:
    """Traces equal estimates, for every distinct rank, in every column but scalars; depths read hidden states before a norm or after it."""
    changes = {"model.pattern": pattern, "model.num_layers": len(pattern), **settings}
    changes["model.features.mtp"] = {**settings["model.features.mtp"], "normed_input": normed}
    compare_distinct_ranks(job_with(changes))
