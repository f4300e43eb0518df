"""Peaks with activations in host memory (`host.activation_offload`): every column of every rank, byte by byte, and the host's bytes."""

from typing import Any

import pytest
from trace_checks import BF16, compare_passes

from megaplan.budget.peaks import build_budget

pytestmark = pytest.mark.runtime
MOE = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 96}
MODEL = {"model.pattern": "AEDM", "model.num_layers": 8, "model.hidden_size": 64, "model.vocab_size": 128, "model.moe": MOE}
ALONE = {"mesh": {"dp_shard": 2}, "schedule": {"kind": "1f1b", "num_microbatches": 2}}
LINE = {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": {"kind": "1f1b", "num_microbatches": 5}}
LOOP = {"mesh": {"pp": 2, "vpp": 2}, "schedule": {"kind": "interleaved_1f1b", "num_microbatches": 4}}
ALL = {"activation_offload": ["A", "E", "D", "M"]}
CASES: dict[str, dict[str, Any]] = {
    "alone-one-family": ALONE | {"host": {"activation_offload": ["A"]}},
    "alone": ALONE | {"host": ALL, "precision": BF16},
    "alone-gathered-again": ALONE | {"host": ALL, "precision": BF16, "sharding": {"reshard_after_forward": True}},
    "alone-recompute": ALONE | {"host": ALL, "recompute": {"default": "selective", "blocks": {"D": "full", "M": "none"}}},
    "alone-kernels": ALONE | {"host": ALL | {"kernels": "triton"}, "precision": BF16},
    "line": LINE | {"host": ALL, "precision": BF16},
    "line-ddp-tp": LINE | {"host": ALL, "mesh": {"pp": 2, "dp_shard": 2, "tp": 2}, "sharding": {"mode": "ddp"}},
    "line-ep": LINE | {"host": {"activation_offload": ["E"]}, "mesh": {"pp": 2, "dp_shard": 2, "ep": 2}},
    "loop": LOOP | {"host": {"activation_offload": ["A", "M"]}, "precision": BF16},
    "bfs-cp": {"mesh": {"pp": 2, "vpp": 2, "cp": 2}, "schedule": {"kind": "looped_bfs", "num_microbatches": 3}, "host": ALL},
    "gpipe-depth": {
        "mesh": {"pp": 2},
        "schedule": {"kind": "gpipe", "num_microbatches": 3},
        "host": ALL,
        "model.features": {"mtp": {"depth": 1, "ffn_hidden_size": 96}},
    },
}


IN_CI = ("alone", "alone-recompute", "alone-one-family", "loop", "line-ep", "gpipe-depth")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow) for name in CASES])
def test_layers_in_host_memory_hold_what_the_estimate_says(job_with: Any, name: str) -> None:
    job = job_with({**MODEL, "batch": {"micro_batch_size": 1, "seq_length": 64}, **CASES[name]})
    for group in build_budget(job.spec, job.inventory, job.layout).ranks:
        found = compare_passes(job, group.ranks[0])
        assert found.trace.differences == (), "\n".join(map(str, found.trace.differences))
        assert found.trace.host_bytes == found.budget.host.total > 0
