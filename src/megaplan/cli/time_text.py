"""Time and traffic of a step for a terminal, and the change of the time from one plan to another."""

from collections.abc import Iterator, Sequence

from megaplan.columns import Basis
from megaplan.layout.step_time import NS, PlannedTime
from megaplan.layout.traffic import AxisTraffic
from megaplan.terminal.table import table, wrap
from megaplan.units import format_figure, format_ns

NUM_TERMS = 6
LAUNCHES = "includes launches and copies as they were measured"


def time_lines(time: PlannedTime | str) -> Iterator[str]:
    """The step with its interval and rates, and its largest terms; or why none is stated."""
    if isinstance(time, str):
        yield from wrap(f"step: not timed: {time}", indent="  ")
        return
    yield f"step: {seconds_text(time)}"
    yield f"  {time.tokens_per_second_per_device:,.0f} tokens/s per device, MFU {100 * time.mfu:.1f} %"
    if time.missing:
        yield from wrap(f"  no fitted step combines {', '.join(time.missing)} with the other settings of this one", indent="  ")
    if any(time.traffic):
        reduced, gathered = (f"{format_figure(size / 1e9)} GB" for size in time.traffic)
        yield from wrap(f"  data ranks reduce {reduced} of gradients and gather {gathered} of parameters per step", indent="  ")
    if time.turns is not None:
        yield f"  pairs in turns hide {_text(time.turns.hidden)} of {_text(time.turns.seconds)} of experts' exchanges"
    largest = sorted((term for term in time.terms.items() if term[1] > 0), key=lambda term: -term[1])[:NUM_TERMS]
    yield from wrap("  " + ", ".join(f"{name} {_text(seconds)}" for name, seconds in largest), indent="  ")


def turns_text(time: PlannedTime) -> str:
    """The exchanges that pairs in turns hide, and those for which a step waits; empty without turns."""
    if time.turns is None:
        return ""
    hidden, waited = _text(time.turns.hidden), _text(time.turns.seconds - time.turns.hidden)
    launches = ", and a pair takes at least the time in which the host launches its kernels" if time.counts_launches else ""
    return (
        f"{hidden} of exchanges of experts' rows, in a step of an average pipeline rank, are hidden by the other microbatch of a pair, "
        f"which computes until its own next exchange. {waited} are waited for: in forwards and backwards outside of pairs, and where"
        f" the other microbatch computes for a shorter time{launches}"
    )


def traffic_lines(rows: Sequence[AxisTraffic]) -> list[str]:
    """A table of the bytes that a rank sends in a step."""
    cells = [(f"{row.axis} {row.what}", str(row.ranks), row.link, gigabytes(row.rank_bytes)) for row in rows]
    return table([("sent by a rank in a step", "ranks", "link", "GB"), *cells], left=(0, 2), indent="  ")


def gigabytes(num_bytes: int) -> str:
    """`7.09`, `0.0123`: three digits at least."""
    return f"{num_bytes / 1e9:,.2f}" if num_bytes >= 1e9 else f"{num_bytes / 1e9:.3g}"


def cost_line(time: PlannedTime | str, price: float, num_devices: int) -> str:
    """`cost: 160.00 an hour on 64 devices, 22.10 for 1,000,000,000 tokens`, in the price's currency."""
    hourly = price * num_devices
    rate = 0.0 if isinstance(time, str) else time.tokens_per_second_per_device * num_devices
    tokens = f", {hourly / 3600 / rate * 1e9:,.2f} for 1,000,000,000 tokens" if rate else ""
    return f"cost: {hourly:,.2f} an hour on {num_devices:,} devices{tokens}"


def seconds_text(time: PlannedTime) -> str:
    """`6.91 s, 80 % interval 6.27 s to 7.63 s (fitted, dense)`."""
    return f"{_text(time.seconds)}, 80 % interval {_text(time.low)} to {_text(time.high)} ({_basis(time)})"


def unlike_steps(before: PlannedTime, after: PlannedTime) -> str:
    """Note that two steps are not comparable, if only one has measured launches and copies; else nothing."""
    if before.counts_launches is after.counts_launches:
        return ""
    which = "before" if before.counts_launches else "after"
    return f"the step {which} the change {LAUNCHES}, the other step does not: compare layouts, not devices"


def _basis(time: PlannedTime) -> str:
    """Basis and class of a time; no step is measured itself, but the rates that it is modelled with."""
    return f"{'modelled with measured rates' if time.basis is Basis.MEASURED else time.basis}, {time.calibration}"


def change_line(before: PlannedTime | str, after: PlannedTime | str) -> str:
    """`step: 6.91 s → 7.10 s (+2.8 %), 9,480 → 9,227 tokens/s per device (-2.7 %), …`; or which plan has no time, and why."""
    if isinstance(before, str) or isinstance(after, str):
        reasons = dict.fromkeys(time for time in (before, after) if isinstance(time, str))
        return f"step: not timed: {'; '.join(reasons)}"
    growth, gain = (100 * share for share in (after.seconds / before.seconds - 1, rate_gain(before, after)))
    kinds = dict.fromkeys((_basis(before), _basis(after)))
    unlike = f"; {note}" if (note := unlike_steps(before, after)) else ""
    old, new = before.tokens_per_second_per_device, after.tokens_per_second_per_device
    rates = f"{old:,.0f} → {new:,.0f} tokens/s per device ({gain:+.1f} %), MFU {100 * before.mfu:.1f} → {100 * after.mfu:.1f} %"
    hidden = [0.0 if time.turns is None else time.turns.hidden for time in (before, after)]
    turns = "" if before.turns is after.turns is None else f", pairs in turns hide {' → '.join(map(_text, hidden))} of exchanges"
    return f"step: {_text(before.seconds)} → {_text(after.seconds)} ({growth:+.1f} %), {rates}{turns}; {' → '.join(kinds)}{unlike}"


def rate_gain(before: PlannedTime, after: PlannedTime) -> float:
    """Relative change of tokens per second and device, which compares plans of different batches."""
    return after.tokens_per_second_per_device / before.tokens_per_second_per_device - 1


def _text(seconds: float) -> str:
    return format_ns(round(seconds / NS))
