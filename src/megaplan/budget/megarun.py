"""The budget of a job that megarun runs: cells of every distinct rank, from a spec, its inventory and a layout."""

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from megaplan.budget.chunk import Chunk
from megaplan.budget.evaluation import BlockMemo, Evaluation, SlotParts
from megaplan.budget.init import SlotInit, init_peak
from megaplan.budget.peaks import WORK_OF_STAGE, StageSpans
from megaplan.budget.rank import Persistent, all_offsets, equal_runs, rank_cells, reserving
from megaplan.budget.step import HeldBySchedule, StepPeak, step_peak
from megaplan.budget.values import Budget, KeptBytes, RankBudget, StageBudget, device_budget, merged_ranks
from megaplan.families.registry import FAMILIES
from megaplan.hosts.allocator import slack_bytes
from megaplan.hosts.megarun.streams import SHARDS, ShardsPool
from megaplan.hosts.values import HostBytes
from megaplan.inventory.tensors import Inventory
from megaplan.layout.ranks import Layout, Slot, rank_coordinate
from megaplan.schedules.in_flight import receive_buffers, shared_buffers
from megaplan.schedules.states import RankState, rank_states, sequential_states
from megaplan.spec.host import device_of
from megaplan.spec.models import Spec
from megaplan.tuples import new

GPIPE, ONE_F_ONE_B = "gpipe", "1f1b"
WORK_OF_LAYER = 6
"""Work of a layer on one rank of its stage, in steps of about a microsecond; twice that on ranks with other shards."""
SEQUENTIAL_FAMILIES = frozenset(family.letter for family in FAMILIES.values() if family.in_pieces)
"""Letters for which the ranks of a CP group differ in memory while state is relayed."""


def megarun_budget(
    spec: Spec, inventory: Inventory, layout: Layout, *, padded: bool = True, shards: ShardsPool = SHARDS, listed: bool = True
) -> Budget:
    """Bytes of every rank by phase and column.

    Args:
        spec: A checked spec whose host is megarun.
        inventory: Parameter tensors of the spec.
        layout: Slots of the spec.
        padded: True if shards are padded, as FSDP2 does; the difference is the cost of padding (`megaplan.budget.fit`).
        shards: Pool of gradient shards; another than the runtime's own describes older versions.
        listed: False to list only the first of the ranks with equal cells.
    """
    device = device_budget(device_of(spec.device), spec.mesh.world_size)
    usable, counts = device.usable_bytes, schedule_counts(spec)
    evaluations = evaluate(spec, inventory, layout, padded=padded, shards=shards)
    ranks = [
        found
        for evaluation, places in evaluations
        for found in stage_ranks(evaluation, usable, places, counts, range(layout.pp), listed=listed)
    ]
    last, _ = evaluations[0]
    stages = tuple(
        new(StageBudget, (slot.index, slot.pp_rank, slot.chunk, slot.start, slot.stop, last.parts(slot).stored.whole_parameters))
        for slot in layout.slots
    )
    return Budget(device, stages, merged_ranks(ranks), inventory.parameters, inventory.active_parameters)


def evaluate(
    spec: Spec,
    inventory: Inventory,
    layout: Layout,
    *,
    padded: bool = True,
    memo: BlockMemo | None = None,
    shards: ShardsPool = SHARDS,
) -> list[tuple[Evaluation, Container[int]]]:
    """The evaluations of a job, each with the places in a CP group for which it holds, the last place first."""
    cp, last = spec.mesh.cp, Evaluation(spec, inventory, layout, padded=padded, memo=memo, shards=shards)
    if cp == 1 or not any(block.family in SEQUENTIAL_FAMILIES for block in inventory.layers):
        return [(last, range(cp))]
    others = Evaluation(spec, inventory, layout, is_last_cp_rank=False, padded=padded, memo=memo, shards=shards)
    return [(last, {cp - 1}), (others, range(cp - 1))]


class ScheduleCounts(NamedTuple):
    """Counts of a schedule for every pp rank, whatever its layers: its states, and receive buffers by chunk (none without a pipeline)."""

    points: Sequence[Sequence[RankState]]
    receives: Sequence[Sequence[tuple[int, int]]] = ()


