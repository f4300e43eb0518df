"""Bytes that torch's allocator reserves for a rank, from its allocated bytes: a closed form of the replay in `megaplan.hosts.allocator`.

Each stream's pool is as large as that stream's own peak, and these peaks do not coincide: all-gathers are largest where a forward begins,
reduced gradients where a backward ends, activations between the two. So reserved is allocated at the main peak, plus for every other stream
the part of its pool at its own peak that is not allocated at the main one.

Without expandable segments a request larger than any block that activations leave gets its own segment, whatever is free: a group's
reduce-scatter input, and its reduced output if that is in the computing stream.

A share of activations belongs to neither: remainders of blocks that no later request fits. The two shares are fitted, with these spreads:
expandable segments 0.3 to 3.6 % in replays of traced runs (one measured run: 0.5 %), else 5.5 to 9.5 % in six runs measured on one H200
(docs/reference/measured.md). With expandable segments the whole is −4.0 to +0.8 % of 25 replays of traced runs, 22 of them within 0.8 %,
and −4.1 to +0.5 % of what 13 runs reserved on H200s, 11 of them within 1.3 %.

Reserved memory never falls while a process lives: a phase has at least as much as the phases before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from megaplan.budget.chunk import Chunk
from megaplan.budget.step import StepPeak
from megaplan.budget.stored import RankStorage
from megaplan.budget.values import ACTIVATIONS, FEATURES, OVERHEAD, ROUTING, Cells
from megaplan.columns import Column
from megaplan.hosts.allocator import LARGE_BUFFER_BYTES, OPEN_SEGMENTS_BYTES, ROUND_LARGE_BYTES
from megaplan.hosts.megarun.streams import GroupPools, Reserving, ShardsPool
from megaplan.tuples import new

PER_MILLE = 1000
NO_ROUNDING = (0, 0, 0, 0, 0)
EXPANDABLE_SHARE, SEGMENTS_SHARE = 15, 70
"""Fitted, per mille of activations: the unused part of the computing stream's pool with expandable segments, and without."""
PLACE_PERCENT = 40
"""Fitted: a request of more than this part of the free bytes, which are in pieces, fits no piece and grows the pool (in replays 38 to 48).
"""


def reserving(chunks: Sequence[Chunk], stored: RankStorage, shards: ShardsPool, *, num_reductions: int, expandable: bool) -> Reserving:
    """Reserved bytes beyond the allocated ones. With expandable segments they follow from the storage of parameters, for any batch.

    Args:
        chunks: Chunks that run on it.
        stored: Storage of its parameters.
        shards: Pool of gradient shards.
        num_reductions: Number of reductions of each group per step: one under a pipeline, else one per microbatch.
        expandable: True if the allocator has expandable segments.
    """
    policy = chunks[0].policy
    if not expandable:
        return _reserving(chunks, stored.pools, shards, num_reductions=num_reductions, expandable=False)
    key = policy.separate_shards, policy.pipelined, policy.replicated, num_reductions > 1
    found = stored.reservings.get(key)
    if found is None:
        found = stored.reservings[key] = _reserving(chunks, stored.pools, shards, num_reductions=num_reductions, expandable=True)
    return found


