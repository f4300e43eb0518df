"""Time to read and refuse every bad input: the bar is 2 s each.

python benchmarks/refusals.py

Runs the tests of bad specs, overrides, files, plans and cost files, and times each; a test may hold many inputs, so what it shows is an
upper bound. Exits 1 if one is past the bar, or fails.
"""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BAR_SECONDS = 2.0
NUM_SHOWN = 10
MANY_INPUTS = ("test_hostile", "test_ten_thousand_layers_are_read")
FOLDERS = "spec", "plan/test_read.py", "cost/test_file.py", "importers"


class Durations:
    """Seconds of each test's own call."""

    def __init__(self) -> None:
        self.found: list[tuple[float, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what took time; fixtures are not the input's."""
        if report.when == "call":
            self.found.append((report.duration, report.nodeid))


def main() -> int:
    """Run, print the slowest."""
    durations = Durations()
    chosen = [str(ROOT / "tests/megaplan" / folder) for folder in FOLDERS]
    failed = pytest.main(["-q", "-p", "no:cacheprovider", *chosen], plugins=[durations])
    single = sorted((item for item in durations.found if not any(name in item[1] for name in MANY_INPUTS)), reverse=True)
    for seconds, name in single[:NUM_SHOWN]:
        print(f"{seconds:6.2f} s  {name}")
    return 1 if failed or single[0][0] > BAR_SECONDS else 0


if __name__ == "__main__":
    sys.exit(main())
