"""CI's share of the planner's long products of cases."""

import pytest
from thinned import mark_slow

ONE_IN = {
    **{"test_pinned_imports.py": 2, "test_pinned_launches.py": 2, "test_pinned_searches.py": 2},
    **{"test_exhaustive.py": 2, "test_fitting.py": 2},
}
"""Tables that were committed, which `make test-all` compares whole, and searches beside a brute-force one."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_slow(items, ONE_IN)
