"""Certificates of cuts that were decided elsewhere: their distance from the best under the same constraints."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, product
from operator import attrgetter
from typing import Any

from megaplan.layout.build import Spans
from megaplan.partition.best_cuts import balance
from megaplan.partition.constraints import Constraints, constraints_of
from megaplan.partition.cut_search import CutSearch
from megaplan.partition.limits import EdgeWeights, SpanSum, Weight, layer_weight, never_all
from megaplan.partition.values import Balance, Certificate, StackCosts, bottleneck, least_busiest
from megaplan.schedules import cut_pipeline, placement
from megaplan.schedules.placement import Placement, slots_of_rank
from megaplan.spec.models import Spec
from megaplan.spec.pattern import Span

Shares = Mapping[int, tuple[SpanSum, ...]]
"""Further limits, one for the span of each slot."""
Exclusion = tuple[tuple[int, Span], ...]
"""Sets of (slot, span): the slots must not all contain their span at the same time."""


MOST_OF_MEANS = 60_000
"""Largest number of slots times layers for which a bound from means is computed: tenths of a second."""


@dataclass(frozen=True)
class Stack:
    """Layer costs, placement and memory limits.

    Attributes:
        costs: Costs of layers and ends.
        rules: Constraints on cuts.
        where: Placement.
        pp: Ranks.
        vpp: Slots of each rank.
        baseline: Cuts to keep if equally good.
        sums: Sums of each rank that every fitting split keeps.
    """

    costs: StackCosts
    rules: Constraints
    where: Placement
    pp: int
    vpp: int
    baseline: tuple[int, ...] | None = None
    sums: tuple[tuple[SpanSum, ...], ...] = ()

    @cached_property
    def _between(self) -> EdgeWeights:
        return EdgeWeights()

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.costs.layers)

    @property
    def num_slots(self) -> int:
        """Slots of the pipeline."""
        return self.pp * self.vpp

    def bottleneck(self, spans: Spans) -> int:
        """Cost of the part that paces a step with these cuts; see `values.bottleneck`."""
        return bottleneck(self.where, self.costs.of_slots(spans))[1]

    def slots(self, rank: int) -> tuple[int, ...]:
        """Slots of a rank, by chunk."""
        return slots_of_rank(self.where, rank, self.pp, self.vpp)

    @property
    def best_free(self) -> Balance:
        """The best cuts of a stack without sums."""
        return _best_free(self)

    def best(
        self,
        exclusions: Iterable[Exclusion] = (),
        spare: Sequence[int] | None = None,
        shares: Shares | None = None,
        most: int | None = None,
    ) -> Balance | None:
        """The best cuts within the sums and the exclusions.

        Args:
            exclusions: Excluded spans, for loop placement; each is of one slot.
            spare: Bytes that each rank may hold in addition to the sums; negative to hold fewer.
            shares: Further limits for loop placement.
            most: The largest acceptable cost of a slot, or rank; None for any.
        """
        excluded = list(exclusions)
        limits = self._limits(spare or (0,) * self.pp, excluded, shares or {}) if self.sums or excluded else None
        if self._paces:
            return self._best_paced(limits or [[]] * len(self._paces), most)
        return balance(self.costs, self.num_slots, self.rules, limits=limits, baseline=self.baseline, most=most, **self._how)

    @cached_property
    def _paces(self) -> list[tuple[Weight, ...]]:
        """The costs of each part, a slot or a rank of a V, on its own device; empty if all devices are of one type."""
        on = {each: layer_weight(each.layers, each.first, each.last) for each in self.costs.own}
        own = [on[each] for each in self.costs.own]
        inner = own[: self.pp] if self.where == "v" else own
        return [(weight, own[-1 - part]) if self.where == "v" else (weight,) for part, weight in enumerate(inner)]

    def _best_paced(self, limits: Sequence[list[SpanSum]], most: int | None) -> Balance | None:
        """The cuts that minimise the cost of the most expensive part on its own device.

        Ties are broken by the costs on the first device.
        """

        def within(limit: int) -> list[list[SpanSum]]:
            return [[SpanSum(pace, limit), *own] for pace, own in zip(self._paces, limits, strict=True)]

        high = sum(weight.up[-1] for pace in self._paces for weight in pace) if most is None else most
        search = CutSearch(self.costs, self.num_slots, self.rules, within(high), **self._how)
        if not search.feasible(search.total):
            return None
        low = min(high, least_busiest(Counter(self.costs.own[: len(self._paces)])))
        while low < high:
            middle = (low + high) // 2
            search.limit(within(middle))
            low, high = (low, middle) if search.feasible(search.total) else (middle + 1, high)
        found = balance(self.costs, self.num_slots, self.rules, limits=within(high), baseline=self.baseline, **self._how)
        return None if found is None else found._replace(value=high)

    @cached_property
    def partition_work(self) -> int:
        """Work of one search for cuts, in steps of about a microsecond.

        A loop placement examines each layer at each slot, and each sum of each slot. A V placement searches pairs of cuts: measured as 20
        steps for each pair of layers.
        """
        if self.where == "v":
            return 20 * self.num_layers * self.num_layers
        return self.num_slots * self.num_layers + 10 * sum(len(points) for points in self.sums) * self.vpp

    def leaves_any(self, exclusions: Iterable[Exclusion], spare: Sequence[int]) -> bool:
        """True if there are cuts within the sums and the exclusions, at any cost; arguments as for `best`."""
        search = CutSearch(self.costs, self.num_slots, self.rules, self._limits(spare, list(exclusions)), **self._how)
        return search.feasible(search.total)

    @property
    def _how(self) -> dict[str, Any]:
        return {"folded": self.where == "v", "weights": self._between}

    def _limits(self, spare: Sequence[int], exclusions: Sequence[Exclusion], shares: Shares | None = None) -> list[list[SpanSum]]:
        """Sums of each slot, or of each rank of a V."""
        found = []
        for part, sums in enumerate(self._part_sums):
            room, owned = spare[part % self.pp], self.slots(part) if self.where == "v" else (part,)
            limits = [SpanSum(each.weights, each.most + room) for each in sums]
            limits += (shares or {}).get(part, ())
            spans = [dict(exclusion) for exclusion in exclusions if exclusion[0][0] in owned]
            found.append(limits + [never_all(self.num_layers, [each[slot] for slot in owned]) for each in spans])
        return found

    @cached_property
    def _part_sums(self) -> Sequence[Sequence[SpanSum]]:
        """Upper limits by rank where the slots are a V. Otherwise by slot: its chunk plus the lightest spans of the rank's other chunks."""
        if self.where == "v":
            return self.sums or ((),) * self.pp
        known: dict[int, int] = {}  # numbers of distinct weights, which several points share
        found: list[dict[int, SpanSum]] = [{} for _ in range(self.num_slots)]
        for rank, points in enumerate(self.sums):
            for point in points:
                for weight in point.weights:
                    if id(weight) not in known:
                        known[id(weight)] = min([after - start for start, after in pairwise(weight.up)])
                lightest = [known[id(weight)] for weight in point.weights]
                most = point.most - sum(lightest)
                for chunk, (weight, own) in enumerate(zip(point.weights, lightest, strict=True)):
                    sums, each = found[rank + chunk * self.pp], SpanSum((weight,), most + own)
                    sums[id(weight)] = min(each, sums.get(id(weight), each), key=attrgetter("most"))
        return [tuple(sums.values()) for sums in found]

    @cached_property
    def least_excess(self) -> int:
        """Lower bound on the largest excess over the sums at any cost, from weighted means of them; very low if the stack is too deep."""
        if self.num_slots * self.num_layers > MOST_OF_MEANS:
            return -(1 << 62)
        from megaplan.partition.bounds import SlotSum, mean_bound  # noqa: PLC0415  (only where nothing fits)

        slots, sums = {rank: self.slots(rank) for rank in range(self.pp)}, []
        for rank, points in enumerate(self.sums):
            for point in points:
                before = {slot: weight.up for slot, weight in zip(slots[rank], point.weights, strict=True)}
                sums.append(SlotSum(before, -point.most))
        return mean_bound(sums, self.num_slots, self.num_layers, self.rules)

    def shares(self, rank: int, spans: Spans, excess: int) -> Shares:
        """Limits of the slots of a rank that exceeds its memory, all reduced in proportion."""
        owned = self.slots(rank)
        point = max(self.sums[rank], key=lambda point: point.excess([spans[slot] for slot in owned]))
        weights = [weight.of(spans[slot]) for weight, slot in zip(point.weights, owned, strict=True)]
        total = sum(weights) or 1
        sizes = zip(owned, point.weights, weights, strict=True)
        return {slot: (SpanSum((weight,), size - size * excess // total),) for slot, weight, size in sizes}

    def apportioned(self, ratio: tuple[int, int], spare: Sequence[int]) -> Shares:
        """Limits of each slot when every chunk of a rank gets `ratio` times the memory of the previous chunk."""
        (num, den), last = ratio, self.vpp - 1
        parts = [den ** (last - chunk) * num**chunk for chunk in range(self.vpp)]
        found: dict[int, tuple[SpanSum, ...]] = {}
        for rank in range(self.pp):
            for chunk, slot in enumerate(self.slots(rank)):
                mosts = [(each.most + spare[rank]) * parts[chunk] // sum(parts) for each in self.sums[rank]]
                weights = [each.weights[chunk] for each in self.sums[rank]]
                found[slot] = tuple([SpanSum((weight,), most) for weight, most in zip(weights, mosts, strict=True)])
        return found

    def rank_excess(self, rank: int, spans: Spans) -> int:
        """Bytes by which the rank exceeds its sums; negative if it is within them."""
        owned = [spans[slot] for slot in self.slots(rank)]
        return max([point.excess(owned) for point in self.sums[rank]])


@lru_cache(maxsize=256)
def _best_free(stack: Stack) -> Balance:
    """The best cuts of a stack without sums; cached because specs that differ in memory alone have equal stacks."""
    assert not stack.sums, "sums may leave no split"
    found = stack.best()
    assert found is not None, "without limits there is a split"
    return found


def stack_of(spec: Spec, costs: StackCosts, baseline: tuple[int, ...] | None = None) -> Stack:
    """Layer costs, placement and constraints of a spec, without memory; of two mirrored copies the pipeline that has their cuts."""
    mesh, schedule = spec.mesh, spec.schedule
    kind, pp, vpp, _ = cut_pipeline(schedule.kind, mesh.pp, mesh.vpp, schedule.num_microbatches)
    return Stack(costs, constraints_of(spec), placement(kind), pp, vpp, baseline)


def certify(stack: Stack, spans: Spans, lower_bound: int | None = None) -> Certificate:
    """The bottleneck of cuts, compared with the best one.

    Args:
        stack: Layer costs, placement and constraints.
        spans: Spans of the cuts.
        lower_bound: Lower bound over all cuts under the same constraints; by default the best cuts' value without memory limits.
    """
    costs = stack.costs.of_slots(spans)
    if lower_bound is None:
        lower_bound = _least(stack, spans)
    measures, value = bottleneck(stack.where, costs)
    return Certificate("bottleneck", value, lower_bound, costs, stack.costs.unit, measures)


def _least(stack: Stack, spans: Spans) -> int:
    """The smallest bottleneck of cuts that leave no slot empty except those that `spans` leaves empty.

    A host may give the first slot only the embedding, or the last only the head. An empty slot between two others reduces no cost.
    """
    empty = [start == stop for start, stop in spans]
    if not any(empty):
        return stack.best_free.value
    found, between = [], sum(empty[1:-1])
    for first, last in product({False, empty[0]}, {False, empty[-1]}):
        alone = first * stack.costs.first, last * stack.costs.last
        costs = stack.costs._replace(first=stack.costs.first - alone[0], last=stack.costs.last - alone[1])
        filled = len(spans) - first - last
        num_slots = [
            count for count in range(filled, max(filled - between, 1) - 1, -1) if not stack.rules.problems(stack.num_layers, count)
        ]
        if num_slots:
            best = balance(costs, num_slots[0], stack.rules)
            assert best is not None, "without limits there is a split"
            found.append(max(best.value, *alone))
    return min(found)
