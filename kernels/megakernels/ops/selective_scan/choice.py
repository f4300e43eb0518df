"""Selects the functions of the selective scan: Triton kernels if enabled and the state is narrow enough, else plain torch."""

from types import ModuleType

from torch import Tensor

from megakernels._common import chooses_triton, runs_triton
from megakernels.ops.selective_scan import reference
from megakernels.ops.selective_scan.inputs import SelectiveScan
from megakernels.ops.selective_scan.sizes import accepts


def chosen(given: SelectiveScan) -> ModuleType:
    """The module whose `forward` and `backward` run for these inputs."""
    if runs_triton(given.x) and accepts(given):
        from megakernels.ops.selective_scan import kernel  # noqa: PLC0415  triton is optional, and only CUDA needs it

        return kernel
    return reference


def chooses_kernel(given: SelectiveScan) -> bool:
    """Whether the kernels would run for these inputs on CUDA."""
    return chooses_triton(given.x) and accepts(given)


def forward(state: Tensor | None, given: SelectiveScan) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.forward` or `kernel.forward`."""
    made: tuple[Tensor, Tensor, Tensor] = chosen(given).forward(state, given)
    return made


def backward(grad_last: Tensor | None, grad_y: Tensor, given: SelectiveScan, states: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """`reference.backward` or `kernel.backward`."""
    found: tuple[tuple[Tensor, ...], Tensor] = chosen(given).backward(grad_last, grad_y, given, states)
    return found
