"""The budget of a job that megarun runs: from a spec, its inventory and a layout to the cells of every distinct rank."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterable, Sequence
from itertools import chain

from megaplan.budget.chunk import Chunk
from megaplan.budget.evaluation import Evaluation, SlotParts
from megaplan.budget.occupancy import Occupancy, moments
from megaplan.budget.rank import Persistent, rank_cells
from megaplan.budget.reserve import device_budget
from megaplan.budget.split_backward import split_step_peak
from megaplan.budget.step import Lingering, StepPeak, accumulating_peak, step_peak
from megaplan.budget.values import Budget, RankBudget, StageBudget
from megaplan.devices import load_device
from megaplan.hosts.megarun.dims import is_pipelined
from megaplan.hosts.megarun.optimizer import Uneven, last_moment
from megaplan.inventory.tensors import Family, Inventory
from megaplan.layout.ranks import rank_coordinate
from megaplan.layout.values import Layout, Slot
from megaplan.schedule.actions import Orders
from megaplan.schedule.in_flight import receive_buffers
from megaplan.schedule.registry import SPLIT_BACKWARD, actions
from megaplan.spec.models import Mesh, Spec
from megaplan.tuples import new

WALKING = (Family.M, Family.R)
"""Their ranks of a CP group differ in what they hold while state is handed on."""


def megarun_budget(spec: Spec, inventory: Inventory, layout: Layout) -> Budget:
    """Bytes of every rank by phase and column.

    Args:
        spec: A checked spec whose host is megarun.
        inventory: Its parameter tensors.
        layout: Its slots.
    """
    device = device_budget(load_device(spec.device.name))
    usable = device.usable_bytes
    cp, walks = spec.mesh.cp, any(block.family in WALKING for block in inventory.layers)
    last = Evaluation(spec, inventory, layout)
    if cp > 1 and walks:
        ranks = _ranks(last, usable, {cp - 1}) + _ranks(Evaluation(spec, inventory, layout, turns=False), usable, set(range(cp - 1)))
    else:
        ranks = _ranks(last, usable, set(range(cp)))
    stages = tuple(
        new(StageBudget, (slot.index, slot.pp_rank, slot.chunk, slot.start, slot.stop, parts.parameters))
        for slot, parts in zip(layout.slots, last.slots, strict=True)
    )
    return Budget(device, stages, _merged(ranks), inventory.parameters, inventory.active_parameters)


def _ranks(evaluation: Evaluation, usable_bytes: int, places: Container[int]) -> list[RankBudget]:
    """The distinct ranks at these places of their CP groups."""
    spec, layout = evaluation.spec, evaluation.layout
    mesh, schedule, chunk_of = spec.mesh, spec.schedule, [slot.chunk for slot in layout.slots]
    occupied: Sequence[Sequence[Occupancy]] = ()
    orders: Orders = ()
    receives: Sequence[Sequence[tuple[int, int]]] = ()
    if is_pipelined(mesh):
        degrees = schedule.kind, mesh.pp, mesh.vpp, schedule.num_microbatches
        if schedule.kind in SPLIT_BACKWARD:
            orders = actions(*degrees)
        else:
            occupied = moments(*degrees, chunk_of, num_steps=schedule.distinct_steps)
        receives = receive_buffers(*degrees)
    of_rank = layout.by_rank()
    offsets = tuple([offset for offset in range(mesh.world_size // mesh.pp) if offset // mesh.tp % mesh.cp in places])
    ranks: list[RankBudget] = []
    for pp_rank in range(mesh.pp):
        own_slots = of_rank[pp_rank]
        owned = [evaluation.slots[slot.index] for slot in own_slots]
        chunks = [parts.chunk for parts in owned]
        num_receives = sum(forward + backward for forward, backward in receives[pp_rank]) if receives else 0
        persistent = _persistent(evaluation, own_slots, owned, num_receives)
        if orders:
            turns = len(own_slots) == 2 and own_slots[1].index == own_slots[0].index + 1
            order, count = orders[pp_rank] * schedule.distinct_steps, schedule.num_microbatches * schedule.distinct_steps
            peak = split_step_peak(chunks, order, chunk_of, count, turns=turns)
        elif occupied:
            peak = step_peak(chunks, occupied[pp_rank], _lingering(evaluation, own_slots, chunks))
        else:
            peak = accumulating_peak(chunks[0], schedule.microbatches_per_update)
        ranks += _distinct(mesh, pp_rank, persistent, peak, usable_bytes, offsets)
    return ranks


def slot_chunks(spec: Spec, inventory: Inventory, layout: Layout) -> tuple[Chunk, ...]:
    """The chunk that each slot is, in model order."""
    return tuple(parts.chunk for parts in Evaluation(spec, inventory, layout).slots)


def _lingering(evaluation: Evaluation, slots: Sequence[Slot], chunks: Sequence[Chunk]) -> Lingering:
    """1F1B's locals name the last output and the last sent gradient; the other schedules' actions return before the next one runs."""
    if evaluation.spec.schedule.kind != "1f1b":
        return Lingering()
    boundary, logits = evaluation.boundary_bytes, chunks[0].logits_bytes
    return Lingering(boundary if slots[0].index > 0 else 0, logits or boundary, logits)


def _persistent(evaluation: Evaluation, slots: Sequence[Slot], parts: Sequence[SlotParts], num_receives: int) -> Persistent:
    storages = [storage for part in parts for storage in part.storages]
    residents, _, _, _, matrix, other, unevens, _, _, casts_of, _, slacks, state_slacks, parameters = zip(*storages, strict=True)
    chunks, _, _, by_adamw, attend, routers, _ = zip(*parts, strict=True)
    casts = [cast for casts in casts_of for cast in casts]
    first, last = slots[0].index == 0, slots[-1].index == len(evaluation.layout.slots) - 1
    buffers = evaluation.rotary_bytes * sum(attend) + evaluation.router_sum_bytes * sum(routers)
    buffers += evaluation.further_loss_bytes if last else 0
    inputs = (evaluation.input_bytes if first else 0) + (evaluation.label_bytes if last else 0)
    return new(
        Persistent,
        (
            tuple(map(sum, zip(*residents, strict=True))),
            sum([chunk.shard_bytes for chunk in chunks]),
            sum(by_adamw) if evaluation.uses_muon else 0,
            sum(matrix),
            sum(other),
            tuple(chain.from_iterable(unevens)),
            _root_uneven(parts),
            storages,
            max([cast.scratch_bytes for cast in casts], default=0),
            last_moment(casts),
            buffers,
            evaluation.rotary_scratch_bytes if attend[-1] else 0,  # else another slot's parameters come after the tables
            inputs + evaluation.starts_bytes,
            num_receives * evaluation.boundary_bytes,
            evaluation.workspace_bytes,
            sum(slacks) + num_receives * evaluation.boundary_slack_bytes,
            sum(state_slacks),
            sum(parameters),
        ),
    )


def _root_uneven(parts: Sequence[SlotParts]) -> tuple[tuple[Uneven, int], ...]:
    found: list[tuple[Uneven, int]] = []
    for index, part in enumerate(parts):
        if part.root_uneven:
            later = sum([sum(storage.resident_bytes) for other in parts[index + 1 :] for storage in other.storages])
            found += [(tensor, later) for tensor in part.root_uneven]
    return tuple(found)


def _distinct(
    mesh: Mesh, pp_rank: int, persistent: Persistent, peak: StepPeak, usable_bytes: int, offsets: tuple[int, ...]
) -> list[RankBudget]:
    """The budgets of a pipeline rank's data, context and tensor ranks at these offsets: they differ where shards are uneven."""
    first = pp_rank * (mesh.world_size // mesh.pp)
    found: list[RankBudget] = []
    for alike in _alike(mesh, persistent.uneven, offsets) if persistent.uneven else (offsets,):
        coordinate = rank_coordinate(mesh, first + alike[0])
        states = persistent.states(coordinate["dp_shard"], alike[0] // (mesh.ep * mesh.etp) % mesh.efsdp)
        cells, where = rank_cells(persistent, peak, states)
        ranks = tuple([first + offset for offset in alike])
        found.append(new(RankBudget, (ranks, coordinate, persistent.parameters, cells, where, usable_bytes)))
    return found


def _alike(mesh: Mesh, uneven: Sequence[Uneven], offsets: Sequence[int]) -> Iterable[Sequence[int]]:
    """The offsets that hold the same of every tensor."""
    dense = sorted([bound for tensor in uneven if not tensor.expert for bound in tensor.boundaries])
    expert = sorted([bound for tensor in uneven if tensor.expert for bound in tensor.boundaries])
    dense_place = [bisect_right(dense, index) for index in range(mesh.dp_shard)]
    expert_place = [bisect_right(expert, index) for index in range(mesh.efsdp)]
    inner, expert_inner = mesh.cp * mesh.tp, mesh.ep * mesh.etp
    places: dict[tuple[int, int], list[int]] = {}
    for offset in offsets:
        place = (dense_place[offset // inner % len(dense_place)], expert_place[offset // expert_inner % len(expert_place)])
        places.setdefault(place, []).append(offset)
    return places.values()


def _merged(ranks: list[RankBudget]) -> tuple[RankBudget, ...]:
    """Largest peak first; budgets of different pipeline ranks that are equal become one."""
    by_peak: dict[int, list[RankBudget]] = {}  # only equal peaks can have equal cells
    for rank in sorted(ranks, key=lambda rank: rank.ranks):
        alike = by_peak.setdefault(rank.peak_bytes, [])
        for index, twin in enumerate(alike):
            if twin.cells == rank.cells and twin.parameters == rank.parameters:
                alike[index] = twin._replace(ranks=tuple(sorted((*twin.ranks, *rank.ranks))))
                break
        else:
            alike.append(rank)
    return tuple(rank for peak in sorted(by_peak, reverse=True) for rank in by_peak[peak])
