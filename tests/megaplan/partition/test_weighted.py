"""The partitioner by hand: constraints, ties, caps, speed. `test_brute_force.py` compares them with every split."""

from collections.abc import Sequence
from itertools import accumulate
from random import Random

import pytest
from split_stacks import slot_costs

from megaplan.errors import MegaplanError
from megaplan.partition.best_cuts import balance
from megaplan.partition.constraints import Constraints
from megaplan.partition.limits import SpanSum, layer_weight
from megaplan.partition.values import Balance, StackCosts, equal_cuts


def slot_caps(layer_bytes: Sequence[int], cap_bytes: Sequence[int]) -> list[list[SpanSum]]:
    """Limits of layers that weigh the same on every slot, whose caps differ."""
    weight = layer_weight(layer_bytes)
    return [[SpanSum((weight,), cap)] for cap in cap_bytes]


def cuts_of(found: Balance | None) -> tuple[int, ...] | None:
    return found and found.cuts


@pytest.mark.requirement("R-24")
def test_constraints_hold() -> None:
    costs = StackCosts((1,) * 12)
    assert cuts_of(balance(costs, 3)) == (4, 8)
    assert cuts_of(balance(costs, 3, Constraints(forbid=(4,)))) == (3, 7)
    assert cuts_of(balance(costs, 3, Constraints(pin=(2,)))) == (2, 7)
    assert cuts_of(balance(costs, 3, Constraints(together=((3, 7),)))) == (3, 7)


@pytest.mark.requirement("R-24")
@pytest.mark.requirement("R-27")
def test_constraints_hold_in_a_v() -> None:
    costs = StackCosts((1,) * 12)
    assert cuts_of(balance(costs, 4, folded=True)) == (1, 2, 7)
    assert cuts_of(balance(costs, 4, Constraints(forbid=(1, 7)), folded=True)) == (2, 3, 8)
    assert cuts_of(balance(costs, 4, Constraints(pin=(9,)), folded=True)) == (3, 4, 9)
    assert cuts_of(balance(costs, 4, Constraints(together=((0, 5),)), folded=True)) == (5, 6, 11)


@pytest.mark.requirement("R-23")
def test_edge_stages_take_fewer_layers() -> None:
    assert cuts_of(balance(StackCosts((10,) * 12, first=10, last=20), 3)) == (4, 9)


@pytest.mark.requirement("R-23")
@pytest.mark.requirement("R-27")
def test_the_rank_with_both_ends_takes_fewer_layers() -> None:
    """Rank 0 owns the embedding's slot and the head's: 30 of its 70 are ends."""
    found = balance(StackCosts((10,) * 12, first=10, last=20), 4, folded=True)
    assert found is not None
    assert found.value == 80
    first, turn, last = found.cuts
    assert (first + 12 - last) * 10 + 30 <= 80
    assert first < turn < last


def test_a_cap_that_differs_by_slot_defeats_the_greedy_cut() -> None:
    """Filling slot 0 as far as it goes would leave layer 2, the large one, to slot 1, whose cap is below it."""
    costs, memory = StackCosts((1, 1, 1, 1)), [1, 1, 6, 1]
    assert cuts_of(balance(costs, 3, limits=slot_caps(memory, [9, 2, 8]))) == (1, 2)


def furthest_first(costs: StackCosts, num_ranks: int, limit: int) -> bool:
    """The search that keeps one stop a start: whether it finds a V within the limit."""
    before = [0, *accumulate(costs.layers)]
    end = len(costs.layers)
    reached = {0: end}
    for rank in range(num_ranks):
        inside: dict[int, int] = {}
        for start, stop in reached.items():
            for inner_start in range(start + 1, stop):
                room = limit - (before[inner_start] - before[start])
                stops = [inner for inner in range(inner_start, stop) if before[stop] - before[inner] <= room]
                if stops:
                    inside[inner_start] = min(inside.get(inner_start, end), stops[0])
        reached = inside if rank < num_ranks - 1 else {start: stop for start, stop in inside.items() if start == stop}
    return bool(reached)


def test_keeping_one_stop_a_start_misses_solutions() -> None:
    """Going ahead can strand a layer that only an earlier rank had room for: the full search finds what this gives up."""
    random = Random(7)
    for _ in range(4000):
        costs = StackCosts(tuple(random.randint(0, 9) for _ in range(random.randint(6, 9))))
        found = balance(costs, 6, folded=True)
        assert found is not None
        if not furthest_first(costs, 3, found.value):
            return
    pytest.fail("the greedy search was right every time")


