"""Settings that all suites share: generated examples have no time limit, for a busy machine is not a defect."""

import sys
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent / "support"))  # helpers of several suites, imported by name
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # random_plans, step_times, accuracy_megatron

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from thinned import mark_slow  # noqa: PLC0415  found by the path above

    if config.getoption("--device", None) is None:  # a device is fast enough for all kernel checks
        mark_slow(items)
