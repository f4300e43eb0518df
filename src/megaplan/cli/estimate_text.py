"""An estimate for a terminal: the job, the verdict, the worst ranks by column, and their totals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megaplan.budget.values import Budget, RankBudget, ServingBudget
from megaplan.cli.header import header_lines
from megaplan.cli.ranks_text import rank_table, view_of
from megaplan.cli.time_text import cost_line, time_lines, traffic_lines
from megaplan.layout.ranks import runs_label, runs_of
from megaplan.terminal.output import StyledLine
from megaplan.terminal.table import wrap
from megaplan.units import format_bytes, format_ns
from megaplan.wording import plural

if TYPE_CHECKING:
    from megaplan.api.estimate import Estimate
    from megaplan.budget.serving import ServingTimes


def estimate_lines(
    found: Estimate, ranks: Sequence[RankBudget], *, all_ranks: bool = False, price: float | None = None
) -> Iterator[StyledLine]:
    """(text, style) of every line; `ranks` are the ranks to show, `all_ranks` whether to show also those for which a line has no room.

    `price` is per device and hour.
    """
    budget, job = found.budget, found.job
    letters = [block.family for block in job.inventory.layers]
    yield from header_lines(job.spec, letters, budget.parameters, budget.active_parameters)
    pools = [(f"{runs_label((pool.ranks,))} on ", pool.device) for pool in budget.pools]
    for where, device in pools or [("", budget.device)]:
        items = ", ".join(f"{item.name} {format_bytes(item.bytes)}" for item in device.reserve)
        capacity, usable = format_bytes(device.capacity_bytes), format_bytes(device.usable_bytes)
        reserve = f"  {where}{device.name}: {capacity} − {format_bytes(device.reserve_bytes)} reserved ({items}) = {usable} usable"
        yield from ((line, "") for line in wrap(reserve, indent="    "))
    yield "", ""
    style = "bold red" if not budget.fits else "bold green" if found.narrow is None else "bold yellow"
    yield from ((line, style) for line in wrap(verdict(found), indent="  "))
    yield from ((line, "") for line in time_lines(found.step_time))
    if price is not None:
        yield cost_line(found.step_time, price, job.spec.mesh.world_size), ""
    yield "", ""
    yield from ((line, "") for line in rank_table([view_of(rank) for rank in ranks], all_ranks=all_ranks))
    yield from (
        (line, "")
        for line in wrap(f"peak of {runs_label(runs_of(ranks[0].ranks))}: {ranks[0].peak_places[ranks[0].peak_phase]}", indent="  ")
    )
    yield _largest(found), ""
    yield "", ""
    yield from ((line, "") for line in _four_numbers(found, ranks[0]))
    if found.parts.traffic:
        yield "", ""
        yield from ((line, "") for line in traffic_lines(found.parts.traffic))
    if found.serving is not None:
        yield "", ""
        yield from _serving(found.serving, found.serving_times)


TORCH_WORDS = (
    "bytes of live tensors in torch's allocator",
    "plus its rounding and slack (modelled)",
    "plus CUDA context, NCCL and driver",
)
XLA_WORDS = (
    "bytes of live buffers of the program",
    "the same: XLA places all buffers before the program runs",
    "plus what the runtime keeps",
)


def _four_numbers(found: Estimate, rank: RankBudget) -> Iterator[str]:
    """Allocated, reserved, device, and allocated under skew, of one rank: they answer different questions and are never one number."""
    routing, moe = found.routing, found.job.spec.model.moe
    yield f"{runs_label(runs_of(rank.ranks))}, at the peak:"
    words = XLA_WORDS if found.job.spec.host.kind.xla else TORCH_WORDS
    sizes = rank.allocated_bytes, rank.peak_bytes, found.device_bytes(rank)
    rows = list(zip(("allocated", "reserved", "device"), sizes, words, strict=True))
    if routing is not None:
        balanced, skewed = routing.allocated_bytes(rank)
        rows += [
            ("allocated, balanced", balanced, "every expert rank gets an equal share"),
            (f"allocated, skew {routing.skew:g}", skewed, f"busiest rank, {routing.reason}"),
        ]
    if rank.host.total:
        pinned, node = format_bytes(rank.host.pinned), format_bytes(found.host_bytes_per_node)
        rows.append(("host memory", rank.host.total, f"offloaded, {pinned} of it page-locked; up to {node} per node"))
    if found.memory_copies_bytes:
        rows.append(("host, copies", found.memory_copies_bytes, "a node: states of the last steps, for a restart (run.save: memory)"))
    width = max(len(name) for name, _, _ in rows)
    yield from (f"  {name.ljust(width)}  {format_bytes(num_bytes):>10}  {text}" for name, num_bytes, text in rows)
    if routing is not None and rank.fits and not routing.skewed.of_rank(rank.ranks[0]).fits:
        yield f"  DOES NOT FIT under skew {routing.skew:g}"
    if routing is None and moe is not None:
        why = "a capacity bounds every expert" if moe.capacity is not None else "all experts are on the rank (ep 1)"
        yield f"  allocated under skew: the same, {why}"


def _largest(found: Estimate) -> str:
    largest, now = found.largest_micro_batch, found.job.spec.batch.micro_batch_size
    if largest is None:
        return f"even micro-batch 1 does not fit (now {now})"
    return f"largest micro-batch that fits: {largest} (now {now})"


def verdict(found: Estimate) -> str:
    """`fits: the worst, ranks 0-3, peak at 79.06 GiB and leave 58.40 GiB`."""
    budget, worst, narrow = found.budget, found.worst, found.narrow
    label, peak = runs_label(runs_of(worst.ranks)), format_bytes(worst.peak_bytes)
    what = "the peak with the least room" if budget.pools else "the largest peak"
    if budget.fits:
        text = f"{found.verdict}: {what} is {peak}, on {label}; headroom {format_bytes(worst.headroom_bytes)}"
        if narrow is None:
            return text
        most = f"{format_bytes(narrow.most_bytes)} of {format_bytes(narrow.worst.usable_bytes)}"
        return f"{text}, and measured runs of this host reserved up to {narrow.percent:.0f} % more: {most}"
    over = sum(len(rank.ranks) for rank in budget.ranks if not rank.fits)
    excess = format_bytes(-worst.headroom_bytes)
    return f"DOES NOT FIT: {over} of {_world(budget)} ranks; {what} is {peak}, on {label}, over by {excess}"


def _world(budget: Budget) -> int:
    return sum(len(rank.ranks) for rank in budget.ranks)


def _serving(serving: ServingBudget, times: ServingTimes | None) -> Iterator[StyledLine]:
    parts = (
        ("parameters", serving.parameters_bytes),
        ("KV cache", serving.kv_cache_bytes),
        ("recurrent states", serving.recurrent_state_bytes),
    )
    text = " + ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in parts if num_bytes)
    verdict_text = "fits" if serving.fits else "DOES NOT FIT"
    sentences = [f"serving, another process: {text} = {format_bytes(serving.total)}, {verdict_text}"]
    if serving.stages:
        largest = max(serving.stages, key=lambda stage: stage.total)
        degrees = " · ".join(f"{axis} {degree}" for axis, degree in zip(("tp", "pp", "ep"), serving.degrees, strict=True) if degree > 1)
        where = f"layers {largest.first}-{largest.end - 1}" if len(serving.stages) > 1 else "every rank"
        verdict_text = "fits" if serving.ranks_fit else "DOES NOT FIT"
        sentences.append(f"by rank at {degrees}: at most {format_bytes(largest.total)}, of {where}, {verdict_text}")
    if times is not None:
        sentences.append(
            f"a decoding step at the full context takes {format_ns(times.decode_ns)}, {times.tokens_per_second:,.0f} tokens/s of "
            f"{plural(times.num_devices, 'device')}; a prompt of the whole context is read in {format_ns(times.prefill_ns)} "
            f"(modelled; 80 % interval {times.low:g} to {times.high:g} of it)"
        )
    yield from ((line, "") for sentence in sentences for line in wrap(sentence, indent="  "))
