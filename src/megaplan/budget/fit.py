"""Ways to fit: the largest micro-batch, and the columns to reduce with the required amount (R-46)."""

from __future__ import annotations

from typing import NamedTuple

from megaplan.budget.build import build_budget
from megaplan.budget.values import RankBudget
from megaplan.columns import Column
from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, Severity
from megaplan.inventory.tensors import Inventory
from megaplan.layout.values import Layout
from megaplan.spec.models import Spec
from megaplan.units import format_bytes

DOES_NOT_FIT = "MP501"
HEADROOM_PERCENT = 20
"""Headroom below this share of usable memory warns. Source: arXiv:2411.06465: of 454 runs none under 80% of its estimate ran out."""
MAX_MICRO_BATCH = 1 << 40
"""Bound of the doubling; memory grows with the size, so that no device holds as much."""


class Cut(NamedTuple):
    """A column that alone could bring a rank under its limit, and the required reduction."""

    column: Column
    column_bytes: int
    excess_bytes: int


def largest_micro_batch(spec: Spec, inventory: Inventory, layout: Layout) -> int | None:
    """The largest `batch.micro_batch_size` that fits every rank, found by evaluation; None if not even 1 does.

    Everything else is unchanged, the number of microbatches included.
    """

    def with_size(size: int) -> Spec:
        return spec.model_copy(update={"batch": spec.batch.model_copy(update={"micro_batch_size": size})})

    def fits(size: int) -> bool:
        return build_budget(with_size(size), inventory, layout).fits

    if not fits(1):
        return None
    low, high = 1, 2
    while high <= MAX_MICRO_BATCH and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def cuts(rank: RankBudget) -> tuple[Cut, ...]:
    """The columns with at least the rank's excess, largest first; the largest one if none has that much. Empty if it fits."""
    if rank.fits:
        return ()
    excess = -rank.headroom_bytes
    columns = sorted(rank.columns.items(), key=lambda item: -item[1])
    return tuple(Cut(column, size, excess) for column, size in columns if size >= excess) or (Cut(*columns[0], excess),)


def low_headroom(worst: RankBudget) -> list[Diagnostic]:
    """MP502 if a rank fits with little headroom."""
    if worst.headroom_bytes * 100 >= worst.usable_bytes * HEADROOM_PERCENT:
        return []
    column, size = max(worst.columns.items(), key=lambda item: item[1])
    percent = 100 * worst.headroom_bytes // worst.usable_bytes
    headroom, usable = format_bytes(worst.headroom_bytes), format_bytes(worst.usable_bytes)
    detail = (
        f"headroom {headroom} of {usable} usable is {percent}%, below {HEADROOM_PERCENT}%\nlargest column: {column} = {format_bytes(size)}"
    )
    return [diagnostic("MP502", detail, Location(), (), Severity.WARNING)]
