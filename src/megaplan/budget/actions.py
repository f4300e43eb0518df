"""Peaks of a chunk's actions: the segments of its blocks on the tape, one after another, from the level at which the action begins.

A forward and a backward add up the bytes that their blocks leave. Under a pipeline unsharded gradients accumulate and are reduced once per
step, in a separate action: the slot's own group first, then its layers in order. Without a pipeline every backward reduces: each layer
after its backward, the slot's own group at the end. The gradients of a first microbatch are cast for accumulation after each layer,
those of the slot's own parameters when all layers are done.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from megaplan.budget.chunk import Chunk, ChunkPolicy
from megaplan.budget.forwards import ForwardSegment, Gathers, forward_segment, loss_points
from megaplan.budget.gathers import NOTHING_LATER
from megaplan.budget.tape import (
    BUCKET,
    CAST,
    GATHERS_AHEAD,
    NOTHING_AHEAD,
    VALUE_SUMS,
    Ahead,
    Point,
    Segment,
    backward_point,
    cast_bytes,
    casting,
    casting_experts,
    in_group,
    listed_last,
    made_bytes,
    reducing,
    reducing_experts,
    reduction,
    reduction_leaves,
)
from megaplan.budget.unit import Peak, Unit
from megaplan.hosts.megarun.listed import fsdp_order
from megaplan.hosts.megarun.sizes import GroupBytes
from megaplan.schedules.states import BACKWARDED, FORWARDED, UNTOUCHED, ChunkState
from megaplan.tuples import new

ForwardPoint = tuple[int, Point, int, int, int, bool]
"""Unit, point, communication, values that the stage holds, absent bytes, and True if it replaces an equal earlier point."""


def forward_peak(chunk: Chunk, state: ChunkState, absent: int = 0, *, weight_grads: bool = True) -> Peak:
    """The largest point of a forward.

    Args:
        chunk: Chunk of a rank.
        state: State of the chunk before it.
        absent: Bytes that are not allocated until a rank's first product, in its first forward.
        weight_grads: True if the gradients of linear layers exist.
    """
    fresh = state is UNTOUCHED or not chunk.policy.pipelined
    best = -1
    found: ForwardPoint | None = None
    for each in _forward_points(chunk, state, absent, fresh=fresh):
        index, point, communication, held, missing, wins = each
        total = chunk.before[index] + communication + point.size + held - missing
        if total > best or (wins and total == best):
            best, found = total, each
    gradients, filled = chunk.held(state, weight_grads=weight_grads)[0], chunk.root.casting_bytes + chunk.root.gathered_bytes
    if found is None or (fresh and filled - absent > best):  # before any unit runs
        where = "gathering of the slot's own parameters"
        return Peak(gradients + filled - absent, where, -1, None, (), gradients, filled, 0, absent)
    index, point, communication, held, missing, _ = found
    return chunk.peak(index, point, gradients, communication, held, missing)


def _forward_points(chunk: Chunk, state: ChunkState, absent: int, *, fresh: bool) -> Iterator[ForwardPoint]:
    """Points of a forward; among equal points the last one of the unit's own forward counts."""
    settings, gathered = _before_forward(chunk, state, fresh=fresh)
    first_layer, flat = chunk.first_layer, chunk.root.flat_bytes if fresh else 0
    later, by_stage = [NOTHING_LATER] * len(chunk.units), 0
    if settings.gathers and settings.ahead:
        later, by_stage = chunk.later_again if settings.again else chunk.later
    missing = absent if first_layer >= 0 else 0
    if by_stage:
        yield 0, GATHERS_AHEAD, gathered + flat + by_stage, 0, missing, False
    for index, unit in enumerate(chunk.units):
        key = settings._replace(found_bytes=flat) if unit.joins else settings
        gather, run, left, own_flat = unit.segments.get(key) or _forward(unit, key)
        (begins, runs), (copied, running, issued) = chunk.held_values[index], later[index]
        if gather is not None:  # the output of the group gathered last is freed when that of the next group has been copied out
            yield index, gather, gathered + flat + copied, begins, missing, False
            if issued:  # the unit's own group has been copied out, and no operation has run
                yield index, gather, gathered + issued - unit.opens.casting_bytes, begins, missing, False
        if own_flat >= 0:
            flat = own_flat
        if index == first_layer:
            missing = 0
        for point, in_stage in loss_points(unit) if index == chunk.head else ((run, True),):
            yield index, point, gathered + (flat + running) * in_stage, runs, missing, True
        gathered += left


