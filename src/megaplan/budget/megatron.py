"""The budget of a job that Megatron-Core runs: its own ledger, storage and phases in the same cells."""

from collections import Counter
from collections.abc import Sequence

from megaplan.budget.peaks import WORK_OF_JOB_LAYER, WORK_OF_STAGE, StageSpans
from megaplan.budget.rank import EqualRanks, all_offsets, runs_between
from megaplan.budget.values import Budget, Cells, DeviceBudget, KeptBytes, RankBudget, ReserveItem, StageBudget, checked, spec_device
from megaplan.columns import Basis, Column, Phase
from megaplan.hosts.megatron.chunks import chunk, recomputed_groups
from megaplan.hosts.megatron.pattern import MTP, count, operators
from megaplan.hosts.megatron.peak import (
    FIRST_LAYER,
    LAYER_BACKWARD,
    LAYER_FORWARD,
    MegatronMemory,
    fixed_bytes,
    host_bytes,
    in_flight_counts,
    memory,
    overhead_bytes,
)
from megaplan.hosts.megatron.run import MegatronRun, MegatronStage, setting_of, stages_of
from megaplan.hosts.megatron.storage import (
    GRADIENT_PADDING,
    HISTORIES,
    LOW_WEIGHTS,
    dealt_elements,
    gradient_copies_bytes,
    is_fsdp,
    optimizer_state,
    padding_elements,
    parameters,
    storage_bytes,
    stored_bytes,
    uses_muon,
)
from megaplan.hosts.megatron.tensors import Parameters
from megaplan.hosts.megatron.workspaces import all_to_all_bytes, hybrid_ep_bytes
from megaplan.inventory.tensors import Inventory
from megaplan.layout.ranks import Layout, rank_coordinate
from megaplan.spec.host import device_of
from megaplan.spec.models import Spec

BUFFERS = ("all-gather buffer",)
DISPATCHERS = (
    ("hybrid_ep", "DeepEP, csrc/hybrid_ep: rows of all ranks of the experts, and their scores"),
    ("nccl_all_to_all", "NCCL, src/transport/p2p.cc: 12 MiB for each channel to each peer of the experts over NVLink"),
)
"""Items of the reserve that a dispatcher takes, with their sources."""
PADDED = Column.TENSOR_PARALLEL_PARAMS, Column.EXPERT_PARALLEL_PARAMS
"""Columns of the padding in the buffers of Muon's matrices: for dense matrices and for experts."""


def megatron_budget(spec: Spec, inventory: Inventory, layout: Layout) -> Budget:
    """Bytes of every rank by phase and column.

    Args:
        spec: A checked spec whose host is Megatron-Core.
        inventory: Parameter tensors of the spec, for the parameters of stages and of the model.
        layout: Slots of the spec.
    """
    run, found = MegatronRun(spec, inventory), list[RankBudget]()
    device = spec_device(spec, spec.mesh.world_size)
    for stage in stages_of(run, layout):
        found += _ranks(stage, device)
    elements = {name: block.elements for name, block in inventory.blocks()}
    stages = tuple(
        StageBudget(slot.index, slot.pp_rank, slot.chunk, slot.start, slot.stop, sum(elements[name] for name in slot.blocks))
        for slot in layout.slots
    )
    ranks = tuple(sorted(found, key=lambda rank: (-rank.peak_bytes, rank.ranks)))
    return Budget(device, stages, ranks, inventory.parameters, inventory.active_parameters)


class MegatronPeaks:
    """The peaks of some pipeline ranks of a layout, and their work."""

    def __init__(self, spec: Spec, inventory: Inventory, _memo: object) -> None:
        """The blocks of other specs are not used, because values that layers share are cached by their sizes."""
        self._run = MegatronRun(spec, inventory)

    def __call__(self, layout: Layout, stages: Sequence[StageSpans]) -> tuple[list[int], int]:
        """`stages` are pipeline ranks with their spans in the layout."""
        found = stages_of(self._run, layout, [rank for rank, _ in stages])
        num_layers = sum([stop - start for _, spans in stages for start, stop in spans])
        return [_peak_bytes(stage) for stage in found], len(stages) * WORK_OF_STAGE + WORK_OF_JOB_LAYER * num_layers


def _peak_bytes(stage: MegatronStage) -> int:
    """The largest peak of a pipeline rank's data ranks."""
    held = parameters(stage)
    found = [_placed(stage, *indices) for indices, _ in _places(stage, held)] if _is_uneven(stage.spec) else [stage]
    return max([memory(each, held).reserved(stage.spec.host.fragmentation_percent) for each in found])


