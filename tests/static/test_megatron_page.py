"""docs/reference/megatron-arguments.md is what the table of Megatron's launch arguments says."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "megatron_page.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="needs the sources")


def test_the_page_is_up_to_date() -> None:
    found = subprocess.run([sys.executable, str(SCRIPT), "--check"], check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
