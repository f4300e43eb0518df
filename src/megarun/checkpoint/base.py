"""A checkpoint's unquantised weights as the packed weights of a plan with `lora.base`: each rank reads and packs its rows in host memory.

A rank reads all columns of its rows, including other tensor ranks' columns, because the mean and the step of a row cover all.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from megakernels.ops.packed_weight.facts import Packing
from megakernels.ops.packed_weight.reference import join, pack
from megaplan.inventory.tensors import Inventory, Owner, ParamTensor
from megarun.checkpoint.pieces import Pieces, local_of, pieces_of_local
from megarun.engine.trainer import Trainer
from megarun.parallel.groups.mesh import RankMesh
from megarun.parallel.groups.ownership import local_part
from megarun.parallel.groups.packed import packings, parts_of


class BaseWeight(NamedTuple):
    """A packed weight that a checkpoint has unquantised.

    Attributes:
        name: Name of the weight.
        tensor: Entry of the inventory.
        packing: Form of its rows.
        rows: This rank's rows, packed.
        pieces: The same rows of the unquantised weight, to be read.
    """

    name: str
    tensor: ParamTensor
    packing: Packing
    rows: torch.Tensor
    pieces: Pieces

    def fill(self, mesh: RankMesh) -> None:
        """Pack the tensors that were read."""
        found = []
        for (_, part), value in zip(parts_of(self.tensor, self.packing), pack(self.pieces.local, self.packing), strict=True):
            found.append(local_part(part, value, mesh) if part.tp_dim == 1 else value)
        self.rows.copy_(join(*found))


def base_weights(trainer: Trainer, inventory: Inventory, saved: Mapping[str, Any]) -> list[BaseWeight]:
    """The packed weights of a trainer that a checkpoint has unquantised; `saved` are DCP's records of its tensors."""
    tensors, mesh = dict(inventory.tensors()), trainer.mesh
    found = []
    for stage in trainer.stages:
        forms = packings(stage)
        for name, parameter in stage.named_parameters():
            if name in forms and name in saved:
                tensor = tensors[name]
                whole = tensor._replace(owner=Owner.REPLICATED, tp_dim=None) if tensor.tp_dim == 1 else tensor
                local, (rows, _), offsets = local_of(parameter)
                read = torch.empty((rows, tensor.shape[1]), dtype=saved[name].properties.dtype)
                pieces = pieces_of_local(whole, read, (rows, tensor.shape[1]), offsets, mesh)
                found.append(BaseWeight(name, tensor, forms[name], local, pieces))
    return found
