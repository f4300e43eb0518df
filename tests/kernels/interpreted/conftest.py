"""These files run in a process of their own, with TRITON_INTERPRET=1: triton reads it when it is imported."""

import os
from pathlib import Path
from typing import Any

import pytest


def pytest_collect_file(file_path: Path, parent: Any) -> None:
    if parent.session.isinitpath(file_path) and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("TRITON_INTERPRET=1 pytest tests/kernels/interpreted/check_*.py")
