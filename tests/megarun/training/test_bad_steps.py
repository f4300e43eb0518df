"""Batches of steps after some were left out, and the rule of spikes."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megaplan.spec.training import BadSteps, LossSpike
from megarun.data.progress import START
from megarun.engine.trainer import StepResult
from megarun.training.bad_steps import StepGuard

pytestmark = pytest.mark.runtime
RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=8)


@given(ranges=RANGES)
@settings(max_examples=60, deadline=None)
def test_steps_count_the_batches_that_are_left(ranges: list[tuple[int, int]]) -> None:
    progress, freed = START, set()
    for first, length in ranges:
        progress = progress.without((first, first + length))
        freed |= set(range(first, first + length))
    left = [number for number in range(100) if number not in freed]
    assert [progress.batch(step) for step in range(40)] == left[:40]
    assert all(one[1] < two[0] for one, two in zip(progress.skipped, progress.skipped[1:], strict=False))


def guard_of(rules: BadSteps, trainer: Any = None) -> Any:
    keeper = SimpleNamespace(control=dist.group.WORLD, last=lambda: None)
    return StepGuard(rules, keeper, trainer or SimpleNamespace(drop_gradients=lambda: None, scales_losses=False))  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_process")
def test_a_spike_is_measured_by_the_median_of_good_steps() -> None:
    guard = guard_of(BadSteps(spike=LossSpike(factor=2.0, steps=3)))
    for step, loss in enumerate([9.0, 1.0, 1.0]):  # no loss is a spike before three are known
        assert guard.judge(step, StepResult(loss, 1.0)) is None
    assert guard.judge(3, StepResult(2.0, 1.0)) is None  # twice the median is none yet
    bad = guard.judge(4, StepResult(2.1, 1.0))
    assert (bad.decision, bad.reason, bad.loss, bad.batches) == ("skip", "the loss is a spike", 2.1, (4, 5))
    assert guard.follow(bad) == 4
    assert guard.data_progress.batch(4) == 5
    assert guard.data_progress.losses == (1.0, 1.0, 2.0)  # a bad step's is not among them


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("result", [StepResult(math.nan, 1.0), StepResult(math.inf, 1.0), StepResult(1.0, math.nan)])
def test_without_a_rule_only_what_is_not_finite_is_bad(result: StepResult) -> None:
    guard = guard_of(BadSteps())
    assert guard.judge(0, StepResult(1.0, 1.0)) is None
    assert guard.judge(1, StepResult(1e9, 1.0)) is None
    assert guard.data_progress.losses == ()
    assert guard.judge(2, result).decision == "skip"


@pytest.mark.usefixtures("one_process")
def test_an_overflow_halves_the_scale_and_is_not_a_bad_step() -> None:
    """The batch is skipped; after 2,000 steps without an overflow the scale doubles. At scale 1 a gradient that is not finite is bad."""
    set_to: list[float] = []
    trainer = SimpleNamespace(drop_gradients=lambda: None, scales_losses=True, scale_losses=set_to.append)
    guard = guard_of(BadSteps(skips=0), trainer)
    for step in range(16):
        found = guard.judge(0, StepResult(1.0, math.inf))
        assert (found.decision, found.next_step, found.batches) == ("skip", 1, (step, step + 1))
        assert guard.follow(found) == 0
    assert set_to == [2.0**power for power in range(15, -1, -1)]
    assert guard.data_progress.loss_scale == 1
    for step in range(2000):
        assert guard.judge(step, StepResult(1.0, 1.0)) is None
    assert (guard.data_progress.loss_scale, guard.data_progress.num_scaled, set_to[-1]) == (2.0, 0, 2.0)
    assert guard.judge(2000, StepResult(math.nan, 1.0)).decision == "stop"
