"""Scans and recurrences over a CP group, on the rank at which the relay reverses and on sending ranks: every column, by lane."""

from typing import Any

import pytest
from trace_checks import BF16

from megaplan.budget.peaks import build_budget
from megaplan.columns import Phase
from megaplan.devices import load_device
from megarun.trace.compare import RankComparison
from megarun.trace.rank import trace_rank

pytestmark = pytest.mark.runtime
SMALLEST_LANE_BYTES = 16 << 10
UNTOLD_BYTES = 256
"""Scalars of losses, and what Mamba-3's two exchanges of a share for each head take."""
MAMBA2 = {"kind": "mamba2", "expand": 4, "head_dim": 32, "state_dim": 64, "num_groups": 8, "conv_kernel": 4, "chunk_size": 16}
MAMBA3 = {"kind": "mamba3", "expand": 4, "head_dim": 32, "state_dim": 64, "num_groups": 8, "chunk_size": 8, "save_every": 16}
M2RNN = {"kind": "m2rnn", "num_heads": 8, "key_dim": 64, "value_dim": 64, "conv_kernel": 4, "save_every": 16}
CELLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # the layers' section, other keys of the spec
    "mamba2, 8 lanes": (MAMBA2, {"mesh.cp": 4}),
    "mamba2, 8 lanes, bf16": (MAMBA2, {"mesh.cp": 4, "precision": BF16, "batch.seq_length": 512}),
    "mamba2, 1 lane": ({**MAMBA2, "num_groups": 1}, {"mesh.cp": 4}),
    "mamba2, 4 lanes, selective": (MAMBA2, {"mesh.cp": 2, "recompute": {"default": "selective"}}),
    "mamba3, 8 lanes": (MAMBA3, {"mesh.cp": 4}),
    "mamba3, 4 ranks of 1 lane, tp 2": ({**MAMBA3, "num_groups": 2}, {"mesh": {"cp": 4, "tp": 2}}),
    "mamba3 mimo, bf16": ({**MAMBA3, "mimo_rank": 2}, {"mesh.cp": 4, "precision": BF16, "batch.seq_length": 512}),
    "m2rnn, 8 lanes": (M2RNN, {"mesh.cp": 4}),
    "m2rnn, 8 lanes, bf16": (M2RNN, {"mesh.cp": 4, "precision": BF16}),
    "m2rnn, packed, tp 2": (M2RNN, {"mesh": {"cp": 4, "tp": 2}, "data": {"packing": "documents"}}),
}
IN_CI = ("mamba2, 1 lane", "mamba3, 4 ranks of 1 lane, tp 2")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow) for name in CELLS])
def test_ranks_hold_the_lanes_that_the_estimate_says(job_with: Any, name: str) -> None:
    layers, others = CELLS[name]
    letter = "R" if layers["kind"] == "m2rnn" else "M"
    section = {"recurrent": layers} if letter == "R" else {"mamba": layers}
    model = {"pattern": letter, "num_layers": 2, "hidden_size": 64, "vocab_size": 64, **section}
    batch = {"micro_batch_size": 2, "seq_length": 64}
    job = job_with({"model": model, "batch": batch, "schedule.num_microbatches": 2, **others})
    spec = job.spec
    budget = build_budget(spec, job.inventory, job.layout)
    workspace_bytes = load_device(spec.device.name).gemm_workspace.value
    last = spec.mesh.tp * (spec.mesh.cp - 1)
    assert budget.of_rank(0) != budget.of_rank(last)
    for rank in (0, spec.mesh.tp * (spec.mesh.cp - 2), last):
        found = RankComparison(budget.of_rank(rank), trace_rank(job, rank, workspace_bytes=workspace_bytes))
        for phase in (Phase.FIRST_FORWARD_BACKWARD, Phase.FORWARD_BACKWARD):
            assert found.budget.peak_places[phase] == "backward of layers.1"
            for column, pair in found.columns(phase).items():
                assert abs(pair.difference) <= UNTOLD_BYTES < SMALLEST_LANE_BYTES, (rank, phase, column)
