"""One rank of the pipeline: its persistent state, and the cells of every phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
)
from megaplan.columns import Column, Phase
from megaplan.hosts.megarun.allocator import OPEN_SEGMENTS_BYTES
from megaplan.hosts.megarun.optimizer import LastMoment, MatrixMoments, Uneven, in_turn
from megaplan.hosts.megarun.storage import OWNER_COLUMNS, BlockStorage

INIT, FIRST_FORWARD_BACKWARD, FIRST_OPTIMIZER, FORWARD_BACKWARD, OPTIMIZER = Phase
RESIDENT_COLUMNS = tuple(OWNER_COLUMNS.values())
MomentCells = dict[Column, int]
CAST = "the update beside a gradient cast for it"


class States(NamedTuple):
    """What depends on a rank's place among those that share its parameters.

    Attributes:
        matrix_bytes: Moments of the matrix group.
        other_bytes: Moments of the rest, and step counters.
        padding_scratch_bytes: Beside all parameters while a short shard of a slot's own group is padded; later slots' are off it.
        muon: Where Muon's steps peak.
    """

    matrix_bytes: int
    other_bytes: int
    padding_scratch_bytes: int
    muon: MatrixMoments


class Persistent(NamedTuple):
    """What a pipeline rank holds outside microbatches, equal for all its data ranks.

    Attributes:
        resident_bytes: Parameter shards: of replicated, tensor-parallel and expert-parallel tensors.
        shard_bytes: Gradient shards.
        other_shard_bytes: Those of groups that hold nothing but AdamW's tensors, which its step drops before Muon's runs; 0 without Muon.
        matrix_state_bytes: Muon's moments of evenly sharded tensors.
        other_state_bytes: AdamW's.
        uneven: Tensors that shard unevenly.
        root_uneven: Those of the slots' own groups, which are padded when all else of their slot is in place, each with the bytes of the
            parameters of later slots.
        storages: Of the rank's blocks, in the order they are updated.
        cast_bytes: The largest gradient that is cast for AdamW.
        first_other: The peak of AdamW's first step.
        buffer_bytes: Rotary tables.
        buffer_scratch_bytes: What the last of them needs while it is computed.
        input_bytes: Token ids, labels and document starts of a step.
        receive_bytes: Receive buffers.
        workspace_bytes: Of GEMM libraries.
        slack_bytes: Allocator rounding of shards and buffers.
        state_slack_bytes: Allocator rounding of moments.
        parameters: Elements after TP and EP.
    """

    resident_bytes: tuple[int, ...]
    shard_bytes: int
    other_shard_bytes: int
    matrix_state_bytes: int
    other_state_bytes: int
    uneven: tuple[Uneven, ...]
    root_uneven: tuple[tuple[Uneven, int], ...]
    storages: Sequence[BlockStorage]
    cast_bytes: int
    first_other: LastMoment
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
        padding = [tensor.padding_scratch_bytes(dense_index) - later for tensor, later in self.root_uneven]
        muon = in_turn([each.even_moments or each.matrix_moments(dense_index, expert_index) for each in self.storages])
        return States(matrix, other, max(padding) if padding else 0, muon)


def rank_cells(persistent: Persistent, step: StepPeak, states: States) -> tuple[Cells, dict[Phase, str]]:
    """Cells of every phase of the data ranks of a pipeline rank that have these states, and where each phase's peak lies."""
    matrix_bytes, other_bytes, padding_bytes, muon = states
    scratch, first_momenta, first_scratch, momenta = muon
    base = _base(persistent)
    init = base.copy()
    padding = padding_bytes > persistent.buffer_bytes + persistent.buffer_scratch_bytes
    init[COMMUNICATION] = 0
    init[WORKSPACE] = padding_bytes if padding else persistent.buffer_scratch_bytes
    init[ACTIVATIONS] = 0 if padding else persistent.buffer_bytes

    first_step = {column: size + step.cells[column] for column, size in base.items()}
    first_step[OVERHEAD] += step.slack_bytes
    steady_step = first_step.copy()
    steady_step[OVERHEAD] += persistent.state_slack_bytes
    steady_step[MATRIX_OPTIMIZER] += matrix_bytes
    steady_step[OTHER_OPTIMIZER] += other_bytes

    first_update = base
    first_update[OVERHEAD] += persistent.state_slack_bytes
    first_update[GRADIENTS] += persistent.shard_bytes
    # AdamW updates first; its gradients are gone where they fill a buffer of their own when Muon's iterations begin
    steady_update = first_update.copy()
    to_make, dropped, cast_bytes = persistent.first_other, persistent.other_shard_bytes, persistent.cast_bytes
    cast = cast_bytes > scratch - dropped  # AdamW's update, beside every gradient, is the higher
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
        INIT: "padding of a short shard" if padding else "parameters in place",
        FIRST_FORWARD_BACKWARD: step.where,
        FIRST_OPTIMIZER: _first_update(to_make) if made_at_end else "Newton-Schulz beside the momenta made so far",
        FORWARD_BACKWARD: step.where,
        OPTIMIZER: "Newton-Schulz of the largest matrix" if not cast and scratch else _update(cast_bytes),
    }
    return cells, where


def _update(cast_bytes: int) -> str:
    return CAST if cast_bytes else "the update of all parameters"


def _first_update(to_make: LastMoment) -> str:
    return CAST if to_make.scratch_bytes else "all moments made"


def _base(persistent: Persistent) -> MomentCells:
    """What is there in every phase, all but what optimizers hold."""
    cells = NO_BYTES.copy()
    cells.update(zip(RESIDENT_COLUMNS, persistent.resident_bytes, strict=True))
    cells[ACTIVATIONS] = persistent.buffer_bytes + persistent.input_bytes
    cells[COMMUNICATION] = persistent.receive_bytes
    cells[WORKSPACE] = persistent.workspace_bytes
    cells[OVERHEAD] = persistent.slack_bytes + OPEN_SEGMENTS_BYTES
    return cells
