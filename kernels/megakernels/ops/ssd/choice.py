"""Which functions run the scan: Triton's kernels where they are chosen and take the inputs, else plain torch."""

from types import ModuleType

from torch import Tensor

from megakernels._common import chooses_triton, runs_triton
from megakernels.ops.ssd import reference
from megakernels.ops.ssd.sizes import accepts


def chosen(x: Tensor, B: Tensor, C: Tensor) -> ModuleType:
    """The module whose `forward` and `backward` run for these inputs."""
    if runs_triton(x) and accepts(x, B, C):
        from megakernels.ops.ssd import kernel  # noqa: PLC0415  triton is optional, and only CUDA needs it

        return kernel
    return reference


def chooses_kernel(x: Tensor, B: Tensor, C: Tensor) -> bool:
    """Whether the kernels run for these inputs on CUDA, wherever they are."""
    return chooses_triton(x) and accepts(x, B, C)
