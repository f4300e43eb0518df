"""Weights of frozen linears whose rows are packed in four or eight bits (`lora.base`).

A linear's `weight` is then the bytes of its rows, one tensor that FSDP2 shards and gathers without a cast. A product makes the matrix, and
drops it. TP cuts codes and magnitudes at whole blocks; every rank has the mean and step of a row, which cover all columns.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megakernels import unpacked
from megakernels.ops.packed_weight.facts import Packing
from megakernels.ops.packed_weight.reference import join, pack
from megaplan.inventory.tensors import Owner, ParamTensor
from megarun.parallel.groups.mesh import RankMesh
from megarun.parallel.groups.ownership import local_part

PARTS = "codes", "absmax", "nested_absmax"
"""Names of the parts of packed rows in a checkpoint, after the weight's."""


class PackedWeight(NamedTuple):
    """A packed weight, as gathered.

    Attributes:
        rows: Bytes of its rows: the parameter itself, whose storage FSDP2 fills again for backward.
        columns: Columns of the matrix.
        packing: Form of the rows.
    """

    rows: Tensor
    columns: int
    packing: Packing

    @property
    def requires_grad(self) -> bool:
        """False: it is frozen."""
        return False


def matrix(weight: Tensor | PackedWeight, dtype: torch.dtype) -> Tensor:
    """The matrix that a product reads."""
    return unpacked(weight.rows, weight.columns, weight.packing, dtype) if isinstance(weight, PackedWeight) else weight


def pack_linear(module: nn.Linear, packing: Packing) -> None:
    """Give a linear a weight of packed rows, without values."""
    rows = torch.empty(module.out_features, packing.row_bytes(module.in_features), dtype=torch.uint8, device=module.weight.device)
    module.weight = nn.Parameter(rows, requires_grad=False)
    module.packing = packing  # type: ignore[assignment]  # a plain attribute


def packing_of(module: nn.Module) -> Packing | None:
    """The form of a linear's weight; None if it is a matrix."""
    return getattr(module, "packing", None)


def weight_of(module: nn.Linear) -> Tensor | PackedWeight:
    """A linear's weight."""
    packing = packing_of(module)
    return module.weight if packing is None else PackedWeight(module.weight, module.in_features, packing)


def packings(stage: nn.Module) -> dict[str, Packing]:
    """The forms of a stage's packed weights, by the weights' names."""
    return {f"{name}.weight": packing for name, module in stage.named_modules() if (packing := packing_of(module)) is not None}


def parts_of(tensor: ParamTensor, packing: Packing) -> Iterator[tuple[str, ParamTensor]]:
    """The parts of a packed weight's rows, as tensors of bytes, by their names."""
    rows, columns = tensor.shape
    widths = packing.code_bytes(columns), packing.maximum_bytes(columns), packing.nested_bytes
    for name, width in zip(PARTS, widths, strict=True):
        part = tensor._replace(name=f"{tensor.name}.{name}", shape=(rows, width))
        if name == PARTS[2] and tensor.tp_dim == 1:
            part = part._replace(owner=Owner.REPLICATED, tp_dim=None)
        yield name, part


def pack_part(tensor: ParamTensor, whole: Tensor, packing: Packing, mesh: RankMesh | None) -> Tensor:
    """The packed rows of this rank's part of a whole weight, before state sharding; of a whole weight without a mesh."""
    values: Any = zip(parts_of(tensor, packing), pack(whole, packing), strict=True)
    return join(*(value if mesh is None else local_part(part, value, mesh) for (_, part), value in values))
