"""What data ranks exchange, and the optimizer's pass over its state: what a step has beside its layers, in whole nanoseconds.

Megarun's FSDP2 gathers parameters and reduces gradients beside the layers. Without a pipeline it does both for every microbatch, and once
more gathers for backward where parameters are freed after forward. torch's pipeline schedules keep what they gathered and reduce once, at
the end of the step. What is exposed: without a pipeline the gather before the first layer, the reduction after the last, and what all of
it takes beyond the layers' own time; under a pipeline the reduction, and what gathers take beyond the forwards beside which they run.

Parameters are those of a mean pipeline rank, so that no figure here depends on the cuts. Muon's Newton-Schulz steps run on whole matrices,
which data ranks gather and do not share.

Source: arXiv:2304.11277, section 4 (FSDP's overlap); torch/distributed/pipelining/stage.py, `backward_maybe_with_nosync`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from megaplan.cost.rates import Rates
from megaplan.cost.transfers import Group as Ranks
from megaplan.cost.transfers import gather_ns
from megaplan.dtypes import DType
from megaplan.inventory.tensors import Group, Inventory, Owner
from megaplan.spec.models import Spec

OPTIMIZER_BYTES = 30
"""Read and written of an element: gradient, master, two moments and parameter."""


@dataclass(frozen=True, slots=True)
class DataTimes:
    """Of one pipeline rank.

    Attributes:
        gather_ns: All of its parameters once.
        reduce_ns: All of its gradients once, over shards and replicas.
        optimizer_ns: The update of its shard, and under Muon the orthogonalisation of its matrices.
    """

    gather_ns: int
    reduce_ns: int
    optimizer_ns: int


class LocalElements(NamedTuple):
    """Of the whole model, on one tensor and expert rank.

    Attributes:
        dense: Elements of dense tensors.
        experts: Of expert banks.
        orthogonalised_flops: Of one Newton-Schulz step on all matrices of the rank; see `newton_schulz_flops`.
        trained: Of dense tensors, those with gradients.
        trained_experts: Of expert banks, likewise.
    """

    dense: int
    experts: int
    orthogonalised_flops: int
    trained: int
    trained_experts: int


def local_elements(inventory: Inventory, tp: int, ep: int, etp: int) -> LocalElements:
    """Of the whole model on one tensor and expert rank."""
    dense = experts = flops = trained = trained_experts = 0
    for block, count in inventory.makes:
        for tensor in block.tensors:
            elements = prod(tensor.shape)
            if tensor.owner is Owner.EXPERT_PARALLEL:
                own = elements // (ep * (etp if tensor.tp_dim is not None else 1))
                experts, trained_experts = experts + count * own, trained_experts + count * own * (tensor.group is not Group.FROZEN)
            else:
                divided = tensor.owner is Owner.TENSOR_PARALLEL and tensor.tp_dim is not None
                own = elements // (tp if divided else 1)
                dense, trained = dense + count * own, trained + count * own * (tensor.group is not Group.FROZEN)
            if tensor.group is Group.MATRIX:
                columns = tensor.shape[-1]
                matrices = count * tensor.local_matrices(tp, ep)
                flops += matrices * newton_schulz_flops(elements // tensor.num_matrices // columns, columns)
    return LocalElements(dense, experts, flops, trained, trained_experts)


def newton_schulz_flops(rows: int, columns: int) -> int:
    """One step on a matrix of n ≤ m: X Xᵀ and its square, of which symmetry leaves half to compute, and one product with X: 3 n² m + n³.

    Source: K. Jordan et al., "Muon" (2024), the quintic iteration; `megakernels.symmetric_product` computes one triangle.
    """
    short, long = sorted((rows, columns))
    return 3 * short**2 * long + short**3


def data_times(spec: Spec, rates: Rates, local: LocalElements) -> DataTimes:
    """Times of a mean pipeline rank.

    Args:
        spec: A checked spec.
        rates: Of its device.
        local: Of its tensor and expert ranks.
    """
    mesh, precision = spec.mesh, spec.precision
    dense, experts = local.dense // mesh.pp, local.experts // mesh.pp
    trained, trained_experts = local.trained // mesh.pp, local.trained_experts // mesh.pp
    shards, banks = Ranks(mesh.dp_shard, mesh.cp * mesh.tp), Ranks(mesh.efsdp, mesh.ep * mesh.etp)
    replicas = Ranks(mesh.dp_replicate, mesh.dp_shard * mesh.cp * mesh.tp)
    sent, summed = precision.params.bytes, precision.reduce.bytes
    gather = gather_ns(rates, spec, shards, dense * sent) + gather_ns(rates, spec, banks, experts * sent)
    reduced = gather_ns(rates, spec, shards, trained * summed) + gather_ns(rates, spec, banks, trained_experts * summed)
    shard = trained // mesh.dp_shard + trained_experts // mesh.efsdp
    reduced += 2 * gather_ns(rates, spec, replicas, shard * summed)
    reduced += 2 * gather_ns(rates, spec, Ranks(mesh.cp, mesh.tp), trained // mesh.dp_shard * summed)
    return DataTimes(
        gather, reduced, rates.memory_ns(shard * OPTIMIZER_BYTES) + _muon_ns(spec, rates, local.orthogonalised_flops // mesh.pp)
    )


def _muon_ns(spec: Spec, rates: Rates, flops: int) -> int:
    """Newton-Schulz on whole matrices, which every data rank repeats."""
    if not spec.optimizer.uses_muon:
        return 0
    dtype = spec.optimizer.newton_schulz_dtype or (DType.FP32 if spec.precision.params is DType.FP32 else DType.BF16)
    return rates.compute_ns(flops * spec.optimizer.newton_schulz_steps, "D", dtype)


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
