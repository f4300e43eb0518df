"""Builds the stage of a slot: on the meta device, checked against the inventory, then materialised."""

from __future__ import annotations

import torch

from megaplan.hosts.megarun.dims import local_shape
from megaplan.inventory.tensors import Inventory
from megaplan.layout.values import Slot
from megaplan.spec.models import Spec
from megarun.dtypes import TORCH_DTYPES
from megarun.model.stage import Stage
from megarun.parallel.apply.scaled import scale_linears
from megarun.parallel.groups.context import WHOLE, ContextParallel
from megarun.parallel.groups.expert import LOCAL, ExpertParallel
from megarun.parallel.groups.tensor import ALONE, TensorParallel


def build_stage(
    spec: Spec,
    inventory: Inventory,
    slot: Slot,
    tp: TensorParallel = ALONE,
    ep: ExpertParallel = LOCAL,
    cp: ContextParallel = WHOLE,
) -> Stage:
    """A rank's stage of `slot` on the meta device: its part of every parameter, in `precision.master`.

    Raises:
        RuntimeError: Its tensors differ from the inventory's, which is a bug.
    """
    with torch.device("meta"):
        stage = Stage(spec, inventory, slot, tp, ep, cp).to(TORCH_DTYPES[spec.precision.master])
    scale_linears(stage, spec, inventory)
    wrong = differences(stage, inventory, slot, spec)
    if wrong:
        raise RuntimeError(f"stage {slot.index} differs from the inventory: {'; '.join(wrong)}")
    return stage


def materialise(stage: Stage, device: torch.device) -> None:
    """Give a (sharded) meta stage storage on `device`: parameters uninitialised, buffers filled."""
    stage.to_empty(device=device)
    stage.add_buffers(device)


def differences(stage: Stage, inventory: Inventory, slot: Slot, spec: Spec) -> list[str]:
    """Tensors whose name, shape or dtype differs between `stage` and the rank's part of the slot's blocks; empty if none."""
    mesh, dtype = spec.mesh, TORCH_DTYPES[spec.precision.master]
    tensors = {f"{name}.{tensor.name}": tensor for name in slot.blocks for tensor in inventory.block(name).tensors}
    expected = {n: (tensor.stored_shape(local_shape(tensor, mesh.tp, mesh.ep, mesh.etp)), dtype) for n, tensor in tensors.items()}
    found = {name: (tuple(p.shape), p.dtype) for name, p in stage.named_parameters()}
    found |= {name: (tuple(b.shape), b.dtype) for name, b in stage.named_buffers() if not name.startswith("rope_")}
    names = sorted(expected.keys() | found.keys())
    return [f"{n}: inventory {expected.get(n)}, module {found.get(n)}" for n in names if expected.get(n) != found.get(n)]