def _before_forward(chunk: Chunk, state: ChunkState, *, fresh: bool) -> tuple[Gathers, int]:
    """Settings of the layers' segments of a forward, and the gathered parameters and kept parts that exist before it."""
    policy, found = chunk.policy, chunk.root.gathered_bytes
    gathers = fresh or (policy.reshard and state is not BACKWARDED)
    again = gathers and not fresh and chunk.parts_bytes > 0
    found += (0 if gathers else chunk.layers_gathered_bytes) + (chunk.parts_bytes if again else 0)
    return new(Gathers, (gathers, policy.reshard, policy.gathers_ahead > 0, again, 0)), found


def _forward(unit: Unit, key: Gathers) -> ForwardSegment:
    found = unit.segments[key] = forward_segment(unit, key)
    return found


class Accumulating(NamedTuple):
    """Settings of a backward where gradients accumulate.

    Attributes:
        accumulates: True if gradients are added in place to an earlier microbatch's.
        fetches: True if layers are gathered again for it.
        takes: True if the gradients of experts are taken inside their layer's backward.
        casts: True if first gradients are cast.
        first: True in the first backward.
    """

    accumulates: bool
    fetches: bool
    takes: bool
    casts: bool
    first: bool


def backward_settings(policy: ChunkPolicy, state: ChunkState, *, in_place: bool) -> Accumulating:
    """Settings of a backward in this state of its chunk; `in_place` is true if later microbatches add their gradients in place."""
    first, frees = state <= FORWARDED, not policy.pipelined
    fetches = policy.reshard and (frees or state is not BACKWARDED)  # under a pipeline a backward leaves every layer gathered
    return Accumulating(in_place and not first, fetches, frees or not in_place, first and not in_place, first)


def accumulating_backward_peak(chunk: Chunk, state: ChunkState) -> Peak:
    """The largest point of a backward that accumulates unsharded gradients: under a pipeline, or without FSDP2."""
    policy, frees = chunk.policy, not chunk.policy.pipelined
    cast, summed = backward_settings(policy, state, in_place=False), backward_settings(policy, state, in_place=True)
    settings = summed if policy.in_place else cast
    units, before, carried, waiting = chunk.units, chunk.before, chunk.backward_extra, chunk.waiting_from
    lasting = chunk.summed_later if settings.accumulates else chunk.lasting
    (gradients, gathered), made, taken = _before_backward(chunk, settings), 0, 0
    ahead, buckets, bucket = NOTHING_AHEAD, policy.has_buckets(first=settings.first), 0  # one group at a time
    reached: list[tuple[int, Point, int, int, int]] = []
    for index in range(len(units) - 1, -1, -1):
        unit = units[index]
        if settings.fetches:
            ahead = chunk.ahead[index]
            gathered += unit.closes.gathered_bytes - unit.closes.part_bytes + unit.bank.gathered_bytes - unit.bank.part_bytes
        key = summed if unit.block.in_place else cast, ahead
        points, of_cast = unit.segments.get(key) or accumulating_segment(unit, chunk.names[index], key, policy)
        for point in points:
            reached.append((index, point, gradients + made, gathered + bucket, carried[index]))
            bucket = unit.bank.reduce_bytes * buckets or bucket  # from its experts' gradients on
        gathered -= unit.opens.gathered_bytes + unit.bank.gathered_bytes if frees else 0
        kept = unit.unsharded_bytes if settings.first else 0
        if unit.waits and not unit.block.in_place:
            kept, made, taken = in_group(unit, kept, made, taken)
        if of_cast >= 0:
            activations = passed_on(chunk, index) + waiting[index]
            held = gradients + lasting[index] + chunk.waiting_sums(index) + of_cast
            reached.append((index, CAST, held, gathered + ahead.flat_bytes + bucket, activations))
        gradients += lasting[index] + kept
        if buckets and unit.opens.reduce_bytes:
            bucket, activations = unit.opens.reduce_bytes, passed_on(chunk, index)
            reached.append((index, BUCKET, gradients, gathered + bucket, activations))
        if sums := chunk.first_sums(index):
            reached.append((index, VALUE_SUMS, gradients + made, gathered + ahead.flat_bytes + bucket, sums + waiting[index]))
    most = max(reached, key=lambda each: before[each[0]] + each[1].size + each[2] + each[3] + each[4])
    ends = ends_of_backward(chunk, gradients, gathered, casts=settings.casts, bucket=bucket, own=buckets)
    return max([chunk.peak(*most), *ends], key=lambda peak: peak.total)


