"""The budget of a job that Megatron-Core runs: its own ledger, storage and phases in the same cells."""

from __future__ import annotations

from collections.abc import Sequence

from megaplan.budget.equal_ranks import EqualRanks, all_offsets, runs_between
from megaplan.budget.peaks import WORK_OF_JOB_LAYER, WORK_OF_STAGE, StageSpans
from megaplan.budget.reserve import device_budget
from megaplan.budget.values import Budget, Cells, DeviceBudget, KeptBytes, RankBudget, ReserveItem, StageBudget, checked
from megaplan.columns import Basis, Column, Phase
from megaplan.hosts.megatron.from_spec import jobs_from_spec
from megaplan.hosts.megatron.job import MTP, MegatronJob, count
from megaplan.hosts.megatron.peak import (
    FIRST_LAYER,
    LAYER_BACKWARD,
    LAYER_FORWARD,
    MegatronMemory,
    fixed_bytes,
    in_flight_counts,
    memory,
)
from megaplan.hosts.megatron.saved import chunk, operator, operators
from megaplan.hosts.megatron.storage import (
    HISTORIES,
    LOW_WEIGHTS,
    Parameters,
    dealt_elements,
    gradient_copies_bytes,
    optimizer_state,
    parameters,
    storage_bytes,
    stored_bytes,
)
from megaplan.hosts.megatron.workspaces import hybrid_ep_bytes
from megaplan.inventory.tensors import Inventory
from megaplan.layout.ranks import rank_coordinate
from megaplan.layout.values import Layout
from megaplan.spec.device import device_of
from megaplan.spec.models import Spec

ROUTED = ("router", "dispatch.map", "dispatch.rows", "dispatch.handle", "routed.fc1.input")
"""Kept routing tensors of experts: scores, maps and received rows."""
BUFFERS = ("all-gather buffer",)


def megatron_budget(spec: Spec, inventory: Inventory, layout: Layout) -> Budget:
    """Bytes of every rank by phase and column.

    Args:
        spec: A checked spec whose host is Megatron-Core.
        inventory: Parameter tensors of the spec, for the parameters of stages and of the model.
        layout: Slots of the spec.
    """
    letters = "".join(block.family for block in inventory.layers)
    found: list[RankBudget] = []
    jobs = jobs_from_spec(spec, letters, layout)
    device = _device(spec, jobs[0])
    for job in jobs:
        found += _ranks(spec, job, device)
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
        """Blocks of other specs are not used: values that layers share are cached by their sizes."""
        self._spec, self._letters = spec, "".join(block.family for block in inventory.layers)

    def __call__(self, layout: Layout, stages: Sequence[StageSpans]) -> tuple[list[int], int]:
        """`stages` are pipeline ranks with their spans in the layout."""
        jobs = jobs_from_spec(self._spec, self._letters, layout, [rank for rank, _ in stages])
        num_layers = sum([stop - start for _, spans in stages for start, stop in spans])
        return [_peak_bytes(self._spec, job) for job in jobs], len(stages) * WORK_OF_STAGE + WORK_OF_JOB_LAYER * num_layers


def _peak_bytes(spec: Spec, job: MegatronJob) -> int:
    """The largest peak of a pipeline rank's data ranks."""
    held = parameters(job)
    runs = [job.of_rank(job.chunks, job.pp_rank, *indices) for indices, _ in _places(spec, job, held)] if _is_uneven(job) else [job]
    peak = max([memory(run, held).peak for run in runs])
    return peak + peak * spec.host.fragmentation_percent // 100


def _device(spec: Spec, job: MegatronJob) -> DeviceBudget:
    """The device, with a reserve that includes the dispatcher library's allocations from the driver."""
    device = device_budget(device_of(spec.device), spec.mesh.world_size)
    size = hybrid_ep_bytes(job, device_of(spec.device).domain.value)
    if not size:
        return device
    item = ReserveItem("hybrid_ep", size, Basis.MODELLED, "DeepEP, csrc/hybrid_ep: rows of all ranks of the experts, and their scores")
    return device._replace(reserve=(*device.reserve, item))


def megatron_kept_bytes(spec: Spec, inventory: Inventory, layout: Layout) -> tuple[KeptBytes, ...]:
    """Bytes that one microbatch keeps on each slot, in model order."""
    kept = [0] * len(layout.slots)
    for job in jobs_from_spec(spec, "".join(block.family for block in inventory.layers), layout):
        for slot, own in zip(layout.of_rank(job.pp_rank or 0), job.chunks, strict=True):
            kept[slot.index] = chunk(job, own)
    return tuple(map(KeptBytes, kept))


def _is_uneven(job: MegatronJob) -> bool:
    """True if data ranks store different bytes, because Muon's whole matrices do not divide evenly among them."""
    return job.optimizer == "muon" and job.distributed_optimizer


