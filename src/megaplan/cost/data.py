"""Times of a step outside its layers, in whole nanoseconds: exchanges of data ranks and the optimizer's pass over its state.

Megarun's FSDP2 gathers parameters and reduces gradients while the layers run. Without a pipeline it does both for every microbatch, and
gathers once more for backward if parameters are freed after forward. torch's pipeline schedules keep gathered parameters and reduce once,
at the end of the step. Under `sharding.mode: ddp` nothing is gathered, and gradients are all-reduced once a step. Exposed time: without a
pipeline the gather before the first unit, the reduction after the last, and the excess of all exchanges over the layers' own time; under a
pipeline the reduction, and the excess of gathers over the concurrent forwards.

Parameters are the mean of the pipeline ranks, so that no figure here depends on the cuts. Each of Muon's matrices is sent to one of the
ranks that share it, orthogonalised there, and sent back.

Source: arXiv:2304.11277, section 4 (FSDP's overlap); torch/distributed/pipelining/stage.py, `backward_maybe_with_nosync`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from megakernels.facts import KindWork
from megakernels.ops.fp8_linear.facts import DELAYED_ROLES, SCALE_BYTES
from megaplan.cost.elements import LocalElements, local_elements, with_recipe
from megaplan.cost.outside_layers import (
    CLIP_OPERATIONS,
    Matrices,
    StoredParameters,
    adamw_operations,
    adamw_parts,
    clip_parts,
    delayed_parts,
    exchanged_elements,
    gather_parts,
    muon_operations,
    muon_parts,
    newton_schulz_flops,
    reduce_parts,
    sum_parts,
)
from megaplan.cost.rates import Rates
from megaplan.cost.transfers import RankGroup as Ranks
from megaplan.cost.transfers import gather_ns, sum_ns
from megaplan.inventory.tensors import Inventory
from megaplan.spec.models import Spec
from megaplan.spec.step_graphs import replays_graphs, replays_update

GRAPH_OPERATIONS, UPDATE_GRAPH_OPERATIONS = 3, 2
"""Host launches before a step of graphs (copies of a batch's inputs, a graph) and before a recorded update (copy of numbers, a graph)."""
OPTIMIZER_BYTES = 30
"""Read and written of an element: gradient, master, two moments and parameter."""


@dataclass(frozen=True, slots=True)
class DataTimes:
    """Sums of one pipeline rank.

    Attributes:
        gather_ns: All of its parameters once.
        again_ns: The same, after the first time in a step.
        reduce_ns: All of its gradients once, over shards and replicas.
        optimizer_ns: The update of its shard, and under Muon the orthogonalisation of its matrices; at least the time to copy its state in
            host memory to the device and back.
        copies_ns: Casts and copies around one gather, around one reduction, and the addition of its result; 0 if not counted.
        phases: Nanoseconds of clipping and of Muon's update on the device, with the operations that the host launches for them.
        late: Host operations of AdamW before its single launch.
        issued: Launches around one gather, and around one reduction.
    """

    gather_ns: int
    reduce_ns: int
    optimizer_ns: int
    copies_ns: tuple[int, int, int] = (0, 0, 0)
    phases: tuple[tuple[int, int], ...] = ()
    late: int = 0
    issued: tuple[int, int] = (0, 0)
    again_ns: int = 0


def shard_traffic(spec: Spec, inventory: Inventory) -> tuple[int, int]:
    """Bytes of gradients that FSDP2 reduces and of parameters that it gathers in a step, each payload once per collective.

    Without a pipeline it does both for every microbatch, and gathers again for backward if parameters are freed after forward; a pipeline
    does both once. Under `sharding.mode: ddp` gradients are reduced once.
    """
    mesh, precision = spec.mesh, spec.precision
    if mesh.dp_replicate * mesh.dp_shard * mesh.cp == 1:
        return 0, 0
    trained = inventory.trained_parameters * spec.num_copies
    if spec.sharding.copies:
        return trained * precision.reduce.bytes, 0
    times = 1 if mesh.pp > 1 else spec.schedule.microbatches_per_update
    gathers = times * (2 if spec.sharding.reshard_after_forward and mesh.pp == 1 else 1)
    whole = local_elements(inventory, 1, 1, 1, spec.packing)
    packed = with_recipe(spec, inventory, whole)
    used = precision.params.bytes
    saved = (
        (times, count * used - size)
        for times, (count, size) in ((mesh.tp, packed.made_packed), (mesh.ep * mesh.etp, packed.made_packed_banks))
    )
    once = whole.dense_bytes(used, 1) + whole.experts * used - sum(times * each for times, each in saved)
    gathered = once * gathers if mesh.dp_shard > 1 else 0
    return trained * precision.reduce.bytes * times, gathered * spec.num_copies


class DataSends(NamedTuple):
    """Times of an average pipeline rank's transfers between data ranks, once each; with rates of one nanosecond per byte they are bytes.

    Attributes:
        gather: Gather of all its parameters.
        again: The same from the ranks that keep them between forward and backward.
        shards: Reduction of all its gradients over shards.
        replicas: Sum of the gradients of shards, or of whole copies, over replicas.
        context: Sum of the gradients over context ranks.
        matrices: Muon's matrices, sent to the ranks that orthogonalise them and back.
        mirrored: Sum of the gradients of shards over both copies of the model.
        maxima: Largest magnitudes of operands under delayed scaling, reduced over all ranks of a stage.
    """

    gather: int
    again: int
    shards: int
    replicas: int
    context: int
    matrices: int
    mirrored: int
    maxima: int


def stage_ranks(spec: Spec) -> Ranks:
    """The ranks that multiply by a stage's weights."""
    count = spec.mesh.world_size // spec.pp_shares
    return Ranks(count, spec.mesh.world_size // count if spec.num_copies > 1 else 1)


def mirrors_of(spec: Spec) -> Ranks:
    """The two ranks with the copies of a part of the model, with the distance of the pipeline's ends."""
    return Ranks(2, spec.mesh.world_size // 2)


def data_sends(spec: Spec, rates: Rates, local: LocalElements) -> DataSends:
    """Transfers of a mean pipeline rank; arguments as for `data_times`."""
    mesh, precision, pp = spec.mesh, spec.precision, spec.pp_shares
    trained, trained_experts = (each // pp for each in (local.trained, local.trained_experts))
    (dense_degree, bank_degree), dense_stride, bank_stride = spec.shard_degrees, mesh.cp * mesh.tp, mesh.ep * mesh.etp
    shards, banks = Ranks(dense_degree, dense_stride), Ranks(bank_degree, bank_stride)
    keepers, bank_keepers = map(Ranks, spec.shard_keepers, (dense_stride, bank_stride))
    sent, summed = precision.params.bytes, precision.reduce.bytes
    dense, experts = local.dense_bytes(sent, pp), local.bank_bytes(sent, pp)
    own, banked = trained // dense_degree, trained_experts // bank_degree
    groups, stacks = max(1, dense_groups(spec, local) // pp), 1 if spec.sharding.wraps_stages else -(-local.banks // pp)
    if spec.sharding.copies:
        replicas = sum_ns(rates, spec, Ranks(mesh.data_ranks, dense_stride), own * summed, groups)
        replicas += sum_ns(rates, spec, Ranks(mesh.efsdp * mesh.dp_replicate, bank_stride), banked * summed, stacks)
    else:
        replicas = sum_ns(rates, spec, Ranks(mesh.dp_replicate, mesh.dp_shard * dense_stride), (own + banked) * summed, groups)
    mirrored = 0
    if spec.num_copies > 1:
        mirrored = sum_ns(rates, spec, mirrors_of(spec), (own + banked) * precision.grads.bytes, local.trained_tensors // pp)
    exchange = 0
    if spec.optimizer.uses_muon:
        pairs = zip((shards, banks), exchanged_elements(spec, held_of(spec, local)), strict=True)
        exchange = 2 * sum([gather_ns(rates, spec, ranks, own // pp * spec.newton_schulz_dtype.bytes) for ranks, own in pairs])
    maxima = local.delayed_weights // pp * DELAYED_ROLES * SCALE_BYTES
    maxima = sum_ns(rates, spec, stage_ranks(spec), maxima) if maxima else 0
    return DataSends(
        gather=gather_ns(rates, spec, shards, dense, groups) + gather_ns(rates, spec, banks, experts, stacks),
        again=gather_ns(rates, spec, keepers, dense, groups) + gather_ns(rates, spec, bank_keepers, experts, stacks),
        shards=gather_ns(rates, spec, shards, trained * summed, groups) + gather_ns(rates, spec, banks, trained_experts * summed, stacks),
        replicas=replicas,
        context=sum_ns(rates, spec, Ranks(mesh.cp, mesh.tp), own * summed, groups),
        matrices=exchange,
        mirrored=mirrored,
        maxima=maxima,
    )


def data_times(spec: Spec, rates: Rates, local: LocalElements) -> DataTimes:
    """Times of a mean pipeline rank.

    Args:
        spec: A checked spec.
        rates: Rates of the device.
        local: Elements of its tensor and expert ranks.
    """
    sends, held, pp = data_sends(spec, rates, local), held_of(spec, local), spec.pp_shares
    gather, reduced, exchange = sends.gather, sends.shards + sends.replicas + sends.context + sends.mirrored, sends.matrices + sends.maxima
    dense_degree, bank_degree = spec.shard_degrees
    shard = local.trained // pp // dense_degree + local.trained_experts // pp // bank_degree
    if rates.measured is None:
        update = rates.memory_ns(shard * OPTIMIZER_BYTES) + _muon_ns(spec, rates, local.matrices)
        return DataTimes(gather, reduced, max(update + exchange, _offload_ns(spec, rates, held)), again_ns=sends.again)

    def taken(parts: Iterable[KindWork]) -> int:
        return sum(part_ns(spec, rates, part) for part in parts)

    clip, adamw = taken(clip_parts(spec, held)), taken(adamw_parts(spec, held))
    scaled = taken(delayed_parts(spec, held))
    muon = taken(muon_parts(spec, held, rates.device.num_sms.value))
    phases = (clip // pp, CLIP_OPERATIONS), (muon // pp, muon_operations(spec, held) // pp)
    late = adamw_operations(spec, held) // pp
    before, after = tuple(gather_parts(spec, held)), tuple(reduce_parts(spec, held))
    copies = taken(before) // pp, taken(after) // pp, taken(sum_parts(spec, held)) // pp
    issued = sum(part.launches for part in before) // pp, sum(part.launches for part in after) // pp
    update = max(adamw // pp + muon // pp + exchange, _offload_ns(spec, rates, held)) + scaled // pp
    return DataTimes(gather, reduced, clip // pp + update, copies, phases, late, issued, sends.again)


def _offload_ns(spec: Spec, rates: Rates, held: StoredParameters) -> int:
    """Time in which the moments in host memory are copied to the device and back, in one stream: on a mean pipeline rank."""
    fraction, others = spec.host.optimizer_offload, held.shard - (held.shard_matrices if spec.optimizer.uses_muon else 0)
    if fraction is None:
        return 0
    elements = held.shard + others  # Muon has one moment of an element, AdamW two
    return 2 * rates.host_ns(int(fraction * elements) // spec.pp_shares * spec.precision.moments.bytes)


def copies_ns(spec: Spec, times: DataTimes) -> int:
    """FSDP2's casts and copies in a step."""
    (gathers, reductions), (before, after, added) = exchanges(spec), times.copies_ns
    return gathers * before + reductions * after + (reductions - 1) * added


def host_ns(spec: Spec, issue_ns: int, update_ns: int, times: DataTimes, forward: tuple[int, int], backward: tuple[int, int]) -> int:
    """The time for which the phases of a step wait for the host: to launch a phase may take longer than to run it.

    A phase is the forward of a microbatch, its backward, clipping, or Muon's update; the host is synchronised between them, or nearly so.
    AdamW is one launch for many tensors; the device waits for it while the host processes each tensor. If microbatches are replayed as CUDA
    graphs, the host launches one graph per microbatch, all except the first while the device runs the previous one; a recorded update of
    AdamW and Muon is one further graph.

    Args:
        spec: A checked spec.
        issue_ns: Host time of one launch of forward and backward.
        update_ns: Host time of one operation of clipping and the update.
        times: Times of a mean pipeline rank.
        forward: Nanoseconds and launches of F of one microbatch, on a mean pipeline rank.
        backward: The same of I and W.
    """
    reshard, alone = spec.sharding.reshard_after_forward, not spec.mesh.is_pipelined
    (before, after, _), (gathers, reductions) = times.copies_ns, times.issued
    first, again = alone or reshard, alone and reshard
    waits = max(0, (forward[1] + first * gathers) * issue_ns - forward[0] - first * before)
    launches = backward[1] + again * gathers + alone * reductions
    waits += max(0, launches * issue_ns - backward[0] - again * before - alone * after)
    waits *= spec.schedule.microbatches_per_update
    if replays_graphs(spec):
        waits = min(waits, GRAPH_OPERATIONS * issue_ns)
    clip, *muon = (max(0, operations * update_ns - taken) for taken, operations in times.phases or ((0, 0),))
    update = sum(muon) + times.late * update_ns
    if replays_update(spec):
        update = min(update, UPDATE_GRAPH_OPERATIONS * update_ns)
    return waits + clip + update


def exchanges(spec: Spec) -> tuple[int, int]:
    """Number of gathers of all parameters, and of reductions of all gradients, in a step: under a pipeline without resharding, once.

    Without FSDP2 the gradients of every microbatch are cast and added.
    """
    count, reshard = spec.schedule.microbatches_per_update, spec.sharding.reshard_after_forward
    gathers = count * (1 + reshard) if reshard or not spec.mesh.is_pipelined else 1
    return gathers, 1 if spec.mesh.is_pipelined and not spec.has_whole_state else count


def held_of(spec: Spec, local: LocalElements) -> StoredParameters:
    """The parameters of all pipeline ranks together."""
    dense, banks = spec.shard_degrees
    return StoredParameters(
        local.dense + local.experts,
        local.trained + local.trained_experts,
        local.trained // dense + local.trained_experts // banks,
        local.dense_matrices // dense + local.expert_matrices // banks,
        local.tensors,
        local.trained_tensors,
        dense_groups(spec, local),
        local.matrices,
        (local.made_packed, local.made_packed_banks),
        local.packed_tensors,
        local.delayed_weights,
    )


def num_units(spec: Spec) -> int:
    """Units of layers, or stages as units, on all pipeline ranks, with the layers dealt out evenly."""
    slots, layers = spec.mesh.num_slots, spec.sharding.unit_layers
    if not layers:
        return slots
    of_slot, more = divmod(spec.model.num_layers, slots)
    return more * -(-(of_slot + 1) // layers) + (slots - more) * -(-of_slot // layers)


def dense_groups(spec: Spec, local: LocalElements) -> int:
    """Number of groups of dense parameters on all pipeline ranks: units, prediction depths, and one group for all other parameters."""
    outside = 0 if spec.sharding.wraps_stages else local.groups - spec.model.num_layers
    return num_units(spec) + outside


def part_ns(spec: Spec, rates: Rates, part: KindWork) -> int:
    """Time of a kind of kernels outside the layers."""
    dtype = spec.newton_schulz_dtype if part.flops else spec.precision.params
    return rates.kind_ns(part.kind, part.num_bytes, part.flops, "D", dtype.of_products) + part.launches * rates.launch_ns


def _muon_ns(spec: Spec, rates: Rates, matrices: Iterable[Matrices]) -> int:
    """Newton-Schulz on full matrices, each on one of the ranks that share it."""
    if not spec.optimizer.uses_muon:
        return 0
    dtype, flops, steps = spec.newton_schulz_dtype, 0, spec.optimizer.newton_schulz_steps
    for each in matrices:
        number = -(-each.num_tensors * each.stack // each.degree(spec))
        flops += number * newton_schulz_flops(each.rows, each.columns, steps)
    return rates.compute_ns(flops // spec.pp_shares, "D", dtype)


def exposed_ns(spec: Spec, times: DataTimes, forward_ns: int, layers_ns: int) -> int:
    """Time that a step waits for data ranks.

    Args:
        spec: A checked spec.
        times: Times of a mean pipeline rank.
        forward_ns: F of the whole model for one microbatch.
        layers_ns: F, I and W of it.
    """
    mesh, reshard = spec.mesh, spec.sharding.reshard_after_forward
    count = spec.schedule.microbatches_per_update
    if spec.sharding.copies and not mesh.is_pipelined:  # in the last microbatch's backward
        return times.reduce_ns // num_units(spec) + max(0, times.reduce_ns - (layers_ns - forward_ns))
    if not mesh.is_pipelined and spec.sharding.wraps_stages:  # before a forward, and after a backward
        return count * (times.gather_ns + times.reduce_ns)
    if not mesh.is_pipelined:
        moved = count * (times.gather_ns + times.again_ns * reshard + times.reduce_ns)
        return (times.gather_ns + times.reduce_ns) // num_units(spec) + max(0, moved - count * layers_ns)
    if reshard:
        return times.reduce_ns + max(0, times.gather_ns - times.again_ns + count * (2 * times.again_ns - layers_ns // mesh.pp))
    return times.reduce_ns + max(0, times.gather_ns - (0 if spec.sharding.wraps_stages else forward_ns // mesh.pp))
