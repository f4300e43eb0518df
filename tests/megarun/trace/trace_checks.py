"""Compares an estimate with what the runtime allocates, column by column."""

from megaplan.budget.peaks import build_budget
from megaplan.columns import Phase
from megaplan.devices import load_device
from megarun.job.job import Job
from megarun.trace.compare import RankComparison
from megarun.trace.rank import trace_rank

BF16 = {"params": "bf16", "grads": "fp32", "master": "fp32", "moments": "fp32", "reduce": "fp32"}
"""Mixed precision: products in bf16, state in fp32."""
SCALARS_BYTES = 32
"""The loss and its sum, the squares of the gradient norm: in no ledger."""


def compare_passes(job: Job, rank: int = 0) -> RankComparison:
    """Estimate and trace of a rank, whose forwards and backwards are equal to the byte, except for scalars that no ledger lists."""
    budget = build_budget(job.spec, job.inventory, job.layout).of_rank(rank)
    found = RankComparison(budget, trace_rank(job, rank, workspace_bytes=load_device("h200").gemm_workspace.value))
    for phase in (Phase.FIRST_FORWARD_BACKWARD, Phase.FORWARD_BACKWARD):
        for column, pair in found.columns(phase).items():
            assert abs(pair.difference) <= SCALARS_BYTES, (rank, phase, column, pair.estimate, pair.trace)
    return found


def compare_distinct_ranks(job: Job) -> None:
    """The same of every distinct rank; what a block keeps is storage by storage what its ledger lists."""
    for group in build_budget(job.spec, job.inventory, job.layout).ranks:
        found = compare_passes(job, group.ranks[0]).trace.differences
        assert found == (), "\n".join(map(str, found))