def _reserving(chunks: Sequence[Chunk], pools: GroupPools, shards: ShardsPool, *, num_reductions: int, expandable: bool) -> Reserving:
    separate, replicated = shards is ShardsPool.REDUCE_SCATTER, chunks[0].policy.replicated
    lasting = pools.shard_bytes if separate and not pools.recast_bytes else pools.recast_bytes
    passing = 0
    if num_reductions > 1 or pools.recast_bytes:  # outputs are not the shards themselves; with replicas they wait for the backward's end
        passing = pools.all_reduced_bytes if replicated else pools.reduced_bytes
    streams = (pools.gather_bytes > 0) + (lasting + passing > 0)
    open_bytes = OPEN_SEGMENTS_BYTES + streams * LARGE_BUFFER_BYTES
    if expandable:
        requests, live = _last_requests(chunks[0], separate=lasting > 0, later=num_reductions > 1)
        return new(Reserving, (pools.gather_bytes + lasting + passing, open_bytes, 0, EXPANDABLE_SHARE, requests, live, False))
    groups = list(chain.from_iterable([chunk.reduced_groups for chunk in chunks]))
    if passing and not replicated:
        passing = _own_segments([group.reduced_bytes for group in groups])
    left = max([size for chunk in chunks for unit in chunk.units for size, *_ in unit.block.part.tensors.values()], default=0)
    missing = _own_segments([group.reduce_bytes for group in groups], left)
    if not lasting:  # memory of the first microbatch's backward serves the next one's
        missing += sum([group.reduced_bytes for group in groups if group.reduced_bytes > left])
        missing = max(missing - pools.shard_bytes, 0) if num_reductions > 1 else missing
    return new(Reserving, (pools.gather_bytes + lasting + passing, open_bytes, missing, SEGMENTS_SHARE, (), 0, True))


def _last_requests(chunk: Chunk, *, separate: bool, later: bool) -> tuple[tuple[int, ...], int]:
    """Requests of the reduction of a slot's own parameters as a backward ends, and live bytes before it; none under a pipeline."""
    if chunk.policy.pipelined:
        return (), 0
    root = chunk.root
    live = root.made_bytes + (0 if separate else chunk.shard_bytes if later else chunk.shard_bytes - root.shard_bytes)
    return ((root.reduce_bytes,) if separate or later else (root.reduce_bytes, root.reduced_bytes)), live


def _own_segments(sizes: Iterable[int], largest: int = 0) -> int:
    """Segments that consecutive requests get, each freed before the next: those of requests larger than all before, and than `largest`."""
    total = 0
    for size in sizes:
        if size > largest:
            total, largest = total + size + -size % ROUND_LARGE_BYTES, size
    return total


def add_overhead(cells: Cells, reserving: Reserving, step: StepPeak, outside_graphs: int, rounding: Sequence[int]) -> None:
    """Fill the overhead column: reserved less allocated, phase by phase.

    Args:
        cells: Cells of a rank, all but overhead.
        reserving: Reserving of the rank.
        step: Peaks of its steps.
        outside_graphs: Bytes that the optimizer takes while the memory of recorded microbatches is a pool that serves nothing else; else 0.
        rounding: Bytes that rounding adds in each phase to tensors that have their own segments.
    """
    if not reserving.rounds:
        rounding = NO_ROUNDING
    _, first_step, _, steady_step, _ = cells.values()
    steady = _beyond(steady_step, reserving, step)
    first = steady if step.first is None else _beyond(first_step, reserving, step.first)
    more = OPEN_SEGMENTS_BYTES, first, OPEN_SEGMENTS_BYTES, steady + outside_graphs, OPEN_SEGMENTS_BYTES
    reserved = 0
    for phase, own, rounded in zip(cells.values(), more, rounding, strict=True):
        allocated = sum(phase.values())
        wanted = allocated + own + rounded
        reserved = max(reserved, wanted)
        phase[OVERHEAD] = reserved - allocated


def _beyond(phase: dict[Column, int], reserving: Reserving, peak: StepPeak) -> int:
    """Bytes that a step reserves beyond its allocated peak and rounding."""
    other_pool_bytes, open_bytes, missing, share, requests, live, _ = reserving
    grown, free = 0, peak.total - peak.late_bytes - live  # at the end of a backward, from the computing stream's pool then
    for size in requests:
        if size * 100 > free * PLACE_PERCENT:
            grown += size
        else:
            free -= size
    unused = (phase[ACTIVATIONS] + phase[FEATURES] + phase[ROUTING]) * share // PER_MILLE
    return open_bytes + max(other_pool_bytes - peak.other_pool_bytes, 0) + missing + unused + max(grown - peak.late_bytes, 0)
