"""From a slot to a stage: built on the meta device, checked against the inventory, then given storage."""

from __future__ import annotations

import torch

from megaplan.inventory.tensors import Inventory
from megaplan.layout.values import Slot
from megaplan.spec.models import Spec
from megarun.dtypes import TORCH_DTYPES
from megarun.model.stage import Stage


def build_stage(spec: Spec, inventory: Inventory, slot: Slot) -> Stage:
    """The stage of `slot` on the meta device, parameters in `precision.master`.

    Raises:
        RuntimeError: Its tensors are not the inventory's, which is a defect.
    """
    with torch.device("meta"):
        stage = Stage(spec, inventory, slot).to(TORCH_DTYPES[spec.precision.master])
    wrong = differences(stage, inventory, slot, TORCH_DTYPES[spec.precision.master])
    if wrong:
        raise RuntimeError(f"stage {slot.index} is not the inventory's: {'; '.join(wrong)}")
    return stage


def materialise(stage: Stage, device: torch.device) -> None:
    """Give a (sharded) meta stage storage on `device`: parameters uninitialised, rotary tables computed."""
    stage.to_empty(device=device)
    stage.add_rotary(device)


def differences(stage: Stage, inventory: Inventory, slot: Slot, dtype: torch.dtype) -> list[str]:
    """Every tensor in which `stage` and the slot's blocks differ, by name, shape or dtype; empty if none."""
    expected = {f"{name}.{t.name}": (t.shape, dtype) for name in slot.blocks for t in inventory.block(name).tensors}
    found = {name: (tuple(p.shape), p.dtype) for name, p in stage.named_parameters()}
    found |= {name: (tuple(b.shape), b.dtype) for name, b in stage.named_buffers() if not name.startswith("rope_")}
    names = sorted(expected.keys() | found.keys())
    return [f"{n}: inventory {expected.get(n)}, module {found.get(n)}" for n in names if expected.get(n) != found.get(n)]
