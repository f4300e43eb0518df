"""Branch and bound over meshes in the order of their bounds, until none of the rest can be among the best, or a limit is reached.

A search of many layouts begins with the layouts of `exploration.start`: after seconds it has a good row, which limits all others.

A mesh has two bounds: first a cheap one; once it is among the smallest, the least bound of the mesh's schedules and policies that may fit.
Meshes are processed in waves of a fixed size, and the limit of a wave is set before it begins. So the outcomes do not depend on the number
of processes or the order in which they finish.
"""

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush, nsmallest
from itertools import islice
from time import monotonic
from typing import Any, Literal

from megaplan.exploration.evaluate import UNLIMITED, Evaluator
from megaplan.exploration.space import Space
from megaplan.exploration.start import first_outcomes, plain_layouts
from megaplan.exploration.values import Exact, LayoutChoice, Objective, Outcome

WAVE, REFINED = 16, 128
"""Meshes of a wave, and meshes whose second bound is computed together."""
PLAIN_SEEDS, PLAIN_TRIED = 32, 256
"""Meshes without a pipeline that are evaluated first, and the number with the smallest bounds from which they are taken."""
ALONE = 200
"""Largest number of meshes for which one process is as fast as several, and that need no first answer."""
PLAIN_SHARE = 0.4
"""Share of a time limit after the first answer in which meshes are tried with their simplest schedule."""
MORE_SECONDS, MOST_SECONDS = 0.7, 20.0
"""Time for the explanation of a result after a search that has spent its time limit, and after one without a limit."""
SMALL_GAP, SURE_SECONDS = 0.01, 5.0
"""Gap at which a search with a time limit ends, and the time that it takes for a proof before."""
Stop = Literal["", "gap", "time", "interrupt"]
"""Reason why a search ended before every layout was decided; empty if all were decided."""


@dataclass(frozen=True, slots=True)
class SearchTask:
    """A search to run; every process builds its own evaluator from it.

    Attributes:
        space: The space of layouts.
        objective: Objective of the search.
        headroom_bytes: Bytes that must stay free on every rank.
        top: Number of rows to return.
        seconds: Time limit; None for a search that ends with a proof.
    """

    space: Space
    objective: Objective
    headroom_bytes: int
    top: int
    seconds: float | None = None

    def evaluator(self, deadline: float | None = None) -> Evaluator:
        """A new evaluator, which evaluates nothing after a deadline of `time.monotonic`."""
        return Evaluator(self.space, self.headroom_bytes, self.objective, deadline)


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a search.

    Attributes:
        done: Meshes that are decided.
        total: All meshes.
        evaluated: Exact evaluations.
        best: The best row so far.
        bound_ns: Lower bound on the step of every layout; 0 if none is known yet.
    """

    done: int
    total: int
    evaluated: int
    best: Exact | None
    bound_ns: int

    @property
    def gap(self) -> float | None:
        """Difference between the best row's step and the bound, as a share of the bound."""
        return self.best.step_ns / self.bound_ns - 1 if self.best is not None and self.bound_ns else None


