"""One rank of the pipeline: its persistent state, and the cells of every phase."""

from collections.abc import Container, Iterable, Sequence
from itertools import chain, pairwise
from operator import add
from typing import NamedTuple

from megaplan.budget.chunk import Chunk
from megaplan.budget.init import InitPeak, SlotInit
from megaplan.budget.step import StepPeak
from megaplan.budget.stored import RankStorage, Updates
from megaplan.budget.values import (
    ACTIVATIONS,
    COMMUNICATION,
    FEATURES,
    GRADIENTS,
    MATRIX_OPTIMIZER,
    NO_BYTES,
    OTHER_OPTIMIZER,
    OVERHEAD,
    ROUTING,
    WORKSPACE,
    Cells,
    checked,
)
from megaplan.columns import Column, Phase
from megaplan.hosts.allocator import LARGE_BUFFER_BYTES, OPEN_SEGMENTS_BYTES, ROUND_LARGE_BYTES
from megaplan.hosts.megarun.sizes import LastPeak, Uneven
from megaplan.hosts.megarun.storage import OWNER_COLUMNS
from megaplan.hosts.megarun.streams import GroupPools, Reserving, ShardsPool
from megaplan.spec.models import Mesh
from megaplan.tuples import new


class EqualRanks(NamedTuple):
    """Ranks with equal bytes.

    Attributes:
        first: The first offset.
        stop: Offset after the last one of the first replica.
    """

    first: int
    stop: int


def equal_runs(mesh: Mesh, uneven: Iterable[Uneven], places: Container[int], shards: int | None = None) -> tuple[EqualRanks, ...]:
    """The runs of offsets whose ranks hold the same bytes of every tensor.

    Args:
        mesh: Degrees.
        uneven: Tensors of which data ranks hold different bytes.
        places: Places in the CP group of the requested ranks.
        shards: Ranks that share a dense tensor; `dp_shard` by default.
    """
    size = mesh.dp_shard * mesh.cp * mesh.tp // (shards or mesh.dp_shard), mesh.ep * mesh.etp
    return runs_between(mesh, [bound * size[tensor.expert] for tensor in uneven for bound in tensor.boundaries], places)


def runs_between(mesh: Mesh, offsets: Iterable[int], places: Container[int]) -> tuple[EqualRanks, ...]:
    """The runs of ranks at these places, between offsets of the first replica where ranks begin to differ."""
    last = mesh.dp_shard * mesh.cp * mesh.tp
    edges = sorted({0, last, *[offset for offset in offsets if offset < last]})
    found = ((_first(mesh, start, stop, places), stop) for start, stop in pairwise(edges))
    return tuple(EqualRanks(first, stop) for first, stop in found if first < stop)


