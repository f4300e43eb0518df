"""Published runs of torchtitan: the page matches the estimates, and the rows keep their errors."""

from statistics import mean

import pytest
from accuracy_torchtitan.page import PAGE, compare, compared, text
from accuracy_torchtitan.rows import ROWS


@pytest.fixture(scope="module")
def found():
    return compared()


def test_the_page_is_of_these_estimates(found):
    assert PAGE.read_text(encoding="utf-8") == text(found)


def test_rows_of_the_fit_are_within_two_percent(found):
    assert max(abs(one.error) for one in found if one.row.fitted) < 2


def test_held_rows_of_the_small_model_are_within_five_percent(found):
    held = [one for one in found if not one.row.fitted and one.row.name.startswith("8B") and "B200" not in one.row.name]
    assert len(held) == 13
    assert max(abs(one.error) for one in held) < 5


def test_no_held_row_is_beyond_a_fifth(found):
    held = [one for one in found if not one.row.fitted]
    assert max(abs(one.error) for one in held) < 20
    assert mean(abs(one.error) for one in held) < 7


def test_every_row_that_ran_fits_its_device(found):
    for one in found:
        assert one.peak_bytes <= one.usable_bytes, one.row.name


def test_a_row_is_read_from_a_job_file():
    row = ROWS[2]
    assert "[float8]\nenable_float8_linear = true" in row.job
    assert compare(row).where.startswith("backward of head")
