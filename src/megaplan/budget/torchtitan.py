"""The budget of a job that torchtitan runs: FSDP2 of transformer blocks, in the evaluation and the points of megarun's runtime.

It differs from megarun's budget: a layer is a pair of letters; gradients are reduced in fp32 on their own stream and gathers fill buffers
on another, so that torch's allocator keeps both pools separate from the model's; the schedule may keep its outputs. The budget is of memory
that torch reserves, because torchtitan logs that.

Source: torchtitan/distributed/fsdp.py, train.py; torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (`foreach_reduce` makes its
output on the reduce-scatter stream, `foreach_all_gather` its own on the copy-in stream).
"""

from collections.abc import Sequence
from typing import NamedTuple

from megaplan.budget.chunk import ChunkPolicy
from megaplan.budget.evaluation import Evaluated, Evaluation, SlotParts
from megaplan.budget.megarun import held_by_schedule, schedule_counts
from megaplan.budget.rank import all_offsets, equal_runs
from megaplan.budget.step import StepPeak, step_peak
from megaplan.budget.stored import RankStorage, StoredState, Updates
from megaplan.budget.values import (
    ACTIVATIONS,
    COMMUNICATION,
    GRADIENTS,
    MATRIX_OPTIMIZER,
    NO_BYTES,
    OTHER_OPTIMIZER,
    OVERHEAD,
    WORKSPACE,
    Budget,
    Cells,
    KeptBytes,
    RankBudget,
    StageBudget,
    checked,
    device_budget,
)
from megaplan.columns import Phase
from megaplan.hosts.megarun.embedding import boundary_bytes, input_bytes, label_bytes, rotary_bytes
from megaplan.hosts.megarun.sizes import NOTHING, GroupBytes, Sizes, storage_sizes
from megaplan.hosts.megarun.storage import OWNER_COLUMNS, BlockStorage
from megaplan.hosts.torchtitan.blocks import PAIR, in_blocks, transformer_blocks
from megaplan.hosts.torchtitan.ends import LOGITS
from megaplan.hosts.torchtitan.ledger import block_bytes, block_variants, sums_in_place
from megaplan.inventory.tensors import Inventory
from megaplan.layout.ranks import Layout, Slot, rank_coordinate
from megaplan.schedules.registry import SPLIT_BACKWARD
from megaplan.spec.host import device_of
from megaplan.spec.local import local_dims
from megaplan.spec.models import Spec

REPLICATED, TENSOR_PARALLEL, EXPERT_PARALLEL = OWNER_COLUMNS.values()


class Pools(NamedTuple):
    """Memory of torch in the streams of FSDP2's collectives, allocated or not.

    Attributes:
        shards: Outputs of all reductions, which are the gradients. If gradients have another dtype, the gradients are casts, and one
            reduced output exists in addition, or all outputs if replicas are summed.
        gathers: Outputs of two all-gathers, the current one and the next.
    """

    shards: int
    gathers: int


class TitanEvaluation(Evaluation):
    """The values of a rank under torchtitan. Its blocks are transformer blocks; the layout's slots count letters."""

    def __init__(self, spec: Spec, inventory: Inventory, layout: Layout) -> None:  # blocks, groups and policy are torchtitan's own
        """Evaluate every block once."""
        self.spec, self.layout = spec, layout
        self.inventory = blocks = transformer_blocks(inventory)
        self.dims = local_dims(spec)
        self.boundary_bytes = boundary_bytes(self.dims)
        self.step_sum_bytes: dict[str, int] = {}
        self.workspace_bytes = device_of(spec.device).gemm_workspace.value
        sizes, pipelined = titan_sizes(spec), spec.mesh.is_pipelined
        whole = StoredState(sizes, blocks)
        self._groups = {name: whole.block(name).both for name, _ in blocks.blocks()}
        reshard = spec.sharding.reshard_after_forward
        self.stored = PooledStored(sizes, blocks, frees_embedding=reshard and spec.host.fsdp_ends == "separate" and not blocks.tied)
        last = f"layers.{len(blocks.layers) - 1}"
        kept_bytes = self._groups[last].gathered_bytes if reshard and not pipelined and spec.host.fsdp_ends == "root" else 0
        made: dict[object, Evaluated] = {}
        self.blocks: dict[str, Evaluated] = {}
        for name, variant in block_variants(spec, blocks).items():
            tied = name == "head" and blocks.tied
            if variant not in made:
                block = blocks.block("embedding" if tied else name)
                sums = block_bytes(spec, self.dims, name, block, kept_gather_bytes=kept_bytes if name == "head" else 0)
                storage = None if tied else self.stored.block(name)
                made[variant] = Evaluated(block, sums, storage, layer=name.startswith("layers."), input_bytes=self.boundary_bytes)
            self.blocks[name] = made[variant]
        self.policy = ChunkPolicy(
            pipelined=pipelined,
            reshard=reshard,
            splits_backward=spec.schedule.kind in SPLIT_BACKWARD and pipelined,
            in_place=sums_in_place(spec),
            replicated=spec.mesh.dp_replicate > 1,
            gathers_ahead=0,
            boundary_bytes=self.boundary_bytes,
        )
        self._parts: dict[int, SlotParts] = {}
        self.equal_ranks = {}

    def _make(self, slot: Slot) -> SlotParts:
        return super()._make(in_blocks(slot))

    def of_rank(self, slots: tuple[Slot, ...]) -> RankStorage:
        """Storage of the parameters of a pipeline rank with these slots."""
        return super().of_rank(tuple(map(in_blocks, slots)))

    def pools(self, slots: Sequence[Slot]) -> Pools:
        """Pools of a pipeline rank with these slots."""
        precision, flats, largest, outputs = self.spec.precision, 0, 0, list[int]()
        for slot in map(in_blocks, slots):
            held = [(name, self._groups[name]) for name in slot.blocks]
            outputs += [group.reduced_bytes for _, group in held]
            largest = max([largest, *[group.flat_bytes for name, group in held if name.startswith("layers.")]])
            flats = max(flats, sum(group.flat_bytes for name, group in held if not name.startswith("layers.")))
        gradients, reduced = sum(outputs), 0
        if precision.master is not precision.reduce:
            gradients, reduced = gradients // precision.reduce.bytes * precision.master.bytes, max(outputs)
            reduced = sum(outputs) if self.policy.replicated else reduced
        return Pools(gradients + reduced, max(flats, largest) + largest)


