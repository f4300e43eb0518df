"""What torch's allocator reserves for a rank, from what it hands out: a closed form of `megaplan.hosts.allocator`'s replay.

Each stream's pool is as large as that stream's own peak, and these peaks do not coincide: all-gathers are largest where a forward begins,
reduced gradients where a backward ends, activations between the two. So reserved is allocated at the main peak, and of every other stream
what its pool has at its own peak and not then.

Without expandable segments a request larger than any block that activations leave gets a segment of its own, whatever is free: a group's
reduce-scatter input, and its reduced output where that lies in the computing stream.

A share of activations is neither: remainders of blocks that no later request fits. The two shares are fitted, with these spreads:
expandable segments 0.3 to 3.6 % in replays of traced runs (one measured run: 0.5 %), else 5.5 to 9.5 % in six runs measured on one H200
(docs/reference/measured.md).

What is reserved never falls while a process lives: a phase has at least what the phases before it had.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from megaplan.budget.chunk import Chunk
from megaplan.budget.reduction import reduced_groups
from megaplan.budget.step import StepPeak
from megaplan.budget.values import ACTIVATIONS, FEATURES, OVERHEAD, ROUTING, Cells
from megaplan.columns import Column
from megaplan.hosts.allocator import LARGE_BUFFER_BYTES, OPEN_SEGMENTS_BYTES, ROUND_LARGE_BYTES
from megaplan.hosts.megarun.streams import GroupPools, ShardsPool
from megaplan.tuples import new

PER_MILLE = 1000
EXPANDABLE_SHARE, SEGMENTS_SHARE = 15, 70
"""Fitted, per mille of activations: what stays unused in the computing stream's pool with expandable segments, and without."""
PLACE = 6
"""Fitted: a request of more than a sixth of what lies free, in pieces, finds no piece large enough and grows the pool."""


class Reserving(NamedTuple):
    """What a rank reserves beyond what it hands out in a step.

    Attributes:
        beside_bytes: What other streams' pools have at their own peaks.
        open_bytes: One segment or page of each pool that is not full.
        missing_bytes: Requests after the main peak that fit no block that activations leave.
        share: Per mille of activations that stay unused.
        last_requests: Where the reduction of the slot's own parameters ends a backward, what it asks for in the computing stream.
        live_bytes: What of a step is alive then.
        rounds: Whether tensors have segments of their own, each rounded.
    """

    beside_bytes: int
    open_bytes: int
    missing_bytes: int
    share: int
    last_requests: tuple[int, ...]
    live_bytes: int
    rounds: bool


def reserving(chunks: Sequence[Chunk], pools: GroupPools, shards: ShardsPool, *, num_reductions: int, expandable: bool) -> Reserving:
    """Of a rank.

    Args:
        chunks: What runs on it.
        pools: Of all of its groups.
        shards: Where gradient shards lie.
        num_reductions: How often a step reduces each group: once under a pipeline, else once a microbatch.
        expandable: Whether the allocator has expandable segments.
    """
    apart, replicated = shards is ShardsPool.REDUCE_SCATTER, chunks[0].policy.replicated
    lasting = pools.shard_bytes if apart and not pools.recast_bytes else pools.recast_bytes
    passing = 0
    if (
        num_reductions > 1 or pools.recast_bytes
    ):  # outputs that are not the shards themselves; with replicas they wait for the backward's end
        passing = pools.all_reduced_bytes if replicated else pools.reduced_bytes
    streams = (pools.gather_bytes > 0) + (lasting + passing > 0)
    open_bytes = OPEN_SEGMENTS_BYTES + streams * LARGE_BUFFER_BYTES
    beside = pools.gather_bytes + lasting + passing
    if expandable:
        requests, live = _last_requests(chunks[0], apart=lasting > 0, later=num_reductions > 1)
        return new(Reserving, (beside, open_bytes, 0, EXPANDABLE_SHARE, requests, live, False))
    groups = list(chain.from_iterable([reduced_groups(chunk) for chunk in chunks]))
    if passing and not replicated:
        passing = _own_segments([group.reduced_bytes for group in groups])
    left = max([size for chunk in chunks for unit in chunk.units for size, *_ in unit.block.part.tensors.values()], default=0)
    missing = _own_segments([group.reduce_bytes for group in groups], left)
    if not lasting:  # what the first microbatch's backward took is there for the next one's
        missing += sum([group.reduced_bytes for group in groups if group.reduced_bytes > left])
        missing = max(missing - pools.shard_bytes, 0) if num_reductions > 1 else missing
    return new(Reserving, (pools.gather_bytes + lasting + passing, open_bytes, missing, SEGMENTS_SHARE, (), 0, True))


def _last_requests(chunk: Chunk, *, apart: bool, later: bool) -> tuple[tuple[int, ...], int]:
    """What the reduction of a slot's own parameters asks for when a backward ends, and what is alive before it; nothing under a pipeline."""
    if chunk.policy.pipelined:
        return (), 0
    root = chunk.root
    live = root.made_bytes + (0 if apart else chunk.shard_bytes if later else chunk.shard_bytes - root.shard_bytes)
    return ((root.reduce_bytes,) if apart or later else (root.reduce_bytes, root.reduced_bytes)), live


def _own_segments(sizes: Iterable[int], largest: int = 0) -> int:
    """Segments that requests one after another get, each freed before the next: of those larger than all before, and than `largest`."""
    total = 0
    for size in sizes:
        if size > largest:
            total, largest = total + size + -size % ROUND_LARGE_BYTES, size
    return total


def add_overhead(cells: Cells, reserving: Reserving, first: StepPeak, steady: StepPeak) -> None:
    """Fill the overhead column: reserved less allocated, phase by phase.

    Args:
        cells: Of a rank, all but overhead, which holds what rounding adds to tensors with segments of their own.
        reserving: Of the rank.
        first: Where its first step peaks.
        steady: Where a later one does.
    """
    rounds = reserving.rounds
    init, first_step, first_update, step, update = cells.values()
    reserved = _fill(init, 0, OPEN_SEGMENTS_BYTES, rounds=rounds)
    for stepping, updating, peak in ((first_step, first_update, first), (step, update, steady)):
        reserved = _fill(stepping, reserved, _beyond(stepping, reserving, peak), rounds=rounds)
        reserved = _fill(updating, reserved, OPEN_SEGMENTS_BYTES, rounds=rounds)


def _beyond(phase: dict[Column, int], reserving: Reserving, peak: StepPeak) -> int:
    """What a step reserves beyond its allocated peak and rounding."""
    beside, open_bytes, missing, share, requests, live, _ = reserving
    unused = (phase[ACTIVATIONS] + phase[FEATURES] + phase[ROUTING]) * share // PER_MILLE
    grown, free = 0, peak.total - peak.late_bytes - live  # at the end of a backward, of what the computing stream's pool has then
    for size in requests:
        if size * PLACE > free:
            grown += size
        else:
            free -= size
    return open_bytes + max(beside - peak.beside_bytes, 0) + missing + unused + max(grown - peak.late_bytes, 0)


def _fill(phase: dict[Column, int], so_far: int, more: int, *, rounds: bool) -> int:
    """Fill a phase's overhead; what is reserved at its end: what it allocates and `more`, or what was before it."""
    rounding = phase[OVERHEAD]
    allocated = sum(phase.values()) - rounding
    reserved = max(so_far, allocated + more + rounding if rounds else allocated + more)
    phase[OVERHEAD] = reserved - allocated
    return reserved
