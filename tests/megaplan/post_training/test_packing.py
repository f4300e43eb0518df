"""Responses in rows, responses in flight, and sums of a tensor group over nodes."""

import random
from math import ceil

import pytest

import megaplan
from megaplan.post_training.job import packed_rows

SPEC = "plans/llama-3.1-8b-rl.yaml"
SPLIT = ("post_training.placement=split", "post_training.rollout.gpus=16", "post_training.rollout.response={mean: 1000, max: 3966}")


@pytest.mark.parametrize("seed", range(20))
def test_rows_hold_whole_sequences(seed: int) -> None:
    """No fewer rows than tokens need, nor than sequences longer than half a row; no more than first-fit's bound of 11/9 of the best."""
    draw = random.Random(seed)
    sizes = [float(draw.randint(1, 4096)) for _ in range(draw.randint(1, 300))]
    rows, least = packed_rows(sizes, 4096.0), max(ceil(sum(sizes) / 4096), sum(size > 2048 for size in sizes))
    assert least <= rows <= 11 * least / 9 + 1
    assert packed_rows([4096.0] * len(sizes), 4096.0) == len(sizes)
    assert packed_rows([1.0] * len(sizes), 4096.0) == 1


def test_as_many_iterations_are_in_flight_as_responses_may_be_old() -> None:
    """More in flight take fewer steps; an engine never runs more than those."""
    steps = []
    for staleness in (1, 2, 4):
        found = megaplan.rl(SPEC, *SPLIT, f"post_training.staleness={staleness}", "post_training.rollout.memory_fraction=0.9")
        assert found.engine.slots <= staleness * found.engine.sequences_of_group
        steps.append(found.engine.steps)
    assert steps[0] > steps[1] >= steps[2]
    assert steps[0] >= megaplan.rl(SPEC, *SPLIT, "post_training.staleness=1").lengths.mean


def test_sums_over_nodes_take_longer_than_in_one() -> None:
    """Sixteen ranks in two nodes wait for a tree or ring over the network in every layer."""
    one, two = (
        megaplan.rl(SPEC, f"device.per_node={size}", "device.domain=" + str(size), "post_training.rollout.tp=8").engine.decode_seconds
        for size in (8, 4)
    )
    assert two > one + 32 * 2 * 15e-6
