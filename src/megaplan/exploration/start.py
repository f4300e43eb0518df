"""First answer of a search: the usual degrees, each with its simplest schedule, in the order of their bounds.

The rows that it finds limit the search of all layouts. A class of layouts (one number of pipeline and tensor ranks) moves back in the order
for each of its layouts that did not fit.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from time import monotonic

from megaplan.exploration.evaluate import UNLIMITED, Evaluator
from megaplan.exploration.values import LayoutChoice, Outcome

TRIED = 64
"""Largest number of layouts that are evaluated."""
ENOUGH_SECONDS = 3.0
"""Time after which a search with a time limit is content with the rows that it has."""


def first_outcomes(own: Evaluator, *, limited: bool) -> Iterator[Outcome]:
    """Outcomes of the most promising layouts; they do not change the result of a complete search.

    Args:
        own: Evaluates them.
        limited: The search has a time limit.
    """
    started, best = monotonic(), UNLIMITED
    failures: Counter[tuple[int, int]] = Counter()
    tried = 0

    def put_off(bound: int, mesh: LayoutChoice) -> int:
        return bound + bound * failures[mesh.pp, mesh.tp] // 4

    waiting = [(bound, bound, layout) for bound, layout in plain_layouts(own, own.space.usual_meshes())]
    heapify(waiting)
    while waiting and tried < TRIED and not own.is_late and not (limited and best < UNLIMITED and monotonic() > started + ENOUGH_SECONDS):
        key, bound, layout = heappop(waiting)
        if put_off(bound, layout) > key:
            heappush(waiting, (put_off(bound, layout), bound, layout))
            continue
        if bound >= best or own.fits_nowhere(layout) > 0:
            continue
        tried += 1
        found = own.outcome(layout, best)
        if found.best is None:
            failures[layout.pp, layout.tp] += 1
        else:
            best = min(best, found.best.step_ns)
        yield found


def plain_layouts(own: Evaluator, meshes: Iterable[LayoutChoice]) -> Iterator[tuple[int, LayoutChoice]]:
    """Meshes with their simplest legal schedule, each with a lower bound on its step."""
    for mesh in meshes:
        layout = own.space.plain_layout(mesh)
        if layout is not None:
            yield own.bound_ns(layout), layout
