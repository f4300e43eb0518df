"""Random layouts of random models train as one process does; `make parity-random SEED=7 COUNT=40` trains those of other seeds."""

import copy

import pytest
from parity_compare import course_difference
from parity_world import Worlds
from random_cells import random_cell

pytestmark = pytest.mark.runtime
SEEDS, IN_LANE = range(8), 4
"""Seeds, and those of them that the lane of random seeds takes; the others are slow."""


@pytest.mark.random_seeds
@pytest.mark.requirement("R-62")
@pytest.mark.requirement("R-63")
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow if seed >= IN_LANE else ()) for seed in SEEDS])
def test_a_random_layout_trains_as_one_process(seed: int, worlds: Worlds) -> None:
    """Every gradient of three steps, and the optimizers' three steps on equal gradients."""
    cell = random_cell(seed)
    case, reference = ({**each, "run": "course"} for each in (cell.case, cell.reference))
    records, expected = worlds.train(case, cell.world_size), worlds.reference(reference)
    found = course_difference(case, records, expected, cell.bound, lambda number: worlds.reference({**reference, "perturbed": number}))
    assert found is None, f"{cell.name} ({cell.axes}): {found} > {cell.bound:.0e}"


@pytest.mark.slow
def test_a_planted_difference_is_found(worlds: Worlds) -> None:
    """In a late gradient, in the parameters after plain steps, in those after the optimizers' steps, and in a loss."""
    case = {**random_cell(0).reference, "run": "course"}
    record = worlds.reference(case)
    assert course_difference(case, [record], record, 0.0) is None
    for key in ("initial", "gradients 3", "trained", "updated"):
        wrong = copy.deepcopy(record)
        wrong[key]["final_norm.weight"][0].view(-1)[0] += 1e-3
        found = course_difference(case, [wrong], record, 1e-5)
        assert found is not None
        assert (found.what, found.name) == (key, "final_norm.weight")
    perturbed = worlds.reference({**case, "perturbed": 0})
    moved = {name: (value[0] - record["gradients 1"][name][0]).abs().max() for name, value in perturbed["gradients 1"].items()}
    assert all(float(each) > 0 for each in moved.values())
    for times, is_found in ((1.0, False), (10.0, True)):
        wrong = copy.deepcopy(record)
        wrong["gradients 1"]["final_norm.weight"][0].view(-1)[0] += times * moved["final_norm.weight"]
        found = course_difference(case, [wrong], record, 0.0, lambda _: perturbed)
        assert (found is not None) is is_found
    wrong = copy.deepcopy(record)
    wrong["losses"][2] *= 1.001
    assert "losses: the first tensor that differs is step 3" in str(course_difference(case, [wrong], record, 1e-5))
