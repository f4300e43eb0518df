"""The profiled steps of the newest H200 run, and the model's results for them."""

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))


@pytest.fixture(scope="session")
def results() -> dict[str, Any]:
    """Runs with their steps, and profiles by kernel."""
    from gpu.measured.results import FITTED, document  # noqa: PLC0415  (found by the path above)

    return document(FITTED)
