"""An estimate for a terminal: the job, the verdict, the worst ranks by column, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megaplan.budget.fit import largest_micro_batch
from megaplan.budget.values import Budget, RankBudget, ServingBudget
from megaplan.cli.header import header_lines
from megaplan.cli.inputs import Subject
from megaplan.cli.ranks_text import rank_table, view_of
from megaplan.cli.table import wrap
from megaplan.plan.runs import runs_label, runs_of
from megaplan.units import format_bytes

Line = tuple[str, str]


def estimate_lines(given: Subject, budget: Budget, ranks: Sequence[RankBudget], serving: ServingBudget | None) -> Iterator[Line]:
    """(text, style) of every line."""
    letters = [block.family.value for block in given.inventory.layers]
    yield from header_lines(given.spec, letters, budget.parameters, budget.active_parameters)
    device = budget.device
    items = ", ".join(f"{item.name} {format_bytes(item.bytes)}" for item in device.reserve)
    capacity, usable = format_bytes(device.capacity_bytes), format_bytes(device.usable_bytes)
    reserve = f"  {device.name}: {capacity} less a reserve of {format_bytes(device.reserve_bytes)} ({items}) leaves {usable}"
    yield from ((line, "") for line in wrap(reserve, indent="    "))
    yield "", ""
    style = "bold green" if budget.fits else "bold red"
    yield from ((line, style) for line in wrap(verdict(budget), indent="  "))
    yield "", ""
    yield from ((line, "") for line in rank_table([view_of(rank) for rank in ranks]))
    yield from (
        (line, "") for line in wrap(f"peak of {runs_label(runs_of(ranks[0].ranks))}: {ranks[0].moments[ranks[0].peak_phase]}", indent="  ")
    )
    yield _largest(given), ""
    if serving is not None:
        yield "", ""
        yield from _serving(serving)


def _largest(given: Subject) -> str:
    largest, now = largest_micro_batch(given.spec, given.inventory, given.layout), given.spec.batch.micro_batch_size
    if largest is None:
        return f"no micro-batch fits (now {now})"
    return f"largest micro-batch that fits: {largest} (now {now})"


def verdict(budget: Budget) -> str:
    """`fits: the worst, ranks 0-3, peak at 79.06 GiB and leave 58.40 GiB`."""
    worst = budget.worst
    label, peak = runs_label(runs_of(worst.ranks)), format_bytes(worst.peak_bytes)
    if budget.fits:
        return f"fits: the largest peak is {peak}, on {label}; headroom {format_bytes(worst.headroom_bytes)}"
    over = sum(len(rank.ranks) for rank in budget.ranks if not rank.fits)
    excess = format_bytes(-worst.headroom_bytes)
    return f"DOES NOT FIT: {over} of {_world(budget)} ranks; the largest peak is {peak}, on {label}, over by {excess}"


def _world(budget: Budget) -> int:
    return sum(len(rank.ranks) for rank in budget.ranks)


def _serving(serving: ServingBudget) -> Iterator[Line]:
    parts = (
        ("parameters", serving.parameters_bytes),
        ("KV cache", serving.kv_cache_bytes),
        ("recurrent states", serving.recurrent_state_bytes),
    )
    text = " + ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in parts if num_bytes)
    verdict_text = "fits" if serving.fits else "DOES NOT FIT"
    yield from (
        (line, "") for line in wrap(f"serving, another process: {text} = {format_bytes(serving.total)}, {verdict_text}", indent="  ")
    )
