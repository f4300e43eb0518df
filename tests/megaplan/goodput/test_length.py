"""Steps of a run against a count of them one by one, and the terms that a run adds to them."""

import random
from typing import Any

import pytest

import megaplan
from megaplan.cost.forward import forward_seconds
from megaplan.goodput.length import combined
from megaplan.layout.step_time import PlannedTime, planned_time

SPEC = "plans/llama-3.1-8b.yaml"


def planned(seconds: float, *changes: str) -> tuple[Any, float]:
    """The job of the spec, and its step with another length."""
    job = megaplan.load(SPEC, *changes)
    time = planned_time(job.spec, job.spans, job.inventory)
    assert isinstance(time, PlannedTime)
    return job, time.seconds * seconds


def counted(tokens: int, ramp: int, first: int, batch: int) -> int:
    """Steps until the tokens are trained, with a batch that grows linearly with them."""
    done, steps = 0.0, 0
    while done < tokens:
        done += batch if done >= ramp else first + (batch - first) * done / ramp
        steps += 1
    return steps


def test_a_growing_batch_makes_the_steps_that_a_count_makes() -> None:
    rng = random.Random(3)
    batch = megaplan.load(SPEC).spec.global_batch_tokens
    for _ in range(12):
        first = rng.randint(batch // 64, batch - 1)
        ramp = rng.randint(20, 2000) * batch
        tokens = ramp + rng.randint(0, 3000) * batch if rng.random() < 0.6 else rng.randint(10, ramp // batch) * batch  # or within the ramp
        found = megaplan.run(SPEC, tokens=tokens, ramp_tokens=ramp, ramp_from=first)
        assert found.steps == pytest.approx(counted(tokens, ramp, first, batch), rel=0.01, abs=3)
        assert 0 <= found.days_by_cause.ramp < (found.steps - tokens / batch + 1) * found.step_seconds.value / 86400


def test_a_batch_that_begins_whole_adds_nothing() -> None:
    batch = megaplan.load(SPEC).spec.global_batch_tokens
    plain = megaplan.run(SPEC, tokens="1T")
    for first in (batch, 2 * batch):
        assert megaplan.run(SPEC, tokens="1T", ramp_tokens="100B", ramp_from=first).days == plain.days


def test_smaller_batches_take_the_time_of_fewer_microbatches() -> None:
    """Whole batches of half the microbatches, over the same tokens, add twice the fixed cost of one step."""
    job = megaplan.load(SPEC)
    batch, count = job.spec.global_batch_tokens, job.spec.schedule.num_microbatches
    half = megaplan.estimate(SPEC, f"schedule.num_microbatches={count // 2}").step_time.seconds
    whole = megaplan.estimate(SPEC).step_time.seconds
    found = megaplan.run(SPEC, tokens=4000 * batch, ramp_tokens=4000 * batch, ramp_from=batch // 2)
    added = found.days_by_cause.ramp * 86400
    most = 4000 * (2 * half - whole)
    assert 0 < added < most
    assert added / most == pytest.approx((found.steps - 4000) / 4000, rel=1e-3)


def test_an_evaluation_is_a_forward_of_its_tokens() -> None:
    rng = random.Random(5)
    job, seconds = planned(1.0)
    time = planned_time(job.spec, job.spans, job.inventory)
    assert isinstance(time, PlannedTime)
    forward = forward_seconds(job.spec, job.inventory, seconds, time.terms)
    assert 0.2 * seconds < forward < 0.5 * seconds
    batch = job.spec.global_batch_tokens
    for _ in range(6):
        every, tokens = rng.randint(50, 5000), rng.randint(1, 20) * batch
        found = megaplan.run(SPEC, tokens="1T", eval_every=every, eval_tokens=tokens)
        times = found.steps // every
        assert found.days_by_cause.evaluations * 86400 == pytest.approx(times * forward * tokens / batch)
        assert found.losses.evaluations == pytest.approx(found.days_by_cause.evaluations / found.days.value)
        assert found.goodput + sum(vars(found.losses).values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("host", "full"),
    [
        ("host={name: megarun}", "recompute.default=full"),
        ("host={name: torchtitan}", "recompute.default=full"),
        ("host={name: megatron, model: gpt}", "host.recompute_num_layers=1"),
    ],
)
def test_a_forward_without_gradients_recomputes_nothing(host: str, full: str) -> None:
    """A backward's recompute lengthens the step, and neither an evaluation nor log-probabilities."""
    given = ("recompute={default: none}", "precision={params: bf16}", host, "optimizer.matrix=adamw", "mesh={dp_shard: 8}")
    steps, forwards = [], []
    for changes in (given, (*given, full)):
        job = megaplan.load(SPEC, *changes)
        time = planned_time(job.spec, job.spans, job.inventory)
        assert isinstance(time, PlannedTime)
        steps.append(time.seconds)
        forwards.append(forward_seconds(job.spec, job.inventory, time.seconds, time.terms))
    assert steps[1] > 1.15 * steps[0]
    assert forwards[1] == pytest.approx(forwards[0], rel=0.06)


def test_causes_sum_to_the_days_and_a_slower_rate_lengthens_the_steps_alone() -> None:
    rng = random.Random(7)
    for _ in range(8):
        rate = rng.uniform(0.5, 1)
        keys = {"tokens": "1T", "eval_every": rng.randint(100, 2000), "mtbf": rng.choice([200, 30000]), "ramp_tokens": "50B"}
        found, plain = (megaplan.run(SPEC, **keys, sustained=each) for each in (rate, 1.0))
        assert sum(vars(found.days_by_cause).values()) == pytest.approx(found.days.value)
        assert found.days_by_cause.steps == plain.days_by_cause.steps
        assert found.mean_step_seconds.value == pytest.approx(plain.mean_step_seconds.value / rate)
        assert plain.days_by_cause.sustained == 0
        assert found.step_seconds == plain.step_seconds


def test_estimate_has_no_sustained_rate() -> None:
    plain, slow = (megaplan.estimate(SPEC, f"run={{sustained: {rate}}}").step_time.seconds for rate in (1.0, 0.5))
    assert plain == slow


def test_ends_of_independent_factors_are_within_those_of_both_together() -> None:
    assert combined(2.0, ((1.0, 1.1), (1.0, 1.0)), 1) == pytest.approx(2.2)
    both = combined(1.0, ((1.0, 1.1), (1.0, 1.1)), 1)
    assert 1.1 < both < 1.21
    assert combined(1.0, ((1.0, 0.9), (1.0, 1.0)), -1) == pytest.approx(0.9)