class PooledStored(StoredState):
    """FSDP2's storage without the contents of its streams' pools: outputs of gathers and reductions."""

    def __init__(self, sizes: Sizes, inventory: Inventory, *, frees_embedding: bool) -> None:
        """`frees_embedding` is true if the gathered embedding is freed after its forward.

        Neither this forward nor the second gather is then a peak.
        """
        super().__init__(sizes, inventory)
        embedding = id(inventory.block("embedding"))
        self._blocks = {key: _pooled(storage, ungathered=frees_embedding and key == embedding) for key, storage in self._blocks.items()}


def _pooled(storage: BlockStorage, *, ungathered: bool) -> BlockStorage:
    def group(whole: GroupBytes) -> GroupBytes:
        gathered = 0 if ungathered else whole.gathered_bytes
        return whole._replace(shard_bytes=0, reduced_bytes=0, flat_bytes=0, gathered_bytes=gathered)

    both = group(storage.both)  # experts in a separate group, which is reduced earlier, count until their block has ended
    return storage._replace(dense=both, experts=NOTHING, both=both)


def titan_sizes(spec: Spec) -> Sizes:
    """Sizes of FSDP2's sharding: over dp_shard · cp ranks, for experts over efsdp ranks.

    With float8 gathers a weight has one byte per element.

    Unsharded gradients are in the reduction's dtype, in which a pipeline accumulates them; gradient shards are in the streams' pools.
    """
    mesh, recipe = spec.mesh, spec.precision.recipe
    low = frozenset({PAIR}) if recipe is not None and recipe.param_gather else frozenset[str]()
    degrees, reduce = (mesh.dp_shard * mesh.cp, mesh.efsdp), spec.precision.reduce.bytes
    return storage_sizes(spec)._replace(degrees=degrees, low=low, whole_state=False, grads=reduce, recasts=False)


def torchtitan_budget(spec: Spec, inventory: Inventory, layout: Layout) -> Budget:
    """Bytes of every rank by phase and column.

    Args:
        spec: A checked spec whose host is torchtitan.
        inventory: Parameter tensors of the spec.
        layout: Slots of the spec, which end between transformer blocks.
    """
    device = device_budget(device_of(spec.device), spec.mesh.world_size)
    evaluation, counts = TitanEvaluation(spec, inventory, layout), schedule_counts(spec)
    ranks: list[RankBudget] = []
    for pp_rank, slots in enumerate(layout.by_rank()):
        parts = [evaluation.parts(slot) for slot in slots]
        chunks = [part.chunk for part in parts]
        peak = step_peak(chunks, counts.points[pp_rank], held_by_schedule(evaluation, chunks))
        receives = sum(map(sum, counts.receives[pp_rank])) if counts.receives else 0
        ranks += _ranks(evaluation, pp_rank, slots, peak, receives, device.usable_bytes)
    stages = tuple(
        StageBudget(slot.index, slot.pp_rank, slot.chunk, slot.start, slot.stop, evaluation.parts(slot).stored.whole_parameters)
        for slot in layout.slots
    )
    ordered = tuple(sorted(ranks, key=lambda rank: (-rank.peak_bytes, rank.ranks)))
    return Budget(device, stages, ordered, inventory.parameters, inventory.active_parameters)


