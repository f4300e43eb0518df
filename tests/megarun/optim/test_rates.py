"""Learning rates of each schedule against values computed by hand, and what both optimizers are given."""

import math
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch

from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.models import ConstantRate, CosineRate, RateSchedule, Spec, StableRate
from megarun.engine.build import build_stage, materialise
from megarun.optim.build import Optimizers
from megarun.optim.rates import rate_factor

pytestmark = pytest.mark.runtime
CASES: list[tuple[RateSchedule, int, list[float]]] = [
    (ConstantRate(warmup_steps=4), 6, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]),
    (ConstantRate(warmup_steps=0), 2, [1.0, 1.0, 1.0]),
    (ConstantRate(), 30, [1 / 3, 2 / 3, 1.0, 1.0]),
    (
        CosineRate(kind="cosine", warmup_steps=2, final_fraction=0.2),
        6,
        [0.5, 1.0, 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6, 0.6 - 0.4 * math.sqrt(0.5), 0.2, 0.2],
    ),
    (CosineRate(kind="cosine", warmup_steps=3), 3, [1 / 3, 2 / 3, 1.0, 1.0]),
    (StableRate(kind="wsd", warmup_steps=2, decay_steps=4), 8, [0.5, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
    (
        StableRate(kind="wsd", warmup_steps=0, decay_steps=4, decay="sqrt", final_fraction=0.5),
        5,
        [1.0, 0.75, 1 - math.sqrt(0.5) / 2, 1 - math.sqrt(0.75) / 2, 0.5, 0.5],
    ),
]


@pytest.mark.parametrize(("schedule", "num_steps", "expected"), CASES)
def test_factors_are_those_computed_by_hand(schedule: RateSchedule, num_steps: int, expected: list[float]) -> None:
    """One value a step; the last ones are past the end of training."""
    assert [rate_factor(schedule, step, num_steps) for step in range(len(expected))] == pytest.approx(expected, rel=1e-12)


def test_a_warm_up_that_is_not_stated_is_a_tenth_and_at_most_100_steps() -> None:
    assert rate_factor(ConstantRate(), 49, 10_000) == 0.5
    assert rate_factor(ConstantRate(), 0, 9) == 1.0


def test_muon_and_adamw_follow_one_schedule(spec_with: Any) -> None:
    """Each rate is its own base times the same factor."""
    rates = {"learning_rate": 0.002, "muon_learning_rate": 0.03, "steps": 8}
    wsd = {"kind": "wsd", "warmup_steps": 2, "decay_steps": 4}
    spec = Spec.model_validate(spec_with({"training": {**rates, "rate_schedule": wsd}}))
    inventory = build_inventory(spec)
    stage = build_stage(spec, inventory, build_layout(spec, inventory, [(0, 5)]).slots[0])
    materialise(stage, torch.device("cpu"))
    optimizers = Optimizers([stage], inventory, spec)
    for step, factor in ((0, 0.5), (2, 1.0), (5, 0.5)):
        with ExitStack() as stack:
            updates = {type(each).__name__: stack.enter_context(mock.patch.object(each, "step")) for each in optimizers._all}
            optimizers.step(step, 0.25)
        found = {name: [float(update.call_args.kwargs[key]) for key in ("rate", "scale")] for name, update in updates.items()}
        assert found == {"AdamW": [0.002 * factor, 0.25], "Muon": [0.03 * factor, 0.25]}
