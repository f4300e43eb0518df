"""Response lengths: the given numbers hold, and the limit cuts."""

import pytest

from megaplan.post_training.lengths import Lengths
from megaplan.spec.post_training import ResponseLengths


def test_a_mean_alone_is_the_mean_of_cut_responses():
    lengths = Lengths(ResponseLengths(mean=3000.0), 4096)
    assert lengths.mean == pytest.approx(3000, rel=1e-3)
    assert lengths.longest(2048) == 4096


def test_a_mean_and_a_percentile_give_the_spread():
    lengths = Lengths(ResponseLengths(mean=900.0, p99=6000.0), 16384)
    assert lengths.mean == pytest.approx(900, rel=1e-3)
    assert lengths.at(0.99) == pytest.approx(6000, rel=1e-6)


def test_percentiles_are_kept_and_the_tail_goes_on():
    lengths = Lengths(ResponseLengths(p50=500.0, p90=1500.0, p99=6000.0), 32768)
    assert [lengths.at(share) for share in (0.5, 0.9, 0.99)] == pytest.approx([500, 1500, 6000])
    assert 6000 < lengths.longest(4096) < 32768


def test_quantiles_rise_and_a_longer_tail_has_a_longer_longest():
    short, long = (Lengths(ResponseLengths(mean=900.0, p99=p99), 16384) for p99 in (2000.0, 8000.0))
    assert short.quantiles(100) == sorted(short.quantiles(100))
    assert short.longest(1024) < long.longest(1024)
