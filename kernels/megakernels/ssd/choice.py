"""Which functions run the scan: Triton's kernels where they are chosen and take the inputs, else plain torch."""

from types import ModuleType

from torch import Tensor

from megakernels._common import runs_triton
from megakernels.ssd import reference


def chosen(x: Tensor, B: Tensor, C: Tensor) -> ModuleType:
    """The module whose `forward` and `backward` run for these inputs."""
    if runs_triton(x):
        from megakernels.ssd import kernel  # noqa: PLC0415  triton is optional, and only CUDA needs it

        if kernel.accepts(x, B, C):
            return kernel
    return reference
