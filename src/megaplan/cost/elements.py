"""Elements of the whole model on one tensor and expert rank, and the part of them that is gathered packed."""

from collections import Counter
from math import prod
from typing import NamedTuple

from megakernels.ops.packed_weight.facts import Packing
from megaplan.cost.outside_layers import Matrices
from megaplan.inventory.adapters import packable, packed_tensor
from megaplan.inventory.tensors import Group, Inventory, Owner, layer_names
from megaplan.spec.local import delayed_weights, packed_gather
from megaplan.spec.models import Spec


class LocalElements(NamedTuple):
    """Elements of the whole model on one tensor and expert rank.

    Attributes:
        dense: Elements of dense tensors.
        experts: Elements of expert banks.
        trained: Elements of dense tensors with gradients.
        trained_experts: Elements of expert banks with gradients.
        dense_matrices: Elements of dense tensors that Muon updates.
        expert_matrices: Elements of expert banks that Muon updates.
        tensors: Parameters.
        trained_tensors: Tensors with gradients.
        groups: Blocks whose dense parameters are gathered together.
        banks: Blocks with expert banks, which are gathered separately.
        matrices: Matrices that Muon updates, tensor by tensor.
        kept_packed: Elements of weights that are stored packed (`lora.base`), and their packed bytes, in which they are gathered.
        made_packed: The same of dense weights that are packed before a gather (a recipe's `param_gather`).
        made_packed_banks: The same of expert banks.
        packed_tensors: Tensors of both.
        delayed_weights: Weights whose products have numbers of delayed scaling.
    """

    dense: int
    experts: int
    trained: int
    trained_experts: int
    dense_matrices: int
    expert_matrices: int
    tensors: int
    trained_tensors: int
    groups: int
    banks: int
    matrices: tuple[Matrices, ...]
    kept_packed: tuple[int, int] = (0, 0)
    made_packed: tuple[int, int] = (0, 0)
    made_packed_banks: tuple[int, int] = (0, 0)
    packed_tensors: int = 0
    delayed_weights: int = 0

    def dense_bytes(self, size: int, pp: int) -> int:
        """Bytes of a mean pipeline rank's dense tensors as they are gathered, `size` bytes per element."""
        elements, stored = map(sum, zip(self.kept_packed, self.made_packed, strict=True))
        return (self.dense - elements) // pp * size + stored // pp

    def bank_bytes(self, size: int, pp: int) -> int:
        """The same of its expert banks."""
        elements, stored = self.made_packed_banks
        return (self.experts - elements) // pp * size + stored // pp


def local_elements(inventory: Inventory, tp: int, ep: int, etp: int, packing: Packing | None = None) -> LocalElements:
    """The elements of the whole model on one tensor and expert rank."""
    tensors = trained_tensors = packed = stored = banks = 0
    matrices = Counter[tuple[int, int, int, bool]]()
    elements, trained, muon = [0, 0], [0, 0], [0, 0]
    for block, count in inventory.makes:
        banks += count * any(tensor.owner is Owner.EXPERT_PARALLEL for tensor in block.tensors)
        for tensor in block.tensors:
            own, in_bank = tensor.local_elements(tp, ep, etp), tensor.owner is Owner.EXPERT_PARALLEL
            elements[in_bank] += count * own
            tensors += count
            if packing is not None and packable(block, tensor):
                packed += count * own
                stored += count * packed_tensor(packing, tensor, tp).local_elements(tp, ep, etp)
            if tensor.group is Group.FROZEN:
                continue
            trained[in_bank] += count * own
            trained_tensors += count
            if tensor.group is Group.MATRIX:
                columns, local = tensor.shape[-1], tensor.local_matrices(tp, ep)
                rows = tensor.elements // tensor.num_matrices // columns
                muon[in_bank] += count * own
                matrices[local, rows, columns, in_bank] += count
    layers = len(inventory.layers)
    groups = layers + sum(name.startswith("mtp.") for name, _ in inventory.outside) + 1
    made = tuple(Matrices(number, *key) for key, number in matrices.items())
    (dense, experts), (own, banked), (whole, stacked) = elements, trained, muon
    return LocalElements(dense, experts, own, banked, whole, stacked, tensors, trained_tensors, groups, banks, made, (packed, stored))


def with_recipe(spec: Spec, inventory: Inventory, local: LocalElements) -> LocalElements:
    """The elements, extended by the weights that the recipe packs before a gather, and by its weights with delayed scaling."""
    names = *layer_names(len(inventory.layers)), "head"
    delayed = sum([len(delayed_weights(spec, inventory, name)) for name in names])
    return _with_packed(spec, inventory, local._replace(delayed_weights=delayed))


def _with_packed(spec: Spec, inventory: Inventory, local: LocalElements) -> LocalElements:
    packs = packed_gather(spec)
    if packs is None:
        return local
    mesh, found, count = spec.mesh, [[0, 0], [0, 0]], 0
    for name, block in zip(layer_names(len(inventory.layers)), inventory.layers, strict=True):
        if packs.covers(name, block.family):
            for tensor in block.tensors:
                shape = tensor.local_shape(mesh.tp, mesh.ep, mesh.etp)
                size = packs.shard_bytes(block.family, tensor.name, shape)
                if size is not None:
                    own = found[tensor.owner is Owner.EXPERT_PARALLEL]
                    own[0], own[1], count = own[0] + prod(shape), own[1] + size * packs.degree(shape), count + 1
    (dense, dense_bytes), (banks, bank_bytes) = found
    return local._replace(made_packed=(dense, dense_bytes), made_packed_banks=(banks, bank_bytes), packed_tensors=count)