def _placed(stage: MegatronStage, data_index: int, expert_index: int) -> MegatronStage:
    return stage._replace(data_index=data_index, expert_index=expert_index)


def megatron_reserve(spec: Spec) -> tuple[ReserveItem, ...]:
    """The driver's memory that the experts' dispatcher takes: HybridEP's rows, or NCCL's buffers for the peers of an all-to-all."""
    at, device = setting_of(spec), device_of(spec.device)
    sizes = hybrid_ep_bytes(at, device.domain.value), all_to_all_bytes(at, device)
    return tuple([ReserveItem(name, size, Basis.MODELLED, source) for (name, source), size in zip(DISPATCHERS, sizes, strict=True) if size])


def megatron_kept_bytes(spec: Spec, inventory: Inventory, layout: Layout) -> tuple[KeptBytes, ...]:
    """Bytes that one microbatch keeps on each slot, in model order."""
    kept = [0] * len(layout.slots)
    run = MegatronRun(spec, inventory)
    for stage in stages_of(run, layout):
        for slot, own in zip(layout.of_rank(stage.pp_rank), stage.chunks, strict=True):
            kept[slot.index] = chunk(run, own)
    return tuple(map(KeptBytes, kept))


def tensor_bytes(spec: Spec, inventory: Inventory, layout: Layout) -> tuple[Counter[int], ...]:
    """Bytes of each parameter of a rank, and the number of such parameters, by pipeline rank; each expert is a separate parameter."""
    run, found = MegatronRun(spec, inventory), []
    for stage in stages_of(run, layout):
        sizes: Counter[int] = Counter()
        for tensor, number in parameters(stage).counts.items():
            sizes[stored_bytes(run, tensor)] += number
        found.append(sizes)
    return tuple(found)


def _is_uneven(spec: Spec) -> bool:
    """True if data ranks store different bytes because Muon's matrices cannot be distributed evenly."""
    return uses_muon(spec) and spec.host.distributed_optimizer


def _places(stage: MegatronStage, held: Parameters) -> list[tuple[tuple[int, int], list[EqualRanks]]]:
    """Equal data ranks of a pipeline rank: places among dense and among experts' ranks, and the runs of ranks."""
    mesh = stage.spec.mesh
    kinds = [(mesh.tp, mesh.dp_shard * mesh.cp, False), (mesh.ep * mesh.etp, mesh.efsdp, True)]
    dealt = [
        (size, dealt_elements(stage, held, ranks, experts=experts) if _is_uneven(stage.spec) else []) for size, ranks, experts in kinds
    ]
    edges = [place * size for size, shares in dealt for place in range(len(shares) + 1)]
    found: dict[tuple[tuple[int, int], ...], tuple[tuple[int, int], list[EqualRanks]]] = {}
    for run in runs_between(mesh, edges, range(mesh.cp)):
        places = run.first // mesh.tp, run.first // (mesh.ep * mesh.etp)
        share = tuple([shares[place] if place < len(shares) else (0, 0) for (_, shares), place in zip(dealt, places, strict=True)])
        found.setdefault(share, (places, []))[1].append(run)
    return list(found.values())


