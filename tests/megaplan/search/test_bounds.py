"""Bounds of a step from whole layers, and cuts that are looked for no further than they are of use."""

import random
from itertools import combinations

import pytest
from small_problems import problem

from megaplan.cost.times import LayerTime
from megaplan.exploration.evaluate import Evaluator
from megaplan.layout.build import spans_of
from megaplan.partition.best_cuts import balance
from megaplan.partition.bounds import PACKED_PARTS, packed
from megaplan.partition.limits import layer_weight
from megaplan.partition.values import StackCosts
from megaplan.schedules import SlotTimes, actions, replay


@pytest.mark.parametrize("kind", ["1f1b", "gpipe"])
@pytest.mark.parametrize("seed", range(30))
def test_a_packed_step_is_the_least_that_whole_layers_allow(kind, seed):
    draw = random.Random(seed)
    num_layers, pp = draw.randint(4, 7), draw.randint(2, 4)
    count, hop = draw.randint(pp, 3 * pp), draw.choice([0, 7])
    layers = [LayerTime(draw.randint(1, 40), draw.randint(1, 80), draw.randint(0, 40)) for _ in range(num_layers)]
    before = layer_weight([layer.total_ns for layer in layers]).up
    bound, least, shortest = packed(before, pp, count, hop), 1 << 62, 1 << 62
    for cuts in combinations(range(1, num_layers), pp - 1):
        slots = [sum(layers[start:stop], start=LayerTime()) for start, stop in spans_of(cuts, num_layers)]
        own = [slot.total_ns for slot in slots]
        least = min(least, max(count * own[rank] + sum(own[:rank]) + 2 * rank * hop for rank in range(pp)))
        times = SlotTimes(*(tuple(getattr(slot, part) for slot in slots) for part in ("forward_ns", "input_ns", "weight_ns")))
        shortest = min(shortest, replay(actions(kind, pp, 1, count), times, p2p=hop).makespan)
    assert bound <= least <= shortest
    assert count * max(layer.total_ns for layer in layers) > least or bound > least - 2 - least // PACKED_PARTS


@pytest.mark.parametrize("seed", range(12))
def test_what_layers_keep_does_not_depend_on_what_was_asked_before(seed):
    space, _ = problem(seed)
    for mesh in space.meshes()[:3]:
        asked = Evaluator(space, 0)
        layout = next(iter(space.layouts_of(mesh)), None)
        if layout is None:
            continue
        policies = space.policies(layout)
        asked.fits_nowhere(mesh)
        for policy in policies:
            alone = Evaluator(space, 0)
            spec = alone.spec(layout, policy)
            assert asked.side(spec).floors.kept_bytes(spec) == alone.side(spec).floors.kept_bytes(spec)


@pytest.mark.parametrize("seed", range(20))
def test_cuts_that_cost_more_than_is_of_use_are_none(seed):
    draw = random.Random(seed)
    costs = StackCosts(tuple(draw.randint(1, 30) for _ in range(draw.randint(8, 14))), draw.randint(0, 9), draw.randint(0, 9))
    for folded in (False, True):
        best = balance(costs, 4, folded=folded)
        assert best is not None
        assert balance(costs, 4, folded=folded, most=best.value) == best
        assert balance(costs, 4, folded=folded, most=best.value + 1) == best
        assert balance(costs, 4, folded=folded, most=best.value - 1) is None