def _places(spec: Spec, job: MegatronJob, held: Parameters) -> list[tuple[tuple[int, int], list[EqualRanks]]]:
    """Equal data ranks of a pipeline rank: places among dense and among experts' ranks, and the runs of ranks."""
    mesh = spec.mesh
    kinds = [(mesh.tp, job.data_parallel, False), (mesh.ep * mesh.etp, job.expert_data_parallel, True)]
    dealt = [(size, dealt_elements(held, ranks, experts=experts) if _is_uneven(job) else []) for size, ranks, experts in kinds]
    edges = [place * size for size, shares in dealt for place in range(len(shares) + 1)]
    found: dict[tuple[tuple[int, int], ...], tuple[tuple[int, int], list[EqualRanks]]] = {}
    for run in runs_between(mesh, edges, range(mesh.cp)):
        places = run.first // mesh.tp, run.first // (mesh.ep * mesh.etp)
        share = tuple([shares[place] if place < len(shares) else (0, 0) for (_, shares), place in zip(dealt, places, strict=True)])
        found.setdefault(share, (places, []))[1].append(run)
    return list(found.values())


def _ranks(spec: Spec, job: MegatronJob, device: DeviceBudget) -> list[RankBudget]:
    """The budgets of a pipeline rank's data ranks."""
    mesh, held = spec.mesh, parameters(job)
    kept = memory(job, held)
    elements = held.elements(experts=False) + held.elements(experts=True)
    budgets: list[RankBudget] = []
    first = (job.pp_rank or 0) * (mesh.world_size // mesh.pp)
    for (dense, expert), runs in _places(spec, job, held):
        ranks = sorted([first + offset for run in runs for offset in all_offsets(mesh, run, range(mesh.cp))])
        cells = _cells(job.of_rank(job.chunks, job.pp_rank, dense, expert), held, kept, spec.host.fragmentation_percent)
        budgets.append(
            RankBudget(tuple(ranks), rank_coordinate(mesh, ranks[0]), elements, checked(cells), _moments(kept), device.usable_bytes)
        )
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


def _cells(job: MegatronJob, held: Parameters, kept: MegatronMemory, fragmentation_percent: int) -> Cells:
    state, parts = optimizer_state(job, held), storage_bytes(job, held)
    fixed = fixed_bytes(job, held.shapes)
    base = dict.fromkeys(Column, 0)
    for one, number in held.counts.items():
        base[_owner(one.rule.is_expert, one.sharded)] += number * stored_bytes(job, one)
    if job.fsdp:  # one flat shard of tensors that tp shards, and one of replicated ones
        base[Column.REPLICATED_PARAMS] //= job.data_parallel
        base[Column.TENSOR_PARALLEL_PARAMS] = parts["parameters"] - base[Column.REPLICATED_PARAMS]
    base[Column.GRADIENTS] = parts["gradients"]
    base[Column.MATRIX_OPTIMIZER], base[Column.OTHER_OPTIMIZER] = state.matrix_master, state.other_master

    running = base.copy()
    running[Column.COMMUNICATION] = sum(fixed[name] for name in BUFFERS)
    running[Column.WORKSPACE] = sum(size for name, size in fixed.items() if name not in BUFFERS)
    running[Column.WORKSPACE] += sum(parts.get(name, 0) for name in (LOW_WEIGHTS, HISTORIES))
    stepped = running.copy()
    stepped[Column.MATRIX_OPTIMIZER] += state.matrix_moments
    stepped[Column.OTHER_OPTIMIZER] += state.other_moments

    routing = _routing_bytes(job)
    gathered = kept.gathered[kept.peak_phase] + kept.received[kept.peak_phase]
    first, steady = running.copy(), stepped.copy()
    for cells in (first, steady):
        cells[Column.ROUTING] = routing
        cells[Column.ACTIVATIONS] = kept.activations + max(kept.phases.values()) - routing - gathered
        cells[Column.COMMUNICATION] += gathered
    after = stepped.copy()
    after[Column.GRADIENTS] += gradient_copies_bytes(job, held)
    after[Column.COMMUNICATION] += kept.leftover
    phases = {
        Phase.INIT: base,
        Phase.FIRST_FORWARD_BACKWARD: first,
        Phase.FIRST_OPTIMIZER: after,
        Phase.FORWARD_BACKWARD: steady,
        Phase.OPTIMIZER: after.copy(),
    }
    for cells in phases.values():
        cells[Column.OVERHEAD] = sum(cells.values()) * fragmentation_percent // 100
    return phases


def _owner(expert: bool, sharded: bool) -> Column:
    if expert:
        return Column.EXPERT_PARALLEL_PARAMS
    return Column.TENSOR_PARALLEL_PARAMS if sharded else Column.REPLICATED_PARAMS


def _routing_bytes(job: MegatronJob) -> int:
    """Bytes that the experts' routing keeps, for the microbatches in flight."""
    if job.moe is None:
        return 0
    routed = sum(size for name, size in operator(job, "E").items() if name in ROUTED)
    kept = [count(job.recomputed(operators(letters))[1], "E") for letters in job.chunks]
    ahead = [letters.count(MTP) * count(job.mtp_operators, "E") for letters in job.chunks]
    own = [layers + modules for layers, modules in zip(kept, ahead, strict=True)]
    return sum(number * routed * layers for number, layers in zip(in_flight_counts(job), own, strict=True))
