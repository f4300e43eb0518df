"""Both partitioners against every split of small stacks."""

from __future__ import annotations

from random import Random

import pytest
from split_stacks import Instance, best_cuts, random_instance, rank_sums, slot_costs

from megaplan.errors import MegaplanError
from megaplan.split.folded_ties import balance_folded
from megaplan.split.values import Balance
from megaplan.split.weighted import balance


def solve(instance: Instance, *, folded: bool) -> Balance | None:
    """None if the constraints or the limits leave no split."""
    costs, rules = instance.costs, instance.rules
    try:
        if folded:
            return balance_folded(costs, instance.num_slots // 2, rules, limits=instance.pair_limits, baseline=instance.baseline)
        return balance(costs, instance.num_slots, rules, limits=instance.slot_limits, baseline=instance.baseline)
    except MegaplanError:
        return None


def compare(seed: int, instances: int, *, folded: bool) -> tuple[int, int, int]:
    """Feasible instances, infeasible ones, and those feasible ones where limits or ties decided."""
    random, feasible, weigh = Random(seed), 0, rank_sums if folded else slot_costs
    limited = 0
    for number in range(instances):
        instance = random_instance(random, folded=folded)
        expected, found = best_cuts(instance, folded=folded), solve(instance, folded=folded)
        assert (found and found.cuts) == expected, (seed, number, instance)
        if found is not None and expected is not None:
            assert found.value == max(weigh(instance.costs, expected)), (seed, number, instance)
            feasible += 1
            limited += instance.slot_limits is not None or instance.pair_limits is not None
    return feasible, instances - feasible, limited


@pytest.mark.requirement("R-29")
@pytest.mark.parametrize("folded", [False, True], ids=["largest slot", "largest rank"])
@pytest.mark.parametrize("seed", range(2))
def test_brute_force_agrees(seed: int, folded: bool) -> None:
    feasible, infeasible, limited = compare(seed, 600, folded=folded)
    assert feasible > 150
    assert infeasible > 50
    assert limited > 50


@pytest.mark.slow
@pytest.mark.requirement("R-29")
@pytest.mark.parametrize("folded", [False, True], ids=["largest slot", "largest rank"])
@pytest.mark.parametrize("seed", range(100, 104))
def test_brute_force_agrees_at_length(seed: int, folded: bool) -> None:
    compare(seed, 5000, folded=folded)
