"""One rank of the pipeline: its chunks and persistent state, and the cells of every phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megaplan.budget.chunk import Chunk, Peak
from megaplan.budget.occupancy import ChunkState, Occupancy, Step
from megaplan.budget.reduction import reduce_peak, reducing_backward_peak
from megaplan.budget.values import NO_BYTES, Cells
from megaplan.columns import Column, Phase
from megaplan.hosts.megarun.allocator import OPEN_SEGMENTS_BYTES
from megaplan.hosts.megarun.optimizer import Uneven

MomentCells = dict[Column, int]


@dataclass(frozen=True, slots=True)
class States:
    """What depends on a rank's place among those that share its parameters.

    Attributes:
        matrix_bytes: Muon's moments.
        other_bytes: AdamW's moments and step counters.
        padding_scratch_bytes: Beside the parameters while a short shard of the slot's own group is padded.
    """

    matrix_bytes: int
    other_bytes: int
    padding_scratch_bytes: int


@dataclass(frozen=True, slots=True)
class Persistent:
    """What a pipeline rank holds outside microbatches, equal for all its data ranks.

    Attributes:
        resident: Parameter shards by column.
        shard_bytes: Gradient shards.
        matrix_shard_bytes: Those of groups that hold nothing but Muon's tensors, which its step drops before AdamW makes its moments.
        matrix_state_bytes: Muon's moments of evenly sharded tensors.
        other_state_bytes: AdamW's.
        uneven: Tensors that shard unevenly.
        root_uneven: Those of the slots' own groups, which are padded when all else is in place.
        scratch_bytes: The largest scratch of Muon's tensors.
        first_matrix: Momenta made and scratch at the peak of Muon's first step.
        buffer_bytes: Rotary tables.
        buffer_scratch_bytes: What the last of them needs while it is computed.
        input_bytes: Token ids and labels of a step.
        receive_bytes: Receive buffers.
        workspace_bytes: Of GEMM libraries.
        slack_bytes: Allocator rounding of shards and buffers.
        state_slack_bytes: Allocator rounding of moments.
        parameters: Elements after TP and EP.
    """

    resident: Mapping[Column, int]
    shard_bytes: int
    matrix_shard_bytes: int
    matrix_state_bytes: int
    other_state_bytes: int
    uneven: tuple[Uneven, ...]
    root_uneven: tuple[Uneven, ...]
    scratch_bytes: int
    first_matrix: tuple[int, int]
    buffer_bytes: int
    buffer_scratch_bytes: int
    input_bytes: int
    receive_bytes: int
    workspace_bytes: int
    slack_bytes: int
    state_slack_bytes: int
    parameters: int

    def states(self, dense_index: int, expert_index: int) -> States:
        """Moments of the rank at these places, and the scratch of padding its short shards."""
        matrix, other = self.matrix_state_bytes, self.other_state_bytes
        for tensor in self.uneven:
            size = tensor.state_bytes(expert_index if tensor.expert else dense_index)
            if tensor.matrix:
                matrix += size
            else:
                other += size
        return States(matrix, other, max([tensor.padding_scratch_bytes(dense_index) for tensor in self.root_uneven], default=0))


@dataclass(frozen=True, slots=True)
class StepPeak:
    """The largest moment of a step's forward and backward."""

    total: int
    where: str
    cells: MomentCells
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
    for moment in moments:
        state = moment.states[moment.chunk]
        if state is ChunkState.BACKWARDED and not chunks[moment.chunk].policy.reshard and moment.step is not Step.REDUCE:
            state = ChunkState.REFORWARDED  # they differ in what is gathered, and then only if it was freed
        key = (moment.step, moment.chunk, state)
        peak = peaks.get(key) or peaks.setdefault(key, _peak(chunks[moment.chunk], moment))
        total = peak.total + _beside(chunks, moment) + lingering.at(moment)
        if best is None or total >= best[0]:
            best = (total, moment, peak)
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
    return StepPeak(total, f"{peak.where}, {_in_flight(moment)}", cells, slack)


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


def rank_cells(persistent: Persistent, states: States, step: StepPeak) -> tuple[Cells, dict[Phase, str]]:
    """Cells of every phase, and where each phase's peak lies."""
    moments = states.matrix_bytes + states.other_bytes
    scratch, first_matrix = persistent.scratch_bytes, sum(persistent.first_matrix)
    created_at_end = moments - persistent.matrix_shard_bytes >= first_matrix
    overhead = persistent.slack_bytes + OPEN_SEGMENTS_BYTES
    with_states = overhead + persistent.state_slack_bytes

    init = _base(persistent, overhead)
    init[Column.COMMUNICATION] = 0
    padding = states.padding_scratch_bytes > persistent.buffer_bytes + persistent.buffer_scratch_bytes
    init[Column.WORKSPACE] = states.padding_scratch_bytes if padding else persistent.buffer_scratch_bytes
    init[Column.ACTIVATIONS] = 0 if padding else persistent.buffer_bytes
    first_step = _plus(_base(persistent, overhead + step.slack_bytes), step.cells)
    steady_step = _with_states(_plus(_base(persistent, with_states + step.slack_bytes), step.cells), states)
    updating = _base(persistent, with_states)
    updating[Column.GRADIENTS] += persistent.shard_bytes
    first_update = dict(updating)
    if created_at_end:
        first_update = _with_states(first_update, states)
        first_update[Column.GRADIENTS] -= persistent.matrix_shard_bytes
    else:
        made, size = persistent.first_matrix
        first_update[Column.MATRIX_OPTIMIZER] += made
        first_update[Column.WORKSPACE] += size
    steady_update = _with_states(updating, states)
    steady_update[Column.WORKSPACE] += scratch
    update = "Newton-Schulz of the largest matrix" if scratch else "the update of all parameters"
    cells = {
        Phase.INIT: init,
        Phase.FIRST_FORWARD_BACKWARD: first_step,
        Phase.FIRST_OPTIMIZER: first_update,
        Phase.FORWARD_BACKWARD: steady_step,
        Phase.OPTIMIZER: steady_update,
    }
    where = {
        Phase.INIT: "padding of a short shard" if padding else "parameters in place",
        Phase.FIRST_FORWARD_BACKWARD: step.where,
        Phase.FIRST_OPTIMIZER: "all moments made" if created_at_end else "Newton-Schulz beside the momenta made so far",
        Phase.FORWARD_BACKWARD: step.where,
        Phase.OPTIMIZER: update,
    }
    return cells, where


def _base(persistent: Persistent, overhead: int) -> MomentCells:
    cells = NO_BYTES.copy()
    for column, size in persistent.resident.items():
        cells[column] += size
    cells[Column.ACTIVATIONS] = persistent.buffer_bytes + persistent.input_bytes
    cells[Column.COMMUNICATION] = persistent.receive_bytes
    cells[Column.WORKSPACE] = persistent.workspace_bytes
    cells[Column.OVERHEAD] = overhead
    return cells


def _plus(cells: MomentCells, more: Mapping[Column, int]) -> MomentCells:
    for column, size in more.items():
        cells[column] += size
    return cells


def _with_states(cells: MomentCells, states: States) -> MomentCells:
    found = dict(cells)
    found[Column.MATRIX_OPTIMIZER] += states.matrix_bytes
    found[Column.OTHER_OPTIMIZER] += states.other_bytes
    return found


def _peak(chunk: Chunk, moment: Occupancy) -> Peak:
    state = moment.states[moment.chunk]
    if moment.step is Step.FORWARD:
        return chunk.forward_peak(state)
    return chunk.backward_peak(state) if moment.step is Step.BACKWARD else reduce_peak(chunk)


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