@dataclass
class Explored:
    """State and results of a search.

    Attributes:
        task: The task.
        bounds: Bound of every mesh, ascending.
        outcomes: Outcomes of every layout of the explored meshes.
        num_refined: Number of meshes with a known second bound, in the order of `bounds`.
        waiting: Refined meshes that are not explored yet, with their second bounds; a heap.
        stopped: Reason why the search ended early; empty if none of the remaining meshes can be among the best.
        deadline: End of a search with a time limit, a value of `time.monotonic`.
    """

    task: SearchTask
    bounds: list[tuple[int, LayoutChoice]]
    outcomes: dict[LayoutChoice, Outcome] = field(default_factory=dict)
    num_refined: int = 0
    waiting: list[tuple[int, LayoutChoice]] = field(default_factory=list)
    stopped: Stop = "interrupt"
    deadline: float | None = None

    @property
    def complete(self) -> bool:
        """True if none of the remaining meshes can be among the best."""
        return not self.stopped

    def answer_ends(self) -> float:
        """Deadline of the explanation of the result, a value of `time.monotonic`."""
        now = monotonic()
        return now + MOST_SECONDS if self.deadline is None else max(self.deadline, now + MORE_SECONDS)

    @property
    def progress(self) -> Progress:
        """Progress so far."""
        return Progress(self.done, len(self.bounds), self.num_evaluated, next(iter(self.rows), None), self.bound_ns)

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Keep outcomes; an outcome that was not evaluated because of a deadline does not replace an earlier one."""
        for outcome in outcomes:
            if not (outcome.is_late and outcome.layout in self.outcomes):
                self.outcomes[outcome.layout] = outcome

    @property
    def done(self) -> int:
        """Meshes that are decided."""
        return self.num_refined - len(self.waiting)

    @property
    def left(self) -> list[tuple[int, LayoutChoice]]:
        """Unexplored meshes with their best bounds, ascending."""
        return sorted([*self.waiting, *self.bounds[self.num_refined :]])

    @property
    def not_looked_at(self) -> Counter[int]:
        """Unexplored meshes that can be among the best, by number of pipeline ranks."""
        limit = self.limit_ns
        return Counter(mesh.pp for bound, mesh in self.left if bound <= limit)

    @property
    def rows(self) -> list[Exact]:
        """The best layouts so far, best first."""
        found = [outcome.best for outcome in self.outcomes.values() if outcome.best is not None]
        return sorted(found, key=lambda one: one.order(self.task.objective))[: self.task.top]

    @property
    def limit_ns(self) -> int:
        """Upper limit on the step of a layout that can be among the best."""
        rows = self.rows
        return rows[-1].step_ns if len(rows) == self.task.top and self.task.objective != "headroom" else UNLIMITED

    @property
    def num_evaluated(self) -> int:
        """Exact evaluations."""
        return sum(outcome.num_evaluated for outcome in self.outcomes.values())

    @property
    def bound_ns(self) -> int:
        """Lower bound on the step of every layout of the space, over all policies and cuts."""
        if not self.bounds:
            return 0
        seen = [outcome.bound_ns for outcome in self.outcomes.values()]
        left = [bound for bound, _ in (*self.waiting[:1], *self.bounds[self.num_refined : self.num_refined + 1])]
        return min([*seen, *left], default=0)

    def next_waiting(self) -> list[tuple[int, LayoutChoice]]:
        """Meshes of the smallest second bounds, at most a wave, that can be among the best."""
        limit = self.limit_ns
        return [item for item in nsmallest(WAVE, self.waiting) if item[0] <= limit]

    def next_to_refine(self, ready: Sequence[tuple[int, LayoutChoice]]) -> list[LayoutChoice]:
        """Meshes whose first bound is smaller than the largest of a wave, so that their second bound may be smaller, too."""
        limit = self.limit_ns if len(ready) < WAVE else min(self.limit_ns, ready[-1][0])
        batch = self.bounds[self.num_refined : self.num_refined + REFINED]
        return [mesh for bound, mesh in batch if bound <= limit]


def explore(task: SearchTask, processes: int, report: Callable[[Progress], None] = lambda _: None) -> Explored:
    """Run a search; an interrupt returns the results so far.

    Args:
        task: The task.
        processes: Number of worker processes; the result does not depend on it.
        report: Callback for progress, called at intervals.
    """
    started = monotonic()
    deadline = None if task.seconds is None else started + task.seconds
    own, found = task.evaluator(), Explored(task, [], deadline=deadline)
    try:
        if (over := own.fits_on_no_mesh()) > 0:
            return _nothing_fits(found, own, task.space.meshes(), over)
        if task.space.has_more_meshes(ALONE):
            for outcome in first_outcomes(own, limited=task.seconds is not None):
                found.add([outcome])
                report(found.progress)
        own.deadline = deadline  # the first result was found under its own limits
        meshes = task.space.meshes()
        with _workers(task, own, processes if len(meshes) > ALONE else 1) as run:
            _decide(found, own, meshes, run, lambda: _stops(found, started, report))
    except KeyboardInterrupt:
        found.stopped = "interrupt"
    return found


def _nothing_fits(found: Explored, own: Evaluator, meshes: Sequence[LayoutChoice], over_bytes: int) -> Explored:
    """Decides every mesh at once, if the model's state alone exceeds the memory of all devices together."""
    for mesh in meshes:
        for layout in own.space.layouts_of(mesh):
            found.add([Outcome(layout, None, 0, len(own.space.policies(layout)), UNLIMITED, proven=True, over_bytes=over_bytes)])
    found.bounds, found.num_refined, found.stopped = [(UNLIMITED, mesh) for mesh in meshes], len(meshes), ""
    return found


def _stops(found: Explored, started: float, report: Callable[[Progress], None]) -> bool:
    """True if a search with a time limit ends; its reason is noted."""
    now, seconds = found.progress, found.task.seconds
    report(now)
    if seconds is None:
        return False
    spent = monotonic() - started
    small = found.task.objective != "headroom" and now.gap is not None and now.gap < SMALL_GAP and len(found.rows) == found.task.top
    found.stopped = "time" if spent > seconds else "gap" if small and spent > SURE_SECONDS else "interrupt"
    return found.stopped != "interrupt"


