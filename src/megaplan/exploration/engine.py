"""Branch and bound over meshes: in the order of their bounds, until none that is left can be among the best.

A mesh has two bounds: one that takes little time, and, once that is among the smallest, the least of its schedules and policies that may
fit. Meshes are taken in waves of a fixed size, and what a wave is compared with is decided before it begins. So the same outcomes are
computed whatever the number of processes, and in whatever order they finish.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush, nsmallest
from itertools import islice
from typing import Any

from megaplan.exploration.evaluate import UNLIMITED, Evaluator
from megaplan.exploration.space import Space
from megaplan.exploration.values import Exact, LayoutChoice, Objective, Outcome

WAVE, REFINED = 16, 128
"""Meshes of a wave, and meshes whose second bound is worked out at once."""
PLAIN_SEEDS, PLAIN_TRIED = 32, 256
"""Meshes without a pipeline that are evaluated first, of so many with the smallest bounds."""
ALONE = 200
"""Meshes up to which one process is as fast as several."""


@dataclass(frozen=True, slots=True)
class SearchTask:
    """A search to make; every process makes its own evaluator of it.

    Attributes:
        space: The space.
        objective: What is best.
        headroom_bytes: To stay free on every rank.
        top: Rows wanted.
    """

    space: Space
    objective: Objective
    headroom_bytes: int
    top: int

    def evaluator(self) -> Evaluator:
        """One of its own."""
        return Evaluator(self.space, self.headroom_bytes, self.objective)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a search is.

    Attributes:
        done: Meshes that are decided.
        total: All meshes.
        evaluated: Exact evaluations.
        best: The best row so far.
    """

    done: int
    total: int
    evaluated: int
    best: Exact | None


@dataclass
class Explored:
    """Everything that a search has seen.

    Attributes:
        task: What was searched.
        bounds: Of every mesh, ascending.
        outcomes: Of every layout of the meshes that were not left out.
        num_refined: Meshes whose second bound is known, in the order of `bounds`.
        waiting: Of those the ones that are not explored, with their second bounds; a heap.
        complete: True if no mesh is left that could be among the best.
    """

    task: SearchTask
    bounds: list[tuple[int, LayoutChoice]]
    outcomes: dict[LayoutChoice, Outcome] = field(default_factory=dict)
    num_refined: int = 0
    waiting: list[tuple[int, LayoutChoice]] = field(default_factory=list)
    complete: bool = False

    @property
    def done(self) -> int:
        """Meshes that are decided."""
        return self.num_refined - len(self.waiting)

    @property
    def left(self) -> list[tuple[int, LayoutChoice]]:
        """Meshes that are not explored, with the best of their bounds, ascending."""
        return sorted([*self.waiting, *self.bounds[self.num_refined :]])

    @property
    def rows(self) -> list[Exact]:
        """The best layouts so far, best first."""
        found = [outcome.best for outcome in self.outcomes.values() if outcome.best is not None]
        return sorted(found, key=lambda one: one.order(self.task.objective))[: self.task.top]

    @property
    def limit_ns(self) -> int:
        """No step that is longer can be among the best."""
        rows = self.rows
        return rows[-1].step_ns if len(rows) == self.task.top and self.task.objective != "headroom" else UNLIMITED

    @property
    def num_evaluated(self) -> int:
        """Exact evaluations."""
        return sum(outcome.num_evaluated for outcome in self.outcomes.values())

    @property
    def bound_ns(self) -> int:
        """Lower bound on the step of every layout of the space, over all policies and cuts."""
        seen = [outcome.bound_ns for outcome in self.outcomes.values()]
        left = [bound for bound, _ in (*self.waiting[:1], *self.bounds[self.num_refined : self.num_refined + 1])]
        return min([*seen, *left], default=0)

    def next_waiting(self) -> list[tuple[int, LayoutChoice]]:
        """The meshes of the smallest second bounds, at most a wave, that can be among the best."""
        limit = self.limit_ns
        return [item for item in nsmallest(WAVE, self.waiting) if item[0] <= limit]

    def next_to_refine(self, ready: Sequence[tuple[int, LayoutChoice]]) -> list[LayoutChoice]:
        """Meshes that come before the last of a wave by their first bounds, and so may by their second."""
        limit = self.limit_ns if len(ready) < WAVE else min(self.limit_ns, ready[-1][0])
        batch = self.bounds[self.num_refined : self.num_refined + REFINED]
        return [mesh for bound, mesh in batch if bound <= limit]


