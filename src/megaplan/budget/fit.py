"""What fits: the largest micro-batch, which column to cut and by how much, and changes that were evaluated (R-46)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from megaplan.budget.build import build_budget
from megaplan.budget.values import Budget, RankBudget
from megaplan.columns import Column
from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity
from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import build_layout
from megaplan.layout.runs import runs_label, runs_of
from megaplan.layout.values import Layout
from megaplan.spec.models import Spec
from megaplan.spec.rules import check_rules
from megaplan.units import format_bytes

HEADROOM_PERCENT = 20
"""Below this share of what is usable, headroom warns. Source: arXiv:2411.06465: of 454 runs none under 80% of its estimate ran out."""

MAX_MICRO_BATCH = 1 << 16


class Cut(NamedTuple):
    """A column that alone could bring a rank under its limit, and by how much it must shrink."""

    column: Column
    column_bytes: int
    excess_bytes: int


class WhatIf(NamedTuple):
    """A change of the spec, evaluated: `overrides` are texts for `--set`."""

    overrides: tuple[str, ...]
    peak_bytes: int
    headroom_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the worst rank fits."""
        return self.headroom_bytes >= 0


def largest_micro_batch(spec: Spec, inventory: Inventory, layout: Layout) -> int | None:
    """The largest `batch.micro_batch_size` that fits every rank, found by evaluation; None if not even 1 does.

    All else stays as it is, the number of microbatches too.
    """

    def fits(size: int) -> bool:
        return build_budget(_with(spec, ("batch", "micro_batch_size", size)), inventory, layout).fits

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
    """The columns that hold at least what a rank has too much, largest first; the largest one where none does. Empty if it fits."""
    if rank.fits:
        return ()
    excess = -rank.headroom_bytes
    columns = sorted(rank.columns.items(), key=lambda item: -item[1])
    return tuple(Cut(column, size, excess) for column, size in columns if size >= excess) or (Cut(*columns[0], excess),)


def what_ifs(spec: Spec, inventory: Inventory, layout: Layout) -> tuple[WhatIf, ...]:
    """Single changes that lower the worst peak, each evaluated with the same cuts, lowest peak first. Degrees double, batches halve."""
    before = build_budget(spec, inventory, layout).worst.peak_bytes
    spans = tuple((slot.start, slot.stop) for slot in layout.slots)
    found = []
    for changes in _changes(spec, inventory):
        changed = _with(spec, *changes)
        if any(item.severity is Severity.ERROR for item in check_rules(changed)):
            continue
        try:
            worst = build_budget(changed, inventory, build_layout(changed, inventory, spans)).worst
        except MegaplanError:
            continue
        if worst.peak_bytes < before:
            texts = tuple(f"{section}.{key}={str(value).lower()}" for section, key, value in changes)
            found.append(WhatIf(texts, worst.peak_bytes, worst.headroom_bytes))
    return tuple(sorted(found, key=lambda item: item.peak_bytes))


def fit_diagnostics(spec: Spec, inventory: Inventory, layout: Layout, budget: Budget) -> list[Diagnostic]:
    """MP501 (does not fit), MP502 (little headroom) and MP503 (no micro-batch fits), as warnings: "no" is an answer, not a failure."""
    worst = budget.worst
    if worst.fits:
        return _low_headroom(worst)
    detail = [
        f"{runs_label(runs_of(worst.ranks))}: peak {worst.peak_bytes:,} B in {worst.peak_phase}, usable {worst.usable_bytes:,} B, "
        f"over by {-worst.headroom_bytes:,} B",
        *(f"cut {cut.column.key} = {cut.column_bytes:,} B by {cut.excess_bytes:,} B" for cut in cuts(worst)[:3]),
    ]
    hints = [
        f"{' '.join(f'--set {text}' for text in change.overrides)}   # peak {format_bytes(change.peak_bytes)}, "
        + (f"leaves {format_bytes(change.headroom_bytes)}" if change.fits else f"still over by {format_bytes(-change.headroom_bytes)}")
        for change in what_ifs(spec, inventory, layout)[:4]
    ]
    found = [diagnostic("MP501", "\n".join(detail), Location(), hints, Severity.WARNING)]
    size = spec.batch.micro_batch_size
    largest = largest_micro_batch(spec, inventory, layout) if size > 1 else None
    if largest is None:
        least = f"batch.micro_batch_size = 1 is over too; it was {size}" if size > 1 else "batch.micro_batch_size = 1 is over"
        found.append(diagnostic("MP503", least, Location(key="batch.micro_batch_size"), (), Severity.WARNING))
    return found


def _low_headroom(worst: RankBudget) -> list[Diagnostic]:
    if worst.headroom_bytes * 100 >= worst.usable_bytes * HEADROOM_PERCENT:
        return []
    column, size = max(worst.columns.items(), key=lambda item: item[1])
    percent = 100 * worst.headroom_bytes // worst.usable_bytes
    detail = (
        f"headroom {worst.headroom_bytes:,} B of {worst.usable_bytes:,} B usable is {percent}%, below {HEADROOM_PERCENT}%\n"
        f"largest column: {column.key} = {size:,} B"
    )
    return [diagnostic("MP502", detail, Location(), (), Severity.WARNING)]


def _changes(spec: Spec, inventory: Inventory) -> Iterator[tuple[tuple[str, str, Any], ...]]:
    """Changes worth evaluating, as (section, key, value)."""
    mesh, size = spec.mesh, spec.batch.micro_batch_size
    if size > 1:
        yield (("batch", "micro_batch_size", size // 2), ("schedule", "num_microbatches", spec.schedule.num_microbatches * 2))
    schedule = spec.schedule
    if mesh.pp > 1 and schedule.num_microbatches % 2 == 0:  # half of the receive buffers
        halved = ("schedule", "num_microbatches", schedule.num_microbatches // 2)
        yield (halved, ("schedule", "steps_per_update", schedule.steps_per_update * 2))
    if not spec.sharding.reshard_after_forward:
        yield (("sharding", "reshard_after_forward", True),)
    for policy in ("selective", "full"):
        if spec.recompute.default == "none":
            yield (("recompute", "default", policy),)
    for axis in ("dp_shard", "tp", "ep", "cp"):
        yield (("mesh", axis, 2 * getattr(mesh, axis)),)
    if mesh.tp > 1 and not mesh.vocab_parallel and inventory.layers:
        yield (("mesh", "vocab_parallel", True),)


def _with(spec: Spec, *changes: tuple[str, str, Any]) -> Spec:
    """The spec with some keys of its sections replaced."""
    found = spec
    for section, key, value in changes:
        changed = getattr(found, section).model_copy(update={key: value})
        found = found.model_copy(update={section: changed})
    return found
