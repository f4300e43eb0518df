"""One rank of the pipeline: its persistent state, and the cells of every phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megaplan.budget.init import InitPeak, SlotInit, init_peak
from megaplan.budget.step import StepPeak
from megaplan.budget.values import (
    ACTIVATIONS,
    COMMUNICATION,
    GRADIENTS,
    MATRIX_OPTIMIZER,
    NO_BYTES,
    OTHER_OPTIMIZER,
    OVERHEAD,
    WORKSPACE,
    Cells,
    checked,
)
from megaplan.columns import Column, Phase
from megaplan.hosts.megarun.allocator import OPEN_SEGMENTS_BYTES
from megaplan.hosts.megarun.optimizer import AT_END, Cast, LastMoment, MatrixMoments, in_turn, last_moment
from megaplan.hosts.megarun.storage import OWNER_COLUMNS, BlockStorage
from megaplan.tuples import new

INIT, FIRST_FORWARD_BACKWARD, FIRST_OPTIMIZER, FORWARD_BACKWARD, OPTIMIZER = Phase
REPLICATED, TENSOR_PARALLEL, EXPERT_PARALLEL = OWNER_COLUMNS.values()
MomentCells = dict[Column, int]
CAST = "the update beside a gradient cast for it"


class States(NamedTuple):
    """What depends on a rank's place among those that share its parameters.

    Attributes:
        matrix_bytes: Moments of the matrix group.
        other_bytes: Moments of the rest, and step counters.
        init: Where building the rank peaks.
        adamw: Where AdamW's steps peak.
        muon: Where Muon's steps peak.
    """

    matrix_bytes: int
    other_bytes: int
    init: InitPeak
    adamw: LastMoment
    muon: MatrixMoments


class Persistent(NamedTuple):
    """What a pipeline rank holds outside microbatches, equal for all its data ranks.

    Attributes:
        resident_bytes: Parameter shards: of replicated, tensor-parallel and expert-parallel tensors.
        shard_bytes: Gradient shards.
        other_shard_bytes: Those of groups that hold nothing but AdamW's tensors, which its step drops before Muon's runs; 0 without Muon.
        matrix_state_bytes: Muon's moments of evenly sharded tensors.
        other_state_bytes: AdamW's.
        uneven: Storages of which some tensors shard unevenly, and how many blocks have each.
        slots: What each slot of the rank gets when it is built.
        storages: Of the rank's blocks, in the order they are updated.
        casts: Gradients that are cast for AdamW, in that order.
        buffer_bytes: Rotary tables and sums of a step.
        input_bytes: Token ids, labels and document starts of a step.
        receive_bytes: Receive buffers.
        workspace_bytes: Of GEMM libraries.
        slack_bytes: Allocator rounding of shards and buffers.
        state_slack_bytes: Allocator rounding of moments.
        parameters: Elements after TP and EP.
    """

    resident_bytes: tuple[int, int, int]
    shard_bytes: int
    other_shard_bytes: int
    matrix_state_bytes: int
    other_state_bytes: int
    uneven: tuple[tuple[BlockStorage, int], ...]
    slots: Sequence[SlotInit]
    storages: Sequence[BlockStorage]
    casts: Sequence[Cast]
    buffer_bytes: int
    input_bytes: int
    receive_bytes: int
    workspace_bytes: int
    slack_bytes: int
    state_slack_bytes: int
    parameters: int

    def states(self, dense_index: int, expert_index: int) -> States:
        """What differs on the rank at these places."""
        matrix, other = self.matrix_state_bytes, self.other_state_bytes
        found: dict[int, MatrixMoments] = {}
        for storage, count in self.uneven:
            for tensor in storage.uneven:
                size = count * tensor.state_bytes(expert_index if tensor.expert else dense_index)
                if tensor.matrix:
                    matrix += size
                else:
                    other += size
            if storage.even_moments is None:
                found[id(storage)] = storage.matrix_moments(dense_index, expert_index)
        muon = in_turn([each.even_moments or found[id(each)] for each in self.storages])
        init = init_peak(self.slots, dense_index, expert_index)
        adamw = last_moment(self.casts, dense_index, expert_index) if self.casts else AT_END
        return new(States, (matrix, other, init, adamw, muon))


def rank_cells(persistent: Persistent, step: StepPeak, states: States) -> tuple[Cells, dict[Phase, str]]:
    """Cells of every phase of the data ranks of a pipeline rank that have these states, and where each phase's peak lies."""
    matrix_bytes, other_bytes, building, to_make, muon = states
    scratch, first_momenta, first_scratch, momenta = muon
    base = _base(persistent)
    init = base.copy()
    (init[REPLICATED], init[TENSOR_PARALLEL], init[EXPERT_PARALLEL]), init[ACTIVATIONS], init[WORKSPACE], init_where = building
    init[COMMUNICATION] = 0

    first_step = {column: size + step.cells[column] for column, size in base.items()}
    first_step[OVERHEAD] += step.slack_bytes
    steady_step = first_step.copy()
    where_first = step.where
    if step.first is not None:
        first_step = {column: size + step.first.cells[column] for column, size in base.items()}
        first_step[OVERHEAD] += step.slack_bytes
        where_first = step.first.where
    steady_step[OVERHEAD] += persistent.state_slack_bytes
    steady_step[MATRIX_OPTIMIZER] += matrix_bytes
    steady_step[OTHER_OPTIMIZER] += other_bytes

    first_update = base
    first_update[OVERHEAD] += persistent.state_slack_bytes
    first_update[GRADIENTS] += persistent.shard_bytes
    # AdamW updates first; its gradients are gone where they fill a buffer of their own when Muon's iterations begin
    steady_update = first_update.copy()
    dropped, cast_bytes = persistent.other_shard_bytes, to_make.largest_bytes
    cast = cast_bytes > scratch - dropped  # AdamW's update, with every gradient alive, is the higher
    if not cast:
        steady_update[GRADIENTS] -= dropped
    steady_update[WORKSPACE] += cast_bytes if cast else scratch
    steady_update[MATRIX_OPTIMIZER] += matrix_bytes
    steady_update[OTHER_OPTIMIZER] += other_bytes

    matrix, other = matrix_bytes - momenta - to_make.matrix_bytes, other_bytes - to_make.other_bytes
    by_muon = matrix_bytes - momenta + other_bytes - dropped + first_momenta + first_scratch
    made_at_end = matrix + other + to_make.scratch_bytes >= by_muon
    if made_at_end:
        first_update[MATRIX_OPTIMIZER] += matrix
        first_update[OTHER_OPTIMIZER] += other
        first_update[WORKSPACE] += to_make.scratch_bytes
    else:
        first_update[GRADIENTS] -= dropped
        first_update[MATRIX_OPTIMIZER] += matrix_bytes - momenta + first_momenta
        first_update[OTHER_OPTIMIZER] += other_bytes
        first_update[WORKSPACE] += first_scratch
    cells = {
        INIT: init,
        FIRST_FORWARD_BACKWARD: first_step,
        FIRST_OPTIMIZER: first_update,
        FORWARD_BACKWARD: steady_step,
        OPTIMIZER: steady_update,
    }
    where = {
        INIT: init_where,
        FIRST_FORWARD_BACKWARD: where_first,
        FIRST_OPTIMIZER: _first_update(to_make) if made_at_end else "Newton-Schulz with the momenta made so far",
        FORWARD_BACKWARD: step.where,
        OPTIMIZER: "Newton-Schulz of the largest matrix" if not cast and scratch else _update(cast_bytes),
    }
    return checked(cells), where


def _update(cast_bytes: int) -> str:
    return CAST if cast_bytes else "the update of all parameters"


def _first_update(to_make: LastMoment) -> str:
    return CAST if to_make.scratch_bytes else "all optimizer state made"


def _base(persistent: Persistent) -> MomentCells:
    """What is there in every phase, all but what optimizers hold."""
    cells = NO_BYTES.copy()
    cells[REPLICATED], cells[TENSOR_PARALLEL], cells[EXPERT_PARALLEL] = persistent.resident_bytes
    cells[ACTIVATIONS] = persistent.buffer_bytes + persistent.input_bytes
    cells[COMMUNICATION] = persistent.receive_bytes
    cells[WORKSPACE] = persistent.workspace_bytes
    cells[OVERHEAD] = persistent.slack_bytes + OPEN_SEGMENTS_BYTES
    return cells
