"""The time of a step on each rank: data, computation, waiting for other ranks; and the rank that the others wait for.

All ranks of a job have the same step time, because they wait for the slowest. Only the part in which a rank waits differs. On CPU
a thread looks at the main thread's call stack every few milliseconds: in a collective or not. On CUDA the host only starts
collectives, so there is no such number, and only the time for data is compared.
"""

import threading
import time
from collections.abc import Sequence
from statistics import median
from types import TracebackType

import torch
import torch.distributed as dist

from megaplan.layout.ranks import rank_coordinate
from megaplan.spec.models import Mesh
from megarun.errors import place
from megarun.launch.progress import Progress
from megarun.metrics.records import RankTimes

EVERY_STEPS = 10
SAMPLE_SECONDS = 0.005
SPREAD = 1.5
LEAST_SHARE = 0.05  # a share of the step: a smaller difference is not worth a line
COMPUTING, DATA = "computing", "reading data"


class WaitSampler:
    """Measures how long the main thread waits for other ranks, while it is entered.

    Args:
        progress: Progress of the main thread.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress, self._waited = progress, 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wait sampler", daemon=True)

    def __enter__(self) -> "WaitSampler":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(1)

    def take(self) -> float:
        """Seconds of waiting since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._over.wait(SAMPLE_SECONDS):
            now = time.perf_counter()
            if self._progress.operation()[1]:
                self._waited += now - last
            last = now


class StepTimes:
    """Adds up this rank's times and compares them with other ranks', every few steps.

    Args:
        mesh: Mesh of the plan.
        rank: This rank.
        group: gloo group of all ranks.
        sampler: Measures waiting; None without such measurements.
    """

    def __init__(self, mesh: Mesh, rank: int, group: dist.ProcessGroup, sampler: WaitSampler | None) -> None:
        self._mesh, self._rank, self._group, self._sampler = mesh, rank, group, sampler
        self._sums, self._steps = [0.0, 0.0, 0.0], 0

    def begin(self) -> float:
        """The current time, at the beginning of a step; earlier waiting belongs to no step."""
        if self._sampler is not None:
            self._sampler.take()
        return time.perf_counter()

    def add(self, step: int, step_seconds: float, data_seconds: float) -> RankTimes | None:
        """Add a step; every `EVERY_STEPS` steps it returns a line for all ranks, and is then collective.

        Args:
            step: Optimizer steps done.
            step_seconds: Wall clock of the step on this rank.
            data_seconds: Part of it for data.
        """
        waited = min(self._sampler.take() if self._sampler is not None else 0.0, step_seconds - data_seconds)
        for index, value in enumerate((data_seconds, step_seconds - data_seconds - waited, waited)):
            self._sums[index] += value
        self._steps += 1
        if step % EVERY_STEPS or self._mesh.world_size == 1:
            return None
        table = torch.zeros(self._mesh.world_size, 3, dtype=torch.float64)
        table[self._rank] = torch.tensor(self._sums, dtype=torch.float64) / self._steps
        dist.all_reduce(table, group=self._group)
        self._sums, self._steps = [0.0, 0.0, 0.0], 0
        data, computing, waiting = (table[:, column].tolist() for column in range(3))
        return rank_times(self._mesh, step, data, computing, waiting, is_sampled=self._sampler is not None)


def rank_times(
    mesh: Mesh, step: int, data: Sequence[float], computing: Sequence[float], waiting: Sequence[float], *, is_sampled: bool
) -> RankTimes:
    """The line of some steps, with the slowest rank if it is beyond `SPREAD` times the median of its peers.

    Peers are the other ranks of the same pipeline rank: stages may take unequal times by plan.

    Args:
        mesh: Mesh of the plan.
        step: The last of the steps.
        data: Seconds per step of each rank for data.
        computing: Seconds per step of each rank outside of collectives.
        waiting: Seconds per step of each rank in collectives.
        is_sampled: True if computing and waiting were measured.
    """
    least = LEAST_SHARE * max(sum(times) for times in zip(data, computing, waiting, strict=True))
    slow = []
    for what, values in ((DATA, data), *(((COMPUTING, computing),) if is_sampled else ())):
        for rank, value in enumerate(values):
            others = [values[other] for other in range(mesh.world_size) if other != rank and _stage(mesh, other) == _stage(mesh, rank)]
            if others and value > SPREAD * (usual := median(others)) and value - usual > least:
                slow.append((value - usual, rank, what, usual))
    slowest, kind, note = None, None, None
    if slow:
        excess, slowest, kind, usual = max(slow)
        value = usual + excess
        note = f"{place(slowest, mesh)} is slow: {kind} {value:.3g} s per step, {usual:.3g} s on other ranks of its stage"
    return RankTimes(step, list(data), list(computing) if is_sampled else None, list(waiting) if is_sampled else None, slowest, kind, note)


def _stage(mesh: Mesh, rank: int) -> int:
    return rank_coordinate(mesh, rank)["pp"]
