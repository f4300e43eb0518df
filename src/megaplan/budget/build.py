"""`build_budget`: from a spec, its inventory and a layout to the cells of every distinct rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megaplan.budget.chunk import NOTHING, Chunk, Policy, Unit
from megaplan.budget.occupancy import enough_microbatches, occupancies
from megaplan.budget.rank import Persistent, RankCells
from megaplan.budget.reserve import device_budget
from megaplan.budget.step import Lingering, StepPeak, accumulating_peak, step_peak
from megaplan.budget.values import Budget, DeviceBudget, RankBudget, StageBudget
from megaplan.columns import Column
from megaplan.devices import Device, load_device
from megaplan.hosts.megarun.allocator import slack_bytes
from megaplan.hosts.megarun.boundaries import boundary_bytes, receive_bytes
from megaplan.hosts.megarun.buffers import rotary_bytes, rotary_scratch_bytes, token_bytes
from megaplan.hosts.megarun.dims import Dims, is_pipelined, local_dims
from megaplan.hosts.megarun.ledger import accumulates_in_place, block_bytes, make_of
from megaplan.hosts.megarun.optimizer import Cast, MatrixScratch, Uneven, last_moment, uses_muon
from megaplan.hosts.megarun.parts import BlockBytes
from megaplan.hosts.megarun.storage import BlockStorage, block_storage
from megaplan.inventory.tensors import Block, Family, Inventory
from megaplan.layout.ranks import rank_coordinate
from megaplan.layout.values import Layout, Slot
from megaplan.schedule.actions import Orders
from megaplan.schedule.in_flight import receive_buffers
from megaplan.schedule.registry import actions
from megaplan.spec.models import Mesh, Spec


class _Evaluation:
    """One call's working values: each distinct block is evaluated once."""

    def __init__(self, spec: Spec, inventory: Inventory, layout: Layout) -> None:
        self.spec, self.inventory, self.layout = spec, inventory, layout
        self.dims: Dims = local_dims(spec)
        self.outside = dict(inventory.outside)
        blocks = (*inventory.layers, *self.outside.values())
        distinct = {id(block): block for block in blocks}
        self.elements = {key: block.elements for key, block in distinct.items()}
        self.parameters = sum([self.elements[id(block)] for block in blocks])
        self.in_place = all(accumulates_in_place(spec, block) for block in distinct.values())
        self.boundary_bytes = boundary_bytes(self.dims)
        self._sums: dict[tuple[int, bool, str], BlockBytes] = {}
        self._units: dict[tuple[int, bool, str, bool, bool], Unit] = {}
        self._storages: dict[int, BlockStorage] = {}

    def block(self, name: str) -> Block:
        """The inventory's block of a name."""
        return self.inventory.layers[int(name[7:])] if name.startswith("layers.") else self.outside[name]

    def unit(self, name: str, block: Block, *, tied: bool, owned: bool) -> Unit:
        """A block as a unit.

        Args:
            name: In the inventory; `head` for a tied head.
            block: The inventory's.
            tied: Whether another unit or a copy stands for its parameters.
            owned: Whether its input is a storage of the chunk that it would keep.
        """
        make = make_of(self.spec, name, block)
        key = (*make, tied, owned)
        found = self._units.get(key)
        if found is None:
            sums = self._sums.get(make)
            if sums is None:
                sums = self._sums[make] = block_bytes(self.spec, self.dims, name, block)
            storage = None if tied else self.storage(block)
            kept = self.boundary_bytes if sums.keeps_input and owned else 0
            found = self._units[key] = Unit(sums, storage, name.startswith("layers."), kept)
        return found

    def storage(self, block: Block) -> BlockStorage:
        """Storage of a block."""
        found = self._storages.get(id(block))
        if found is None:
            found = self._storages[id(block)] = block_storage(self.spec, block)
        return found


@dataclass(frozen=True, slots=True)
class _SlotParts:
    chunk: Chunk
    storages: tuple[BlockStorage, ...]
    root_uneven: tuple[Uneven, ...]
    attends: bool


