"""Balanced and skewed routing: which bytes move, and when none can."""

import pytest

from megaplan.budget.build import build_budget
from megaplan.budget.skew import routing_range
from megaplan.columns import Column
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout


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
