"""The generator of random plans lies beside the benchmark that uses it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))  # random_plans
