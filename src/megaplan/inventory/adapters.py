"""Parameters of a block under `lora`: its own are frozen, and every adapted linear gets A [rank, in] and B [out, rank].

TP shards an adapter as it shards the linear. For a column-parallel linear every rank has A and the rows of B that belong to its rows; for a
row-parallel one the columns of A that belong to its columns, and B. If a rank has an unsharded adapter of a sharded linear, its gradient is
a partial sum over TP, as for every replicated tensor.
"""

from collections.abc import Iterator
from typing import Protocol

from megakernels.ops.packed_weight.facts import Packing
from megaplan.inventory.tensors import Block, Group, Init, Outside, Owner, ParamTensor, make_block

A_SUFFIX, B_SUFFIX = "lora_a", "lora_b"
LINEAR_ENDINGS = ("_proj", "_down", "_up")
"""Endings of the names of adaptable linears; routers, gates of one row, convolutions and tables have other names."""
NOT_ADAPTED = ("indexer.",)
"""Linears whose gradients are not those of the language model's loss."""


class Chooses(Protocol):
    """Interface that decides which linears are adapted."""

    @property
    def rank(self) -> int:
        """Rows of A."""
        ...

    def adapts(self, letter: str, linear: str) -> bool:
        """True if this linear is adapted."""
        ...


def adaptable(tensor: ParamTensor) -> str | None:
    """The name of the linear that has this weight, if it can have adapters; else None."""
    if len(tensor.shape) != 2 or tensor.owner is Owner.EXPERT_PARALLEL:
        return None
    return linear_of(tensor.name)


def linear_of(parameter: str) -> str | None:
    """The name of the linear that has this parameter as its weight, if it can have adapters; else None."""
    name, _, kind = parameter.rpartition(".")
    if kind != "weight":
        return None
    return name if name.endswith(LINEAR_ENDINGS) and not name.startswith(NOT_ADAPTED) else None


def packable(block: Block, tensor: ParamTensor) -> bool:
    """True if a tensor of a block is the weight of a frozen linear of a layer, which `lora.base` packs."""
    return tensor.group is Group.FROZEN and not isinstance(block.family, Outside) and adaptable(tensor) is not None


def packed_tensor(packing: Packing, tensor: ParamTensor, tp: int) -> ParamTensor:
    """The rows of a weight as bytes; under TP a rank with some of the columns has records of these."""
    parts = tp if tensor.tp_dim == 1 else 1
    return tensor._replace(shape=(tensor.shape[0], parts * packing.row_bytes(tensor.shape[1] // parts)), group=Group.PACKED)


def adapted_linears(lora: Chooses, block: Block) -> Iterator[str]:
    """Names of a layer's adapted linears."""
    for tensor in block.tensors:
        name = adaptable(tensor)
        if name is not None and lora.adapts(block.family, name):
            yield name


def adapted_block(lora: Chooses, block: Block, *, layer: bool) -> Block:
    """A block with frozen tensors and, if it is a layer, adapters, each pair after its linear's weight."""
    chosen = set(adapted_linears(lora, block)) if layer else set()
    tensors: list[ParamTensor] = []
    for tensor in block.tensors:
        tensors.append(tensor._replace(group=Group.FROZEN))
        name = adaptable(tensor)
        if name in chosen:
            tensors += adapter_tensors(tensor, f"{name}.", lora.rank)
    return make_block(block.family, tuple(tensors), block.variant, block.reads)


def adapter_tensors(weight: ParamTensor, prefix: str, rank: int) -> tuple[ParamTensor, ParamTensor]:
    """A, uniform within ± 1 / sqrt(in), and B, zero, so that training starts from the base model."""
    rows, columns = weight.shape
    cut = weight.tp_dim if weight.owner is Owner.TENSOR_PARALLEL else None
    of_a = (Owner.TENSOR_PARALLEL, 1) if cut == 1 else (Owner.REPLICATED, None)
    of_b = (Owner.TENSOR_PARALLEL, 0) if cut == 0 else (Owner.REPLICATED, None)
    parts = weight.tp_parts if cut == 0 else ()
    return (
        ParamTensor(prefix + A_SUFFIX, (rank, columns), of_a[0], Group.OTHER, Init.CONV, of_a[1], weight.tp_parts if cut == 1 else ()),
        ParamTensor(prefix + B_SUFFIX, (rows, rank), of_b[0], Group.OTHER, Init.ZEROS, of_b[1], parts),
    )
