"""The peak of a step's forward and backward on one rank: the largest of the moments its order has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megaplan.budget.chunk import Chunk, Peak
from megaplan.budget.occupancy import ChunkState, Occupancy, Step
from megaplan.budget.reduction import reduce_peak, reducing_backward_peak
from megaplan.columns import Column


@dataclass(frozen=True, slots=True)
class StepPeak:
    """The largest moment of a step's forward and backward."""

    total: int
    where: str
    cells: dict[Column, int]
    slack_bytes: int


@dataclass(frozen=True, slots=True)
class Lingering:
    """What the schedule's own locals still name one action longer.

    Attributes:
        gradient_bytes: The last input gradient that was sent.
        output_bytes: The last stage output.
        logits_bytes: The last stage output where its microbatch is done: on the last stage.
    """

    gradient_bytes: int = 0
    output_bytes: int = 0
    logits_bytes: int = 0

    def at(self, moment: Occupancy) -> int:
        """Activations of a moment that its counts do not know of."""
        state = moment.states[moment.chunk]
        if moment.step is Step.REDUCE:
            return self.gradient_bytes + self.output_bytes
        if moment.step is Step.FORWARD:
            return self.gradient_bytes + self.logits_bytes if state is ChunkState.BACKWARDED else 0
        return self.gradient_bytes if state > ChunkState.FORWARDED else 0


def step_peak(chunks: Sequence[Chunk], moments: Sequence[Occupancy], lingering: Lingering) -> StepPeak:
    """The largest of the given moments, on top of the rank's persistent state.

    Args:
        chunks: Of the rank.
        moments: From `occupancies`.
        lingering: What is alive beside them.
    """
    best: tuple[int, Occupancy, Peak] | None = None
    peaks: dict[tuple[Step, int, ChunkState], Peak] = {}
    for moment in sorted(moments, key=lambda moment: moment.step is not Step.BACKWARD):  # where the peak mostly is
        chunk, beside = chunks[moment.chunk], _beside(chunks, moment) + lingering.at(moment)
        if best is not None and moment.step is not Step.BACKWARD and _bound(chunk, moment) + beside <= best[0]:
            continue
        state = moment.states[moment.chunk]
        if state is ChunkState.BACKWARDED and not chunk.policy.reshard and moment.step is not Step.REDUCE:
            state = ChunkState.REFORWARDED  # they differ in what is gathered, and then only if it was freed
        key = (moment.step, moment.chunk, state)
        peak = peaks.get(key) or peaks.setdefault(key, _peak(chunk, moment))
        if best is None or peak.total + beside > best[0]:
            best = (peak.total + beside, moment, peak)
    if best is None:
        raise ValueError("a rank without actions has no step")
    total, moment, peak = best
    cells = chunks[moment.chunk].peak_cells(peak)
    slack = 0
    for index, (chunk, count, state) in enumerate(zip(chunks, moment.counts, moment.states, strict=True)):
        others = _others(moment, index, count)
        for column, size in chunk.saved_cells(others).items():
            cells[column] += size
        slack += count * chunk.slack_bytes
        if index == moment.chunk:
            cells[Column.ACTIVATIONS] += chunk.output_bytes if moment.step is Step.BACKWARD else 0
        else:
            gradients, gathered = chunk.held(state)
            cells[Column.GRADIENTS] += gradients
            cells[Column.COMMUNICATION] += gathered
    cells[Column.ACTIVATIONS] += lingering.at(moment)
    first = "first microbatch, " if moment.step is Step.BACKWARD and moment.states[moment.chunk] <= ChunkState.FORWARDED else ""
    return StepPeak(total, f"{peak.where}, {first}{_in_flight(moment)}", cells, slack)


def accumulating_peak(chunk: Chunk, num_microbatches: int) -> StepPeak:
    """The same without a pipeline: microbatches one after another."""
    later = num_microbatches > 1
    state = ChunkState.BACKWARDED if later else ChunkState.UNTOUCHED
    forward, backward = chunk.forward_peak(state), reducing_backward_peak(chunk, later=later)
    shards = chunk.root.shard_bytes + chunk.layers.shard_bytes if later else 0
    if forward.total + shards > backward.total:
        cells, total, peak = chunk.peak_cells(forward), forward.total + shards, forward
        cells[Column.GRADIENTS] += shards
    else:
        cells, total, peak = chunk.peak_cells(backward), backward.total, backward
    return StepPeak(total, peak.where, cells, chunk.slack_bytes)


def _peak(chunk: Chunk, moment: Occupancy) -> Peak:
    state = moment.states[moment.chunk]
    if moment.step is Step.FORWARD:
        return chunk.forward_peak(state)
    return chunk.backward_peak(state) if moment.step is Step.BACKWARD else reduce_peak(chunk)


def _bound(chunk: Chunk, moment: Occupancy) -> int:
    """No forward or reduction of the chunk is larger; cheap, to leave out those that cannot be the peak."""
    if moment.step is Step.FORWARD:
        return chunk.forward_bound + chunk.held(moment.states[moment.chunk])[0]
    return chunk.reduce_bound


def _beside(chunks: Sequence[Chunk], moment: Occupancy) -> int:
    """Other microbatches, and the other chunks' gradients and gathered parameters."""
    running = moment.chunk
    total = chunks[running].output_bytes if moment.step is Step.BACKWARD else 0
    if moment.step is not Step.REDUCE:
        total -= chunks[running].saved_bytes
    for index, chunk in enumerate(chunks):
        total += moment.counts[index] * chunk.saved_bytes
        if index != running:
            total += sum(chunk.held(moment.states[index]))
    return total


def _others(moment: Occupancy, index: int, count: int) -> int:
    """Microbatches of a chunk beside the one that runs."""
    return count - 1 if index == moment.chunk and moment.step is not Step.REDUCE else count


def _in_flight(moment: Occupancy) -> str:
    counts = ", ".join(str(count) for count in moment.counts)
    return f"{counts} microbatches in flight" if len(moment.counts) == 1 else f"{counts} microbatches in flight by chunk"
