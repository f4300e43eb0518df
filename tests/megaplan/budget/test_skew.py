"""Balanced and skewed routing: which bytes move, and when none can."""

import pytest
from megatron_hybrid import spec_of

from megaplan.budget.fit import routing_range
from megaplan.budget.peaks import build_budget
from megaplan.columns import Column
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.layout.step_time import planned_time


def both(spec):
    inventory = build_inventory(spec)
    layout = build_layout(spec, inventory, [(0, 5), (5, 10)])
    budget = build_budget(spec, inventory, layout)
    return budget, routing_range(spec, inventory, layout, budget)


@pytest.mark.parametrize("skew", [1.0, 1.5])
def test_skew_moves_rows_and_no_parameter(hybrid, skew):
    budget, found = both(hybrid({"mesh.ep": 2, "model.moe.routing_skew": skew}))
    assert found.skew == (skew if skew > 1 else 2.0)
    assert (found.balanced if skew == 1 else found.skewed) is budget
    for even in found.balanced.ranks:
        busy = found.skewed.of_rank(even.ranks[0])
        for phase, cells in even.cells.items():
            assert cells[Column.EXPERT_PARALLEL_PARAMS] == busy.cells[phase][Column.EXPERT_PARALLEL_PARAMS]
        assert found.allocated_bytes(even)[0] < found.allocated_bytes(even)[1]


@pytest.mark.parametrize("overrides", [{}, {"mesh.ep": 2, "model.moe.capacity_factor": 1.25}])
def test_no_row_moves_on_one_expert_rank_or_under_a_capacity(hybrid, overrides):
    assert both(hybrid(overrides))[1] is None


def figures(spec, spans):
    """Peaks of all ranks, and the step's seconds."""
    inventory = build_inventory(spec)
    budget = build_budget(spec, inventory, build_layout(spec, inventory, spans))
    peaks = {each.ranks[0]: (each.coordinate["pp"], each.peak_bytes) for each in budget.ranks}
    return peaks, planned_time(spec, spans, inventory).seconds


def skewed(host, hybrid):
    """Specs of a host by their skew; the model's E layers are 4 for megarun, 3 on each of two stages for Megatron."""
    if host == "megarun":
        made = lambda skew: hybrid({"mesh.ep": 2, "model.moe.routing_skew": skew})  # noqa: E731
        spec = made(1.0)
    else:
        made = lambda skew: spec_of("mesh={pp: 2, dp_shard: 4, ep: 4}", f"model.moe.routing_skew={skew}")  # noqa: E731
        spec = made(1.0)
    size = spec.model.num_layers // 2
    return made, [(0, size), (size, 2 * size)], build_inventory(spec).layers


@pytest.mark.parametrize("host", ["megarun", "megatron"])
def test_a_skew_of_each_layer(hybrid, host):
    """Equal skews are one skew; one larger skew moves only the ranks that have its layer, and the step with it."""
    made, spans, layers = skewed(host, hybrid)
    places = [index for index, block in enumerate(layers) if block.family == "E"]
    number, early = len(places), sum(index < spans[0][1] for index in places)
    even = figures(made(1.25), spans)
    for equal in ([1.25] * number, {"first": 1.25, "rest": 1.25}, {"first": [1.25] * number}):
        assert figures(made(equal), spans) == even
    forms = {"first": 2.0, "rest": 1.25}, {"first": [2.0], "rest": 1.25}, [2.0, *[1.25] * (number - 1)]
    first = [figures(made(form), spans) for form in forms]
    assert first[0] == first[1] == first[2]
    last = figures(made([*[1.25] * (number - 1), 2.0]), spans)
    assert 0 < early < number
    most = figures(made(2.0), spans)
    for skewed_one, stage in ((first[0], 0), (last, 1)):
        for rank, (own, before) in even[0].items():
            after = skewed_one[0][rank][1]
            assert before < after <= most[0][rank][1] if own == stage else after == before, (rank, stage)
        assert even[1] <= skewed_one[1] <= most[1]
        assert even[1] < most[1]


def test_layers_of_one_skew_are_one_block(hybrid):
    blocks = build_inventory(hybrid({"mesh.ep": 2, "model.moe.routing_skew": {"first": 2.0, "rest": 1.25}})).layers
    assert [block.variant for block in blocks if block.family == "E"][:2] == [2.0, 1.25]
    assert len({id(block) for block in blocks if block.family == "E"}) == 2
