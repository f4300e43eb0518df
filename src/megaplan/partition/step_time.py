"""`objective: step_time`: cuts that shorten the replayed step, and a bound on how short any cuts could make it.

No exact method is known for the best cuts for a whole step: chunks of a rank wait for each other in ways that sums do not show. So the
search starts from cuts that are good for a reason (the bottleneck optimum, the largest slot's, equal cuts, the baseline) and climbs: it
moves one cut, a run of neighbouring cuts, or two cuts by one allowed position, while the replay gets shorter. The best of all climbs
continues with moves by several positions, across cuts that are longer or do not fit. The result depends only on the spec.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from megaplan.cost.times import ModelTimes
from megaplan.partition.constraints import Constraints
from megaplan.partition.moves import climb
from megaplan.partition.paths import PARTS, RankPath, before
from megaplan.schedules.timeline import LinkedOrders, SlotTimes

MAX_REPLAYS = 4000
"""Largest number of replays of one climb."""
MAX_ACTIONS = 3_000_000
"""Limit of actions that all climbs of a spec replay: well under a second. A climb of a long schedule ends early with its best cuts."""
ACTIONS_A_STEP = 5
"""Actions that are replayed per step of work."""


class StepTimes:
    """Step times of one model's cuts under one schedule; each is replayed once."""

    def __init__(self, times: ModelTimes, linked: LinkedOrders, paths: Sequence[RankPath]) -> None:
        self._boundary_ns, self._num_layers = times.boundary_ns, len(times.layers)
        self._before = [before(times, part) for part in PARTS]
        self._linked, self._checks = linked, 0
        self._chains = [(path.transfers, _terms(path)) for path in paths]
        self._known: dict[tuple[int, ...], int] = {}

    @property
    def num_replays(self) -> int:
        """Cuts replayed so far."""
        return len(self._known)

    @property
    def exhausted(self) -> bool:
        """True if no more cuts are replayed."""
        return self.num_replays * len(self._linked.nodes) >= MAX_ACTIONS

    @property
    def work(self) -> int:
        """Work of replays and paths so far, counted in steps of about a microsecond."""
        return self.num_replays * len(self._linked.nodes) // ACTIONS_A_STEP + self._checks

    def of(self, cuts: tuple[int, ...]) -> int:
        """Length of the step in nanoseconds."""
        if cuts not in self._known:
            self._known[cuts] = self._linked.makespan(self._times_of(cuts), p2p=self._boundary_ns)
        return self._known[cuts]

    def _times_of(self, cuts: Sequence[int]) -> SlotTimes:
        forward, backward, weight = self._slot_times(cuts)
        return SlotTimes(forward, backward, weight)

    def is_at_least(self, cuts: Sequence[int], length_ns: int) -> bool:
        """True if one path alone takes that long, which is cheaper to check than a replay. The path that succeeded last is tried first."""
        parts, chains = self._slot_times(cuts), self._chains
        self._checks += len(cuts)
        for index, (transfers, terms) in enumerate(chains):
            self._checks += 1
            if transfers * self._boundary_ns + sum([often * parts[part][slot] for part, slot, often in terms]) >= length_ns:
                chains.insert(0, chains.pop(index))
                return True
        return False

    def _slot_times(self, cuts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        edges = (0, *cuts, self._num_layers)
        return tuple(tuple([at[stop] - at[start] for start, stop in pairwise(edges)]) for at in self._before)


def _terms(path: RankPath) -> list[tuple[int, int, int]]:
    """(part, slot, number of runs) for each action on a path."""
    return [(part, slot, often) for slot, times in enumerate(path.slots) for part, often in enumerate(times) if often]


def shorten(
    step: StepTimes,
    start: tuple[int, ...],
    rules: Constraints,
    num_layers: int,
    fits: Callable[[tuple[int, ...]], bool],
    places: Sequence[int] = (1,),
) -> tuple[int, ...]:
    """Move cuts while the step gets shorter.

    Args:
        step: Step times.
        start: Cuts that keep the constraints and fit.
        rules: Constraints on cuts.
        num_layers: Layers of the model.
        fits: True if cuts fit; called only for better ones.
        places: Allowed positions by which a cut moves.
    """
    shortest = step.of(start)
    last = step.num_replays + MAX_REPLAYS

    def ended() -> bool:
        return step.num_replays >= last or step.exhausted

    def gains(cuts: tuple[int, ...]) -> bool | None:
        nonlocal shortest
        if step.is_at_least(cuts, shortest):
            return False
        length = step.of(cuts)
        if length < shortest and fits(cuts):
            shortest = length
            return True
        return None if ended() else False

    return climb(start, rules, num_layers, gains, ended, places=places)