def all_offsets(mesh: Mesh, run: EqualRanks, places: Container[int]) -> list[int]:
    """Every offset of a run, in every replica."""
    replica, tp, cp = mesh.dp_shard * mesh.cp * mesh.tp, mesh.tp, mesh.cp
    if all(place in places for place in range(cp)):
        own = list(range(run.first, run.stop))
    else:
        own = [offset for offset in range(run.first, run.stop) if offset // tp % cp in places]
    return own if mesh.dp_replicate == 1 else [base + offset for base in range(0, replica * mesh.dp_replicate, replica) for offset in own]


def _first(mesh: Mesh, start: int, stop: int, places: Container[int]) -> int:
    """The first offset at one of the places; `stop` or larger if there is no such index."""
    while start < stop and start // mesh.tp % mesh.cp not in places:
        start = (start // mesh.tp + 1) * mesh.tp
    return start


PER_MILLE = 1000
NO_ROUNDING = (0, 0, 0, 0, 0)
EXPANDABLE_SHARE, SEGMENTS_SHARE = 15, 70
"""Fitted: the unused part of the computing stream's pool, in per mille of activations, with expandable segments and without."""
PLACE_PERCENT = 40
"""Fitted: a request above this percentage of the free bytes fits into none of the free pieces and grows the pool (in replays 38 to 48).
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
    if num_reductions > 1 or pools.recast_bytes:  # outputs are not the shards; with replicas they are kept until the backward ends
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
    if not lasting:  # the next microbatch's backward reuses memory of the first one's
        missing += sum([group.reduced_bytes for group in groups if group.reduced_bytes > left])
        missing = max(missing - pools.shard_bytes, 0) if num_reductions > 1 else missing
    return new(Reserving, (pools.gather_bytes + lasting + passing, open_bytes, missing, SEGMENTS_SHARE, (), 0, True))


def _last_requests(chunk: Chunk, *, separate: bool, later: bool) -> tuple[tuple[int, ...], int]:
    """Allocator requests of the reduction of a slot's own parameters at the end of a backward, and the live bytes before it.

    Only without a pipeline.
    """
    if chunk.policy.pipelined:
        return (), 0
    root = chunk.root
    live = root.made_bytes + (0 if separate else chunk.shard_bytes if later else chunk.shard_bytes - root.shard_bytes)
    return ((root.reduce_bytes,) if separate or later else (root.reduce_bytes, root.reduced_bytes)), live


def _own_segments(sizes: Iterable[int], largest: int = 0) -> int:
    """Segments of consecutive requests, each freed before the next: a request needs one if it exceeds all earlier ones and `largest`."""
    total = 0
    for size in sizes:
        if size > largest:
            total, largest = total + size + -size % ROUND_LARGE_BYTES, size
    return total


def add_overhead(cells: Cells, reserving: Reserving, step: StepPeak, outside_graphs: int, rounding: Sequence[int]) -> None:
    """Fill the overhead column: reserved less allocated, phase by phase.

    Args:
        cells: Cells of a rank, all except overhead.
        reserving: Reserving of the rank.
        step: Peaks of its steps.
        outside_graphs: Bytes that the optimizer allocates while the memory of recorded microbatches is a separate pool; else 0.
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
        reserved = wanted if wanted > reserved else reserved  # `max` costs Python 3.11 more than the rest of the line
        phase[OVERHEAD] = reserved - allocated


def _beyond(phase: dict[Column, int], reserving: Reserving, peak: StepPeak) -> int:
    """Bytes that a step reserves beyond its allocated peak and rounding."""
    other_pool_bytes, open_bytes, missing, share, requests, live, _ = reserving
    grown, free = 0, peak.total - peak.late_bytes - live  # allocated at the end of a backward; by then from the computing stream's pool
    for size in requests:
        if size * 100 > free * PLACE_PERCENT:
            grown += size
        else:
            free -= size
    unused = (phase[ACTIVATIONS] + phase[FEATURES] + phase[ROUTING]) * share // PER_MILLE
    return open_bytes + max(other_pool_bytes - peak.other_pool_bytes, 0) + missing + unused + max(grown - peak.late_bytes, 0)


INIT, FIRST_FORWARD_BACKWARD, FIRST_OPTIMIZER, FORWARD_BACKWARD, OPTIMIZER = Phase
REPLICATED, TENSOR_PARALLEL, EXPERT_PARALLEL = OWNER_COLUMNS.values()
PhaseCells = dict[Column, int]
CAST = "the update with a gradient cast for it"


class Persistent(NamedTuple):
    """Bytes of a pipeline rank outside microbatches, equal for all its data ranks.

    Attributes:
        stored: Storage of its parameters.
        other_shard_bytes: Gradient shards of groups that hold only AdamW's tensors, which its step drops before Muon's runs; 0
            without Muon.
        slots: Tensors that building each slot of the rank allocates.
        buffer_bytes: Rotary tables and sums of a step.
        input_bytes: Token ids, labels and document starts of a step.
        receive_bytes: Receive buffers.
        workspace_bytes: Workspace of GEMM libraries.
        slack_bytes: Allocator rounding of shards and buffers.
        reserving: Bytes that the allocator reserves in addition to the allocated bytes of a step.
        replays: True if microbatches are replayed as CUDA graphs: their gradients stay allocated, and their memory is a separate pool.
        replays_update: True if the update is also a graph, with memory from that pool.
        graph_bytes: Tensors that graphs have in addition to eager steps.
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
    replays_update: bool = False
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
    matrix_bytes, other_bytes, to_make, momenta, scratch, state_slack, _, buffer = updates
    cast_bytes = to_make.largest_bytes
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
    steady_update, cast = _with_state(first_update, updates, 0 if persistent.replays else persistent.other_shard_bytes)
    steady_update[WORKSPACE] += persistent.graph_workspace_bytes
    steady_update[ACTIVATIONS] += persistent.graph_bytes

    matrix, other = matrix_bytes - momenta - to_make.matrix_bytes, other_bytes - to_make.other_bytes
    dropped = persistent.other_shard_bytes
    made_at_end = matrix + other + to_make.scratch_bytes >= matrix_bytes + other_bytes - dropped + scratch
    if persistent.stored.offload:  # all state is made before the update
        first_update, _ = _with_state(first_update, updates, dropped)
    elif made_at_end:
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
    slack, with_state = persistent.slack_bytes, persistent.slack_bytes + state_slack
    updating = OPEN_SEGMENTS_BYTES if persistent.replays else 0  # outside the graphs' pool
    if persistent.replays and not persistent.replays_update:
        updating += (cast_bytes if cast else scratch) + buffer
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


def _with_state(cells: PhaseCells, updates: Updates, dropped: int) -> tuple[PhaseCells, bool]:
    """The peak of an update after all state has been created, and True if it is AdamW's cast, not an iteration of Muon.

    AdamW updates first; if its gradients have their own buffer of `dropped` bytes, they are freed when Muon's iterations begin.
    """
    found, cast_bytes = cells.copy(), updates.adamw.largest_bytes
    cast = cast_bytes > updates.scratch_bytes - dropped  # AdamW's update has the larger peak, because every gradient is allocated
    if not cast:
        found[GRADIENTS] -= dropped
    found[WORKSPACE] += (cast_bytes if cast else updates.scratch_bytes) + updates.buffer_bytes
    found[MATRIX_OPTIMIZER] += updates.matrix_bytes
    found[OTHER_OPTIMIZER] += updates.other_bytes
    return found, cast


def _added(cells: PhaseCells, more: PhaseCells) -> PhaseCells:
    """The sum by column: both are copies of `NO_BYTES`, so their columns have one order, and a lookup of each would cost more."""
    return dict(zip(cells, map(add, cells.values(), more.values()), strict=True))


def _update(cast_bytes: int) -> str:
    return CAST if cast_bytes else "the update of all parameters"


def _first_update(to_make: LastPeak) -> str:
    return CAST if to_make.scratch_bytes else "all optimizer state made"


def _base(persistent: Persistent) -> PhaseCells:
    """Bytes of every phase except the optimizer's."""
    cells = NO_BYTES.copy()
    cells[REPLICATED], cells[TENSOR_PARALLEL], cells[EXPERT_PARALLEL] = persistent.stored.resident_bytes
    cells[ACTIVATIONS] = persistent.buffer_bytes + persistent.input_bytes
    cells[COMMUNICATION] = persistent.receive_bytes
    cells[WORKSPACE] = persistent.workspace_bytes
    return cells
