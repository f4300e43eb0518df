"""The table of what was compared."""

import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
warnings.filterwarnings("ignore")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    from upstream_checks import ROWS  # noqa: PLC0415

    if ROWS:
        terminalreporter.write_line("\nfarthest from implementations of others, fp32, RMS of the difference over RMS of the value:")
    for operation, source, worst, ratio in ROWS:
        terminalreporter.write_line(f"  {operation:34} {source:58} {ratio:.1e}  {worst}")
