"""What data ranks exchange, and the optimizer's pass over its state: what a step has beside its layers, in whole nanoseconds.

Megarun's FSDP2 gathers parameters and reduces gradients beside the layers. Without a pipeline it does both for every microbatch, and once
more gathers for backward where parameters are freed after forward. torch's pipeline schedules keep what they gathered and reduce once, at
the end of the step. What is exposed: without a pipeline the gather before the first layer, the reduction after the last, and what all of
it takes beyond the layers' own time; under a pipeline the reduction, and what gathers take beyond the forwards beside which they run.

Parameters are those of a mean pipeline rank, so that no figure here depends on the cuts. Orthogonalising Muon's matrices is not counted.

Source: arXiv:2304.11277, section 4 (FSDP's overlap); torch/distributed/pipelining/stage.py, `backward_maybe_with_nosync`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from megaplan.cost.rates import Rates
from megaplan.cost.transfers import Group, gather_ns
from megaplan.inventory.tensors import Inventory, Owner
from megaplan.spec.models import Spec

OPTIMIZER_BYTES = 30
"""Read and written of an element: gradient, master, two moments and parameter."""


@dataclass(frozen=True, slots=True)
class DataTimes:
    """Of one pipeline rank.

    Attributes:
        gather_ns: All of its parameters once.
        reduce_ns: All of its gradients once, over shards and replicas.
        optimizer_ns: The update of its shard.
    """

    gather_ns: int
    reduce_ns: int
    optimizer_ns: int


def local_elements(inventory: Inventory, tp: int, ep: int, etp: int) -> tuple[int, int]:
    """Elements of the whole model on one tensor and expert rank: dense tensors, expert banks."""
    dense = experts = 0
    for _, block in inventory.blocks():
        for tensor in block.tensors:
            elements = prod(tensor.shape)
            if tensor.owner is Owner.EXPERT_PARALLEL:
                experts += elements // (ep * (etp if tensor.tp_dim is not None else 1))
            else:
                divided = tensor.owner is Owner.TENSOR_PARALLEL and tensor.tp_dim is not None
                dense += elements // (tp if divided else 1)
    return dense, experts


def data_times(spec: Spec, rates: Rates, dense: int, experts: int) -> DataTimes:
    """Times of a mean pipeline rank.

    Args:
        spec: A checked spec.
        rates: Of its device.
        dense: Elements of dense tensors on a tensor rank, of all stages; see `local_elements`.
        experts: Of expert banks on an expert rank.
    """
    mesh, precision = spec.mesh, spec.precision
    dense, experts = dense // mesh.pp, experts // mesh.pp
    shards, banks = Group(mesh.dp_shard, mesh.cp * mesh.tp), Group(mesh.efsdp, mesh.ep * mesh.etp)
    replicas = Group(mesh.dp_replicate, mesh.dp_shard * mesh.cp * mesh.tp)
    sent, summed = precision.params.bytes, precision.reduce.bytes
    gather = gather_ns(rates, spec, shards, dense * sent) + gather_ns(rates, spec, banks, experts * sent)
    reduced = gather_ns(rates, spec, shards, dense * summed) + gather_ns(rates, spec, banks, experts * summed)
    shard = dense // mesh.dp_shard + experts // mesh.efsdp
    reduced += 2 * gather_ns(rates, spec, replicas, shard * summed)
    reduced += 2 * gather_ns(rates, spec, Group(mesh.cp, mesh.tp), dense // mesh.dp_shard * summed)
    return DataTimes(gather, reduced, rates.memory_ns(shard * OPTIMIZER_BYTES))


def exposed_ns(spec: Spec, times: DataTimes, forward_ns: int, layers_ns: int) -> int:
    """What a step waits for data ranks.

    Args:
        spec: A checked spec.
        times: Of a mean pipeline rank.
        forward_ns: F of the whole model for one microbatch.
        layers_ns: F, I and W of it.
    """
    mesh, reshard = spec.mesh, spec.sharding.reshard_after_forward
    count = spec.schedule.microbatches_per_update
    if not mesh.is_pipelined:
        moved = count * (times.gather_ns * (2 if reshard else 1) + times.reduce_ns)
        return (times.gather_ns + times.reduce_ns) // spec.model.num_layers + max(0, moved - count * layers_ns)
    if reshard:
        return times.reduce_ns + max(0, count * (2 * times.gather_ns - layers_ns // mesh.pp))
    return times.reduce_ns + max(0, times.gather_ns - forward_ns // mesh.pp)
