"""One rank of the pipeline: its persistent state, and the cells of every phase."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import NamedTuple

from megaplan.budget.init import InitPeak, SlotInit
from megaplan.budget.reserved import add_overhead
from megaplan.budget.step import StepPeak
from megaplan.budget.stored import RankStorage, Updates
from megaplan.budget.values import (
    ACTIVATIONS,
    COMMUNICATION,
    GRADIENTS,
    MATRIX_OPTIMIZER,
    NO_BYTES,
    OTHER_OPTIMIZER,
    WORKSPACE,
    Cells,
    checked,
)
from megaplan.columns import Column, Phase
from megaplan.hosts.allocator import OPEN_SEGMENTS_BYTES
from megaplan.hosts.megarun.optimizer import LastPeak
from megaplan.hosts.megarun.storage import OWNER_COLUMNS
from megaplan.hosts.megarun.streams import Reserving

INIT, FIRST_FORWARD_BACKWARD, FIRST_OPTIMIZER, FORWARD_BACKWARD, OPTIMIZER = Phase
REPLICATED, TENSOR_PARALLEL, EXPERT_PARALLEL = OWNER_COLUMNS.values()
PhaseCells = dict[Column, int]
CAST = "the update with a gradient cast for it"


class Persistent(NamedTuple):
    """Bytes of a pipeline rank outside microbatches, equal for all its data ranks.

    Attributes:
        stored: Storage of its parameters.
        other_shard_bytes: Gradient shards of groups that hold nothing but AdamW's tensors, which its step drops before Muon's runs; 0
            without Muon.
        slots: Tensors that building each slot of the rank allocates.
        buffer_bytes: Rotary tables and sums of a step.
        input_bytes: Token ids, labels and document starts of a step.
        receive_bytes: Receive buffers.
        workspace_bytes: Workspace of GEMM libraries.
        slack_bytes: Allocator rounding of shards and buffers.
        reserving: Bytes that the allocator reserves beyond those allocated in a step.
        replays: True if microbatches are replayed as CUDA graphs: their gradients stay, and their memory is a pool of its own.
        graph_bytes: Tensors of the graphs' own, in addition to those of eager steps.
        graph_workspace_bytes: Workspace of GEMM libraries in the stream in which graphs are recorded.
    """

    stored: RankStorage
    other_shard_bytes: int
    slots: Sequence[SlotInit]
    buffer_bytes: int
    input_bytes: int
    receive_bytes: int
    workspace_bytes: int
    slack_bytes: int
    reserving: Reserving
    replays: bool = False
    graph_bytes: int = 0
    graph_workspace_bytes: int = 0


def rank_cells(persistent: Persistent, step: StepPeak, building: InitPeak, updates: Updates) -> tuple[Cells, dict[Phase, str]]:
    """Cells of every phase of some data ranks of a pipeline rank, and the place of each phase's peak.

    Args:
        persistent: Bytes of the pipeline rank outside microbatches.
        step: Peak of a step's forwards and backwards.
        building: Peak of building the ranks.
        updates: Moments of their parameters, and peaks of updates.
    """
    matrix_bytes, other_bytes, to_make, momenta, scratch = updates
    base = _base(persistent)
    init = base.copy()
    (init[REPLICATED], init[TENSOR_PARALLEL], init[EXPERT_PARALLEL]), init[ACTIVATIONS], init[WORKSPACE], init_where = building
    init[COMMUNICATION] = 0

    first_step = _added(base, step.cells)
    steady_step = first_step.copy()
    where_first = step.where
    if step.first is not None:
        first_step = _added(base, step.first.cells)
        where_first = step.first.where
    steady_step[MATRIX_OPTIMIZER] += matrix_bytes
    steady_step[OTHER_OPTIMIZER] += other_bytes
    steady_step[ACTIVATIONS] += persistent.graph_bytes
    steady_step[WORKSPACE] += persistent.graph_workspace_bytes

    first_update = base
    first_update[GRADIENTS] += persistent.stored.shard_bytes
    # AdamW updates first; if its gradients have their own buffer, they are freed when Muon's iterations begin
    steady_update = first_update.copy()
    dropped, cast_bytes = 0 if persistent.replays else persistent.other_shard_bytes, to_make.largest_bytes
    cast = cast_bytes > scratch - dropped  # AdamW's update, with every gradient alive, is the higher
    if not cast:
        steady_update[GRADIENTS] -= dropped
    steady_update[WORKSPACE] += persistent.graph_workspace_bytes + (cast_bytes if cast else scratch)
    steady_update[ACTIVATIONS] += persistent.graph_bytes
    steady_update[MATRIX_OPTIMIZER] += matrix_bytes
    steady_update[OTHER_OPTIMIZER] += other_bytes

    matrix, other = matrix_bytes - momenta - to_make.matrix_bytes, other_bytes - to_make.other_bytes
    dropped = persistent.other_shard_bytes
    made_at_end = matrix + other + to_make.scratch_bytes >= matrix_bytes + other_bytes - dropped + scratch
    if made_at_end:
        first_update[MATRIX_OPTIMIZER] += matrix
        first_update[OTHER_OPTIMIZER] += other
        first_update[WORKSPACE] += to_make.scratch_bytes
    else:
        first_update[GRADIENTS] -= dropped
        first_update[MATRIX_OPTIMIZER] += matrix_bytes
        first_update[OTHER_OPTIMIZER] += other_bytes
        first_update[WORKSPACE] += scratch
    cells: Cells = {
        INIT: init,
        FIRST_FORWARD_BACKWARD: first_step,
        FIRST_OPTIMIZER: first_update,
        FORWARD_BACKWARD: steady_step,
        OPTIMIZER: steady_update,
    }
    slack, with_state = persistent.slack_bytes, persistent.slack_bytes + persistent.stored.state_slack_bytes
    updating = (cast_bytes if cast else scratch) + OPEN_SEGMENTS_BYTES if persistent.replays else 0  # outside the graphs' pool
    add_overhead(
        cells,
        persistent.reserving,
        step,
        updating,
        (slack, slack + step.slack_bytes, with_state, with_state + step.slack_bytes, with_state),
    )
    where = {
        INIT: init_where,
        FIRST_FORWARD_BACKWARD: where_first,
        FIRST_OPTIMIZER: _first_update(to_make) if made_at_end else "Newton-Schulz with the momenta made so far",
        FORWARD_BACKWARD: step.where,
        OPTIMIZER: "Newton-Schulz of the largest matrix" if not cast and scratch else _update(cast_bytes),
    }
    return checked(cells), where


def _added(cells: PhaseCells, more: PhaseCells) -> PhaseCells:
    """The sum by column: both are copies of `NO_BYTES`, so their columns have one order, and a lookup of each would cost more."""
    return dict(zip(cells, map(add, cells.values(), more.values()), strict=True))


def _update(cast_bytes: int) -> str:
    return CAST if cast_bytes else "the update of all parameters"


def _first_update(to_make: LastPeak) -> str:
    return CAST if to_make.scratch_bytes else "all optimizer state made"


def _base(persistent: Persistent) -> PhaseCells:
    """Bytes of every phase, without those of optimizers."""
    cells = NO_BYTES.copy()
    cells[REPLICATED], cells[TENSOR_PARALLEL], cells[EXPERT_PARALLEL] = persistent.stored.resident_bytes
    cells[ACTIVATIONS] = persistent.buffer_bytes + persistent.input_bytes
    cells[COMMUNICATION] = persistent.receive_bytes
    cells[WORKSPACE] = persistent.workspace_bytes
    return cells
