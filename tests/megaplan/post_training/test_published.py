"""The page of published post-training: its rows, and their errors."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from rl.run import NEAR_MEMORY, PAGE, data, memory  # noqa: E402


def test_the_page_has_every_published_row() -> None:
    found, text = data(), PAGE.read_text(encoding="utf-8")
    assert len(found["iterations"]) >= 10
    assert all(f"{row['seconds']:g}" in text for row in found["iterations"])
    assert all(row["name"] in text for row in found["memory"])
    assert all(row["source"] for row in found["memory"])


def test_nine_published_sizes_are_near() -> None:
    assert sum(abs(each.error) <= NEAR_MEMORY for each in memory()) >= 9