def _ranks(stage: MegatronStage, device: DeviceBudget) -> list[RankBudget]:
    """The budgets of a pipeline rank's data ranks."""
    mesh, held = stage.spec.mesh, parameters(stage)
    kept = memory(stage, held)
    elements = held.elements(experts=False) + held.elements(experts=True)
    budgets: list[RankBudget] = []
    first = stage.pp_rank * (mesh.world_size // mesh.pp)
    for indices, runs in _places(stage, held):
        ranks = sorted([first + offset for run in runs for offset in all_offsets(mesh, run, range(mesh.cp))])
        cells, place = checked(_cells(_placed(stage, *indices), held, kept)), rank_coordinate(mesh, ranks[0])
        budgets.append(RankBudget(tuple(ranks), place, elements, cells, _moments(kept), device.usable_bytes, host_bytes(stage, held)))
    return budgets


def _moments(kept: MegatronMemory) -> dict[Phase, str]:
    step = {
        "loss": "the loss",
        "LM-head backward": "backward of the head",
        LAYER_FORWARD: "forward of a layer, with all microbatches in flight",
        LAYER_BACKWARD: "backward of a layer, with all microbatches in flight",
        FIRST_LAYER: "backward of the first layer",
    }[kept.peak_phase]
    return {
        Phase.INIT: "parameters, gradients and masters in place",
        Phase.FIRST_FORWARD_BACKWARD: step,
        Phase.FIRST_OPTIMIZER: "all optimizer state made",
        Phase.FORWARD_BACKWARD: step,
        Phase.OPTIMIZER: "the update of all parameters",
    }


def _cells(stage: MegatronStage, held: Parameters, kept: MegatronMemory) -> Cells:
    state, parts = optimizer_state(stage, held), storage_bytes(stage, held)
    fixed = fixed_bytes(stage.run, stage.chunks, held.shapes)
    base = dict.fromkeys(Column, 0)
    for one, number in held.counts.items():
        base[_owner(one.rule.is_expert, one.sharded)] += number * stored_bytes(stage.run, one)
    for column, padding in zip(PADDED, padding_elements(stage, held), strict=True):
        base[column] += stage.run.at.element_bytes * padding
    if is_fsdp(stage):  # one flat shard for dense tensors (sharded over tp or replicated), and one for experts
        mesh = stage.spec.mesh
        base[Column.REPLICATED_PARAMS] //= mesh.dp_shard * mesh.cp
        base[Column.EXPERT_PARALLEL_PARAMS] //= mesh.efsdp
        owned = base[Column.REPLICATED_PARAMS] + base[Column.EXPERT_PARALLEL_PARAMS]
        base[Column.TENSOR_PARALLEL_PARAMS] = parts["parameters"] - owned
    base[Column.GRADIENTS] = parts["gradients"] + parts.get(GRADIENT_PADDING, 0)
    base[Column.MATRIX_OPTIMIZER], base[Column.OTHER_OPTIMIZER] = state.matrix_master, state.other_master

    running = base.copy()
    running[Column.COMMUNICATION] = sum(fixed[name] for name in BUFFERS)
    running[Column.WORKSPACE] = sum(size for name, size in fixed.items() if name not in BUFFERS)
    running[Column.WORKSPACE] += sum(parts.get(name, 0) for name in (LOW_WEIGHTS, HISTORIES))
    stepped = running.copy()
    stepped[Column.MATRIX_OPTIMIZER] += state.matrix_moments
    stepped[Column.OTHER_OPTIMIZER] += state.other_moments

    routing = _routing_bytes(stage)
    gathered = kept.gathered[kept.peak_phase] + kept.received[kept.peak_phase]
    first, steady = running.copy(), stepped.copy()
    for cells in (first, steady):
        cells[Column.ROUTING] = routing
        cells[Column.ACTIVATIONS] = kept.activations + max(kept.phases.values()) - routing - gathered
        cells[Column.COMMUNICATION] += gathered
    after = stepped.copy()
    after[Column.GRADIENTS] += gradient_copies_bytes(stage, held)
    after[Column.COMMUNICATION] += kept.leftover
    after[Column.WORKSPACE] += kept.unscaled
    phases = {
        Phase.INIT: base,
        Phase.FIRST_FORWARD_BACKWARD: first,
        Phase.FIRST_OPTIMIZER: after,
        Phase.FORWARD_BACKWARD: steady,
        Phase.OPTIMIZER: after.copy(),
    }
    pools = {Phase.FORWARD_BACKWARD: (kept.pools.inside, kept.pools.twice), Phase.OPTIMIZER: (kept.pools.outside, 0)}
    for phase, cells in phases.items():
        pooled, twice = pools.get(phase, (0, 0))
        cells[Column.OVERHEAD] = overhead_bytes(sum(cells.values()), pooled, stage.spec.host.fragmentation_percent, twice)
    return phases


def _owner(expert: bool, sharded: bool) -> Column:
    if expert:
        return Column.EXPERT_PARALLEL_PARAMS
    return Column.TENSOR_PARALLEL_PARAMS if sharded else Column.REPLICATED_PARAMS


def _routing_bytes(stage: MegatronStage) -> int:
    """Bytes that the experts' routing keeps, for the microbatches in flight."""
    run = stage.run
    if run.spec.model.moe is None:
        return 0
    own = [recomputed_groups(run, operators(letters))[1] + run.ahead * letters.count(MTP) for letters in stage.chunks]
    kept = [sum([run.operator(letter).routing for letter in letters if count(letter, "E")]) for letters in own]
    return sum(number * routing for number, routing in zip(in_flight_counts(stage), kept, strict=True))
