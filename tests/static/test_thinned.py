"""The table of thinned files names files that are there; a renamed one would join every run whole, unnoticed."""

from thinned import ONE_IN, TESTS


def test_every_thinned_file_is_there() -> None:
    assert [name for name in ONE_IN if not (TESTS / name).is_file()] == []
