"""Published runs as `megaplan run` predicts them, and the page that shows them."""

import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from runs.run import PAGE, PERCENT, POINTS, PublishedRun, fitted_rate, page, pairs, rows, steps  # noqa: E402
from runs.scaling import series  # noqa: E402

from megaplan.goodput.figures import figures  # noqa: E402


@cache
def found() -> list[PublishedRun]:
    return rows()


def test_six_runs_are_near_in_goodput_and_ten_in_days() -> None:
    goodput = [abs(row.goodput_error) for row in found() if row.goodput_error is not None]
    days = [abs(row.days_error) for row in found() if row.days_error is not None]
    assert sum(error <= POINTS for error in goodput) >= 6
    assert sum(error <= PERCENT for error in days) >= 10


def test_held_out_runs_are_as_near_as_those_of_the_draw() -> None:
    days = [abs(row.days_error) for row in found() if row.days_error is not None and row.side.startswith("held out")]
    assert len(days) == 9
    assert sum(error <= PERCENT for error in days) >= 6


def test_the_sustained_rate_is_that_of_the_tuning_pairs() -> None:
    rates = {pair.row["name"]: pair.rate for pair in pairs()}
    tuned = [pair.rate for pair in pairs() if pair.row.get("tuned")]
    assert len(tuned) == 4
    named = [figures()[name].value for name in ("sustained", "sustained_low", "sustained_high")]
    assert named == [round(each, 3) for each in fitted_rate(tuned)]
    assert 0.94 < rates["BLOOM 176B, full batch to the end of 48 nodes"] < 0.96


def test_every_run_names_its_sources_and_what_it_was_given() -> None:
    for row in found():
        assert row.row["sources"], row.row["name"]
        given = set(row.row["run"]) - {"tokens"}
        assert not given or row.row.get("given"), row.row["name"]


def test_the_page_has_every_run_the_worst_first() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(row.row["name"] in text for row in found())
    assert [row.worst for row in found()] == sorted((row.worst for row in found()), reverse=True)
    assert text.splitlines()[0] == page(found()).splitlines()[0]


def test_published_scaling_is_projected_within_five_per_cent() -> None:
    errors = [abs(error) for each in series() for error in each.errors.values()]
    assert len(errors) >= 20
    assert max(errors) <= 5


def test_published_steps_of_megatrons_own_modules_are_within_five_per_cent() -> None:
    found = steps()
    assert len(found) == 8
    assert max(abs(step.error) for step in found) <= 5