def _before_backward(chunk: Chunk, settings: Accumulating) -> tuple[int, int]:
    """Gradients and gathered parameters that exist before a backward."""
    gathered = chunk.root.gathered_bytes + (chunk.parts_bytes if settings.fetches else chunk.layers_gathered_bytes)
    return 0 if settings.first else chunk.unsharded_bytes, gathered


def passed_on(chunk: Chunk, index: int) -> int:
    """Gradients that a unit's backward passes on, the received one of another stage, and the last stage's output."""
    return (chunk.passed_bytes(index) if index else chunk.input_bytes) + chunk.logits_bytes


def ends_of_backward(chunk: Chunk, gradients: int, gathered: int, *, casts: bool, bucket: int = 0, own: bool = False) -> Iterator[Peak]:
    """Points after the last block: the sum of a tied embedding's gradients, casts of the slot's own gradients, and their bucket if any.

    Args:
        chunk: The chunk.
        gradients: Gradients that exist at these points.
        gathered: Gathered parameters that exist at these points.
        casts: True if first gradients are cast.
        bucket: Cast of the gradients that are summed over copies of the parameters meanwhile.
        own: True if the slot's own are summed, too.
    """
    whole, frees = chunk.policy.whole, not chunk.policy.pipelined
    tied = chunk.tied_sum_bytes() if frees else 0
    if tied:
        yield chunk.idle_peak("sum of the tied embedding's gradients", gradients + 2 * tied, gathered + bucket)
    gathered -= chunk.root.gathered_bytes if frees else 0
    if casts:
        made = chunk.root.made_bytes + chunk.root.unsharded_bytes if whole else cast_bytes(_outside(chunk))
        held, activations = chunk.unsharded_bytes - chunk.root.unsharded_bytes + made, chunk.input_bytes + chunk.logits_bytes
        yield chunk.idle_peak("cast of the slot's own gradients", held, gathered + bucket, activations + chunk.waiting_from[0])
    if own and chunk.root.reduce_bytes:
        yield chunk.idle_peak("bucket of the slot's own gradients", chunk.unsharded_bytes, gathered + chunk.root.reduce_bytes)


def accumulating_segment(unit: Unit, name: str, key: tuple[Accumulating, Ahead], policy: ChunkPolicy) -> tuple[tuple[Point, ...], int]:
    """A block's backward with accumulated gradients, and the bytes of its layer's casts after it; −1 without casts.

    The segment has one point. If FSDP2 processes the experts' gradients during the backward, it has two: the largest before that, and the
    largest after.
    """
    (accumulates, fetches, takes, casts, first), ahead = key
    points: tuple[Point, ...] = (backward_point(unit, name, ahead, accumulates=accumulates, fetches=fetches, takes=takes),)
    if unit.has_experts and takes:
        after = casting_experts(unit, first=first, casts=casts, accumulates=accumulates, together=policy.whole, frees=not policy.pipelined)
        points = *points, after
    found = unit.segments[key] = points, casting(unit, together=policy.whole) if casts and unit.layer and not unit.joins else -1
    return found


def reducing_backward_peak(chunk: Chunk, *, later: bool) -> Peak:
    """The largest point of one microbatch's backward without a pipeline.

    Args:
        chunk: The only chunk of the rank.
        later: True if a microbatch was reduced before.
    """
    best = max(reducing_backward_points(chunk, later=later), key=lambda peak: peak.total)
    earlier, (root, own_bytes, left) = best.total, _own_reduction(chunk, later=later)
    for gradients, buffers in reduction(root, own_bytes, root.last_made_bytes):
        if left + gradients + buffers > best.total:
            best = chunk.idle_peak("reduction of the slot's own parameters", left + gradients, buffers)
    return best._replace(earlier=earlier)


def _own_reduction(chunk: Chunk, *, later: bool) -> tuple[GroupBytes, int, int]:
    """The slot's own group, its gradients, and the gradients that remain after the layers' reductions."""
    replicated, left = chunk.policy.replicated, chunk.shard_bytes if later else 0
    for unit in chunk.units:
        for group in (unit.opens, unit.bank):
            left += reduction_leaves(group, later=later, replicated=replicated)
    return chunk.root, sum(chunk.lasting), left