def torchtitan_kept_bytes(spec: Spec, inventory: Inventory, layout: Layout) -> tuple[KeptBytes, ...]:
    """Bytes that one microbatch keeps on each slot, in model order."""
    evaluation = TitanEvaluation(spec, inventory, layout)
    return tuple(KeptBytes(evaluation.parts(slot).chunk.saved_bytes) for slot in layout.slots)


def _ranks(
    evaluation: TitanEvaluation, pp_rank: int, slots: tuple[Slot, ...], peak: StepPeak, receives: int, usable_bytes: int
) -> list[RankBudget]:
    """The budgets of a pipeline rank's other ranks: they differ in optimizer state if shards are uneven."""
    mesh, stored = evaluation.spec.mesh, evaluation.of_rank(slots)
    first, everywhere = pp_rank * (mesh.world_size // mesh.pp), range(mesh.cp)
    uneven = [tensor for storage, _ in stored.uneven for tensor in storage.uneven]
    found: dict[tuple[int, int], tuple[Updates, list[int]]] = {}
    for run in equal_runs(mesh, uneven, everywhere, shards=mesh.dp_shard * mesh.cp):
        updates = stored.updates(run.first // mesh.tp, run.first // (mesh.ep * mesh.etp) % mesh.efsdp)
        _, offsets = found.setdefault((updates.matrix_bytes, updates.other_bytes), (updates, []))
        offsets += all_offsets(mesh, run, everywhere)
    budgets = []
    for updates, offsets in found.values():
        ranks = tuple([first + offset for offset in sorted(offsets)])
        cells, where = _cells(evaluation, slots, peak, receives, updates)
        budgets.append(RankBudget(ranks, rank_coordinate(mesh, ranks[0]), stored.parameters, cells, where, usable_bytes))
    return budgets


def _cells(
    evaluation: TitanEvaluation, slots: tuple[Slot, ...], peak: StepPeak, receives: int, updates: Updates
) -> tuple[Cells, dict[Phase, str]]:
    spec, stored, pools = evaluation.spec, evaluation.of_rank(slots), evaluation.pools(slots)
    is_last = slots[-1].index == len(evaluation.layout.slots) - 1
    init = NO_BYTES.copy()
    init[REPLICATED], init[TENSOR_PARALLEL], init[EXPERT_PARALLEL] = stored.resident_bytes
    init[ACTIVATIONS] = len(slots) * rotary_bytes(spec)
    running = init.copy()
    running[ACTIVATIONS] += (input_bytes(spec) if slots[0].index == 0 else 0) + (label_bytes(spec) if is_last else 0)
    running[GRADIENTS], running[COMMUNICATION] = pools.shards, pools.gathers + receives * evaluation.boundary_bytes
    running[WORKSPACE] = evaluation.workspace_bytes
    stepped = running.copy()
    stepped[MATRIX_OPTIMIZER], stepped[OTHER_OPTIMIZER] = updates.matrix_bytes, updates.other_bytes

    at_peak, where = peak.cells, peak.where
    if is_last and spec.host.keep_pipeline_outputs and evaluation.policy.pipelined:
        logits = evaluation.blocks["head"].sums.part.tensors[LOGITS][0]
        count = spec.schedule.num_microbatches
        at_peak = {**at_peak, ACTIVATIONS: at_peak[ACTIVATIONS] + (count - 1) * logits}
        if 2 * count * logits > sum(at_peak.values()):
            at_peak, where = {**NO_BYTES, ACTIVATIONS: 2 * count * logits}, "joining the outputs of all microbatches"
    updating = stepped.copy()
    if spec.host.foreach_optimizer:
        updating[WORKSPACE] += (updates.matrix_bytes + updates.other_bytes) // 2
    phases = {
        Phase.INIT: init,
        Phase.FIRST_FORWARD_BACKWARD: {column: size + at_peak[column] for column, size in running.items()},
        Phase.FIRST_OPTIMIZER: updating,
        Phase.FORWARD_BACKWARD: {column: size + at_peak[column] for column, size in stepped.items()},
        Phase.OPTIMIZER: updating.copy(),
    }
    for cells in phases.values():
        cells[OVERHEAD] = sum(cells.values()) * spec.host.reserved_percent // 100
    made = "all optimizer state made"
    words = ("parameters in place", where, made, where, "the update of all parameters")
    return checked(phases), dict(zip(phases, words, strict=True))
