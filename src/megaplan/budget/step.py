"""The peak of a step's forward and backward on one rank: the largest of the moments its order has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megaplan.budget.chunk import Chunk
from megaplan.budget.occupancy import BACKWARD, BACKWARDED, FORWARD, FORWARDED, REDUCE, REFORWARDED, UNTOUCHED, ChunkState, Occupancy, Step
from megaplan.budget.reduction import reduce_peak, reducing_backward_peak
from megaplan.budget.unit import Peak
from megaplan.budget.values import ACTIVATIONS, COMMUNICATION, GRADIENTS
from megaplan.columns import Column
from megaplan.tuples import new


class StepPeak(NamedTuple):
    """The largest moment of a step's forward and backward; `first`: that of the first step, where it is another one.

    In the first step the libraries have no workspace yet while the first layer's parameters are gathered: no product has run.
    """

    total: int
    where: str
    cells: dict[Column, int]
    slack_bytes: int
    first: StepPeak | None = None


class Lingering(NamedTuple):
    """What the schedule's own locals still name one action longer.

    Attributes:
        gradient_bytes: The last input gradient that was sent.
        output_bytes: The last stage output.
        logits_bytes: The last stage output where its microbatch is done: on the last stage.
        only_at_end: Whether they matter to reductions alone: GPipe's last output belongs to the microbatch whose backward is its last, and
            the name of a sent gradient is given to what is received before the next backward.

    Source: torch/distributed/pipelining/schedules.py, `_step_microbatches` of `ScheduleGPipe` and `Schedule1F1B`.
    """

    gradient_bytes: int = 0
    output_bytes: int = 0
    logits_bytes: int = 0
    only_at_end: bool = False

    def at(self, step: Step, state: ChunkState) -> int:
        """Activations of a moment that its counts do not know of."""
        if step is REDUCE:
            return self.gradient_bytes + self.output_bytes
        if self.only_at_end:
            return 0
        if step is FORWARD:
            return self.gradient_bytes + self.logits_bytes if state is BACKWARDED else 0
        return self.gradient_bytes if state > FORWARDED else 0


def step_peak(chunks: Sequence[Chunk], moments: Sequence[Occupancy], lingering: Lingering, workspace_bytes: int = 0) -> StepPeak:
    """The largest of the given moments, on top of the rank's persistent state.

    Args:
        chunks: Of the rank.
        moments: From `moments`: where the peak mostly is first, so that few others are worked out.
        lingering: What is alive beside them.
        workspace_bytes: Of GEMM libraries, which is persistent but for what runs before the first product.
    """
    largest = _largest(chunks, moments, lingering, 0)
    found = _step_peak(chunks, lingering, largest)
    _, moment, peak = largest
    if _before_products(chunks[moment.chunk], moment, peak):
        first = _step_peak(chunks, lingering, _largest(chunks, moments, lingering, workspace_bytes))
        return found._replace(first=first)
    return found


def _before_products(chunk: Chunk, moment: Occupancy, peak: Peak) -> bool:
    first_forward = moment.step is FORWARD and all(state is UNTOUCHED for state in moment.states)
    return first_forward and peak.moment is None and peak.unit == chunk.first_layer


def _step_peak(chunks: Sequence[Chunk], lingering: Lingering, largest: tuple[int, Occupancy, Peak]) -> StepPeak:
    total, moment, peak = largest
    running = chunks[moment.chunk]
    beside = moment.counts[moment.chunk] - (moment.step is not REDUCE)  # microbatches of its chunk beside the one that runs
    cells = running.peak_cells(peak, beside)
    cells[ACTIVATIONS] += running.output_bytes if moment.step is BACKWARD else 0
    slack = 0
    for index, (chunk, count, state) in enumerate(zip(chunks, moment.counts, moment.states, strict=True)):
        slack += count * chunk.slack_bytes
        if index != moment.chunk:
            for column, size in chunk.saved_cells(count).items():
                cells[column] += size
            gradients, gathered = chunk.held(state)
            cells[GRADIENTS] += gradients
            cells[COMMUNICATION] += gathered
    cells[ACTIVATIONS] += lingering.at(moment.step, moment.states[moment.chunk])
    first = "first microbatch, " if moment.step is BACKWARD and moment.states[moment.chunk] <= FORWARDED else ""
    return new(StepPeak, (total, f"{peak.where}, {first}{_in_flight(moment)}", cells, slack, None))


def _largest(chunks: Sequence[Chunk], moments: Sequence[Occupancy], lingering: Lingering, absent: int) -> tuple[int, Occupancy, Peak]:
    """The largest moment, what is alive then, and the running chunk's part of it; `absent`: until the first product has run."""
    best: tuple[int, Occupancy, Peak] | None = None
    peaks: dict[tuple[Step, int, ChunkState], Peak] = {}
    only_backwards = len(chunks) == 1
    for moment in moments:
        step, index, _, states = moment
        chunk, state = chunks[index], states[index]
        if only_backwards and step is not BACKWARD:  # backwards come first
            if best is not None and _ceiling(chunk, max([moment.counts[0] for moment in moments]), lingering) <= best[0]:
                break
            only_backwards = False
        beside = _beside(chunks, moment)
        if best is not None and step is not BACKWARD:
            bound = chunk.reduce_bound if step is REDUCE else chunk.forward_bound + (chunk.unsharded_bytes if state > FORWARDED else 0)
            if bound + beside + lingering.gradient_bytes + lingering.output_bytes <= best[0]:
                continue
        beside += lingering.at(step, state)
        if best is not None and state is FORWARDED and step is BACKWARD and not chunk.policy.in_place:
            later = peaks.get((BACKWARD, index, REFORWARDED))  # it has all that a first one has, and the gradients accumulated before it
            if later is not None and later.total + beside <= best[0]:
                continue
        if state is BACKWARDED and not chunk.policy.reshard and step is not REDUCE:
            state = REFORWARDED  # they differ in what is gathered, and then only if it was freed
        key = step, index, state
        peak = peaks.get(key)
        if peak is None:
            untouched = absent and step is FORWARD and all(other is UNTOUCHED for other in states)
            peak = peaks[key] = chunk.forward_peak(state, absent) if untouched else _peak(chunk, step, state)
        if best is None or peak.total + beside > best[0]:
            best = (peak.total + beside, moment, peak)
    if best is None:
        raise ValueError("a rank without actions has no step")
    return best


