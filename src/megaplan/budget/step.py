"""The peak of a step's forward and backward on one rank: the largest of the points of its schedule."""

from collections.abc import Sequence
from typing import NamedTuple, cast

from megaplan.budget.actions import accumulating_backward_peak, forward_peak, reduce_peak, reducing_backward_peak
from megaplan.budget.chunk import Chunk
from megaplan.budget.pairs import PairPart, pair_peak
from megaplan.budget.split_backward import SplitBackwardChunk
from megaplan.budget.unit import Peak
from megaplan.budget.values import ACTIVATIONS, COMMUNICATION, GRADIENTS
from megaplan.columns import Column
from megaplan.hosts.allocator import slack_bytes
from megaplan.schedules.actions import ActionKind
from megaplan.schedules.states import (
    BACKWARD,
    BACKWARDED,
    FORWARD,
    FORWARD_AFTER_BACKWARD,
    FORWARDED,
    INPUT,
    REDUCE,
    UNTOUCHED,
    WEIGHT,
    ChunkState,
    RankState,
)
from megaplan.tuples import new

PairKey = tuple[int, int, ChunkState, ChunkState, bool, bool]
"""Chunks of a forward and of its partner, their states, and whether weight gradients of the first and passed gradients exist."""


class StepPeak(NamedTuple):
    """The peak of a step's forward and backward; `first` is the first step's peak, if it differs.

    In the first step the libraries have no workspace yet while the first layer's parameters are gathered, because no product has run.
    `other_pool_bytes` is the part in the pools of other streams than the computing one. `late_bytes` is the excess of the final reduction
    of the slot's own parameters over all earlier points.
    """

    total: int
    where: str
    cells: dict[Column, int]
    slack_bytes: int
    first: "StepPeak | None" = None
    other_pool_bytes: int = 0
    late_bytes: int = 0


class HeldBySchedule(NamedTuple):
    """Tensors that the local variables of torch's schedule keep one action longer.

    Attributes:
        gradient_bytes: The last input gradient that was sent.
        output_bytes: The last stage output.
        logits_bytes: The last stage output after its microbatch is done, on the last stage.
        only_at_end: True if they matter only to reductions: GPipe's last output belongs to the microbatch whose backward is its last, and
            the name of a sent gradient is rebound to a received one before the next backward.

    Source: torch/distributed/pipelining/schedules.py, `_step_microbatches` of `ScheduleGPipe` and `Schedule1F1B`.
    """

    gradient_bytes: int = 0
    output_bytes: int = 0
    logits_bytes: int = 0
    only_at_end: bool = False

    def at(self, kind: ActionKind, state: ChunkState) -> int:
        """Activations at a point that its counts do not include."""
        if kind is REDUCE:
            return self.gradient_bytes + self.output_bytes
        if self.only_at_end:
            return 0
        if kind is FORWARD:
            return self.gradient_bytes + self.logits_bytes if state is BACKWARDED else 0
        return self.gradient_bytes if state > FORWARDED else 0


def step_peak(chunks: Sequence[Chunk], points: Sequence[RankState], held: HeldBySchedule, workspace_bytes: int = 0) -> StepPeak:
    """The largest of the given points, on top of the rank's persistent state.

    Args:
        chunks: Chunks of the rank.
        points: States of the rank (`megaplan.schedules.states`): the most likely peak first, so that few others are evaluated.
        held: Further tensors that the schedule keeps.
        workspace_bytes: Workspace of GEMM libraries, which is persistent except before the first product.
    """
    largest = _largest(chunks, points, held, 0)
    found = _step_peak(chunks, held, largest)
    _, point, peak = largest
    if point.partner < 0 and _before_products(chunks[point.chunk], point, peak):
        first = _step_peak(chunks, held, _largest(chunks, points, held, workspace_bytes))
        return found._replace(first=first)
    return found


def _before_products(chunk: Chunk, point: RankState, peak: Peak) -> bool:
    first_forward = point.kind is FORWARD and all(state is UNTOUCHED for state in point.states)
    gathers = peak.live is None and peak.unit == chunk.first_layer
    return first_forward and (gathers or peak.unit < max(chunk.first_layer, 0))


