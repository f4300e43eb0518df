"""Counts of the runtime's own operations: the layers of a stage run forward and backward without values."""

from collections.abc import Iterable
from typing import Any

import torch
from rooflines.aten import kernel_of
from rooflines.own import NAMESPACE, Bodies
from rooflines.work import Work
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megakernels import use_kernels
from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import build_layout
from megaplan.spec.host import device_of
from megaplan.spec.models import Spec
from megarun.engine.build import build_stage, materialise


class Runs(TorchDispatchMode):
    """Counts every operation of megakernels, and concatenations; entered inside a `FakeTensorMode`."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.bodies, self.found = Bodies(device_of(spec.device)), list[Work]()

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == NAMESPACE:
            self.found.append(self.bodies.work_of(func, args, out))
        elif func is torch.ops.aten.cat.default:
            kernel = kernel_of(func, args, {}, out)
            assert kernel is not None
            self.found.append(Work("cat", (kernel,)))
        return out


def counted_runs(spec: Spec, inventory: Inventory) -> list[Work]:
    """Operations of one forward and backward of all layers of an unsharded model in bf16, in order."""
    stage = build_stage(spec, inventory, build_layout(spec, inventory, [(0, spec.model.num_layers)]).slots[0])
    use_kernels(spec.host.kernels)
    rows, length = spec.batch.micro_batch_size, spec.batch.seq_length
    with FakeTensorMode(allow_non_fake_inputs=True), Runs(spec) as runs:
        materialise(stage, torch.device("cpu"))
        x = torch.empty(rows, length, spec.model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        starts = torch.empty(rows, length, dtype=torch.int32) if spec.data.packing == "documents" else None
        out = stage.run_layers([x], stage.rotary, starts, {})
        out.sum().backward()
    return runs.found
