"""A whole run for a terminal: length and cost, where time goes, checkpoints, and changes that would save time."""

from collections.abc import Iterable, Iterator
from math import isfinite

from megaplan.goodput.values import NamedFigure, RunEstimate, Spread
from megaplan.terminal.output import StyledLine
from megaplan.terminal.table import table, wrap
from megaplan.units import format_bytes, format_figure, format_ns, short_count
from megaplan.wording import plural

NS = 1e9
LEAST_SHOWN = 1e-5
"""Share of the run from which a loss is printed."""


def run_lines(found: RunEstimate) -> Iterator[StyledLine]:
    """(text, style) of every line."""
    spare = f" and {found.num_spare_devices} of spare nodes" if found.num_spare_devices else ""
    yield f"{found.name}: {short_count(found.tokens)} tokens on {found.num_devices:,} {found.device}{spare}", "bold"
    grows = "up to " if found.tokens < (found.steps - 1) * found.tokens_of_step else ""
    yield f"  {plural(found.steps, 'step')} of {grows}{short_count(found.tokens_of_step)} tokens", ""
    if not found.fits:
        yield "  DOES NOT FIT: megaplan estimate shows the ranks", "bold red"
    if found.rollouts_left_out:
        yield "  training steps alone: megaplan rl estimates the iterations of its post-training plan, including rollouts", "bold yellow"
    low, high = format_seconds(found.step_seconds.low), format_seconds(found.step_seconds.high)
    interval = f", 80 % interval {low} to {high}" if low != high else ""
    yield from ((line, "") for line in wrap(f"step {format_seconds(found.step_seconds.value)}{interval} ({found.step_basis})", indent="  "))
    yield "", ""
    yield from ((line, "") for line in table(list(_totals(found)), indent="  "))
    yield "", ""
    yield from ((line, "") for line in table(list(_causes(found)), indent="  "))
    yield "", ""
    yield f"goodput {percent(found.goodput)}", "bold green"
    yield from ((line, "") for line in wrap(_interruptions(found), indent="  "))
    yield from ((line, "") for line in table(list(_losses(found)), indent="  "))
    yield "", ""
    yield from _checkpoints(found)
    if found.gains:
        yield "", ""
        yield "what would gain", "bold"
        rows = list(_gains(found))
        yield from ((line, "") for line in table(rows, left=(0, len(rows[0]) - 1), indent="  "))
    yield "", ""
    yield "  --figures lists every figure with its basis and source", ""


def figure_lines(figures: Iterable[NamedFigure]) -> Iterator[StyledLine]:
    """Every figure that a result depends on."""
    yield "", ""
    yield "figures", "bold"
    for figure in figures:
        unit = f" {figure.unit}" if figure.unit else ""
        yield f"  {figure.name}: {figure.value:,.6g}{unit} ({figure.basis})", ""
        yield from ((line, "") for line in wrap(figure.source, indent="    "))


def format_seconds(seconds: float) -> str:
    """Display of a time: `6.50 s`, `12.3 min`, `4.1 h`, `54.0 d`."""
    if not isfinite(seconds):
        return "-"
    for unit, factor in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.1f} {unit}"
    return format_ns(round(seconds * NS))


def percent(share: float) -> str:
    """Display of a share, with more digits near 0 and 1."""
    return f"{100 * share:.{2 if share > 0.99 or share < 0.01 else 1}f} %"


def _totals(found: RunEstimate) -> Iterator[list[str]]:
    yield ["", "expected", "80 % interval"]
    yield _row("days", found.days)
    yield _row("device hours", found.device_hours)
    if found.cost is not None and found.cost_per_million_tokens is not None:
        yield _row("cost", found.cost)
        yield _row("cost of 1 M tokens", found.cost_per_million_tokens)
    rest = (
        ("energy, MWh", found.energy_kwh, 1e-3),
        ("J a token", found.joules_per_token, 1.0),
        ("CO2e, t", found.carbon_kg, 1e-3),
        ("CO2e, g per 1 M tokens", found.carbon_grams_per_million_tokens, 1.0),
    )
    yield from (_row(name, spread, factor) for name, spread, factor in rest if spread is not None)


