"""Selects the functions of the scan: Triton kernels if enabled and the inputs are supported, else plain torch."""

from types import ModuleType

from torch import Tensor

from megakernels._common import chooses_triton, runs_triton
from megakernels.ops.ssd import reference
from megakernels.ops.ssd.inputs import Scan
from megakernels.ops.ssd.sizes import accepts


def chosen(scan: Scan) -> ModuleType:
    """The module whose `forward` and `backward` run for these inputs."""
    if runs_triton(scan.x) and accepts(scan):
        from megakernels.ops.ssd import kernel  # noqa: PLC0415  triton is optional, and only CUDA needs it

        return kernel
    return reference


def chooses_kernel(scan: Scan) -> bool:
    """Whether the kernels would run for these inputs on CUDA."""
    return chooses_triton(scan.x) and accepts(scan)


def forward(state: Tensor | None, scan: Scan) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.forward` or `kernel.forward`."""
    made: tuple[Tensor, Tensor, Tensor] = chosen(scan).forward(state, scan)
    return made


def backward(grad_last: Tensor | None, grad_y: Tensor, scan: Scan, states: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """`reference.backward` or `kernel.backward`."""
    found: tuple[tuple[Tensor, ...], Tensor] = chosen(scan).backward(grad_last, grad_y, scan, states)
    return found
