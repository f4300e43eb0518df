"""`objective: step_time`: starting cuts, choice among climbs, and certificate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from operator import itemgetter, mul
from typing import TYPE_CHECKING, NamedTuple

from megaplan.budget.fit import DOES_NOT_FIT
from megaplan.cost.pools import slot_times
from megaplan.cost.replay import linked_orders
from megaplan.cost.values import ModelTimes, replayed
from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import Spans, cuts_of, spans_of
from megaplan.partition.best_cuts import balance, climb
from megaplan.partition.bounds import StepBound
from megaplan.partition.constraints import Constraints, constraints_of
from megaplan.partition.memory import Memory
from megaplan.partition.paths import RankPath, before_slots, parts_of, schedule_paths
from megaplan.partition.stack import stack_of
from megaplan.partition.values import Certificate, StackCosts, equal_cuts, time_costs
from megaplan.partition.weigh import Weighted, fitting_cuts, moved_by_memory
from megaplan.schedules import cut_pipeline, num_copies, placement
from megaplan.schedules.timeline import LinkedOrders, SlotTimes
from megaplan.spec.models import Spec

if TYPE_CHECKING:
    from megaplan.cost.values import MeasuredCosts


MAX_REPLAYS = 4000
"""Largest number of replays of one climb."""
MAX_ACTIONS = 3_000_000
"""Limit of actions that all climbs of a spec replay: well under a second. A climb of a long schedule ends early with its best cuts."""
ACTIONS_A_STEP = 5
"""Actions that are replayed per step of work."""


class StepTimes:
    """Step times of one model's cuts under one schedule; each is replayed once."""

    def __init__(self, times: Sequence[ModelTimes], linked: LinkedOrders, paths: Sequence[RankPath], copies: int = 1) -> None:
        """`times` are for each slot's device; `copies` the number of copies of the model that the linked orders run."""
        self._times, self._in_turns, self._copies = times, times[0].in_turns, copies
        self._num_layers = len(times[0].layers)
        self._before = [before_slots(times, part) for part in parts_of(times[0])]
        self._linked, self._checks = linked, 0
        self._columns = list({id(at): at for of_slot in self._before for at in of_slot}.values())
        self._chains = [(path.transfers, *self._terms(path)) for path in paths]
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
            self._known[cuts] = self._linked.makespan(self._times_of(cuts), p2p=self._times[0].widest_ns(cuts))
        return self._known[cuts]

    def _times_of(self, cuts: tuple[int, ...]) -> SlotTimes:
        if self._in_turns:
            return replayed(self._times, spans_of(cuts, self._num_layers), self._copies)
        forward, backward, weight = (part * self._copies for part in self._slot_times(cuts))
        return SlotTimes(forward, backward, weight)

    def is_at_least(self, cuts: Sequence[int], length_ns: int) -> bool:
        """True if a single path takes at least that long, which is cheaper to check than a replay.

        The path that succeeded last is tried first.
        """
        edges, chains, hop_ns = (0, *cuts, self._num_layers), self._chains, self._times[0].widest_ns(cuts)
        reached = [at[edge] for at in self._columns for edge in edges]
        self._checks += len(cuts)
        for index, (transfers, often, chosen) in enumerate(chains):
            self._checks += 1
            if transfers * hop_ns + sum(map(mul, often, chosen(reached))) >= length_ns:
                chains.insert(0, chains.pop(index))
                return True
        return False

    def _slot_times(self, cuts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        edges = (0, *cuts, self._num_layers)
        spans = list(pairwise(edges))
        return tuple(tuple([at[stop] - at[start] for at, (start, stop) in zip(of_slot, spans, strict=True)]) for of_slot in self._before)

    def _terms(self, path: RankPath) -> tuple[tuple[int, ...], Callable[[Sequence[int]], Sequence[int]]]:
        """A path without transfers as a sum over edges: factors, and a function that reads their multiplicands from `reached`.

        If neighbouring slots on one device run a part equally often, the edge between them cancels; a path has few other edges.
        """
        number, column = len(path.slots) + 1, {id(at): index for index, at in enumerate(self._columns)}
        factors = Counter[int]()
        for slot, runs in enumerate(path.slots):
            for often, of_slot in zip(runs, self._before, strict=True):
                start = column[id(of_slot[slot])] * number + slot
                factors[start] -= often
                factors[start + 1] += often
        used = 0, *[place for place, factor in factors.items() if factor and place % number]  # no position is before the first edge
        return tuple([factors[place] for place in used]), itemgetter(*used)


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


FAR, MOST_FAR = (1, 2, 4), 8
"""Distances by which cuts move if no move by one position shortens the step, and the largest number of slots for which all of them are
tried; with more slots the distance is at most two.
"""
MAX_STAGE_WORK = 500_000
"""Work limit for budgets of one spec's cuts, in steps of about a microsecond; beyond it no further cuts are checked for memory."""


class Pipeline:
    """The step of a spec: its replay and its bound, computed on demand: a long schedule takes seconds, and costs need none."""

    def __init__(self, spec: Spec, inventory: Inventory, measured: MeasuredCosts | None = None) -> None:
        """Times are from the costs file or, without one, from the device's rates."""
        mesh, schedule = spec.mesh, spec.schedule
        self.slots = slot_times(spec, inventory) if measured is None else (measured.times,) * spec.mesh.num_slots
        """Times of the model on each slot's device."""
        self.times: ModelTimes = self.slots[0]
        self.costs = time_costs(self.slots)
        self._orders, self._rules = (schedule.kind, mesh.pp, mesh.vpp, schedule.num_microbatches), constraints_of(spec)

    @cached_property
    def step(self) -> StepTimes:
        """Replays of the schedule."""
        return StepTimes(self.slots, linked_orders(*self._orders), self._paths, num_copies(placement(self._orders[0])))

    @property
    def _paths(self) -> tuple[RankPath, ...]:
        return schedule_paths(*self._orders, turns=self.times.in_turns)

    def certify(self, spans: Spans) -> Certificate:
        """The step time of cuts, compared with a bound for all cuts under the same constraints."""
        value, costs = self.step.of(cuts_of(spans)), self.costs.of_slots(spans)
        kind, *_, count = cut_pipeline(*self._orders)
        bound = StepBound(self.slots, self._rules, placement(kind), self._paths).lower_bound(value, count)
        return Certificate("step_time", value, bound, costs, "ns", "step")


class Shortest(NamedTuple):
    """The best cuts that several local searches found.

    Attributes:
        cuts: The best cuts.
        refused: True if cuts were skipped because they do not fit.
    """

    cuts: tuple[int, ...]
    refused: bool


def shortest(
    pipeline: Pipeline, rules: Constraints, bottleneck: tuple[int, ...], baseline: tuple[int, ...] | None, memory: Memory | None
) -> Shortest:
    """The best of several climbs on the replayed step, improved by longer moves.

    Among equally good climbs, the one with the fewest moved cuts continues, then the first in order.

    Args:
        pipeline: Pipeline whose step is minimised.
        rules: Constraints on cuts.
        bottleneck: Starting cuts that keep them and fit.
        baseline: Cuts to keep if equally good.
        memory: Budgets of the cuts; None to ignore memory.
    """
    costs, num_layers, num_slots = pipeline.costs, len(pipeline.costs.layers), len(bottleneck) + 1
    refused = False

    def fitting(cuts: tuple[int, ...]) -> bool:
        nonlocal refused
        if memory is None:
            return True
        found = memory.work < MAX_STAGE_WORK and max(memory.excesses(spans_of(cuts, num_layers))) <= 0
        refused = refused or not found
        return found

    def order(cuts: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        moved = 0 if baseline is None else sum(cut != old for cut, old in zip(cuts, baseline, strict=True))
        return pipeline.step.of(cuts), moved, cuts

    starts = _starts(costs, num_slots, rules, baseline)
    others = [cuts for cuts in starts if not rules.broken_by(cuts) and fitting(cuts)]
    reached = {shorten(pipeline.step, start, rules, num_layers, fitting) for start in dict.fromkeys((bottleneck, *others))}
    best = min(reached, key=order)
    places = FAR if num_slots <= MOST_FAR else FAR[:-1]
    return Shortest(shorten(pipeline.step, best, rules, num_layers, fitting, places), refused)


def shortened(spec: Spec, inventory: Inventory, spans: Spans, memory: Memory) -> Spans:
    """Cuts found by local search from given cuts that fit, with a step that is at most as long."""
    best = shortest(Pipeline(spec, inventory), constraints_of(spec), cuts_of(spans), None, memory)
    return spans_of(best.cuts, len(inventory.layers))


def step_time_cuts(spec: Spec, inventory: Inventory, measured: MeasuredCosts | None, baseline: tuple[int, ...] | None) -> Weighted:
    """The cuts with the shortest step found among those that fit; if none fit, the closest ones."""
    pipeline, rules = Pipeline(spec, inventory, measured), constraints_of(spec)
    num_layers, stack = len(inventory.layers), stack_of(spec, pipeline.costs, baseline)
    bottleneck = fitting_cuts(spec, inventory, stack, measured)
    if any(note.code == DOES_NOT_FIT for note in bottleneck.notes) or spec.mesh.num_slots == 1:
        return Weighted(bottleneck.cuts, partial(pipeline.certify, spans_of(bottleneck.cuts, num_layers)), bottleneck.notes)
    memory = Memory(spec, inventory, measured)
    best, refused = shortest(pipeline, rules, bottleneck.cuts, baseline, memory)
    found = Weighted(best, partial(pipeline.certify, spans_of(best, num_layers)))
    if not refused and not bottleneck.notes:
        return found
    free = shortest(pipeline, rules, stack.best_free.cuts, baseline, None).cuts
    there, here = pipeline.step.of(free), pipeline.step.of(best)
    if there >= here:
        return found
    if max(memory.excesses(spans_of(free, num_layers))) <= 0:  # reached from cuts that do not fit
        return Weighted(free, partial(pipeline.certify, spans_of(free, num_layers)))
    note = moved_by_memory(stack, memory, free, "have the shortest step that was found", f"step: {there:,} ns there, {here:,} here")
    return replace(found, notes=(note,))


def _starts(costs: StackCosts, num_slots: int, rules: Constraints, baseline: tuple[int, ...] | None) -> Sequence[tuple[int, ...]]:
    """Starting cuts: equal ones, the largest slot's optimum, the baseline."""
    largest_slot = balance(costs, num_slots, rules)
    assert largest_slot is not None, "without limits there is a split"
    found = [equal_cuts(len(costs.layers), num_slots), largest_slot.cuts]
    return found if baseline is None else [*found, baseline]