def schedule_counts(spec: Spec) -> ScheduleCounts:
    """The schedule's part of a budget, the same for every layout of the spec."""
    mesh, schedule = spec.mesh, spec.schedule
    if not mesh.is_pipelined:
        return ScheduleCounts([sequential_states(schedule.microbatches_per_update)])
    degrees = schedule.kind, mesh.pp, mesh.vpp, schedule.num_microbatches
    buffers = shared_buffers if spec.host.kind.trained else receive_buffers
    return ScheduleCounts(rank_states(*degrees, num_steps=schedule.distinct_steps, interleaved=spec.interleaves_pairs), buffers(*degrees))


def stage_ranks(
    evaluation: Evaluation,
    usable_bytes: int,
    places: Container[int],
    counts: ScheduleCounts,
    pp_ranks: Iterable[int],
    *,
    listed: bool = True,
) -> list[RankBudget]:
    """The distinct ranks of some pp ranks, at these places of their CP groups; unless `listed`, only the first of several equal ranks."""
    receives, of_rank = counts.receives, evaluation.layout.by_rank()
    ranks: list[RankBudget] = []
    for pp_rank in pp_ranks:
        own_slots = of_rank[pp_rank]
        owned = [evaluation.parts(slot) for slot in own_slots]
        chunks = [parts.chunk for parts in owned]
        persistent = _persistent(evaluation, own_slots, owned, receives[pp_rank] if receives else ())
        held = held_by_schedule(evaluation, chunks)
        points = counts.points[pp_rank]
        peak = step_peak(chunks, points, held, evaluation.workspace_bytes)
        away = kept_on_host(chunks, points) if evaluation.spec.host.activation_offload else 0
        ranks += _distinct(evaluation, pp_rank, persistent, peak, away, usable_bytes, places, listed=listed)
    return ranks


def kept_on_host(chunks: Sequence[Chunk], points: Sequence[RankState]) -> int:
    """Host memory of the layers of microbatches in flight: for each size, the number that exist at the same time."""
    of_chunks = [Counter(chunk.on_host) for chunk in chunks]
    sizes = {size for of in of_chunks for size in of}
    counts = {point.in_flight for point in points}

    def most(size: int) -> int:
        return max([sum([number * of[size] for number, of in zip(each, of_chunks, strict=True)]) for each in counts])

    return sum([size * most(size) for size in sizes])


class MegarunPeaks:
    """The peaks of some pipeline ranks of a layout, and their work."""

    def __init__(self, spec: Spec, inventory: Inventory, memo: BlockMemo | None) -> None:
        """`memo` has blocks of other specs of a search."""
        self._of_job = spec, inventory, memo
        self._counts = schedule_counts(spec)
        self._evaluated: list[tuple[Evaluation, Container[int]]] = []

    def __call__(self, layout: Layout, stages: Sequence[StageSpans]) -> tuple[list[int], int]:
        """`stages` are pipeline ranks with their spans in the layout."""
        spec, inventory, memo = self._of_job
        self._evaluated = self._evaluated or evaluate(spec, inventory, layout, memo=memo)
        evaluations = [(evaluation.of_layout(layout), places) for evaluation, places in self._evaluated]
        peaks, work = [], 0
        for rank, spans in stages:
            found = [
                each
                for evaluation, places in evaluations
                for each in stage_ranks(evaluation, 0, places, self._counts, (rank,), listed=False)
            ]
            peaks.append(max([each.peak_bytes for each in found]))
            work += WORK_OF_STAGE + WORK_OF_LAYER * (2 * len(found) - 1) * sum([stop - start for start, stop in spans])
        return peaks, work


def slot_chunks(spec: Spec, inventory: Inventory, layout: Layout) -> tuple[Chunk, ...]:
    """The chunk of each slot, in model order."""
    evaluation = Evaluation(spec, inventory, layout)
    return tuple(evaluation.parts(slot).chunk for slot in layout.slots)


def megarun_kept_bytes(spec: Spec, inventory: Inventory, layout: Layout) -> tuple[KeptBytes, ...]:
    """Bytes that one microbatch keeps on each slot, in model order."""
    return tuple(KeptBytes(chunk.saved_bytes, chunk.waiting_bytes) for chunk in slot_chunks(spec, inventory, layout))


