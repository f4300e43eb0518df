"""Published runs of MaxText on TPUs: the page matches the estimates, every such run fits by the estimate, and rows keep their errors."""

from statistics import median

import pytest
from accuracy_maxtext.page import PAGE, compared, text


@pytest.fixture(scope="module")
def found():
    return compared()


def test_the_page_is_of_these_estimates(found):
    assert PAGE.read_text(encoding="utf-8") == text(found)


def test_every_run_that_ran_fits_its_device(found):
    sized = [one for one in found if one.usable_bytes]
    assert len(sized) == 46
    assert [one.name for one in sized if one.peak_bytes > one.usable_bytes] == []


def test_rows_that_are_held_out_have_errors_like_the_others(found):
    held, others = ([abs(one.error) for one in found if one.seconds is not None and one.held is wanted] for wanted in (True, False))
    assert (len(held), len(others)) == (18, 28)
    assert median(held) < 10
    assert median(others) < 6


def test_runs_without_an_estimate_are_those_of_the_small_gemma_4(found):
    assert {one.name.split()[0] for one in found if one.seconds is None} == {"gemma4-2b", "gemma4-4b"}