def accumulating_peak(chunk: Chunk, num_microbatches: int, workspace_bytes: int = 0) -> StepPeak:
    """The same without a pipeline: microbatches one after another."""
    later = num_microbatches > 1
    state = BACKWARDED if later else UNTOUCHED
    forward, backward = chunk.forward_peak(state), reducing_backward_peak(chunk, later=later)
    found = _accumulating(chunk, forward, backward, later=later)
    if not later and forward.total > backward.total and forward.moment is None and forward.unit == chunk.first_layer:
        return found._replace(first=_accumulating(chunk, chunk.forward_peak(state, workspace_bytes), backward, later=later))
    return found


def _accumulating(chunk: Chunk, forward: Peak, backward: Peak, *, later: bool) -> StepPeak:
    shards = chunk.shard_bytes if later else 0
    if forward.total + shards > backward.total:
        cells, total, peak = chunk.peak_cells(forward), forward.total + shards, forward
        cells[GRADIENTS] += shards
    else:
        cells, total, peak = chunk.peak_cells(backward), backward.total, backward
    return StepPeak(total, peak.where, cells, chunk.slack_bytes)


def _ceiling(chunk: Chunk, most: int, lingering: Lingering) -> int:
    """Nothing but a backward has more alive on a rank with this chunk alone, of which at most so many microbatches are alive."""
    forward = chunk.forward_bound + chunk.unsharded_bytes + (most - 1) * chunk.saved_bytes
    return max(forward, chunk.reduce_bound) + lingering.gradient_bytes + lingering.output_bytes


def _peak(chunk: Chunk, step: Step, state: ChunkState) -> Peak:
    if step is FORWARD:
        return chunk.forward_peak(state)
    return chunk.backward_peak(state) if step is BACKWARD else reduce_peak(chunk)


def _beside(chunks: Sequence[Chunk], moment: Occupancy) -> int:
    """Other microbatches, and the other chunks' gradients and gathered parameters."""
    step, running, counts, states = moment
    chunk = chunks[running]
    total = counts[running] * chunk.saved_bytes
    if step is not REDUCE:
        total -= chunk.saved_bytes
    if step is BACKWARD:
        total += chunk.output_bytes
    if len(chunks) > 1:
        for other, count, state in zip(chunks, counts, states, strict=True):
            if other is not chunk:
                total += count * other.saved_bytes + sum(other.held(state))
    return total


def _in_flight(moment: Occupancy) -> str:
    counts = ", ".join(str(count) for count in moment.counts)
    return f"{counts} microbatches in flight" if len(moment.counts) == 1 else f"{counts} microbatches in flight by chunk"
