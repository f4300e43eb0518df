"""Tests of the code that Triton's compiler makes of the kernels, on a machine without a GPU. Helpers are imported by name."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
for folder in (Path(__file__).parent, Path(__file__).parents[1] / "sm90"):
    sys.path.insert(0, str(folder))
