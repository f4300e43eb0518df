"""Implementation of `megarun trace`: from a plan file to an exit status."""

from megaplan.budget.peaks import build_budget
from megaplan.terminal import output
from megarun.job.run import read_job
from megarun.job.support import refuse_unbuilt
from megarun.trace import report
from megarun.trace.run import choose_ranks, trace_ranks

PAST_TOLERANCE = 1


def trace_plan(plan: str, *, rank: int | None, stage: int | None, as_json: bool, top: int) -> int:
    """Trace a plan and print the comparison.

    Returns:
        0 if every rank is within tolerance, else 1.

    Raises:
        MegaplanError: The plan cannot be read or built, or has no such rank or stage.
    """
    job, _ = read_job(plan, None)
    refuse_unbuilt(job.spec)
    budget = build_budget(job.spec, job.inventory, job.layout)
    found = trace_ranks(job, budget, choose_ranks(job, budget, rank, stage))
    if as_json:
        output.write_json(report.document(found))
    else:
        output.write("".join(f"{line}\n" for line in report.lines(found, job.spec.mesh, top)))
    return 0 if all(item.within for item in found) else PAST_TOLERANCE
