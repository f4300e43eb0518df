"""The search for cuts that fit, on small random stacks with synthetic memory, compared with every split."""

from collections.abc import Sequence
from itertools import combinations
from random import Random

import pytest

from megaplan.layout.build import Spans, spans_of
from megaplan.partition.constraints import Constraints
from megaplan.partition.fitting import _descend, _effort, best_fitting, min_overflow_bytes
from megaplan.partition.limits import SpanSum, layer_weight
from megaplan.partition.stack import Stack
from megaplan.partition.values import StackCosts
from megaplan.schedules.placement import Placement, slots_of_rank


class MadeUpMemory:
    """Excess of a rank: of its largest sum, and of what its largest layer needs temporarily, which is in no sum."""

    def __init__(self, stack: Stack, moments_bytes: Sequence[int]) -> None:
        self._stack, self._moments_bytes = stack, moments_bytes
        self._asked: set[Spans] = set()

    @property
    def num_budgets(self) -> int:
        return len(self._asked)

    @property
    def work(self) -> int:
        return len(self._asked)

    def excess(self, rank: int, spans: Spans) -> int:
        self._asked.add(spans)
        own = [spans[slot] for slot in self._stack.slots(rank)]
        running = max(self._moments_bytes[layer] for start, stop in own for layer in range(start, stop))
        return self._stack.rank_excess(rank, spans) + running

    def excesses(self, spans: Spans) -> tuple[int, ...]:
        return tuple(self.excess(rank, spans) for rank in range(self._stack.pp))


def random_stack(random: Random, where: Placement) -> tuple[Stack, MadeUpMemory]:
    pp = random.choice([2, 2, 3])
    vpp = 1 if where == "single" else 2
    num_layers = random.randint(pp * vpp + 1, 9)
    costs = StackCosts(tuple(random.randint(0, 6) for _ in range(num_layers)), random.randint(0, 3), random.randint(0, 8))
    static, kept = ([random.randint(1, 9) for _ in range(num_layers)] for _ in range(2))
    sums = []
    for rank in range(pp):
        points = []
        for _ in range(random.choice([1, 2])):
            counts = [random.randint(0, pp - rank + chunk) for chunk in range(vpp)]
            weights = [
                layer_weight([here + count * per for here, per in zip(static, kept, strict=True)], count, 2 * count) for count in counts
            ]
            points.append(SpanSum(tuple(weights), 0))
        sums.append(points)
    heaviest = max(weight.up[-1] for points in sums for point in points for weight in point.weights)
    most = random.randint(heaviest // (2 * pp), heaviest)
    rules = Constraints(forbid=tuple(cut for cut in range(1, num_layers) if random.random() < 0.05))
    if num_layers - 1 - len(rules.forbid) < pp * vpp - 1:
        rules = Constraints()
    limited = tuple(tuple(point._replace(most=most) for point in points) for points in sums)
    stack = Stack(costs, rules, where, pp, vpp, sums=limited)
    return stack, MadeUpMemory(stack, [random.randint(0, 12) for _ in range(num_layers)])


def every_split(stack: Stack) -> list[Spans]:
    allowed = stack.rules.allowed_cuts(stack.num_layers)
    return [spans_of(cuts, stack.num_layers) for cuts in combinations(allowed, stack.pp * stack.vpp - 1)]


@pytest.mark.requirement("R-29")
@pytest.mark.parametrize("where", ["single", "loop", "v"])
def test_what_fits_is_found_and_what_does_not_is_bounded(where: Placement) -> None:
    """Exact with one slot a rank and in a V; in loop placement within its bounds."""
    random, seen = Random(17), {"fits": 0, "moved": 0, "over": 0}
    for _ in range(120):
        stack, memory = random_stack(random, where)
        every = every_split(stack)
        excess_of = {spans: max(memory.excesses(spans)) for spans in every}
        fitting = [stack.bottleneck(spans) for spans in every if excess_of[spans] <= 0]
        free = min(map(stack.bottleneck, every))
        found = best_fitting(stack, MadeUpMemory(stack, memory._moments_bytes))
        if found is not None:
            spans = spans_of(found.balance.cuts, stack.num_layers)
            assert excess_of[spans] <= 0
            assert stack.bottleneck(spans) >= min(fitting) >= found.lower_bound
            assert where == "loop" or stack.bottleneck(spans) == min(fitting) == found.lower_bound
            seen["fits" if min(fitting) == free else "moved"] += 1
            continue
        assert where == "loop" or not fitting
        start = random.choice(every)
        nearest = min_overflow_bytes(stack, MadeUpMemory(stack, memory._moments_bytes), tuple(first for first, _ in start[1:]))
        least = min(excess_of.values())
        assert nearest.overflow_bytes == excess_of[spans_of(nearest.cuts, stack.num_layers)] >= least >= nearest.lower_bound_bytes
        assert where == "loop" or nearest.overflow_bytes == least == nearest.lower_bound_bytes
        seen["over"] += 1
    assert min(seen.values()) > 3, seen


@pytest.mark.parametrize("where", ["single", "loop", "v"])
def test_a_descent_ends_where_no_run_of_cuts_gains(where: Placement) -> None:
    """It never rises, keeps to allowed cuts, and stops only where every move of one cut is no better."""
    random = Random(23)
    for _ in range(60):
        stack, memory = random_stack(random, where)
        start = random.choice(every_split(stack))
        cuts = _descend(stack, memory, tuple(first for first, _ in start[1:]), 10_000, _effort(memory))
        reached, allowed = max(memory.excesses(spans_of(cuts, stack.num_layers))), stack.rules.allowed_cuts(stack.num_layers)
        assert reached <= max(memory.excesses(start))
        for index, cut in enumerate(cuts):
            for place in (allowed.index(cut) - 1, allowed.index(cut) + 1):
                if 0 <= place < len(allowed) and allowed[place] not in cuts:
                    moved = sorted((*cuts[:index], allowed[place], *cuts[index + 1 :]))
                    assert max(memory.excesses(spans_of(moved, stack.num_layers))) >= reached


def test_the_slots_of_a_rank_are_those_of_its_placement() -> None:
    """The bytes that a made-up memory counts for a rank are what the search limits."""
    for where, vpp in (("single", 1), ("loop", 2), ("v", 2)):
        stack = Stack(StackCosts((1,) * 8), Constraints(), where, 2, vpp)
        assert [stack.slots(rank) for rank in range(2)] == [slots_of_rank(where, rank, 2, vpp) for rank in range(2)]