def _step_peak(chunks: Sequence[Chunk], held: HeldBySchedule, largest: tuple[int, RankState, Peak]) -> StepPeak:
    total, point, peak = largest
    kind, running, in_flight, waiting, passed_gradients, kept_inputs, _, states, weight_grads, partner = point
    chunk = chunks[running]
    own_microbatches = (kind not in (REDUCE, WEIGHT)) + (partner == running)
    cells = chunk.action_cells(kind, peak, in_flight[running] - own_microbatches)
    cells[ACTIVATIONS] += chunk.output_bytes if kind in (BACKWARD, INPUT) else 0
    cells[ACTIVATIONS] += held.at(kind, states[running]) + passed_gradients * chunks[0].output_bytes
    cells[ACTIVATIONS] += kept_inputs * chunks[-1].kept_input_bytes
    if partner >= 0 and peak.partner is not None:
        others = 0 if partner == running else in_flight[partner] - 1
        for column, size in chunks[partner].action_cells(BACKWARD, peak.partner, others).items():
            cells[column] += size
        cells[ACTIVATIONS] += chunks[partner].output_bytes
    slack = kept_inputs * slack_bytes([chunks[-1].kept_input_bytes])
    for index, other in enumerate(chunks):
        slack += in_flight[index] * other.slack_bytes + waiting[index] * other.waiting_slack_bytes
        more = other.waiting_cells(waiting[index] - (index == running and kind is WEIGHT))
        for column, size in more.items():
            cells[column] += size
        gradients, gathered = other.held(states[index], weight_grads=weight_grads[index])
        if index not in (running, partner):
            for column, size in other.saved_cells(in_flight[index]).items():
                cells[column] += size
            cells[GRADIENTS] += gradients
        if index not in (running, partner) or kind is WEIGHT:
            cells[COMMUNICATION] += gathered
    other_pools = other_pool_bytes(chunk, point, peak)
    return new(
        StepPeak, (total, f"{peak.where}{_where(chunk, point)}", cells, slack, None, other_pools, peak.total - (peak.earlier or peak.total))
    )


def other_pool_bytes(chunk: Chunk, point: RankState, peak: Peak) -> int:
    """The part of a running chunk's point in the pools of FSDP2's streams: the all-gather ahead, and shards made there."""
    policy, kind, state = chunk.policy, point.kind, point.states[point.chunk]
    gathers = chunk.ahead[peak.unit].flat_bytes if policy.reshard and kind in (BACKWARD, INPUT) and peak.live is not None else 0
    if not policy.separate_shards:
        return gathers
    if kind is REDUCE or (state > FORWARDED and not policy.pipelined):
        return gathers + chunk.shard_bytes
    behind = chunk.units[peak.unit + 1 :] if kind is BACKWARD and not policy.pipelined else ()
    return gathers + sum([unit.opens.shard_bytes + unit.bank.shard_bytes for unit in behind])


def _where(chunk: Chunk, point: RankState) -> str:
    if not chunk.policy.pipelined:
        return ""
    in_flight, waiting = ", ".join(map(str, point.in_flight)), ", ".join(map(str, point.waiting))
    first = "first microbatch, " if point.kind is BACKWARD and point.states[point.chunk] is FORWARDED else ""
    for_weights = f", {waiting} waiting for W" if any(point.waiting) else ""
    by_chunk = " by chunk" if len(point.in_flight) > 1 else ""
    return f", {first}{in_flight} microbatches in flight{for_weights}{by_chunk}"


