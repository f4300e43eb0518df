"""Builds the stage of a slot: on the meta device, checked against the inventory, then materialised."""

from collections.abc import Iterator

import torch
from torch import nn

from megaplan.hosts.megarun.packed import packed_block
from megaplan.inventory.adapters import A_SUFFIX, B_SUFFIX
from megaplan.inventory.tensors import Group, Inventory, ParamTensor
from megaplan.layout.ranks import Slot
from megaplan.spec.models import Lora, Spec
from megarun.dtypes import TORCH_DTYPES
from megarun.model.stage import Stage
from megarun.parallel.apply.scaled import scale_products
from megarun.parallel.groups.adapters import add_adapter, run_frozen
from megarun.parallel.groups.context import WHOLE, ContextParallel
from megarun.parallel.groups.expert import LOCAL, ExpertParallel
from megarun.parallel.groups.packed import pack_linear
from megarun.parallel.groups.tensor import ALONE, TensorParallel


def build_stage(
    spec: Spec,
    inventory: Inventory,
    slot: Slot,
    tp: TensorParallel = ALONE,
    ep: ExpertParallel = LOCAL,
    cp: ContextParallel = WHOLE,
) -> Stage:
    """A rank's stage of `slot` on the meta device: its part of every parameter, in the dtype of its shards.

    Raises:
        RuntimeError: The tensors of the stage differ from the inventory's, which is a bug.
    """
    with torch.device("meta"):
        stage = Stage(spec, inventory, slot, tp, ep, cp).to(TORCH_DTYPES[spec.precision.master])
        for part in (stage.vision, stage.projector):
            if part is not None and not any(parameter.requires_grad for parameter in part.parameters()):
                part.to(TORCH_DTYPES[spec.precision.params])
        if spec.lora is not None:
            _adapt(stage, inventory, slot, spec, spec.lora)
    scale_products(stage, spec, inventory)
    wrong = differences(stage, inventory, slot, spec)
    if wrong:
        raise RuntimeError(f"stage {slot.index} differs from the inventory: {'; '.join(wrong)}")
    return stage


def _adapt(stage: Stage, inventory: Inventory, slot: Slot, spec: Spec, lora: Lora) -> None:
    """Freeze a stage's parameters, in the dtype in which they are stored, and add the adapters that the inventory lists.

    Before FSDP2 wraps the stage, so that it shards the adapters and reduces their gradients with their layer's group.
    """
    stage.to(TORCH_DTYPES[lora.stored(spec.precision.params)]).requires_grad_(False)
    for name, tensor in stored_tensors(spec, inventory, slot):
        if tensor.group is Group.PACKED and lora.packing is not None:
            frozen = _linear(stage, name.rpartition(".")[0])
            pack_linear(frozen, lora.packing)
            run_frozen(frozen)
    shapes = {name: tensor.local_shape(spec.mesh.tp, spec.mesh.ep, spec.mesh.etp) for name, tensor in slot_tensors(inventory, slot)}
    for name, shape in shapes.items():
        path, _, kind = name.rpartition(".")
        if kind == A_SUFFIX:
            dtype = TORCH_DTYPES[spec.precision.master]
            add_adapter(_linear(stage, path), shape, shapes[f"{path}.{B_SUFFIX}"], lora.scale, dtype)


def _linear(stage: Stage, path: str) -> nn.Linear:
    module = stage.get_submodule(path)
    if not isinstance(module, nn.Linear):
        raise RuntimeError(f"{path} is not a linear, and the inventory has one")
    return module


def materialise(stage: Stage, device: torch.device) -> None:
    """Give a (sharded) meta stage storage on `device`: parameters uninitialised, buffers filled."""
    stage.to_empty(device=device)
    stage.add_buffers(device)


def slot_tensors(inventory: Inventory, slot: Slot) -> Iterator[tuple[str, ParamTensor]]:
    """The tensors of a slot's blocks, by full name."""
    for block in slot.blocks:
        for tensor in inventory.block(block).tensors:
            yield f"{block}.{tensor.name}", tensor


def stored_tensors(spec: Spec, inventory: Inventory, slot: Slot) -> Iterator[tuple[str, ParamTensor]]:
    """The stored tensors of a slot's blocks, by full name."""
    for block in slot.blocks:
        for tensor in packed_block(spec.packing, inventory.block(block), spec.mesh.tp).tensors:
            yield f"{block}.{tensor.name}", tensor


def stored_dtype(spec: Spec, tensor: ParamTensor) -> torch.dtype:
    """Dtype of a stored tensor's shards."""
    precision = spec.precision
    if tensor.group is Group.PACKED:
        return torch.uint8
    if tensor.group is not Group.FROZEN:
        return TORCH_DTYPES[precision.master]
    return TORCH_DTYPES[precision.params if spec.lora is None else spec.lora.stored(precision.params)]


def differences(stage: Stage, inventory: Inventory, slot: Slot, spec: Spec) -> list[str]:
    """Tensors whose name, shape, dtype or gradient differs between `stage` and the rank's part of the slot's blocks; empty if none."""
    mesh, tensors = spec.mesh, dict(stored_tensors(spec, inventory, slot))
    expected = {
        name: (
            tensor.stored_shape(tensor.local_shape(mesh.tp, mesh.ep, mesh.etp)),
            stored_dtype(spec, tensor),
            tensor.group not in (Group.FROZEN, Group.PACKED),
        )
        for name, tensor in tensors.items()
    }
    found = {name: (tuple(p.shape), p.dtype, p.requires_grad) for name, p in stage.named_parameters()}
    found |= {name: (tuple(b.shape), b.dtype, False) for name, b in stage.named_buffers() if not name.startswith("rope_")}
    names = sorted(expected.keys() | found.keys())
    return [f"{n}: inventory {expected.get(n)}, module {found.get(n)}" for n in names if expected.get(n) != found.get(n)]