def build_budget(spec: Spec, inventory: Inventory, layout: Layout) -> Budget:
    """Bytes of every rank by phase and column.

    Args:
        spec: A checked spec.
        inventory: Its parameter tensors.
        layout: Its slots.

    Returns:
        The budget; ranks with equal cells are listed together, largest peak first.

    Raises:
        MegaplanError: MP311 … MP313 if the schedule cannot run on these degrees; MP504 if the device is unknown.
    """
    evaluation, device = _Evaluation(spec, inventory, layout), load_device(spec.device.name)
    slots = [_slot_parts(evaluation, slot) for slot in layout.slots]
    mesh, schedule = spec.mesh, spec.schedule
    orders: Orders = ()
    enough = schedule.num_microbatches
    receives: Sequence[Sequence[tuple[int, int]]] = ()
    if is_pipelined(mesh):
        enough = enough_microbatches(schedule.kind, mesh.pp, schedule.num_microbatches)
        orders = actions(schedule.kind, mesh.pp, mesh.vpp, enough)
        receives = receive_buffers(schedule.kind, mesh.pp, mesh.vpp, schedule.num_microbatches)
    chunk_of = [slot.chunk for slot in layout.slots]
    usable = device_budget(device)
    ranks: list[RankBudget] = []
    for pp_rank in range(mesh.pp):
        owned = [slots[slot.index] for slot in layout.of_rank(pp_rank)]
        chunks = [parts.chunk for parts in owned]
        num_receives = sum(forward + backward for forward, backward in receives[pp_rank]) if receives else 0
        persistent = _persistent(evaluation, device, layout.of_rank(pp_rank), owned, num_receives)
        if orders:
            moments = occupancies(orders[pp_rank], mesh.vpp, chunk_of, enough)
            peak = step_peak(chunks, moments, _lingering(evaluation, layout.of_rank(pp_rank), chunks))
        else:
            peak = accumulating_peak(chunks[0], schedule.num_microbatches)
        ranks += _distinct(mesh, pp_rank, persistent, peak, usable)
    stages = tuple(
        StageBudget(slot.index, slot.pp_rank, slot.chunk, slot.start, slot.stop, _elements(evaluation, slot)) for slot in layout.slots
    )
    return Budget(usable, stages, _merged(ranks), evaluation.parameters, inventory.active_parameters)


def _slot_parts(evaluation: _Evaluation, slot: Slot) -> _SlotParts:
    spec, tied_head = evaluation.spec, evaluation.inventory.tied
    is_last = slot.index == len(evaluation.layout.slots) - 1
    names, units, storages, copies = [], [], [], NOTHING
    owned = slot.index == 0  # whether the stream so far is a storage of this chunk, not a receive buffer
    attends = False
    root_uneven: tuple[Uneven, ...] = ()
    for name in (*slot.blocks, "head") if is_last and tied_head else slot.blocks:
        tied = name == "head" and tied_head
        block = evaluation.outside["embedding"] if tied else evaluation.block(name)
        if not tied:
            storages.append(evaluation.storage(block))
            if not name.startswith("layers."):
                root_uneven += storages[-1].uneven
        if name in slot.copies and block.family is Family.EMBEDDING:
            copies = evaluation.storage(block).dense
            continue
        beside = block.family in (Family.RELATION_BIAS, Family.MTP)  # the stream they read is kept by another block
        names.append(name)
        units.append(evaluation.unit(name, block, tied=tied, owned=owned and not beside and name != "embedding"))
        owned = owned or block.family is not Family.RELATION_BIAS
        attends = attends or block.family in (Family.A, Family.MTP)
    policy = Policy(
        pipelined=is_pipelined(spec.mesh),
        reshard=spec.sharding.reshard_after_forward,
        in_place=evaluation.in_place,
        replicated=spec.mesh.dp_replicate > 1,
        boundary_bytes=evaluation.boundary_bytes,
    )
    carries = any(name.startswith("mtp.") for name in names)
    if carries:  # depths run after the head that the layout lists before them; a tied head is appended last
        order = sorted(range(len(names)), key=lambda index: names[index].startswith("mtp."))
        names, units = [names[index] for index in order], [units[index] for index in order]
    chunk = Chunk(names, units, policy, copies=copies, hands_on=not is_last, carries=carries)
    return _SlotParts(chunk, tuple(storages), root_uneven, attends)


def _lingering(evaluation: _Evaluation, slots: Sequence[Slot], chunks: Sequence[Chunk]) -> Lingering:
    """1F1B's locals name the last output and the last sent gradient; the other schedules' actions return before the next one runs."""
    if evaluation.spec.schedule.kind != "1f1b":
        return Lingering()
    boundary, logits = evaluation.boundary_bytes, chunks[0].logits_bytes
    return Lingering(boundary if slots[0].index > 0 else 0, logits or boundary, logits)