def _row(name: str, spread: Spread, factor: float = 1.0) -> list[str]:
    value, low, high = (format_figure(each * factor) for each in (spread.value, spread.low, spread.high))
    return [name, value, f"{low} to {high}" if low != high else "-"]


def _causes(found: RunEstimate) -> Iterator[list[str]]:
    causes, days = found.days_by_cause, found.days.value
    named = {
        "steps at the step's time": causes.steps,
        "a growing batch": causes.ramp,
        "slower steps of a long run": causes.sustained,
        "evaluations": causes.evaluations,
        "save stalls": causes.saves,
        "interruptions": causes.interruptions,
        "first start": causes.start,
    }
    yield ["time of", "days", "share"]
    for name, each in named.items():
        if each >= LEAST_SHOWN * days:
            yield [name, format_figure(each), f"{100 * each / days:.2f} %"]


def _interruptions(found: RunEstimate) -> str:
    every = format_seconds(found.mtbf_hours * 3600)
    return (
        f"{format_figure(found.interruptions)} interruptions, one every {every};"
        f" a recovery takes {format_seconds(found.recovery_seconds)} in the mean"
    )


def _losses(found: RunEstimate) -> Iterator[list[str]]:
    named = {
        "repeated steps": found.losses.repeated,
        "save stalls": found.losses.stalls,
        "evaluations": found.losses.evaluations,
        "detection": found.losses.detection,
        "waiting for a node": found.losses.replacement,
        "restart": found.losses.restart,
        "first step": found.losses.compile,
        "reading checkpoints": found.losses.read,
        "first start": found.losses.start,
    }
    yield ["lost to", "share", "time"]
    for name, share in sorted(named.items(), key=lambda item: -item[1]):
        if share >= LEAST_SHOWN:
            yield [name, f"{100 * share:.3f} %", format_seconds(share * found.days.value * 86400)]


def _checkpoints(found: RunEstimate) -> Iterator[StyledLine]:
    saved, interval = found.checkpoints, found.interval
    largest = max(stage.largest_rank_bytes for stage in saved.ranks)
    yield f"checkpoint {format_bytes(saved.whole_bytes)}, at most {format_bytes(largest)} of a rank", "bold"
    yield f"  host memory of a save: {format_bytes(saved.rank_host_bytes)} per rank, {format_bytes(saved.node_host_bytes)} per node", ""
    how = "best" if interval.chosen else "given"
    yield f"  a save every {interval.steps:,} steps, {format_seconds(interval.seconds)} ({how})", ""
    tried = f"{percent(interval.goodput_at_half)} with half the interval, {percent(interval.goodput_at_double)} with twice"
    young = f"; Young's interval is {format_seconds(interval.young_seconds)}"
    yield from ((line, "") for line in wrap(f"after the first start goodput is {percent(interval.goodput)}, {tried}{young}", indent="  "))
    yield from (
        (line, "")
        for line in wrap(
            f"a save stops training for {format_seconds(saved.stall_seconds)}, {percent(saved.stall_share)} of the time", indent="  "
        )
    )
    rows = [["storage", "a node", "whole", "write", "read", "goodput"]]
    for each in saved.classes:
        total = "-" if each.total_bytes_per_second is None else _rate(each.total_bytes_per_second)
        mark = " *" if each.name == saved.storage else ""
        goodput = "lost with its node" if each.goodput is None else percent(each.goodput)
        times = (format_seconds(each.write_seconds), format_seconds(each.read_seconds))
        rows.append([f"{each.name}{mark}", _rate(each.node_bytes_per_second), total, *times, goodput])
    yield from ((line, "") for line in table(rows, indent="  "))


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:,.4g} GB/s"


def _gains(found: RunEstimate) -> Iterator[list[str]]:
    priced = found.cost is not None
    yield ["change", "goodput", "days", *(["cost"] if priced else []), "needs"]
    for gain in found.gains:
        cost = [] if gain.cost_change is None else [f"{gain.cost_change:+,.0f}"]
        yield [gain.name, percent(gain.goodput), format_figure(gain.days), *cost, gain.note]
