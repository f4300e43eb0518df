"""A share of the tests of a file for every run; the rest joins the slow set."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from hashlib import blake2s

import pytest


def mark_slow(items: Iterable[pytest.Item], one_in: Mapping[str, int]) -> None:
    """Mark all but one in n of the cases of each parametrised test as slow; at least one case of every test stays.

    The draw is by the cases' names: it is the same on every machine, and follows no parameter of a product.

    Args:
        items: Collected tests.
        one_in: n for each file name.
    """
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.path.name in one_in and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for group in cases.values():
        group.sort(key=lambda item: blake2s(item.name.encode()).digest())
        for item in group[-(-len(group) // one_in[group[0].path.name]) :]:
            item.add_marker(pytest.mark.slow)
