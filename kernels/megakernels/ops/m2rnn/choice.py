"""Which functions run the recurrence: Triton's kernels where they are chosen and take the sizes, else plain torch."""

from types import ModuleType

from torch import Tensor

from megakernels._common import chooses_triton, runs_triton
from megakernels.ops.m2rnn import reference
from megakernels.ops.m2rnn.sizes import accepts


def chosen(q: Tensor, v: Tensor) -> ModuleType:
    """The module whose `forward` and `backward` run for these inputs."""
    if runs_triton(q) and accepts(q, v):
        from megakernels.ops.m2rnn import kernel  # noqa: PLC0415  triton is optional, and only CUDA needs it

        return kernel
    return reference


def chooses_kernel(q: Tensor, v: Tensor) -> bool:
    """Whether the kernels run for these inputs on CUDA, wherever they are."""
    return chooses_triton(q) and accepts(q, v)
