"""Work under `lora`: no weight gradients of frozen parameters, and the narrow products of adapters.

What a layer is, its tensors say: frozen ones, and A and B behind a linear's weight. An adapter's products are counted as one operation of
its own, though a kernel adds the second into the linear's output. Adapters' gradients are made with the input's, also where a schedule
splits backwards.
"""

from __future__ import annotations

from dataclasses import replace

from megakernels.ops.library import linear
from megaplan.blocks.work import OpWork, Workload, Works
from megaplan.inventory.adapters import A_SUFFIX, B_SUFFIX
from megaplan.inventory.tensors import Block, Group, Owner, ParamTensor


def adapted_works(load: Workload, ops: Works, block: Block) -> Works:
    """Work of a layer as its tensors have it: the family's where all are trained."""
    if not any(tensor.group is Group.FROZEN for tensor in block.tensors):
        return ops
    tensors = {tensor.name: tensor for tensor in block.tensors}
    adapted = frozenset(name.removesuffix(f".{A_SUFFIX}") for name in tensors if name.endswith(f".{A_SUFFIX}"))
    found = [frozen_work(op, runs_again=op.name in adapted) for op in ops]
    for name in sorted(adapted):
        found.append(_adapter(load, name, block.family, tensors[f"{name}.weight"], tensors[f"{name}.{A_SUFFIX}"]))
    return tuple(found)


def adapter_name(linear: str) -> str:
    """The name of the operation that a linear's adapter is."""
    return f"{linear}.{A_SUFFIX}, {B_SUFFIX}"


def frozen_work(op: OpWork, *, runs_again: bool = False) -> OpWork:
    """Work without parameters' gradients; `runs_again`: an adapter keeps something behind the operation, so that recompute runs it too."""
    return op._replace(work=replace(op.work, weight_grad=0, moved_weight=0), closes=op.closes and not runs_again)


def unreached_work(op: OpWork) -> OpWork:
    """Work of an operation that no gradient reaches."""
    return op._replace(work=replace(op.work, input_grad=0, weight_grad=0, moved_input=0, moved_weight=0))


def trained_elements(block: Block) -> int:
    """Elements that have gradients."""
    return sum(size for tensor, size in zip(block.tensors, block.sizes, strict=True) if tensor.group is not Group.FROZEN)


def _adapter(load: Workload, name: str, part: str, weight: ParamTensor, a: ParamTensor) -> OpWork:
    """X Aᵀ and its product with Bᵀ, added to the linear's output, on this rank's widths."""
    rows, columns = weight.shape
    rank, cut = a.shape[0], weight.tp_dim if weight.owner is Owner.TENSOR_PARALLEL else None
    rows, columns = (rows // load.tp if cut == 0 else rows), (columns // load.tp if cut == 1 else columns)
    work = linear(columns, rank, load.itemsize) + linear(rank, rows, load.itemsize)
    own_tokens = weight.owner is Owner.REPLICATED
    return OpWork(adapter_name(name), part, work, weights=rank * (rows + columns), own_tokens=own_tokens)
