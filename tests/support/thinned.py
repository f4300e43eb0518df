"""A share of the tests of a file for every run; the rest joins the slow set."""

import zlib
from collections.abc import Iterable, Mapping

import pytest


def mark_slow(items: Iterable[pytest.Item], one_in: Mapping[str, int]) -> None:
    """Mark all but one in n of each named file's parametrised tests as slow.

    The draw is by the test's name: it is the same on every machine, and follows no parameter of a product.

    Args:
        items: Collected tests.
        one_in: n for each file name.
    """
    for item in items:
        step = one_in.get(item.path.name, 1)
        if "[" in item.name and zlib.crc32(item.name.encode()) % step:
            item.add_marker(pytest.mark.slow)
