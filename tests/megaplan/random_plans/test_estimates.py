"""Properties of every budget, whatever the plan: 2,000 random ones, those of both hosts among them."""

import pytest
from random_plans.choices import SMALL
from random_plans.draw import draw

from megaplan.budget.peaks import build_budget
from megaplan.budget.values import Budget, RankBudget
from megaplan.columns import Column, Phase
from megaplan.errors import MegaplanError
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.partition.choose import choose_cuts
from megaplan.spec.load import spec_from_document
from megaplan.spec.models import Spec

NUM_PLANS, IN_CI = 2000, 700
LEAST_LEGAL = 0.9
PARAMETERS = (Column.REPLICATED_PARAMS, Column.TENSOR_PARALLEL_PARAMS, Column.EXPERT_PARALLEL_PARAMS)
MOMENTS = (Column.MATRIX_OPTIMIZER, Column.OTHER_OPTIMIZER)


def budget_of(spec: Spec) -> Budget:
    inventory = build_inventory(spec)
    return build_budget(spec, inventory, build_layout(spec, inventory, choose_cuts(spec, inventory).spans))


@pytest.mark.parametrize("seeds", [range(IN_CI), pytest.param(range(IN_CI, NUM_PLANS), marks=pytest.mark.slow)], ids=["few", "many"])
def test_every_cell_of_a_random_budget_is_possible(seeds: range) -> None:
    """No cell is negative, columns sum to the peak, phases include bytes left by earlier ones; every rank is named once."""
    wrong, legal = [], 0
    for seed in seeds:
        try:
            spec = spec_from_document(draw(seed, size=SMALL))
            budget = budget_of(spec)
        except MegaplanError:
            continue
        legal += 1
        found = [*impossible_ranks(spec, budget), *(fault for rank in budget.ranks for fault in impossible_cells(spec, rank))]
        if found:
            wrong.append(f"seed {seed}: {found[0]}")
    assert not wrong, "\n".join(wrong)
    assert legal >= LEAST_LEGAL * len(seeds)


def impossible_ranks(spec: Spec, budget: Budget) -> list[str]:
    """Ranks that are missing or named twice, and headrooms out of order."""
    rooms = [rank.headroom_bytes for rank in budget.ranks]
    faults = {
        "a rank is not named once": sorted(rank for each in budget.ranks for rank in each.ranks) != [*range(spec.mesh.world_size)],
        "the worst rank is not the first": rooms != sorted(rooms),
    }
    return [fault for fault, is_there in faults.items() if is_there]


def impossible_cells(spec: Spec, rank: RankBudget) -> list[str]:
    """Cells of a rank that cannot be, each in words."""
    cells, phases = rank.cells, rank.phases
    faults = [f"{phase} {column} = {size:,}" for phase in Phase for column, size in cells[phase].items() if size < 0]
    if {phase: sum(cells[phase][column] for column in Column) for phase in Phase} != phases:
        faults.append("columns do not sum to their phase")
    if sum(rank.columns.values()) != rank.peak_bytes or rank.peak_bytes != max(phases.values()):
        faults.append("columns do not sum to the peak")
    if rank.usable_bytes - rank.peak_bytes != rank.headroom_bytes:
        faults.append("headroom is not what the peak leaves")
    if spec.host.name == "megarun":
        faults += _of_megarun(rank)
    return faults


def _of_megarun(rank: RankBudget) -> list[str]:
    """Parameters are resident throughout; moments are made by the first update, and stay."""
    faults = [
        f"{column} is not the same in every phase but init, where it is being made"
        for column in PARAMETERS
        if len({rank.cells[phase][column] for phase in Phase if phase is not Phase.INIT}) > 1
    ]
    for column in MOMENTS:
        of_phase = {phase: rank.cells[phase][column] for phase in Phase}
        before = (Phase.INIT, Phase.FIRST_FORWARD_BACKWARD)
        if any(of_phase[phase] for phase in before):
            faults.append(f"{column} is there before the first update")
        if of_phase[Phase.FORWARD_BACKWARD] != of_phase[Phase.OPTIMIZER]:
            faults.append(f"{column} is not the same in every later step")
        if of_phase[Phase.FIRST_OPTIMIZER] > of_phase[Phase.OPTIMIZER]:
            faults.append(f"{column} is more in the first update than after it")
    return faults
