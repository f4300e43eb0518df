"""The partitioner against every split of small stacks, ranked by the rules as they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from random import Random

import pytest

from megaplan.errors import MegaplanError
from megaplan.split.constraints import Constraints
from megaplan.split.values import StackCosts
from megaplan.split.weighted import balance

Fits = Callable[[int, int, int], bool]


def legal_cuts(num_layers: int, num_slots: int, rules: Constraints, fits: Fits | None) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, num_layers), num_slots - 1):
        spans = pairwise((0, *cuts, num_layers))
        if any(cut in rules.forbid for cut in cuts) or not set(rules.pin) <= set(cuts):
            continue
        if any(start < cut < stop for start, stop in rules.together for cut in cuts):
            continue
        if fits is None or all(fits(slot, start, stop) for slot, (start, stop) in enumerate(spans)):
            yield cuts


def slot_costs(costs: StackCosts, cuts: Sequence[int]) -> list[int]:
    edges = [0, *cuts, len(costs.layers)]
    sums = [sum(costs.layers[start:stop]) for start, stop in pairwise(edges)]
    sums[0] += costs.first
    sums[-1] += costs.last
    return sums


def best_cuts(
    costs: StackCosts, num_slots: int, rules: Constraints, fits: Fits | None = None, baseline: Sequence[int] | None = None
) -> tuple[int, ...] | None:
    """Smallest maximum, then fewest moved cuts, then smallest second-largest, then lexicographic; None if no split is legal."""

    def rank(cuts: tuple[int, ...]) -> tuple[int, int, int, tuple[int, ...]]:
        ordered = sorted(slot_costs(costs, cuts), reverse=True)
        moved = 0 if baseline is None else sum(cut != old for cut, old in zip(cuts, baseline, strict=True))
        return ordered[0], moved, ordered[1] if len(ordered) > 1 else 0, cuts

    return min(legal_cuts(len(costs.layers), num_slots, rules, fits), key=rank, default=None)


def random_instance(random: Random) -> tuple[StackCosts, int, Constraints, Fits | None, tuple[int, ...] | None]:
    """A stack of at most 11 layers with, each now and then, edge costs, zero costs, caps, constraints and a baseline.

    Costs are small so that ties abound. Caps weigh layers differently on each slot, as in-flight counts do.
    """
    num_layers = random.randint(1, 11)
    num_slots = random.randint(1, min(num_layers, 6))
    top = random.choice([1, 2, 4, 9, 1000])
    costs = StackCosts(
        tuple(random.randint(0, top) for _ in range(num_layers)),
        first=random.choice([0, 0, random.randint(0, 2 * top)]),
        last=random.choice([0, random.randint(0, 4 * top)]),
    )
    cuts = range(1, num_layers)
    forbid = tuple(cut for cut in cuts if random.random() < random.choice([0, 0.2, 0.5]))
    pin = tuple(cut for cut in cuts if random.random() < random.choice([0, 0, 0.2]))
    together: tuple[tuple[int, int], ...] = ()
    if random.random() < 0.3:
        start = random.randrange(num_layers)
        together = ((start, random.randint(start + 1, num_layers)),)
    fits = None
    if random.random() < 0.4:
        weights = [random.randint(0, 5) for _ in range(num_layers)]
        factors, caps = [random.randint(1, 3) for _ in range(num_slots)], [random.randint(3, 40) for _ in range(num_slots)]

        def fits(slot: int, start: int, stop: int) -> bool:
            return factors[slot] * sum(weights[start:stop]) <= caps[slot]

    baseline = None
    if random.random() < 0.6:
        baseline = tuple(sorted(random.sample(cuts, num_slots - 1)))
    return costs, num_slots, Constraints(forbid, pin, together), fits, baseline


def compare(seed: int, instances: int) -> tuple[int, int]:
    """Feasible and infeasible instances compared."""
    random, feasible = Random(seed), 0
    for number in range(instances):
        costs, num_slots, rules, fits, baseline = random_instance(random)
        expected = best_cuts(costs, num_slots, rules, fits, baseline)
        case = (seed, number, costs, num_slots, rules, baseline)
        if expected is None:
            with pytest.raises(MegaplanError):
                balance(costs, num_slots, rules, fits=fits, baseline=baseline)
            continue
        found = balance(costs, num_slots, rules, fits=fits, baseline=baseline)
        assert found.cuts == expected, case
        assert found.value == max(slot_costs(costs, expected)), case
        feasible += 1
    return feasible, instances - feasible


@pytest.mark.requirement("R-29")
@pytest.mark.parametrize("seed", range(4))
def test_brute_force_agrees(seed: int) -> None:
    feasible, infeasible = compare(seed, 750)
    assert feasible > 200
    assert infeasible > 50


@pytest.mark.slow
@pytest.mark.requirement("R-29")
@pytest.mark.parametrize("seed", range(100, 120))
def test_brute_force_agrees_at_length(seed: int) -> None:
    compare(seed, 5000)
