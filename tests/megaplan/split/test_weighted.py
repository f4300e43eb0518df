"""The partitioner by hand: constraints, ties, caps, refusals, speed. `test_brute_force.py` compares it with every split."""

from __future__ import annotations

import time
from random import Random

import pytest

from megaplan.errors import MegaplanError
from megaplan.split.constraints import Constraints
from megaplan.split.equal import equal_cuts
from megaplan.split.values import StackCosts
from megaplan.split.weighted import balance, slot_caps


@pytest.mark.requirement("R-24")
def test_constraints_hold() -> None:
    costs = StackCosts((1,) * 12)
    assert balance(costs, 3).cuts == (4, 8)
    assert balance(costs, 3, Constraints(forbid=(4,))).cuts == (3, 7)
    assert balance(costs, 3, Constraints(pin=(2,))).cuts == (2, 7)
    assert balance(costs, 3, Constraints(together=((3, 7),))).cuts == (3, 7)


@pytest.mark.requirement("R-23")
def test_edge_stages_take_fewer_layers() -> None:
    assert balance(StackCosts((10,) * 12, first=10, last=20), 3).cuts == (4, 9)


def test_a_cap_that_differs_by_slot_defeats_the_greedy_cut() -> None:
    """Filling slot 0 as far as it goes would leave layer 2, the large one, to slot 1, whose cap is below it."""
    costs, memory = StackCosts((1, 1, 1, 1)), [1, 1, 6, 1]
    assert balance(costs, 3, fits=slot_caps(memory, [9, 2, 8])).cuts == (1, 2)


@pytest.mark.requirement("R-29")
def test_ties_keep_the_baseline_before_they_level_the_rest() -> None:
    costs = StackCosts((8, 3, 3, 3, 3))
    assert balance(costs, 3).cuts == (1, 3)
    assert balance(costs, 3, baseline=(1, 4)).cuts == (1, 3)
    wide = StackCosts((9, 1, 1, 1, 1))
    assert balance(wide, 3).cuts == (1, 3)
    assert balance(wide, 3, baseline=(1, 4)).cuts == (1, 4)
    assert balance(wide, 3, baseline=(2, 4)).cuts == (1, 4)


def test_two_equal_largest_slots_are_their_own_second_largest() -> None:
    assert balance(StackCosts((5, 5, 1, 1, 1)), 3).cuts == (1, 2)


@pytest.mark.parametrize(
    ("rules", "num_slots", "code", "words"),
    [
        (Constraints(), 5, "MP330", "5 slots need 4 cuts"),
        (Constraints(forbid=(1, 2)), 3, "MP330", "allow 1"),
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
    with pytest.raises(MegaplanError, match=f"{code}.*{words}"):
        balance(StackCosts((1, 1, 1, 1)), num_slots, rules)


@pytest.mark.parametrize(
    ("caps", "words"), [([9, 9, 3], "slot 2 cannot"), ([9, 3, 9], "slots 1 to 2 cannot"), ([3, 9, 9], "slots 0 to 2 cannot")]
)
def test_caps_without_a_split_name_the_slot(caps: list[int], words: str) -> None:
    with pytest.raises(MegaplanError, match=f"MP336.*{words}"):
        balance(StackCosts((1, 1, 1)), 3, fits=slot_caps([4, 4, 4], caps))


def test_a_baseline_of_another_size_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="2 cuts, and 2 slots have 1"):
        balance(StackCosts((1, 1, 1)), 2, baseline=(1, 2))


@pytest.mark.parametrize(("num_layers", "num_slots", "limit_ms"), [(128, 16, 20), (1024, 64, 1000)])
@pytest.mark.parametrize("with_baseline", [False, True])
def test_speed(num_layers: int, num_slots: int, limit_ms: int, with_baseline: bool) -> None:
    """Best of five: the limit is on the algorithm, not on the machine's other work."""
    random = Random(num_layers)
    costs = StackCosts(tuple(random.randint(1, 10**9) for _ in range(num_layers)), last=2 * 10**9)
    baseline = equal_cuts(num_layers, num_slots) if with_baseline else None
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        balance(costs, num_slots, baseline=baseline)
        times.append((time.perf_counter() - begin) * 1e3)
    assert min(times) < limit_ms
