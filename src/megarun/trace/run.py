"""Traces the ranks of a job, each in a separate process, a few at a time."""

import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from megaplan.budget.values import Budget
from megaplan.spec.host import device_of
from megaplan.spec.pools import spec_on
from megarun.errors import refusal
from megarun.job.job import Job
from megarun.trace.compare import RankComparison
from megarun.trace.values import RankTrace

MAX_PROCESSES = 2


def choose_ranks(job: Job, budget: Budget, rank: int | None = None, stage: int | None = None) -> list[int]:
    """The ranks to trace, ascending: one, or one of each group that shares a budget, of the whole job or of one stage.

    Args:
        job: Job to trace.
        budget: Estimate of the job, which groups equal ranks.
        rank: If given, only this rank.
        stage: If given, only ranks with this slot.

    Raises:
        MegaplanError: MP485 or MP620 if the job has no such rank or stage.
    """
    if rank is not None:
        last = job.spec.mesh.world_size - 1
        if not 0 <= rank <= last:
            raise refusal("MP485", f"--rank {rank}; the ranks are 0 to {last}", hints=[f"--rank {max(0, min(rank, last))}"])
        return [rank]
    owner = None
    if stage is not None:
        last = len(job.layout.slots) - 1
        if not 0 <= stage <= last:
            raise refusal("MP620", f"--stage {stage}; the stages are 0 to {last}", hints=[f"--stage {max(0, min(stage, last))}"])
        owner = job.layout.slots[stage].pp_rank
    return sorted(group.ranks[0] for group in budget.ranks if owner is None or group.coordinate["pp"] == owner)


def trace_ranks(job: Job, budget: Budget, ranks: Sequence[int]) -> list[RankComparison]:
    """Trace ranks and compare each with its estimate, in the order of `ranks`; shows progress on a terminal.

    Args:
        job: Job that megarun can build.
        budget: Estimate of the job.
        ranks: Global ranks, each traced in a new process, at most `MAX_PROCESSES` at a time.
    """
    per_stage = job.spec.mesh.world_size // job.spec.mesh.pp
    workspace_bytes = {rank: device_of(spec_on(job.spec, rank // per_stage).device).gemm_workspace.value for rank in ranks}
    found: dict[int, RankTrace] = {}
    with rank_processes(len(ranks)) as pool:
        waiting = {pool.submit(trace_alone, job, rank, workspace_bytes[rank]) for rank in ranks}
        try:
            for trace in _shown(as_completed(waiting), len(ranks)):
                found[trace.rank] = trace
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [RankComparison(budget.of_rank(rank), found[rank]) for rank in ranks]


def rank_processes(num_ranks: int, module: str = "megarun.trace.rank") -> ProcessPoolExecutor:
    """A pool of at most `MAX_PROCESSES` processes that runs each task in a new process.

    The processes fork from a server that has imported torch, which takes as long as tracing a small rank. Python starts one server for
    all pools of a process, and it imports the module of the first pool.

    Args:
        num_ranks: Number of tasks.
        module: Module that the server imports.
    """
    processes = get_context("forkserver")
    processes.set_forkserver_preload([module])
    return ProcessPoolExecutor(min(MAX_PROCESSES, num_ranks), processes, max_tasks_per_child=1)


def trace_alone(job: Job, rank: int, workspace_bytes: int) -> RankTrace:
    """Trace one rank in a dedicated process, because a process can join only one fake group."""
    warnings.simplefilter("ignore")  # torch warns about its own internals
    import torch  # noqa: PLC0415  (the parent does not need it)

    from megarun.trace.rank import trace_rank  # noqa: PLC0415

    torch.set_num_threads(1)
    return trace_rank(job, rank, workspace_bytes=workspace_bytes)


def _shown(futures: Iterable[Future[RankTrace]], total: int) -> Iterator[RankTrace]:
    """Results as they complete, with a progress bar on a terminal."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    columns = TextColumn("ranks traced"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not live) as progress:
        task = progress.add_task("trace", total=total)
        for future in futures:
            yield future.result()
            progress.advance(task)
