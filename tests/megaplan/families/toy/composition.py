"""Work of T blocks."""

from __future__ import annotations

from megaplan.families.toy.section import Toy

from megaplan.blocks.costs import linear_op, residual_op
from megaplan.blocks.work import Ops, Workload

PART = "T"


def toy_work(load: Workload, toy: Toy, hidden_size: int, _variant: None = None) -> Ops:
    """One T block, pre-norm and residual included."""
    down = linear_op(load, "down", PART, hidden_size, toy.rank)
    return residual_op(load, PART, hidden_size), down, linear_op(load, "up", PART, toy.rank, hidden_size, closes=True)
