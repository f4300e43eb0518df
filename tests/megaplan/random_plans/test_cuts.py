"""All commands choose the same cuts for a spec: `estimate` shows the stages, bytes and times of the plan that `split` writes."""

from collections.abc import Iterator

import pytest
from random_plans.choices import LARGE
from random_plans.draw import draw

import megaplan

IN_CI, ALL = 40, 500


def specs(count: int) -> Iterator[tuple[int, megaplan.Estimate, megaplan.Split]]:
    """Seed, estimate and split of so many random specs that both take; half of them with the objective left open."""
    seed = found = 0
    while found < count:
        seed += 1
        values = draw(seed, size=LARGE)
        if seed % 2:
            values.get("split", {}).pop("objective", None)
        try:
            estimate = megaplan.estimate(values)
        except megaplan.MegaplanError:
            continue
        if not any(item.code == "MP501" for item in estimate.job.diagnostics):  # of what fits nowhere `split` makes no plan
            found += 1
            yield seed, estimate, megaplan.split(values)


@pytest.mark.parametrize("count", [IN_CI, pytest.param(ALL, marks=pytest.mark.slow)])
def test_an_estimate_has_the_stages_of_the_plan(count: int) -> None:
    differ, by_step, several = [], 0, 0
    for seed, estimate, split in specs(count):
        spans = split.plan.spans
        several += len(spans) > 1
        by_step += split.cuts.objective == "step_time"
        if estimate.job.spans != spans or estimate.step_time != split.step_time:
            differ.append(f"seed {seed}: {estimate.job.spans} and {spans}")
        elif estimate.peak_bytes != max(rank.peak_bytes for rank in split.plan.estimates.ranks):
            differ.append(f"seed {seed}: {estimate.peak_bytes:,} bytes")
    assert differ == []
    assert several > count // 2
    assert by_step > count // 8
