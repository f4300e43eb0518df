"""Published runs with and without low precision: the page is up to date, and the estimate's differences are near the measured ones."""

import pytest
from low_precision_pairs import PAGE, Pair, page, pairs

PAIRS = list(pairs())


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_a_difference_is_within_two_percent_of_the_whole(pair: Pair) -> None:
    assert abs(pair.error) < 2


def test_halving_would_miss_by_more() -> None:
    halved = [Pair(one.name, one.source, one.unit, one.before, one.after, -one.before * one.unit[0] / 2, "") for one in PAIRS]
    assert min(abs(one.error) for one in halved) > 40