def held_by_schedule(evaluation: Evaluation, chunks: Sequence[Chunk]) -> HeldBySchedule:
    """Tensors that local variables of 1F1B's and GPipe's step keep; actions of the other schedules return before the next one runs."""
    kind = evaluation.spec.schedule.kind
    if kind not in (GPIPE, ONE_F_ONE_B) or not evaluation.policy.pipelined:
        return HeldBySchedule()
    (chunk,) = chunks
    return new(HeldBySchedule, (chunk.input_bytes, chunk.logits_bytes or chunk.output_bytes, chunk.logits_bytes, kind == GPIPE))


def _persistent(
    evaluation: Evaluation, slots: tuple[Slot, ...], parts: Sequence[SlotParts], receives: Sequence[tuple[int, int]]
) -> Persistent:
    stored, building, buffers = evaluation.of_rank(slots), [], 0
    chunks = [of_slot.chunk for of_slot in parts]
    ends = [evaluation.layout.bounds(slot) for slot in slots]
    reads_tokens, reads_labels = (any(of_slots) for of_slots in zip(*ends, strict=True))
    for (is_first, _), (_, of_slot, step_sums) in zip(ends, parts, strict=True):
        own = step_sums + (evaluation.further_loss_bytes if of_slot.is_last else 0)
        # the table of an encoder is made before the others
        tables = evaluation.tower_rotary_tables * is_first + evaluation.rotary_tables * of_slot.attends
        building.append(new(SlotInit, (of_slot.resident_bytes, of_slot.blocks if of_slot.uneven else (), of_slot.layers, own, tables)))
        buffers += own + sum([table.num_bytes for table in tables])
    buffers_of = [(chunk.input_bytes, chunk.output_bytes) for chunk in chunks]
    received = [each for counts, sizes in zip(receives, buffers_of, strict=False) for each in zip(counts, sizes, strict=True)]
    inputs = (evaluation.input_bytes if reads_tokens else 0) + (evaluation.label_bytes if reads_labels else 0)
    return new(
        Persistent,
        (
            stored,
            stored.adamw_shard_bytes if evaluation.uses_muon else 0,
            building,
            buffers,
            inputs + evaluation.every_stage_bytes,
            sum([count * size for count, size in received]),
            evaluation.workspace_bytes,
            stored.slack_bytes + sum([count * slack_bytes([size]) for count, size in received]),
            reserving(chunks, stored, evaluation.shards, num_reductions=evaluation.num_reductions, expandable=evaluation.expands_segments),
            evaluation.replays,
            evaluation.replays_update,
            evaluation.graph_bytes,
            evaluation.workspace_bytes if evaluation.replays else 0,
        ),
    )


def _distinct(
    evaluation: Evaluation,
    pp_rank: int,
    persistent: Persistent,
    peak: StepPeak,
    away_bytes: int,
    usable_bytes: int,
    places: Container[int],
    *,
    listed: bool,
) -> list[RankBudget]:
    """The different budgets among a pipeline rank's data, context and tensor ranks at these places; uneven shards make them differ."""
    mesh, stored = evaluation.spec.mesh, persistent.stored
    first = pp_rank * (mesh.world_size // mesh.pp)
    found: list[RankBudget] = []
    key = frozenset([id(storage) for storage, _ in stored.uneven])
    if key not in evaluation.equal_ranks:
        evaluation.equal_ranks[key] = equal_runs(mesh, [tensor for storage, _ in stored.uneven for tensor in storage.uneven], places)
    for run in evaluation.equal_ranks[key]:
        coordinate = rank_coordinate(mesh, first + run.first)
        place = coordinate["dp_shard"], run.first // (mesh.ep * mesh.etp) % mesh.efsdp
        updates = stored.updates(*place)
        cells, where = rank_cells(persistent, peak, init_peak(persistent.slots, *place), updates)
        offsets = all_offsets(mesh, run, places) if listed else [run.first]
        ranks = tuple([first + offset for offset in offsets])
        host = HostBytes(updates.host_bytes + away_bytes, 0)
        found.append(new(RankBudget, (ranks, coordinate, stored.parameters, cells, where, usable_bytes, host)))
    return found
