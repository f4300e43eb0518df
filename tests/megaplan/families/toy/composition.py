"""Work of T blocks."""

from __future__ import annotations

from megaplan.families.toy.section import Toy

from megaplan.blocks.costs import linear_work, residual_work
from megaplan.blocks.work import Workload, Works

PART = "T"


def toy_work(load: Workload, toy: Toy, hidden_size: int, _variant: None = None) -> Works:
    """One T block, pre-norm and residual included."""
    down = linear_work(load, "down", PART, hidden_size, toy.rank)
    return residual_work(load, PART, hidden_size), down, linear_work(load, "up", PART, toy.rank, hidden_size, closes=True)
