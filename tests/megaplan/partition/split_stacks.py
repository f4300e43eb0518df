"""Small random stacks, every split of them, and the definition of a best split."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from random import Random

from megaplan.partition.constraints import Constraints
from megaplan.partition.limits import SpanSum, Weight, layer_weight, never_all
from megaplan.partition.values import StackCosts

Span = tuple[int, int]


@dataclass(frozen=True)
class Instance:
    """A stack with its constraints; the baseline is a cut list or None."""

    costs: StackCosts
    num_slots: int
    rules: Constraints
    baseline: tuple[int, ...] | None
    folded: bool
    limits: tuple[tuple[SpanSum, ...], ...] | None = None
    excluded: tuple[tuple[tuple[Span, ...], ...], ...] = ()

    @property
    def all_limits(self) -> list[tuple[SpanSum, ...]] | None:
        """The sums, and that no part has spans which contain the excluded ones all at once."""
        if self.limits is None:
            return None
        num_layers = len(self.costs.layers)
        pairs = zip(self.limits, self.excluded, strict=True)
        return [(*sums, *(never_all(num_layers, spans) for spans in excluded)) for sums, excluded in pairs]

    def parts(self, spans: Sequence[Span]) -> list[tuple[Span, ...]]:
        """Spans of each slot, or of each rank of a V."""
        return list(zip(spans[: len(spans) // 2], reversed(spans), strict=False)) if self.folded else [(span,) for span in spans]


def legal_cuts(instance: Instance) -> Iterator[tuple[int, ...]]:
    """Every split that honours constraints and limits."""
    rules, num_layers = instance.rules, len(instance.costs.layers)
    for cuts in combinations(range(1, num_layers), instance.num_slots - 1):
        if any(cut in rules.forbid for cut in cuts) or not set(rules.pin) <= set(cuts):
            continue
        if any(start < cut < stop for start, stop in rules.together for cut in cuts):
            continue
        spans = tuple(pairwise((0, *cuts, num_layers)))
        parts = zip(instance.limits or (), instance.excluded, instance.parts(spans), strict=False)
        if all(_within(sums, excluded, own) for sums, excluded, own in parts):
            yield cuts


def _contains(outer: Span, inner: Span) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _within(sums: Sequence[SpanSum], excluded: Sequence[Sequence[Span]], own: Sequence[Span]) -> bool:
    return all(each.excess(own) <= 0 for each in sums) and not any(all(map(_contains, own, spans)) for spans in excluded)


def slot_costs(costs: StackCosts, cuts: Sequence[int]) -> list[int]:
    edges = [0, *cuts, len(costs.layers)]
    sums = [sum(costs.layers[start:stop]) for start, stop in pairwise(edges)]
    sums[0] += costs.first
    sums[-1] += costs.last
    return sums


def rank_sums(costs: StackCosts, cuts: Sequence[int]) -> list[int]:
    sums = slot_costs(costs, cuts)
    return [sums[rank] + sums[-1 - rank] for rank in range(len(sums) // 2)]


def best_cuts(instance: Instance) -> tuple[tuple[int, ...] | None, int]:
    """Smallest maximum, then fewest moved cuts, then smallest second-largest, then lexicographic; and how many have the smallest maximum.

    None if no split is legal.
    """
    weigh, baseline = rank_sums if instance.folded else slot_costs, instance.baseline

    def order(cuts: tuple[int, ...]) -> tuple[int, int, int, tuple[int, ...]]:
        ordered = sorted(weigh(instance.costs, cuts), reverse=True)
        moved = 0 if baseline is None else sum(cut != old for cut, old in zip(cuts, baseline, strict=True))
        return ordered[0], moved, ordered[1] if len(ordered) > 1 else 0, cuts

    orders = [order(cuts) for cuts in legal_cuts(instance)]
    if not orders:
        return None, 0
    best = min(orders)
    return best[-1], sum(each[0] == best[0] for each in orders)


def random_instance(random: Random, *, folded: bool) -> Instance:
    """A stack with, each now and then, edge costs, zero costs, caps, excluded spans, constraints and a baseline.

    Costs are small so that ties abound. Caps weigh layers differently on each slot, as in-flight counts do. Some weights are not plain
    sums, because they count the layers before a span too.
    """
    num_layers = random.randint(2 if folded else 1, 11)
    num_slots = 2 * random.randint(1, min(num_layers // 2, 4)) if folded else random.randint(1, min(num_layers, 6))
    top = random.choice([1, 2, 4, 9, 1000])
    costs = StackCosts(
        tuple(random.randint(0, top) for _ in range(num_layers)),
        first=random.choice([0, 0, random.randint(0, 2 * top)]),
        last=random.choice([0, random.randint(0, 4 * top)]),
    )
    cuts = range(1, num_layers)
    forbid = tuple(cut for cut in cuts if random.random() < random.choice([0, 0.2, 0.5]))
    pin = tuple(cut for cut in cuts if random.random() < random.choice([0, 0, 0.2]))
    together: tuple[Span, ...] = ()
    if random.random() < 0.3:
        start = random.randrange(num_layers)
        together = ((start, random.randint(start + 1, num_layers)),)
    baseline = tuple(sorted(random.sample(cuts, num_slots - 1))) if random.random() < 0.6 else None
    limits, excluded = _limits(random, num_layers, num_slots, folded=folded) if random.random() < 0.6 else (None, ())
    return Instance(costs, num_slots, Constraints(forbid, pin, together), baseline, folded, limits, excluded)


def _weights(random: Random, num_layers: int) -> Weight:
    plain = layer_weight([random.randint(0, 5) for _ in range(num_layers)], random.randint(0, 3), random.randint(0, 3))
    if random.random() < 0.8:
        return plain
    # In addition to the span, a part of the layers before it counts, with a smaller weight.
    return Weight([2 * size for size in plain.up], list(plain.up))


def _span(random: Random, num_layers: int) -> Span:
    start = random.randrange(num_layers)
    return start, random.randint(start + 1, num_layers)


def _limits(
    random: Random, num_layers: int, num_slots: int, *, folded: bool
) -> tuple[tuple[tuple[SpanSum, ...], ...], tuple[tuple[tuple[Span, ...], ...], ...]]:
    """Sums of each slot, or rank of a V, and spans that they do not contain."""
    size, weights = 2 if folded else 1, [_weights(random, num_layers) for _ in range(3)]
    largest, parts = max(weight.up[-1] for weight in weights), range(num_slots // size)

    def one() -> SpanSum:
        return SpanSum(tuple(random.choices(weights, k=size)), random.randint(largest // num_slots, 2 * largest))

    def excluded() -> tuple[Span, ...]:
        return tuple(_span(random, num_layers) for _ in range(size))

    sums = tuple(tuple(one() for _ in range(random.randint(0, 2))) for _ in parts)
    return sums, tuple(tuple(excluded() for _ in range(random.choice([0, 0, 1, 2]))) for _ in parts)
