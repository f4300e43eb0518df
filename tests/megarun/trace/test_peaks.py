"""Places of peaks: the phase and the words of the estimate, and the storages that the runtime holds there."""

from dataclasses import replace
from typing import Any

import pytest
from trace_checks import SCALARS_BYTES

from megaplan.budget.peaks import build_budget
from megaplan.columns import Column, Phase
from megaplan.devices import load_device
from megarun.trace.compare import RankComparison
from megarun.trace.rank import trace_rank
from megarun.trace.values import Row

pytestmark = [pytest.mark.runtime, pytest.mark.requirement("R-47")]
BF16 = dict.fromkeys(("params", "grads", "master", "moments", "reduce"), "bf16")
SQUARE = {"pattern": "D", "num_layers": 4, "hidden_size": 256, "vocab_size": 64, "mlp": {"ffn_hidden_size": 256, "activation": "gelu"}}


def num_tensors(job: Any) -> int:
    """Each has a gradient norm in fp64, and a copy in the stack of all: in no ledger either."""
    return sum(1 for _ in job.inventory.tensors())


def compare(job: Any, rank: int) -> RankComparison:
    budget = build_budget(job.spec, job.inventory, job.layout).of_rank(rank)
    found = RankComparison(budget, trace_rank(job, rank, workspace_bytes=load_device("h200").gemm_workspace.value))
    for phase in Phase:
        allowed = SCALARS_BYTES + 16 * num_tensors(job) * (phase is Phase.OPTIMIZER)
        assert all(abs(pair.difference) <= allowed for pair in found.columns(phase).values()), phase
    assert found.within
    assert found.peak_phase is budget.peak_phase is found.trace.peak_phase
    return found


def at_peak(found: RankComparison) -> tuple[Row, ...]:
    return found.trace.rows[found.trace.peak_phase]


FEW_TOKENS = {
    "batch": {"micro_batch_size": 1, "seq_length": 8},
    "precision": BF16,
    "optimizer": {"matrix": "muon", "newton_schulz_dtype": "fp32"},
    "sharding.reshard_after_forward": True,
}
"""bf16 throughout, the iteration in fp32: Newton-Schulz is what is alive at the peak."""


def test_the_first_update_of_the_last_of_the_largest_matrices(job_with: Any) -> None:
    """It is updated when every other momentum is there: the first step is as high as any, and a run that does not fit fails in it."""
    found = compare(job_with({"model": SQUARE, **FEW_TOKENS}), 0)
    assert found.peak_phase is Phase.FIRST_OPTIMIZER
    assert found.budget.peak_places[Phase.FIRST_OPTIMIZER] == "Newton-Schulz with the momenta made so far"
    assert found.phases[Phase.FIRST_OPTIMIZER] == found.phases[Phase.OPTIMIZER]


