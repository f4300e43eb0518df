"""Worlds of processes that live as long as the session and train one cell after another."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # parity_cells, parity_compare, parity_world

from parity_world import Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Processes to train cells on; started when a cell of their number comes first."""
    with Worlds() as opened:
        yield opened
