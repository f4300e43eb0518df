"""`megarun trace` as a user runs it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaplan.budget.peaks import build_budget
from megaplan.columns import Column, Phase
from megaplan.plan.make import make_plan, write_plan
from megaplan.spec.models import Spec
from megarun.cli.main import run
from megarun.job.job import Job
from megarun.trace import report
from megarun.trace.compare import SCALARS_BYTES, Pair, RankComparison
from megarun.trace.rank import trace_rank

pytestmark = pytest.mark.runtime


@pytest.fixture
def plan(spec_with: Any, tmp_path: Path) -> Callable[..., str]:
    """Writes the plan of the small hybrid with overrides; its path."""

    def write(overrides: dict[str, Any] | None = None) -> str:
        path = tmp_path / "plan.json"
        write_plan(make_plan(Spec.model_validate(spec_with(overrides))), path)
        return str(path)

    return write


def test_the_document_has_every_distinct_rank(plan: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Two stages: two ranks, with exactly the promised keys, and nothing else on stdout."""
    status = run(["trace", plan({"mesh.pp": 2, "schedule.num_microbatches": 2}), "--json"])
    assert status in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"format", "ranks"}
    assert found["format"] == "megaplan.trace/1"
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        assert set(rank) == {"rank", "estimate_peak_bytes", "trace_peak_bytes", "phases", "reserved", "host", "columns"}
        assert set(rank["phases"]) == {str(phase) for phase in Phase}
        assert set(rank["columns"]) == {column.key for column in Column if column is not Column.OVERHEAD}
        for pair in (*rank["phases"].values(), *rank["columns"].values()):
            assert set(pair) == {"estimate", "trace"}
            assert all(type(value) is int for value in pair.values())
        assert rank["trace_peak_bytes"] == max(pair["trace"] for pair in rank["phases"].values())
        assert rank["estimate_peak_bytes"] == sum(pair["estimate"] for pair in rank["columns"].values())


def test_the_report_fits_a_terminal(plan: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run(["trace", plan({"mesh.pp": 2, "schedule.num_microbatches": 2}), "--stage", "1"])
    text = capsys.readouterr().out
    assert "rank 1 (pp 1)" in text
    assert "rank 0" not in text.replace("rank 0,", "")
    assert "1 rank traced; worst error of a peak" in text
    assert max(len(line) for line in text.splitlines()) <= 80


@pytest.mark.parametrize(
    ("words", "code", "values"),
    [
        (["--rank", "2"], "MP485", "the ranks are 0 to 1"),
        (["--rank", "-1"], "MP485", "--rank -1"),
        (["--stage", "5"], "MP620", "the stages are 0 to 1"),
    ],
)
def test_what_the_plan_does_not_have_is_refused(
    plan: Any, capsys: pytest.CaptureFixture[str], words: list[str], code: str, values: str
) -> None:
    assert run(["trace", plan({"mesh.pp": 2, "schedule.num_microbatches": 2}), *words]) == 2
    error = capsys.readouterr().err
    assert f"error[{code}]" in error
    assert values in error


def test_a_failure_is_one_document_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "nowhere.json", "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["format"] == "megaplan.error/1"
    assert captured.err == ""


def test_a_plan_that_megarun_cannot_build_is_refused(plan: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", plan({"precision.grads": "fp16"})]) == 2
    assert "error[MP790]" in capsys.readouterr().err


@pytest.fixture(scope="module")
def comparison(job_with: Any) -> RankComparison:
    """A rank that needs no separate process."""
    job: Job = job_with()
    return RankComparison(build_budget(job.spec, job.inventory, job.layout).of_rank(0), trace_rank(job, 0))


def test_an_estimate_past_tolerance_says_so(comparison: RankComparison, job_with: Any) -> None:
    """A column that grows by 2% of the peak is above tolerance, is named, and its rows are listed."""
    cells = {phase: dict(columns) for phase, columns in comparison.budget.cells.items()}
    for columns in cells.values():
        columns[Column.ROUTING] += comparison.peak.trace // 50
    budget = type(comparison.budget)(
        comparison.budget.ranks,
        comparison.budget.coordinate,
        comparison.budget.parameters,
        cells,
        comparison.budget.peak_places,
        comparison.budget.usable_bytes,
    )
    worse = RankComparison(budget, comparison.trace)
    assert not worse.within
    past = worse.columns_past_tolerance
    assert all(Column.ROUTING in past[phase] for phase in Phase)
    text = "\n".join(report.lines([worse], job_with().spec.mesh, top=3))
    assert "1 of 1 above tolerance" in text
    assert "routing in forward_backward is off by +" in text


@pytest.mark.parametrize(
    ("trace", "difference", "within"),
    [
        (10**9, 0, True),
        (10**9, -(10**6), True),
        (10**9, 10**6, True),
        (10**9, -(10**6) - 1, False),
        (10**9, 10**6 + 1, False),
        (1000, SCALARS_BYTES, True),  # whose share of few bytes is large
        (1000, SCALARS_BYTES + 1, False),
    ],
)
def test_errors_are_signed_and_bounded(trace: int, difference: int, within: bool) -> None:
    """Negative is under; the tolerance is a share, and the scalars that no ledger lists."""
    pair = Pair(trace + difference, trace)
    assert pair.error == pytest.approx(difference / trace)
    assert pair.within is within


def test_nothing_traced_is_not_a_division() -> None:
    assert Pair(0, 0).error == 0.0
    assert Pair(1, 0).error == float("inf")
    assert not Pair(SCALARS_BYTES + 1, 0).within
