"""What FSDP2 holds of a block's parameters: resident shards, gathered copies, gradients, reduce buffers.

Every tensor is sharded along dim 0 in n chunks of ceil(d0 / n) rows. Each rank stores a whole chunk, zero-padded; views of it have the
true rows. Gathered copies and reduce inputs hold n padded chunks; unsharded gradients have the tensor's own shape; the gradient shards of a
group lie in one padded buffer. Optimizer state follows the true rows, so trailing ranks hold less of it.

Dense tensors shard over dp_shard, expert banks over efsdp = dp_shard · cp · tp / (ep · etp). A layer is a group, its expert bank another;
everything outside the layers of a slot is the slot's own group, which is never resharded after forward.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py (`_init_sharded_param`) and _fsdp_collectives.py (`foreach_all_gather`,
`foreach_reduce`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from megaplan.columns import Column
from megaplan.hosts.megarun.allocator import slack_bytes
from megaplan.hosts.megarun.dims import local_shape, param_dtype
from megaplan.hosts.megarun.optimizer import Cast, MatrixScratch, Uneven, matrix_scratch, newton_schulz_dtype, uses_muon
from megaplan.inventory.tensors import Block, Family, Group, Owner
from megaplan.spec.models import Mesh, Spec

OWNER_COLUMNS = {
    Owner.REPLICATED: Column.REPLICATED_PARAMS,
    Owner.TENSOR_PARALLEL: Column.TENSOR_PARALLEL_PARAMS,
    Owner.EXPERT_PARALLEL: Column.EXPERT_PARALLEL_PARAMS,
}


class GroupBytes(NamedTuple):
    """FSDP2 groups, one or several together.

    Attributes:
        gathered_bytes: Unsharded compute copies, padded.
        flat_bytes: The all-gather's own output before it is copied out: 0 on a one-rank mesh.
        unsharded_bytes: Whole gradients in `precision.grads`.
        made_bytes: Whole gradients in the dtype autograd makes them.
        reduce_bytes: Reduce-scatter input in `precision.reduce`, padded.
        reduced_bytes: Its output, a padded shard.
        divided_bytes: On a one-rank mesh, its input divided by the gradient divisor.
        recast_bytes: The output once more, in `precision.grads`, where that is another dtype.
        shard_bytes: Gradient shards in `precision.grads`, padded.
        last_made_bytes: Of `made_bytes`, the last tensor's: `foreach_reduce` names it until it returns, on meshes of more than one rank.
        last_unsharded_bytes: Of `unsharded_bytes`, likewise.
    """

    gathered_bytes: int = 0
    flat_bytes: int = 0
    unsharded_bytes: int = 0
    made_bytes: int = 0
    reduce_bytes: int = 0
    reduced_bytes: int = 0
    divided_bytes: int = 0
    recast_bytes: int = 0
    shard_bytes: int = 0
    last_made_bytes: int = 0
    last_unsharded_bytes: int = 0


def together(groups: Iterable[GroupBytes]) -> GroupBytes:
    """Several groups as one; the last tensor is the last group's that has one."""
    listed = list(groups)
    last = next((group for group in reversed(listed) if group.made_bytes), GroupBytes())
    total = GroupBytes(*map(sum, zip(*listed, strict=True)))
    return total._replace(last_made_bytes=last.last_made_bytes, last_unsharded_bytes=last.last_unsharded_bytes)


@dataclass(frozen=True, slots=True)
class BlockStorage:
    """What a rank holds of one block's parameters.

    Attributes:
        resident: Shards in `precision.master`, padded, by column.
        dense: The group of what is not an expert bank.
        experts: The group of the expert bank.
        both: The two together.
        matrix_state_bytes: Moments of Muon tensors that shard evenly.
        other_state_bytes: Moments of AdamW tensors that shard evenly, step counters of all AdamW tensors.
        uneven: Tensors whose last chunks are short or empty.
        matrix_scratch: Muon's scratch and momentum of each tensor, in the order they are updated.
        casts: AdamW's tensors in that order, where their gradients are cast for it.
        resident_slack_bytes: What the allocator's rounding adds to the shards.
        state_slack_bytes: What it adds to the moments.
        parameters: Elements after TP and EP, before state sharding.
    """

    resident: dict[Column, int]
    dense: GroupBytes
    experts: GroupBytes
    both: GroupBytes
    matrix_state_bytes: int
    other_state_bytes: int
    uneven: tuple[Uneven, ...]
    matrix_scratch: tuple[MatrixScratch, ...]
    casts: tuple[Cast, ...]
    resident_slack_bytes: int
    state_slack_bytes: int
    parameters: int


