"""Rows become specs in code that lies beside the benchmark that uses it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))  # step_times
