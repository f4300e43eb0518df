"""Selects between Triton kernels and the plain torch reference."""

import importlib.util
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""True if Triton's interpreter runs the kernels on CPU tensors, for tests."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32)
"""Dtypes of activations, and of indices, that the kernels accept."""

_chosen = {"kernels": "triton"}  # one flag per process: autograd runs backwards in separate threads


def use_kernels(kernels: Literal["reference", "triton"]) -> None:
    """Choose the implementation of operations on CUDA for this process: Triton kernels (`triton`, the default) or plain torch."""
    _chosen["kernels"] = kernels


def runs_triton(tensor: Tensor, dtypes: Collection[torch.dtype] = DTYPES) -> bool:
    """True for CUDA tensors of dtypes that the kernels accept, unless plain torch is chosen."""
    return HAS_TRITON and (tensor.is_cuda or INTERPRETED) and chooses_triton(tensor, dtypes)


def chooses_triton(tensor: Tensor, dtypes: Collection[torch.dtype] = DTYPES) -> bool:
    """True if a tensor of this dtype uses a Triton kernel on CUDA. Kernels accumulate in fp32, so fp64 uses the reference."""
    return _chosen["kernels"] == "triton" and tensor.dtype in dtypes


def kernel_module(reference: ModuleType, name: str = "kernel") -> ModuleType:
    """The module of Triton kernels in the package of a reference, imported at the first call: triton is optional, only CUDA needs it."""
    return importlib.import_module(f"{reference.__package__}.{name}")


def module_for(tensor: Tensor, reference: ModuleType, kernel: str = "kernel", dtypes: Collection[torch.dtype] = DTYPES) -> ModuleType:
    """The module whose functions run for this tensor: the Triton kernels' or the reference."""
    return kernel_module(reference, kernel) if runs_triton(tensor, dtypes) else reference


@dataclass(frozen=True)
class Implementation:
    """The functions of an operation in plain torch and as Triton kernels, which take some sizes only.

    The argument of the methods is the record of the operation's arguments, whose first is a tensor.

    Attributes:
        reference: Module of the plain torch functions; the module `kernel` of the same package has the same functions.
        accepts: Function of the arguments: True if the kernels take their sizes and dtypes.
    """

    reference: ModuleType
    accepts: Callable[[Any], bool]

    def runs_kernel(self, given: Any) -> bool:
        """True if the kernels run for these arguments."""
        return runs_triton(given[0]) and self.accepts(given)

    def chooses_kernel(self, given: Any) -> bool:
        """True if the kernels would run for these arguments on CUDA."""
        return chooses_triton(given[0]) and self.accepts(given)

    def module(self, given: Any) -> ModuleType:
        """The module whose functions run for these arguments."""
        return kernel_module(self.reference) if self.runs_kernel(given) else self.reference