def test_the_update_of_large_matrices(job_with: Any) -> None:
    """The largest come before others, but all momenta are made before the first: the first update is as high as a later one."""
    attention = {"kind": "gqa", "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
    model = {**SQUARE, "pattern": "DA", "attention": attention}
    found = compare(job_with({"model": model, **FEW_TOKENS}), 0)
    assert found.peak_phase is Phase.FIRST_OPTIMIZER
    assert found.phases[Phase.FIRST_OPTIMIZER] == found.phases[Phase.OPTIMIZER]
    assert found.budget.peak_places[Phase.OPTIMIZER] == "Newton-Schulz of the largest matrix"
    assert found.budget.peak_places[Phase.OPTIMIZER] == "Newton-Schulz of the largest matrix"
    iteration = {row.op: row.nbytes for row in at_peak(found) if row.column is Column.WORKSPACE and "newton" in row.op}
    # of four matrices: a buffer of the iterate, x xᵀ, its polynomial, a mirror image
    assert iteration == {"megakernels.newton_schulz_.default": 4 * 4 * 4 * 256 * 256}


def test_the_backward_of_the_loss_on_the_last_stage(job_with: Any) -> None:
    """A large vocabulary: the last stage peaks where its backward begins, and above the first stage."""
    overrides = {
        "mesh.pp": 2,
        "schedule.num_microbatches": 3,
        "model.vocab_size": 4096,
        "batch": {"micro_batch_size": 2, "seq_length": 64},
    }
    first, last = (compare(job_with(overrides), rank) for rank in (0, 1))
    assert last.peak.trace > first.peak.trace
    assert last.peak_phase is Phase.FORWARD_BACKWARD
    assert last.budget.peak_places[Phase.FORWARD_BACKWARD] == "backward of head, 1 microbatches in flight"
    logits = {row.op for row in at_peak(last) if row.shape == (128, 4096)}
    assert logits == {"aten.mm.default", "megakernels.cross_entropy_backward.default"}  # the logits and their gradient


def test_the_first_backward_of_a_chunk(job_with: Any) -> None:
    """The job has as many microbatches as stages: the last chunk of the first rank has most in flight when its first backward runs."""
    overrides = {
        "mesh": {"pp": 2, "vpp": 2},
        "schedule": {"kind": "interleaved_1f1b", "num_microbatches": 2},
        "batch": {"micro_batch_size": 8, "seq_length": 64},
    }
    found = compare(job_with(overrides), 0)
    assert found.peak_phase is Phase.FORWARD_BACKWARD
    assert found.budget.peak_places[Phase.FORWARD_BACKWARD].endswith("first microbatch, 2, 2 microbatches in flight by chunk")


def test_what_the_first_update_reaches_every_later_one_repeats(job_with: Any) -> None:
    """AdamW alone needs no scratch: its phases are equal except scalars of loss and norm, later on top of all optimizer state."""
    job = job_with({"optimizer.matrix": "adamw"})
    found = compare(job, 0)
    first, later = found.phases[Phase.FIRST_OPTIMIZER], found.phases[Phase.OPTIMIZER]
    assert first.estimate == later.estimate
    numbers = 24  # what an update reads, which is there from the first on
    assert later.trace - first.trace == 8 * (2 * num_tensors(job) + 1) - numbers
    assert found.budget.peak_places[Phase.FIRST_OPTIMIZER] == "all optimizer state made"
    assert found.budget.peak_places[Phase.OPTIMIZER] == "the update of all parameters"


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_no_phase_of_the_first_step_is_above_the_one_that_recurs(job_with: Any, optimizer: str) -> None:
    found = compare(job_with({"mesh.dp_shard": 2, "optimizer.matrix": optimizer}), 1)
    for first, later in ((Phase.FIRST_FORWARD_BACKWARD, Phase.FORWARD_BACKWARD), (Phase.FIRST_OPTIMIZER, Phase.OPTIMIZER)):
        assert found.phases[first].estimate <= found.phases[later].estimate
        assert found.phases[first].trace <= found.phases[later].trace


def test_of_equal_phases_the_first_has_the_peak(job_with: Any) -> None:
    """The first step already reaches the peak, and a run that does not fit fails there."""
    found = compare(job_with({"optimizer.matrix": "adamw"}), 0)
    small, large = found.budget.cells[Phase.INIT], found.budget.cells[Phase.OPTIMIZER]
    cells = {phase: large if phase in (Phase.FIRST_OPTIMIZER, Phase.OPTIMIZER) else small for phase in Phase}
    budget, trace = found.budget._replace(cells=cells), replace(found.trace, cells=cells)
    assert budget.peak_phase is trace.peak_phase is RankComparison(budget, trace).peak_phase is Phase.FIRST_OPTIMIZER
    assert sum(budget.columns.values()) == budget.peak_bytes == budget.phases[Phase.OPTIMIZER]


def test_a_short_shard_is_padded_before_later_slots_are_made(job_with: Any) -> None:
    """Two slots per rank: the first's embedding is padded before the second has parameters, the last's head after everything else."""
    mesh = {"mesh": {"pp": 2, "vpp": 2, "dp_shard": 2}, "schedule": {"kind": "interleaved_1f1b", "num_microbatches": 2}}
    job = job_with({"model": SQUARE | {"vocab_size": 255}, **mesh, "batch": {"micro_batch_size": 8, "seq_length": 64}})
    assert compare(job, 1).budget.peak_places[Phase.INIT] == "parameters in place"
    assert compare(job, 3).budget.peak_places[Phase.INIT] == "padding of a short shard"
