"""Which functions run the recurrence: Triton's kernels where they are chosen and take the sizes, else plain torch."""

from types import ModuleType

from torch import Tensor

from megakernels._common import runs_triton
from megakernels.m2rnn import reference


def chosen(q: Tensor, v: Tensor) -> ModuleType:
    """The module whose `forward` and `backward` run for these inputs."""
    if runs_triton(q):
        from megakernels.m2rnn import kernel  # noqa: PLC0415  triton is optional, and only CUDA needs it

        if kernel.accepts(q, v):
            return kernel
    return reference
