"""The profiled steps of the first H200 run, and what the model says of them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))


@pytest.fixture(scope="session")
def results() -> dict[str, Any]:
    """Runs with their steps, and profiles by kernel."""
    found: dict[str, Any] = json.loads((ROOT / "benchmarks/results/h200-2026-11-26.json").read_text())
    return found