def shard_degrees(mesh: Mesh) -> tuple[int, int]:
    """Ranks that share dense tensors, and those that share expert banks."""
    return mesh.dp_shard, mesh.efsdp


def block_storage(spec: Spec, block: Block) -> BlockStorage:
    """Storage of one block on a rank that holds it."""
    mesh, precision = spec.mesh, spec.precision
    compute, master = param_dtype(spec, block).bytes, precision.master.bytes
    made = max(compute, 2)  # fp8 weights get bf16 gradients
    moments, iteration = precision.moments.bytes, newton_schulz_dtype(spec)
    resident: dict[Column, int] = {}
    counts = {True: [0, 0, 0], False: [0, 0, 0]}  # experts or not: padded shard, padded whole, true whole elements
    states = {True: 0, False: 0}  # of the matrix group or not, whichever optimizer that has
    uneven: list[Uneven] = []
    scratch: list[MatrixScratch] = []
    casts: list[Cast] = []
    dense_degree, expert_degree = shard_degrees(mesh)
    muon, parameters, resident_slack, state_slack = uses_muon(spec), 0, 0, 0
    lasts, last = {True: 0, False: 0}, last_tensor(block)
    for tensor in block.tensors:
        shape = local_shape(tensor, mesh.tp, mesh.ep, mesh.etp)
        rows, elements = shape[0], prod(shape)
        expert = tensor.owner is Owner.EXPERT_PARALLEL
        degree = expert_degree if expert else dense_degree
        chunk_rows, width = -(-rows // degree), elements // rows
        chunk = chunk_rows * width
        column = OWNER_COLUMNS[tensor.owner]
        resident[column] = resident.get(column, 0) + chunk * master
        slack = slack_bytes(chunk * master)
        resident_slack += slack
        count = counts[expert]
        count[0] += chunk
        count[1] += chunk * degree
        count[2] += elements
        parameters += elements
        if expert or tensor.name == last:
            lasts[expert] = elements if degree > 1 else 0
        in_matrix_group = tensor.group is Group.MATRIX
        by_muon = muon and in_matrix_group
        state = width * moments * (1 if by_muon else 2)
        state_slack += (slack if moments == master else slack_bytes(chunk * moments)) * (1 if by_muon else 2)
        if chunk_rows * degree == rows:
            states[in_matrix_group] += state * chunk_rows
        else:
            uneven.append(Uneven(rows, chunk_rows, degree, state, width * master, expert, in_matrix_group))
        if by_muon:
            needed = matrix_scratch(shape, tensor.num_matrices, iteration, precision.master, chunk, degree)
            scratch.append(MatrixScratch(*needed, state * chunk_rows, uneven[-1] if chunk_rows * degree != rows else None))
        else:
            states[in_matrix_group] += STEP_BYTES
            if precision.grads is not precision.master:
                casts.append(Cast(chunk * master, state * chunk_rows + STEP_BYTES, in_matrix_group))
    dense, experts = (
        GroupBytes(
            gathered_bytes=whole * compute,
            flat_bytes=whole * compute if degree > 1 else 0,
            unsharded_bytes=true * precision.grads.bytes,
            made_bytes=true * made,
            reduce_bytes=whole * precision.reduce.bytes,
            reduced_bytes=shard * precision.reduce.bytes,
            divided_bytes=0 if degree > 1 else whole * precision.reduce.bytes,
            recast_bytes=0 if precision.grads is precision.reduce else shard * precision.grads.bytes,
            shard_bytes=shard * precision.grads.bytes,
            last_made_bytes=last_elements * made,
            last_unsharded_bytes=last_elements * precision.grads.bytes,
        )
        for degree, last_elements, (shard, whole, true) in (
            (dense_degree, lasts[False], counts[False]),
            (expert_degree, lasts[True], counts[True]),
        )
    )
    return BlockStorage(
        resident=resident,
        dense=dense,
        experts=experts,
        both=together((dense, experts)),
        matrix_state_bytes=states[True],
        other_state_bytes=states[False],
        uneven=tuple(uneven),
        matrix_scratch=tuple(scratch),
        casts=tuple(casts),
        resident_slack_bytes=resident_slack,
        state_slack_bytes=state_slack,
        parameters=parameters,
    )


def last_tensor(block: Block) -> str:
    """The tensor that FSDP2 lists last in a block's dense group: children before the block's own parameters, in the module's order."""
    names = [tensor.name for tensor in block.tensors if tensor.owner is not Owner.EXPERT_PARALLEL]
    own = {Family.M: "D", Family.R: "A_log", Family.D: "norm.weight"}.get(block.family)
    return own if own is not None and own in names else names[-1]


STEP_BYTES = 4
"""AdamW's step counter, an fp32 scalar beside each parameter (fused AdamW keeps it on the device)."""
