"""FSDP2's controls: units of several layers, gathers further ahead, and parts that are kept between forward and backward."""

from collections.abc import Callable
from typing import Any

import pytest
from trace_checks import BF16, compare_distinct_ranks

pytestmark = pytest.mark.runtime
SMALL = {"model.pattern": "AEMRAD", "model.num_layers": 6, "precision": BF16}
PARTS = {"sharding.reshard_after_forward": True, "sharding.reshard_size": 2}
AHEAD = {"sharding.reshard_after_forward": True, "sharding.prefetch": 2}
SHORT = {"batch": {"micro_batch_size": 1, "seq_length": 16}}
"""So few tokens that a peak is in the backward of a layer, where gradients wait for their group's end."""
LARGE_LAST = {"model.pattern": "AEAE", "model.num_layers": 4, "model.moe.shared_ffn_hidden_size": 1024, **SHORT}
"""Every stage ends with experts, and a peak is while their layer is gathered for its backward."""
EXPERTS = {"model.pattern": "AEAEEMAE", "model.num_layers": 8}
WIDE_MIDDLE = {"model.pattern": "ADA", "model.num_layers": 6, "model.vocab_size": 64, "model.mlp": {"ffn_hidden_size": 2048}, **SHORT}
"""Most gradients are of the layer in the middle of a unit, which waits for its end."""
CASES: dict[str, dict[str, Any]] = {
    "parts": {"mesh": {"dp_shard": 4}, **PARTS},
    "parts-two": {"mesh": {"dp_shard": 4}, **PARTS, "schedule.num_microbatches": 2},
    "parts-experts": {"mesh": {"dp_shard": 8, "ep": 2}, **PARTS},
    "parts-pipeline": {"mesh": {"pp": 2, "dp_shard": 4}, "schedule.num_microbatches": 4, **PARTS},
    "parts-zbv": {"mesh": {"pp": 2, "vpp": 2, "dp_shard": 4}, "schedule": {"kind": "zbv", "num_microbatches": 4}, **PARTS},
    "parts-tp": {"mesh": {"dp_replicate": 2, "dp_shard": 4, "tp": 2}, **PARTS, "model.pattern": "AEMDAD"},
    "ahead": {"mesh": {"dp_shard": 2}, **AHEAD},
    "ahead-experts": {"mesh": {"dp_shard": 4, "ep": 2}, **AHEAD, "schedule.num_microbatches": 2},
    "ahead-kept": {"mesh": {"dp_shard": 4, "ep": 2}, "sharding.prefetch": 3},
    "ahead-pipeline": {"mesh": {"pp": 2, "dp_shard": 4, "ep": 2}, "schedule.num_microbatches": 4, **AHEAD},
    "stages": {"mesh": {"dp_shard": 2}, "sharding.wrap": "stage", "schedule.num_microbatches": 2},
    "stages-pipeline": {"mesh": {"pp": 2, "dp_shard": 3}, "sharding.wrap": "stage", "schedule.num_microbatches": 4},
    "stages-whole": {"mesh": {"pp": 2}, "sharding.wrap": "stage", "schedule.num_microbatches": 4, **SHORT},
    "stages-alone": {"mesh": {}, "sharding.wrap": "stage", "schedule.num_microbatches": 2, **SHORT},
    "ahead-last-experts": {"mesh": {"pp": 2, "dp_shard": 4, "ep": 2}, "schedule.num_microbatches": 4, **LARGE_LAST, **AHEAD},
    "ahead-one-parts": {
        "mesh": {"pp": 2, "dp_shard": 4, "ep": 2},
        "schedule.num_microbatches": 4,
        **LARGE_LAST,
        **PARTS,
        "sharding.prefetch": 1,
    },
    "both": {"mesh": {"dp_shard": 8, "ep": 2}, **AHEAD, **PARTS},
    "units": {"mesh": {"dp_shard": 2}, "sharding.wrap": 2, "schedule.num_microbatches": 2, **SHORT},
    "units-kept": {"mesh": {"dp_shard": 2}, "sharding.wrap": 3, "sharding.reshard_after_forward": False, **SHORT},
    "units-parts": {"mesh": {"dp_shard": 4}, "sharding.wrap": 3, **PARTS},
    "units-experts": {"mesh": {"dp_shard": 4, "ep": 2}, "sharding.wrap": 3, **EXPERTS, **SHORT},
    "units-ahead-experts": {"mesh": {"dp_shard": 4, "ep": 2}, "sharding.wrap": 2, **AHEAD, **EXPERTS},
    "units-pipeline": {"mesh": {"pp": 2, "dp_shard": 2}, "sharding.wrap": 2, "schedule.num_microbatches": 4, **SHORT},
    "units-zbv": {
        "mesh": {"pp": 2, "vpp": 2, "dp_shard": 2},
        "sharding.wrap": 2,
        "schedule": {"kind": "zbv", "num_microbatches": 4},
        **EXPERTS,
        **SHORT,
    },
    "units-copies": {"mesh": {"dp_shard": 2}, "sharding.wrap": 2, "sharding.mode": "ddp", "schedule.num_microbatches": 2, **SHORT},
    "units-of-three-copies": {
        "mesh": {"pp": 2, "dp_shard": 2},
        "sharding": {"wrap": 3, "mode": "ddp"},
        "schedule.num_microbatches": 2,
        **WIDE_MIDDLE,
    },
    "units-of-three-pipeline": {"mesh": {"pp": 2, "dp_shard": 2}, "sharding.wrap": 3, "schedule.num_microbatches": 2, **WIDE_MIDDLE},
    "units-replicas": {"mesh": {"dp_replicate": 2}, "sharding.wrap": 2, "schedule.num_microbatches": 2},
}

IN_CI = ("units", "units-experts", "both", "stages-pipeline", "stages-whole", "ahead-last-experts")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow) for name in CASES])
def test_traces_have_the_estimated_bytes(name: str, job_with: Callable[..., Any]) -> None:
    compare_distinct_ranks(job_with({**SMALL, **CASES[name]}))
