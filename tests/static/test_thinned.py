"""The tables of thinned tests name files and functions that are there; a renamed one would join every run whole, unnoticed."""

from thinned import LONG, ONE_IN, TESTS


def test_every_thinned_test_is_there() -> None:
    assert [name for name in ONE_IN if not (TESTS / name).is_file()] == []
    assert [(file, name) for file, names in LONG.items() for name in names if f"def {name}(" not in (TESTS / file).read_text()] == []
