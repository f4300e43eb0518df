"""Other people's runs: the page and the interval `others` are of the estimates, and both halves have runs of every source with several."""

import pytest
from unseen.compare import compared, others, outside
from unseen.compare import read_rows as rows
from unseen.page import PAGE, text

from megaplan.cost.step.constants import intervals
from megaplan.cost.step.fitted import OTHERS


@pytest.fixture(scope="module")
def found():
    return compared(rows())


def test_the_page_is_of_these_estimates(found):
    assert PAGE.read_text(encoding="utf-8") == text(found)


def test_the_interval_is_of_the_tuning_half(found):
    assert intervals()[OTHERS] == pytest.approx(others(found), abs=1e-4)
    assert not any(one.row["held"] for one in outside(found))


def test_most_far_steps_are_inside_the_interval_that_reaches_to_them(found):
    """Steps near the fit keep the interval of published rows, which some of these runs are above."""
    reached = intervals()[OTHERS][1]
    far = [one.time.high / one.time.seconds >= reached - 1e-9 for one in outside(found)]
    inside = [one.inside for one, is_far in zip(outside(found), far, strict=True) if is_far]
    assert 0 < len(inside) < len(far)
    assert sum(inside) > 0.8 * len(inside)


def test_both_halves_have_runs_of_every_source_with_several():
    sources = [row["group"] for row in rows()]
    several = {source for source in sources if sources.count(source) > 1}
    halves = [{row["group"] for row in rows() if row["held"] is held} for held in (False, True)]
    assert halves[0] & halves[1] == several


def test_no_run_is_listed_twice():
    names = [row["name"] for row in rows()]
    assert len(set(names)) == len(names)