def _largest(chunks: Sequence[Chunk], points: Sequence[RankState], held: HeldBySchedule, absent: int) -> tuple[int, RankState, Peak]:
    """Bytes at the peak, the rank's state there, and the running chunk's peak; `absent` bytes do not exist before the first product."""
    most, best = -1, None
    peaks: dict[tuple[ActionKind, int, ChunkState, bool, bool], Peak] = {}
    pairs: dict[PairKey, Peak] = {}
    for point in points:
        kind, index, _, _, _, _, owns_input, states, weight_grads, partner = point
        chunk, state, grads = chunks[index], states[index], weight_grads[index]
        others = _others(chunks, point) + held.at(kind, state)
        if partner < 0 and kind in (FORWARD, REDUCE) and _bound(chunk, kind, state) + others <= most:
            continue
        if state is FORWARDED and kind is BACKWARD and not chunk.sums_in_place:
            # a later microbatch holds everything that the first holds, and earlier gradients
            later = peaks.get((BACKWARD, index, FORWARD_AFTER_BACKWARD, True, False))
            if later is not None and later.total + others <= most:
                continue
        if state is BACKWARDED and not chunk.policy.reshard and kind is not REDUCE:
            state = FORWARD_AFTER_BACKWARD  # they differ only in gathered parameters, and only if those were freed
        key = kind, index, state, grads, owns_input
        peak = _pair(pairs, chunks, point) if partner >= 0 else peaks.get(key)
        if peak is None:
            missing = absent if kind is FORWARD and states.count(UNTOUCHED) == len(states) else 0
            peak = peaks[key] = _peak(chunk, kind, state, missing, weight_grads=grads, owns_input=owns_input)
        if peak.total + others > most:
            most, best = peak.total + others, (point, peak)
    if best is None:
        raise ValueError("a rank without actions has no step")
    return most, *best


def _pair(pairs: dict[PairKey, Peak], chunks: Sequence[Chunk], point: RankState) -> Peak:
    """The peak of a pair in turns; equal pairs share one."""
    index, partner = point.chunk, point.partner
    key = index, partner, point.states[index], point.states[partner], point.weight_grads[index], point.passed_gradients > 0
    if key not in pairs:
        own, other = (PairPart(chunks[each], point.states[each]) for each in (index, partner))
        pairs[key] = pair_peak(own, other, weight_grads=key[4], consumes=key[5] and partner == 0)
    return pairs[key]


def _bound(chunk: Chunk, kind: ActionKind, state: ChunkState) -> int:
    """Upper bound on the bytes of a forward, or reduction, of the chunk."""
    if kind is REDUCE:
        return chunk.reduce_bound
    return chunk.forward_bound + (chunk.unsharded_bytes if state > FORWARDED else 0)


def _peak(chunk: Chunk, kind: ActionKind, state: ChunkState, absent: int, *, weight_grads: bool, owns_input: bool) -> Peak:
    if kind is FORWARD:
        return forward_peak(chunk, state, absent, weight_grads=weight_grads)
    if kind is BACKWARD:
        if chunk.policy.pipelined or chunk.policy.whole:
            return accumulating_backward_peak(chunk, state)
        return reducing_backward_peak(chunk, later=state > FORWARDED)
    if kind is REDUCE:
        return reduce_peak(chunk)
    split = cast(SplitBackwardChunk, chunk)
    if kind is INPUT:
        return split.input_peak(state, weight_grads=weight_grads)
    return split.weight_peak(weight_grads=weight_grads, owns_input=owns_input)


def _others(chunks: Sequence[Chunk], point: RankState) -> int:
    """Bytes of other microbatches and of other chunks' gradients and gathered parameters.

    In W also the running chunk's gathered parameters.
    """
    kind, running, in_flight, waiting, passed_gradients, kept_inputs, _, states, weight_grads, partner = point
    chunk = chunks[running]
    total = in_flight[running] * chunk.saved_bytes + waiting[running] * chunk.waiting_bytes
    if kind is WEIGHT:
        total += chunk.held(states[running])[1] - chunk.waiting_bytes
    elif kind is not REDUCE:
        total -= chunk.saved_bytes
        if kind is not FORWARD:
            total += chunk.output_bytes
        elif partner == running:
            total += chunk.output_bytes - chunk.saved_bytes
    if len(chunks) > 1:
        total += passed_gradients * chunks[0].output_bytes + kept_inputs * chunks[-1].kept_input_bytes
        for index, other in enumerate(chunks):
            if index == partner != running:  # the pair includes the microbatch that runs on it
                total += (in_flight[index] - 1) * other.saved_bytes + waiting[index] * other.waiting_bytes + other.output_bytes
            elif index != running:
                total += in_flight[index] * other.saved_bytes + waiting[index] * other.waiting_bytes
                total += sum(other.held(states[index], weight_grads=weight_grads[index]))
    return total
