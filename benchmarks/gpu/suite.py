"""The kernel checks of `tests/kernels/interpreted` on a device: one process a file, a line a test."""

import os
from pathlib import Path
from typing import Any

from gpu.checks import Emit

FOLDER = Path(__file__).resolve().parents[2] / "tests/kernels/interpreted"
SMALL = ("check_head_gated_norm", "check_tiles")
NOT_COLLECTED = 5
"""pytest's exit status for a file without a test."""


def check_files(*, small: bool = False) -> list[Path]:
    """Every file of checks, or those that take the interpreter seconds."""
    return [path for path in sorted(FOLDER.glob("check_*.py")) if not small or path.stem in SMALL]


class Lines:
    """A pytest plugin that emits every test's result."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Emit the result of the call, or of a set-up that failed or skipped."""
        if report.when == "call" or report.outcome != "passed":
            self._emit(line_of(report))


def line_of(report: Any) -> dict[str, Any]:
    """A test's result."""
    line = {"test": report.nodeid.rsplit("/", 1)[-1], "outcome": report.outcome, "seconds": round(report.duration, 3)}
    if report.outcome != "passed":
        said = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
        marked = [text for text in said.splitlines() if text.startswith("E ")]
        line["failure"] = (marked or said.splitlines() or [""])[0].removeprefix("E ").strip()[:500]
    return line


def run_file(path: Path, emit: Emit, device: str) -> None:
    """All tests of a file, none of the slow ones.

    Raises:
        RuntimeError: pytest could not run; tests that fail are lines.
    """
    import pytest  # noqa: PLC0415  (a run of other kinds does without)

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    options = [str(path), "--device", device, "--rootdir", str(FOLDER.parents[2]), "-q", "-m", "not slow"]
    status = pytest.main([*options, "-p", "no:cacheprovider", "-p", "no:xdist"], plugins=[Lines(emit)])
    if status not in (0, 1, NOT_COLLECTED):
        raise RuntimeError(f"pytest ended with status {int(status)}")
