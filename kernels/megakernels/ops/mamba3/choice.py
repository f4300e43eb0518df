"""Selects the functions of the scan: Triton kernels if enabled and the inputs are supported, else plain torch."""

from types import ModuleType

from torch import Tensor

from megakernels._common import chooses_triton, runs_triton
from megakernels.ops.mamba3 import reference
from megakernels.ops.mamba3.chunk import Scan
from megakernels.ops.mamba3.sizes import accepts


def chosen(scan: Scan) -> ModuleType:
    """The module whose functions run for these inputs."""
    if runs_triton(scan.x) and accepts(scan):
        from megakernels.ops.mamba3 import kernel  # noqa: PLC0415  triton is optional, and only CUDA needs it

        return kernel
    return reference


def chooses_kernel(scan: Scan) -> bool:
    """Whether the kernels would run for these inputs on CUDA."""
    return chooses_triton(scan.x) and accepts(scan)


def forward(scan: Scan) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.forward` or `kernel.forward`."""
    made: tuple[Tensor, Tensor, Tensor] = chosen(scan).forward(scan)
    return made


def backward(grad_y: Tensor, scan: Scan, states: Tensor, phases: Tensor) -> tuple[Tensor | None, ...]:
    """`reference.backward` or `kernel.backward`."""
    found: tuple[Tensor | None, ...] = chosen(scan).backward(grad_y, scan, states, phases)
    return found