def _decide(
    found: Explored, own: Evaluator, meshes: Sequence[LayoutChoice], run: Callable[..., list[Any]], stops: Callable[[], bool]
) -> None:
    """Decide every mesh, until a limit is reached."""
    found.bounds = sorted(zip(run(_bounded, meshes), meshes, strict=True))
    seeds = list(_seeds(found.bounds, own))
    found.add(run(_sampled, [(layout, UNLIMITED) for layout in seeds if layout not in found.outcomes]))
    if found.task.seconds is not None and len(meshes) > ALONE and _tries_plain(found, run, stops):
        return
    while (ready := found.next_waiting()) or found.next_to_refine(ready):
        if stops():
            return
        if batch := found.next_to_refine(ready):
            for mesh, (bound, outcomes) in zip(batch, run(_refined, batch), strict=True):
                found.add(outcomes)
                if not outcomes:
                    heappush(found.waiting, (bound, mesh))
            found.num_refined += len(batch)
            continue
        limit, wave = found.limit_ns, [heappop(found.waiting)[1] for _ in ready]
        for outcomes in run(_explored, [(mesh, limit) for mesh in wave]):
            found.add(outcomes)
    if stops():
        return
    for outcomes in run(_explored, [(mesh, UNLIMITED) for mesh in _examples(found, own, set(seeds))]):
        found.add(outcomes)
    found.stopped = ""


def _tries_plain(found: Explored, run: Callable[..., list[Any]], stops: Callable[[], bool]) -> bool:
    """Evaluates meshes with their simplest schedule, for a share of the time, as a mesh gains more than a schedule.

    Returns:
        True if the search ends.
    """
    bounded = [item for item in run(_plain, [mesh for _, mesh in found.bounds]) if item is not None]
    left, until = sorted(item for item in bounded if item[1] not in found.outcomes), monotonic() + PLAIN_SHARE * (found.task.seconds or 0.0)
    while left and left[0][0] <= found.limit_ns and monotonic() < until:
        if stops():
            return True
        limit, wave, left = found.limit_ns, left[:WAVE], left[WAVE:]
        found.add(run(_sampled, [(layout, limit) for _, layout in wave]))
    return False


def _seeds(bounds: Sequence[tuple[int, LayoutChoice]], own: Evaluator) -> Iterator[LayoutChoice]:
    """The layouts that give the first limit.

    They are, for each number of tensor and pipeline ranks, the layout with the smallest bound and few sequences per microbatch. In addition
    they are those meshes without a pipeline that have the smallest bounds and may fit, because their bounds are close to their steps.
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

    None of them is among the best; they show how much slower such layouts, and their schedules, are.
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
    """A function that maps over items in the given number of processes, in order."""
    global _worker  # noqa: PLW0603 (a process of a pool has no other place for what it shares between calls)
    _worker = own
    if processes <= 1:
        yield lambda call, items: [call(item) for item in items]
        return
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    with multiprocessing.get_context(method).Pool(processes, _start, (task, own.deadline)) as pool:
        yield lambda call, items: pool.map(call, items, chunksize=max(1, min(64, len(items) // (8 * processes))))


def _start(task: SearchTask, deadline: float | None) -> None:
    """Lets a worker ignore interrupts; the parent process handles them. A forked one has the parent's evaluator."""
    import signal  # noqa: PLC0415

    global _worker  # noqa: PLW0603
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if _worker is None:
        _worker = task.evaluator(deadline)


def _own() -> Evaluator:
    if _worker is None:
        raise RuntimeError("a worker has not been started")
    return _worker


def _bounded(mesh: LayoutChoice) -> int:
    own = _own()
    return 0 if own.is_late else own.bound_ns(mesh)


def _refined(mesh: LayoutChoice) -> tuple[int, list[Outcome]]:
    return _own().refined(mesh)


def _plain(mesh: LayoutChoice) -> tuple[int, LayoutChoice] | None:
    own = _own()
    return None if own.is_late or own.fits_nowhere(mesh) > 0 else next(plain_layouts(own, [mesh]), None)


def _sampled(item: tuple[LayoutChoice, int]) -> Outcome:
    return _own().outcome(*item)


def _explored(item: tuple[LayoutChoice, int]) -> list[Outcome]:
    return _own().outcomes(*item)
