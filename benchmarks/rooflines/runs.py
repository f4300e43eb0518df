"""Count one rank per pipeline rank, each in its own process; this module needs no torch."""

from dataclasses import replace

from megaplan.schedules import schedule_problems
from megarun.job.job import Job
from megarun.trace.run import rank_processes
from rooflines.work import Event

FEWEST_MICROBATCHES = 3
"""The first gathers parameters, the last reduces gradients, and one in between represents all others."""


def with_few_microbatches(job: Job) -> Job:
    """The job with the fewest microbatches that its schedule supports, since all between the first and the last are identical."""
    schedule, mesh = job.spec.schedule, job.spec.mesh
    given = schedule.num_microbatches if mesh.pp > 1 else schedule.microbatches_per_update
    few = next(
        (
            number
            for number in range(FEWEST_MICROBATCHES, given)
            if mesh.pp == 1 or not schedule_problems(schedule.kind, mesh.pp, mesh.vpp, number)
        ),
        given,
    )
    changed = schedule.model_copy(update={"num_microbatches": few, "steps_per_update": 1})
    return replace(job, spec=job.spec.model_copy(update={"schedule": changed}))


def count_ranks(job: Job) -> dict[int, tuple[Event, ...]]:
    """Events of one rank per pipeline rank, by pipeline rank.

    Raises:
        ValueError: A collective is unknown, or a kernel has no registered cost.
    """
    pp = job.spec.mesh.pp
    ranks = [pp_rank * (job.spec.mesh.world_size // pp) for pp_rank in range(pp)]  # pp is the outermost axis
    with rank_processes(pp, "rooflines.rank") as pool:
        return dict(enumerate(pool.map(_count_alone, [job] * pp, ranks)))


def _count_alone(job: Job, rank: int) -> tuple[Event, ...]:
    from rooflines.rank import count_rank  # noqa: PLC0415  a process can join one fake group only

    return count_rank(job, rank)