def reducing_backward_points(chunk: Chunk, *, later: bool) -> Iterator[Peak]:
    """The largest point of each part of a backward until all layers are reduced."""
    fetches, replicated = chunk.policy.reshard, chunk.policy.replicated
    gradients, pending, made = chunk.shard_bytes if later else 0, 0, 0  # `pending` is the last reduce-scatter input
    gathered = chunk.root.gathered_bytes + (chunk.parts_bytes if fetches else chunk.layers_gathered_bytes)
    for index in range(len(chunk.units) - 1, -1, -1):
        unit, ahead, carried = chunk.units[index], chunk.ahead[index] if fetches else NOTHING_AHEAD, chunk.backward_extra[index]
        key = later, fetches, replicated, ahead
        running, experts, after = unit.segments.get(key) or _reducing(unit, chunk.names[index], key)
        if fetches:
            gathered += unit.closes.gathered_bytes - unit.closes.part_bytes + unit.bank.gathered_bytes - unit.bank.part_bytes
        yield chunk.peak(index, running, gradients + made, gathered + pending, carried)
        if index == chunk.embedding and (tied := chunk.tied_sum_bytes()):
            own = gradients + chunk.lasting[index] + 2 * tied
            yield chunk.idle_peak("sum of the tied embedding's gradients", own, gathered + pending)
        if experts is not None:
            yield chunk.peak(index, experts.point, gradients + made, gathered, carried)
            gradients, pending = gradients + experts.left, unit.bank.reduce_bytes
        gradients += chunk.lasting[index]
        gathered -= unit.opens.gathered_bytes + unit.bank.gathered_bytes
        if after is None:
            made += made_bytes(unit) if unit.joins else 0
            continue
        passed = chunk.passed_bytes(index) if index else 0
        yield chunk.peak(index, after.point, gradients + chunk.waiting_sums(index), gathered + ahead.flat_bytes, passed)
        gradients, made = gradients + after.left, 0
        pending = unit.opens.reduce_bytes


def _reducing(unit: Unit, name: str, key: tuple[bool, bool, bool, Ahead]) -> tuple[Point, Segment | None, Segment | None]:
    """A block's backward without a pipeline: the reduction of its experts during it, and of its layer after it."""
    later, fetches, replicated, ahead = key
    running = backward_point(unit, name, ahead, accumulates=False, fetches=fetches, takes=True)
    experts = reducing_experts(unit, ahead.flat_bytes, later=later, replicated=replicated) if unit.has_experts else None
    reduces = unit.layer and not unit.joins
    found = unit.segments[key] = running, experts, reducing(unit, later=later, replicated=replicated) if reduces else None
    return found


def reduce_peak(chunk: Chunk) -> Peak:
    """The largest point of reducing a chunk's accumulated gradients: the slot's own group first, then its layers in order."""
    unsharded, gathered, shards = chunk.unsharded_bytes, 0 if chunk.policy.whole else chunk.gathered_bytes, 0
    best = chunk.idle_peak("", 0, 0)
    for name, group in chunk.groups():
        gathered -= 0 if chunk.policy.whole else group.gathered_bytes
        unsharded -= group.unsharded_bytes
        for gradients, buffers in reduction(group, group.unsharded_bytes, group.last_unsharded_bytes):
            if unsharded + shards + gradients + gathered + buffers > best.total:
                best = chunk.idle_peak(f"reduction of {name}", unsharded + shards + gradients, gathered + buffers)
        shards += group.shard_bytes
    return best


def _outside(chunk: Chunk) -> list[tuple[Mapping[str, int], GroupBytes]]:
    """The gradients of the slot's own parameters by block, in FSDP2's order; with MTP the first depth holds embedding's and head's."""
    found: dict[str, tuple[dict[str, int], GroupBytes]] = {}
    for index, unit in enumerate(chunk.units):
        if not chunk.lasting[index]:
            continue
        passed = unit.shared if unit.layer else unit.block.gradients
        places = {name: name.partition(".")[::2] if name in unit.shared else (chunk.names[index], name) for name in passed}
        for name in sorted(passed, key=lambda name: listed_last(unit, places[name][1])):
            block, own = places[name]
            if block == "head" and unit.storage is None:  # tied
                block = "embedding"
            gradients, _ = found.setdefault(block, ({}, chunk.root if unit.storage is None else unit.storage.dense))
            gradients.setdefault(own, unit.block.gradients[name])
    return [found[block] for block in sorted(found, key=fsdp_order)]
