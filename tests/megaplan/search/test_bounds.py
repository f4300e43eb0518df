"""Bounds of a step from whole layers, and searches for cuts that stop when cuts are no longer useful."""

import random
from collections import Counter
from itertools import combinations

import pytest
from random_plans.choices import LARGE, SMALL
from random_plans.draw import draw
from small_problems import problem

from megaplan.budget.peaks import build_budget
from megaplan.cost.values import LayerTime
from megaplan.errors import MegaplanError
from megaplan.exploration.clocks import clock_of
from megaplan.exploration.evaluate import Evaluator
from megaplan.exploration.floors import floors_of
from megaplan.exploration.values import Exact
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout, spans_of
from megaplan.partition.best_cuts import balance
from megaplan.partition.bounds import PACKED_PARTS, packed
from megaplan.partition.choose import choose_cuts
from megaplan.partition.limits import layer_weight
from megaplan.partition.step import step_time_cuts
from megaplan.partition.values import StackCosts
from megaplan.schedules import SlotTimes, actions, replay
from megaplan.spec.load import spec_from_document


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


@pytest.mark.parametrize("seeds", [range(30), range(1000, 1030)], ids=["pinned", "later"])
def test_floors_of_memory_are_never_above_the_peak_of_a_random_plan(seeds):
    """All three hosts, LoRA, unsharded copies and state on any dtype among them; pools have no floor of one device."""
    found = Counter()
    for seed, size in ((seed, size) for seed in seeds for size in (SMALL, LARGE)):
        try:
            spec = spec_from_document(draw(seed, size=size))
        except MegaplanError:
            continue
        if spec.pools:
            continue
        inventory = build_inventory(spec)
        peak = build_budget(spec, inventory, build_layout(spec, inventory, choose_cuts(spec, inventory).spans)).worst.peak_bytes
        floors = floors_of(spec, inventory)
        assert max(floors.peak_bytes(spec), floors.shared_bytes(spec)) <= peak, (seed, size.name)
        found[spec.host.name] += 1
    assert sum(found.values()) > len(seeds)
    assert len(found) > 1


@pytest.mark.parametrize("pooled", [False, True])
def test_a_step_in_turns_is_shorter_than_its_layers_and_above_its_bounds(pooled):
    """Pairs of many microbatches hide nearly all exchanges: bounds of pairs in sequence would be above the step."""
    document = {
        "format": "megaplan.spec/1",
        "name": "turns",
        "model": {
            "pattern": "AE",
            "num_layers": 16,
            "hidden_size": 2048,
            "vocab_size": 4096,
            "attention": {"kind": "gqa", "num_heads": 16, "num_kv_heads": 4, "head_dim": 128},
            "moe": {"num_experts": 64, "top_k": 8, "ffn_hidden_size": 1408, "activation": "swiglu"},
        },
        "mesh": {"pp": 2, "vpp": 2, "dp_shard": 8, "ep": 8},
        "schedule": {"kind": "dualpipev", "num_microbatches": 128},
        "batch": {"micro_batch_size": 1, "seq_length": 4096},
        "device": {"name": "h100-sxm"},
        "host": {"moe_overlap": True},
        **({"pools": [{"count": 8, "device": {"name": "h100-sxm"}}]} if pooled else {}),
    }
    spec = spec_from_document(document)
    clock = clock_of(spec, build_inventory(spec))
    spans = spans_of((4, 8, 12), 16)
    step = clock.step_ns(spec, spans)
    plain = spec.model_copy(update={"host": spec.host.model_copy(update={"moe_overlap": False})})
    assert sum(clock.terms(spec, spans).values()) == step < clock.step_ns(plain, spans)
    assert 0.9 * step < clock.bound_ns(spec) <= step < clock.bound_ns(plain)
    assert 0.9 * step < clock.tight_bound_ns(spec) <= step < clock.tight_bound_ns(plain)
    costs = clock.costs(spec).of_slots(spans)
    assert max(one + other for one, other in zip(costs, costs[::-1], strict=True)) <= clock.most_cost(spec, step)


def test_cuts_of_pairs_in_turns_are_those_of_the_shortest_step():
    """The busiest slot says little of their step: a search finds at most what `split` finds for the same layout."""
    tried = 0
    for seed in range(8):
        space, _ = problem(seed, turns=True)
        evaluator = Evaluator(space)
        for layout in space.layouts():
            exact = evaluator.exact(layout, space.policies(layout)[0])
            if not isinstance(exact, Exact) or layout.pp == 1:
                continue
            spec = space.spec_of(layout, exact.policy)
            inventory = build_inventory(spec)
            found = step_time_cuts(spec, inventory, None, None)
            if not found.notes:
                there = evaluator.side(spec).clock.step_ns(spec, spans_of(found.cuts, len(inventory.layers)))
                assert exact.step_ns <= there * 1.001  # two cuts of one replayed length may differ by what is next to the layers
                tried += 1
    assert tried > 20