@pytest.mark.requirement("R-29")
def test_ties_keep_the_baseline_before_they_level_the_rest() -> None:
    costs = StackCosts((8, 3, 3, 3, 3))
    assert cuts_of(balance(costs, 3)) == (1, 3)
    assert cuts_of(balance(costs, 3, baseline=(1, 4))) == (1, 3)
    wide = StackCosts((9, 1, 1, 1, 1))
    assert cuts_of(balance(wide, 3)) == (1, 3)
    assert cuts_of(balance(wide, 3, baseline=(1, 4))) == (1, 4)
    assert cuts_of(balance(wide, 3, baseline=(2, 4))) == (1, 4)


@pytest.mark.requirement("R-29")
def test_ties_of_a_v_keep_the_baseline() -> None:
    costs = StackCosts((1,) * 12)
    assert cuts_of(balance(costs, 4, folded=True, baseline=(3, 6, 9))) == (3, 6, 9)
    assert cuts_of(balance(costs, 4, folded=True, baseline=(3, 6, 10))) == (3, 6, 9)


def test_two_equal_largest_slots_are_their_own_second_largest() -> None:
    assert cuts_of(balance(StackCosts((5, 5, 1, 1, 1)), 3)) == (1, 2)


@pytest.mark.parametrize(
    ("rules", "num_slots", "code", "words"),
    [
        (Constraints(), 6, "MP330", "6 slots need 5 cuts"),
        (Constraints(forbid=(1, 2)), 4, "MP330", "allow 1"),
        (Constraints(pin=(1, 2)), 2, "MP330", "2 cuts, and 2 slots have 1"),
        (Constraints(pin=(4,)), 2, "MP327", "cuts are 1 to 3"),
        (Constraints(forbid=(0,)), 2, "MP327", "cut 0"),
        (Constraints(together=((2, 5),)), 2, "MP327", r"layers are \[0, 4\)"),
        (Constraints(pin=(2,), forbid=(2,)), 2, "MP328", "cut 2"),
        (Constraints(pin=(2,), together=((1, 3),)), 2, "MP329", r"inside \[1, 3\)"),
    ],
)
@pytest.mark.requirement("R-24")
def test_constraints_without_a_split_name_what_stands_in_the_way(rules: Constraints, num_slots: int, code: str, words: str) -> None:
    with pytest.raises(MegaplanError, match=f"(?s){code}.*{words}"):
        balance(StackCosts((1, 1, 1, 1)), num_slots, rules)
    with pytest.raises(MegaplanError, match=f"(?s){code}.*{words}"):
        balance(StackCosts((1, 1, 1, 1)), num_slots, rules, folded=True)


@pytest.mark.parametrize("caps", [[9, 9, 3], [9, 3, 9], [3, 9, 9]])
def test_caps_may_leave_no_split(caps: list[int]) -> None:
    assert balance(StackCosts((1, 1, 1)), 3, limits=slot_caps([4, 4, 4], caps)) is None


def test_a_baseline_of_another_size_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="2 cuts, and 2 slots have 1"):
        balance(StackCosts((1, 1, 1)), 2, baseline=(1, 2))
    with pytest.raises(ValueError, match="1 cuts, and 4 slots have 3"):
        balance(StackCosts((1, 1, 1, 1)), 4, folded=True, baseline=(1,))


@pytest.mark.parametrize(("num_layers", "num_slots"), [(128, 16), (1024, 64)])
@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("with_baseline", [False, True])
def test_large_stacks(num_layers: int, num_slots: int, with_baseline: bool, capped: bool) -> None:
    """No slot is above the value, and none below what the whole work leaves; `benchmarks/partition.py` times these sizes."""
    random = Random(num_layers)
    costs = StackCosts(tuple(random.randint(1, 10**9) for _ in range(num_layers)), last=2 * 10**9)
    baseline = equal_cuts(num_layers, num_slots) if with_baseline else None
    memory = [random.randint(1, 10) for _ in range(num_layers)]
    limits = slot_caps(memory, [sum(memory) // num_slots + 20 + slot % 7 for slot in range(num_slots)]) if capped else None
    found = balance(costs, num_slots, limits=limits, baseline=baseline)
    assert len(found.cuts) == num_slots - 1
    assert found.value == max(slot_costs(costs, found.cuts))
    assert found.value * num_slots >= sum(costs.layers) + costs.last
