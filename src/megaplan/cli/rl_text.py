"""A post-training plan for a terminal: verdict, memory by phase, time by phase, pools and lengths; and a search over placements."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote
from typing import TYPE_CHECKING

from megaplan.cli.run_text import figure_lines, format_seconds, percent
from megaplan.post_training.columns import COLUMNS, DEVICE
from megaplan.post_training.values import RlEstimate
from megaplan.terminal.output import StyledLine
from megaplan.terminal.table import table, wrap
from megaplan.units import format_bytes, format_gib, short_count

if TYPE_CHECKING:
    from megaplan.api.rl_search import RlSearch

__all__ = ["column_lines", "figure_lines", "rl_lines", "search_lines"]


def rl_lines(found: RlEstimate) -> Iterator[StyledLine]:
    """(text, style) of every line."""
    yield f"{found.name}: {found.placement} on {found.num_devices:,} {found.device}", "bold"
    yield ("  fits", "bold green") if found.fits else ("  DOES NOT FIT", "bold red")
    peak = next(phase for phase in found.memory if phase.name == found.peak_phase)
    held = f"{found.peak_column} holds {format_bytes(peak.columns[found.peak_column])}"
    yield from _wrapped(
        f"device peak {format_bytes(found.peak_bytes)} in {found.peak_phase}, headroom {format_bytes(peak.headroom_bytes)}; {held}"
    )
    room = "" if found.host_capacity_bytes is None else f" of {format_bytes(found.host_capacity_bytes)}"
    yield from _wrapped(f"host peak {format_bytes(found.host_peak_bytes)}{room} per node, in {found.host_peak_phase}")
    spread = found.iteration_seconds
    ends = f"80 % interval {format_seconds(spread.low)} to {format_seconds(spread.high)}"
    yield from _wrapped(f"iteration {format_seconds(spread.value)}, {ends}; {found.tokens_per_second_per_device:,.0f} tokens/s per device")
    yield "", ""
    yield "time", "bold"
    rows = [["phase", "pool", "seconds", "low", "high", "basis"]]
    for phase in found.times:
        numbers = [f"{each:.2f}" for each in (phase.seconds.value, phase.seconds.low, phase.seconds.high)]
        rows.append([phase.name, phase.pool, *numbers, phase.basis])
    yield from ((line, "") for line in table(rows, left=(0, 1, 5), indent="  "))
    for pool in found.pools:
        tail = "" if pool.empty_share is None else f", {percent(pool.empty_share)} of its sequence slots empty in the rollout"
        yield from _wrapped(f"{pool.name}: {pool.num_devices:,} devices, idle {percent(pool.idle_share)} of an iteration{tail}")
    yield "", ""
    yield "memory of the fullest device, GiB", "bold"
    yield from _memory(found, host=False)
    yield "", ""
    yield "host memory of the fullest node, GiB", "bold"
    yield from _memory(found, host=True)
    yield "", ""
    yield from _rollout(found)
    yield "", ""
    yield "  --explain prints the formula of every column, --figures every figure with its source", ""


def _wrapped(text: str) -> Iterator[StyledLine]:
    return ((line, "") for line in wrap(f"  {text}", indent="  "))


def _memory(found: RlEstimate, *, host: bool) -> Iterator[StyledLine]:
    phases = found.memory
    held = [phase.host_columns if host else phase.columns for phase in phases]
    columns = [column for column in COLUMNS if any(column in each for each in held)]
    rows = [["", *(phase.name for phase in phases)]]
    for column in columns:
        rows.append([column, *(format_gib(each[column]) if column in each else "" for each in held)])
    rows.append(["total", *(format_gib(sum(each.values())) for each in held)])
    if not host:
        rows.append(["headroom", *(format_gib(phase.headroom_bytes) for phase in phases)])
    yield from ((line, "") for line in table(rows, indent="  "))


def _rollout(found: RlEstimate) -> Iterator[StyledLine]:
    engine, lengths = found.engine, found.lengths
    yield "rollout", "bold"
    degrees = " · ".join(f"{name} {degree}" for name, degree in (("tp", engine.tp), ("pp", engine.pp), ("ep", engine.ep)) if degree > 1)
    yield from _wrapped(
        f"{engine.name}: {engine.num_groups:,} groups{f' of {degrees}' if degrees else ''},"
        f" {engine.sequences_of_group:,.0f} sequences each,"
        f" {engine.slots:,} at a time (limited by {engine.limited_by}), cache for {short_count(engine.cache_tokens)} tokens"
    )
    yield from _wrapped(
        f"a step of decoding takes {format_seconds(engine.decode_seconds)}, prefill {format_seconds(engine.prefill_seconds)};"
        f" {short_count(int(engine.tokens_per_second))} tokens/s of all groups"
    )
    yield from _wrapped(
        f"responses: mean {lengths.mean:,.0f}, p50 {lengths.p50:,.0f}, p90 {lengths.p90:,.0f}, p99 {lengths.p99:,.0f}, longest"
        f" {lengths.longest:,.0f} of at most {lengths.limit:,} tokens; {percent(lengths.cut_share)} are cut"
    )
    yield from _wrapped(f"the engine gets {format_bytes(found.sync_bytes)}; {found.microbatches:,} microbatches in an update")


def column_lines(found: RlEstimate) -> Iterator[StyledLine]:
    """The formula of every column that the plan has."""
    used = {column for phase in found.memory for column in (*phase.columns, *phase.host_columns)}
    for title, columns in (
        ("columns of a device", DEVICE),
        ("columns of a node's host memory", {k: v for k, v in COLUMNS.items() if k not in DEVICE}),
    ):
        yield "", ""
        yield title, "bold"
        for column, formula in columns.items():
            if column in used:
                yield f"  {column}", ""
                yield from ((line, "") for line in wrap(f"    {formula}", indent="    "))


def search_lines(found: RlSearch) -> Iterator[StyledLine]:
    """Lines of a search."""
    yield f"{found.name}: {found.num_devices:,} {found.device}, {found.num_evaluated:,} plans of {found.num_plans:,} evaluated", "bold"
    if found.stopped:
        yield "  stopped by the time limit: rows are the best so far", ""
    if not found.rows:
        yield "  nothing fits", "bold red"
        return
    rows = [["iteration", "placement", "training", "rollout", "peak GiB", "host GiB", "idle", "changes"]]
    for row in found.rows:
        idle = "/".join(f"{100 * share:.0f} %" for share in row.idle_shares)
        cells = [format_seconds(row.iteration_seconds), row.placement, str(row.training_devices), str(row.rollout_devices)]
        rows.append([*cells, format_gib(row.peak_bytes, 1), format_gib(row.host_peak_bytes, 1), idle, " ".join(row.layout)])
    yield from ((line, "") for line in table(rows, left=(1, 7), indent="  "))
    yield "", ""
    yield "  best:", ""
    yield f"    megaplan rl {quote(found.source)} {' '.join(f'--set {quote(change)}' for change in found.rows[0].changes)}", ""