def _persistent(
    evaluation: _Evaluation, device: Device, slots: Sequence[Slot], owned: Iterable[_SlotParts], num_receives: int
) -> Persistent:
    spec, last = evaluation.spec, len(evaluation.layout.slots) - 1
    parts = list(owned)
    storages = [storage for part in parts for storage in part.storages]
    resident: dict[Column, int] = {}
    matrix_shards = matrix_states = other_states = slack = state_slack = parameters = 0
    scratch: list[MatrixScratch] = []
    casts: list[Cast] = []
    uneven: list[Uneven] = []
    for storage in storages:
        for column, size in storage.resident.items():
            resident[column] = resident.get(column, 0) + size
        matrix_shards += storage.experts.shard_bytes
        matrix_states += storage.matrix_state_bytes
        other_states += storage.other_state_bytes
        slack += storage.resident_slack_bytes
        state_slack += storage.state_slack_bytes
        parameters += storage.parameters
        scratch += storage.matrix_scratch
        casts += storage.casts
        uneven += storage.uneven
    rotary, tokens = rotary_bytes(spec) * sum(part.attends for part in parts), token_bytes(spec)
    received = receive_bytes(evaluation.dims, num_receives)
    boundary = boundary_bytes(evaluation.dims)
    shards = [part.chunk.root.shard_bytes + part.chunk.layers.shard_bytes for part in parts]
    return Persistent(
        resident=resident,
        shard_bytes=sum(shards),
        matrix_shard_bytes=matrix_shards if uses_muon(spec) else 0,
        matrix_state_bytes=matrix_states,
        other_state_bytes=other_states,
        uneven=tuple(uneven),
        root_uneven=tuple(tensor for part in parts for tensor in part.root_uneven),
        matrix_scratch=tuple(scratch),
        cast_bytes=max([cast.scratch_bytes for cast in casts], default=0),
        first_other=last_moment(casts),
        buffer_bytes=rotary,
        buffer_scratch_bytes=rotary_scratch_bytes(spec) if parts[-1].attends else 0,  # else another slot's parameters come after it
        input_bytes=tokens * (any(slot.index == 0 for slot in slots) + any(slot.index == last for slot in slots)),
        receive_bytes=received,
        workspace_bytes=device.gemm_workspace_bytes,
        slack_bytes=slack + num_receives * slack_bytes(boundary),
        state_slack_bytes=state_slack,
        parameters=parameters,
    )


def _distinct(mesh: Mesh, pp_rank: int, persistent: Persistent, peak: StepPeak, device: DeviceBudget) -> list[RankBudget]:
    """The budgets of a pipeline rank's data, context and tensor ranks: they differ where shards are uneven."""
    dense = {bound for tensor in persistent.uneven if not tensor.expert for bound in tensor.boundaries}
    expert = {bound for tensor in persistent.uneven if tensor.expert for bound in tensor.boundaries}
    per_stage = mesh.world_size // mesh.pp
    first = pp_rank * per_stage
    places: dict[tuple[int, int], list[int]] = {}
    if dense or expert:
        dense_place = [sum([index >= bound for bound in dense]) for index in range(mesh.dp_shard)]
        expert_place = [sum([index >= bound for bound in expert]) for index in range(mesh.efsdp)]
        inner, expert_inner = mesh.cp * mesh.tp, mesh.ep * mesh.etp
        for offset in range(per_stage):
            place = (dense_place[offset // inner % len(dense_place)], expert_place[offset // expert_inner % len(expert_place)])
            places.setdefault(place, []).append(first + offset)
    else:
        places[0, 0] = list(range(first, first + per_stage))
    found: list[RankBudget] = []
    all_cells = RankCells(persistent, peak)
    for ranks in places.values():
        coordinate = rank_coordinate(mesh, ranks[0])
        states = persistent.states(coordinate["dp_shard"], (ranks[0] - first) // (mesh.ep * mesh.etp) % mesh.efsdp)
        cells, where = all_cells.of(states)
        found.append(RankBudget(tuple(ranks), coordinate, persistent.parameters, cells, where, device.usable_bytes))
    return found


def _merged(ranks: list[RankBudget]) -> tuple[RankBudget, ...]:
    """Largest peak first; budgets of different pipeline ranks that are equal become one."""
    ranks.sort(key=lambda rank: (-rank.peak_bytes, rank.ranks))
    found: list[RankBudget] = []
    for rank in ranks:
        twin = next((other for other in reversed(found) if other.cells == rank.cells and other.parameters == rank.parameters), None)
        if twin is None:
            found.append(rank)
        else:
            found[found.index(twin)] = replace(twin, ranks=(*twin.ranks, *rank.ranks))
    return tuple(found)


def _elements(evaluation: _Evaluation, slot: Slot) -> int:
    return sum([evaluation.elements[id(evaluation.block(name))] for name in slot.blocks])