def explore(task: SearchTask, processes: int, report: Callable[[Progress], None] = lambda _: None) -> Explored:
    """Search; what was found so far is returned when the search is interrupted.

    Args:
        task: What to search.
        processes: How many evaluate; the result does not depend on it.
        report: Called now and then.
    """
    own = task.evaluator()
    meshes = task.space.meshes()
    with _workers(task, own, processes if len(meshes) > ALONE else 1) as run:
        found = Explored(task, [])
        try:
            found.bounds = sorted(zip(run(_bounded, meshes), meshes, strict=True))
            seeds = list(_seeds(found.bounds, own))
            found.outcomes.update({outcome.layout: outcome for outcome in run(_sampled, seeds)})
            while (ready := found.next_waiting()) or found.next_to_refine(ready):
                if batch := found.next_to_refine(ready):
                    for mesh, (bound, outcomes) in zip(batch, run(_refined, batch), strict=True):
                        found.outcomes.update({outcome.layout: outcome for outcome in outcomes})
                        if not outcomes:
                            heappush(found.waiting, (bound, mesh))
                    found.num_refined += len(batch)
                    continue
                limit, wave = found.limit_ns, [heappop(found.waiting)[1] for _ in ready]
                for outcomes in run(_explored, [(mesh, limit) for mesh in wave]):
                    found.outcomes.update({outcome.layout: outcome for outcome in outcomes})
                rows = found.rows
                report(Progress(found.done, len(found.bounds), found.num_evaluated, rows[0] if rows else None))
            for outcomes in run(_explored, [(mesh, UNLIMITED) for mesh in _examples(found, own, set(seeds))]):
                found.outcomes.update({outcome.layout: outcome for outcome in outcomes})
            found.complete = True
        except KeyboardInterrupt:
            found.complete = False
    return found


def _seeds(bounds: Sequence[tuple[int, LayoutChoice]], own: Evaluator) -> Iterator[LayoutChoice]:
    """The layouts that the first limit is taken from.

    A layout of each number of tensor and pipeline ranks, the one of the smallest bound with few sequences of a microbatch; and of the
    meshes without a pipeline, whose bound is mostly their step, those of the smallest bounds that may fit.
    """
    seen: set[tuple[int, int]] = set()
    plain = [mesh for _, mesh in bounds if mesh.pp == 1]
    yield from islice((mesh for mesh in plain[:PLAIN_TRIED] if own.fits_nowhere(mesh) <= 0), PLAIN_SEEDS)
    least = min((mesh.micro_batch for _, mesh in bounds), default=1)
    for _, mesh in bounds:
        key = mesh.tp, mesh.pp
        if key not in seen and mesh.micro_batch <= 4 * least:
            layouts = own.space.layouts_of(mesh)
            if layouts:
                seen.add(key)
                yield layouts[0]


def _examples(found: Explored, own: Evaluator, seeds: set[LayoutChoice]) -> Iterator[LayoutChoice]:
    """If pruning removes every mesh of a pp degree, the one with the smallest bound that may fit is still evaluated.

    None of them is among the best: they say by how much such layouts, and the schedules that run on them, are slower.
    """
    if not found.rows:
        return
    seen = {layout.pp for layout, outcome in found.outcomes.items() if outcome.best is not None and (layout not in seeds or layout.pp == 1)}
    for _, mesh in found.left:
        if mesh.pp not in seen and own.fits_nowhere(mesh) <= 0:
            seen.add(mesh.pp)
            yield mesh


_worker: Evaluator | None = None


@contextmanager
def _workers(task: SearchTask, own: Evaluator, processes: int) -> Iterator[Callable[..., list[Any]]]:
    """A function that maps over items, in as many processes, in order."""
    global _worker  # noqa: PLW0603 (a process of a pool has no other place for what it shares between calls)
    _worker = own
    if processes <= 1:
        yield lambda call, items: [call(item) for item in items]
        return
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    with multiprocessing.get_context(method).Pool(processes, _start, (task,)) as pool:
        yield lambda call, items: pool.map(call, items, chunksize=max(1, min(64, len(items) // (8 * processes))))


def _start(task: SearchTask) -> None:
    """A worker leaves an interrupt to the process that waits for it."""
    import signal  # noqa: PLC0415

    global _worker  # noqa: PLW0603
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _worker = task.evaluator()


def _own() -> Evaluator:
    if _worker is None:
        raise RuntimeError("a worker has not been started")
    return _worker


def _bounded(mesh: LayoutChoice) -> int:
    return _own().bound_ns(mesh)


def _refined(mesh: LayoutChoice) -> tuple[int, list[Outcome]]:
    return _own().refined(mesh)


def _sampled(layout: LayoutChoice) -> Outcome:
    return _own().outcome(layout)


def _explored(item: tuple[LayoutChoice, int]) -> list[Outcome]:
    return _own().outcomes(*item)
