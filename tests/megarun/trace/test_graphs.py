"""The bytes of steps that are replayed as CUDA graphs: estimate and trace agree, and both differ from eager ones by what is stated."""

from typing import Any

import pytest
from trace_checks import compare_passes

from megaplan.budget.peaks import build_budget
from megaplan.columns import Column, Phase
from megaplan.devices import load_device
from megarun.job.job import Job

pytestmark = pytest.mark.runtime
D: dict[str, Any] = {
    "model": {"pattern": "D", "num_layers": 2, "hidden_size": 32, "vocab_size": 64, "mlp": {"ffn_hidden_size": 48, "activation": "relu2"}},
    "host.kernels": "triton",
    "optimizer.matrix": "muon",
    "precision": {"params": "bf16", "grads": "fp32", "master": "fp32", "moments": "fp32", "reduce": "fp32"},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "documents, three microbatches": {"schedule.num_microbatches": 3, "data": {"packing": "documents"}},
    "one microbatch": {},
    "the update, too": {"host.cuda_graphs": "step", "schedule.num_microbatches": 2},
    "cast gradients, and the update, too": {
        "precision.grads": "bf16",
        "precision.reduce": "bf16",
        "host.cuda_graphs": "step",
        "optimizer.matrix": "adamw",
    },
    "cast gradients": {"precision.grads": "bf16", "precision.reduce": "bf16", "optimizer.matrix": "adamw"},
}
EAGER = {"host.cuda_graphs": "none"}


def cells(job: Job, phase: Phase) -> dict[Column, int]:
    return build_budget(job.spec, job.inventory, job.layout).worst.cells[phase]


@pytest.mark.parametrize("name", VARIANTS)
def test_estimate_and_trace_agree(name: str, job_with: Any) -> None:
    found = compare_passes(job_with({**D, **VARIANTS[name]}))
    assert found.trace.differences == ()
    for phase in Phase:
        for column, pair in found.columns(phase).items():
            assert abs(pair.difference) <= 1024, (phase, column, pair.estimate, pair.trace)  # scalars of the update


def test_graphs_hold_inputs_and_gradients(job_with: Any) -> None:
    """A microbatch's tokens and labels, a workspace for their stream, and after the step the gradients that eager ones have dropped."""
    replayed, eager = job_with(D), job_with({**D, **EAGER})
    tokens = 2 * 2 * 24 * 8 + 8
    for phase in Phase:
        mine, theirs = cells(replayed, phase), cells(eager, phase)
        differing = [column for column in Column if column is not Column.OVERHEAD and mine[column] != theirs[column]]
        more = {column: mine[column] - theirs[column] for column in differing}
        held = {Column.ACTIVATIONS: tokens, Column.WORKSPACE: load_device("h200").gemm_workspace.value}
        dropped = {Column.GRADIENTS: (2 * 64 * 32 + 3 * 32) * 4}
        wanted = {Phase.FORWARD_BACKWARD: held, Phase.OPTIMIZER: {**held, **dropped}}
        assert more == wanted.get(phase, {})


def test_a_recorded_update_takes_its_memory_from_the_pool(job_with: Any) -> None:
    """Allocated bytes differ by the numbers that it reads, reserved ones by what an eager update takes beyond the pool."""
    replayed, whole = job_with(D), job_with({**D, "host.cuda_graphs": "step"})
    for phase in Phase:
        mine, theirs = cells(whole, phase), cells(replayed, phase)
        differing = [column for column in Column if column is not Column.OVERHEAD and mine[column] != theirs[column]]
        more = {column: mine[column] - theirs[column] for column in differing}
        assert more == ({Column.ACTIVATIONS: 3 * 8} if phase in (Phase.FORWARD_BACKWARD, Phase.OPTIMIZER) else {})
    worst, before = (build_budget(job.spec, job.inventory, job.layout).worst for job in (whole, replayed))
    workspaces = 2 * load_device("h200").gemm_workspace.value
    scratch = before.cells[Phase.OPTIMIZER][Column.WORKSPACE] - workspaces
    assert scratch > 0
    less = before.phases[Phase.FORWARD_BACKWARD] - worst.phases[Phase.FORWARD_BACKWARD]
    assert less == pytest.approx(scratch, abs=64)  # the numbers, and their share of unused bytes


def test_a_pool_of_its_own_is_reserved_in_addition_to_the_optimizers(job_with: Any) -> None:
    replayed, eager = job_with(D), job_with({**D, **EAGER})
    mine, theirs = (build_budget(job.spec, job.inventory, job.layout).worst for job in (replayed, eager))
    scratch = theirs.cells[Phase.OPTIMIZER][Column.WORKSPACE] - load_device("h200").gemm_workspace.value
    assert scratch > 0
    assert mine.phases[Phase.FIRST_OPTIMIZER] == theirs.phases[Phase.FIRST_OPTIMIZER]
    assert mine.phases[Phase.FORWARD_BACKWARD] - theirs.phases[Phase.FORWARD_BACKWARD] >= scratch
