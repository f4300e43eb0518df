"""The partitioner against every split of small stacks."""

from collections import Counter
from random import Random

import pytest
from split_stacks import Instance, best_cuts, random_instance, rank_sums, slot_costs

from megaplan.errors import MegaplanError
from megaplan.partition.best_cuts import balance
from megaplan.partition.values import Balance


def solve(instance: Instance) -> Balance | None:
    """None if the constraints or the limits leave no split."""
    how = {"folded": instance.folded, "limits": instance.all_limits, "baseline": instance.baseline}
    try:
        return balance(instance.costs, instance.num_slots, instance.rules, **how)
    except MegaplanError:
        return None


def compare(seed: int, instances: int, *, folded: bool) -> Counter[str]:
    """Numbers of instances that have a split, have none, have limits and a split, have ties, have ties and a baseline."""
    random, counts, weigh = Random(seed), Counter[str](), rank_sums if folded else slot_costs
    for number in range(instances):
        instance = random_instance(random, folded=folded)
        (expected, num_best), found = best_cuts(instance), solve(instance)
        assert (found and found.cuts) == expected, (seed, number, instance)
        counts["feasible" if expected is not None else "infeasible"] += 1
        if found is not None and expected is not None:
            assert found.value == max(weigh(instance.costs, expected)), (seed, number, instance)
            counts["limited"] += instance.limits is not None
            counts["tied"] += num_best > 1
            counts["tied with a baseline"] += num_best > 1 and instance.baseline is not None
    return counts


@pytest.mark.requirement("R-29")
@pytest.mark.parametrize("folded", [False, True], ids=["largest slot", "largest rank"])
def test_brute_force_agrees(folded: bool) -> None:
    counts = compare(0, 5000, folded=folded)
    assert counts["feasible"] + counts["infeasible"] == 5000
    assert counts["infeasible"] > 500
    assert counts["limited"] > 500
    assert counts["tied"] > 500
    assert counts["tied with a baseline"] > 500


@pytest.mark.slow
@pytest.mark.requirement("R-29")
@pytest.mark.parametrize("folded", [False, True], ids=["largest slot", "largest rank"])
@pytest.mark.parametrize("seed", range(100, 110))
def test_brute_force_agrees_at_length(seed: int, folded: bool) -> None:
    compare(seed, 5000, folded=folded)
