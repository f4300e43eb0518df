"""Selects between Triton kernels and the plain torch reference."""

import importlib.util
import os
from collections.abc import Collection
from typing import Literal

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernels on CPU tensors, for tests."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32)
"""Dtypes of activations, and of indices, that the kernels accept."""

_chosen = {"kernels": "triton"}  # per process: autograd runs backwards in separate threads


def use_kernels(kernels: Literal["reference", "triton"]) -> None:
    """Choose, for this process, whether operations run Triton kernels on CUDA (`triton`, the default) or plain torch."""
    _chosen["kernels"] = kernels


def runs_triton(tensor: Tensor, dtypes: Collection[torch.dtype] = DTYPES) -> bool:
    """True for CUDA tensors of dtypes that the kernels accept, unless plain torch is chosen."""
    return HAS_TRITON and (tensor.is_cuda or INTERPRETED) and chooses_triton(tensor, dtypes)


def chooses_triton(tensor: Tensor, dtypes: Collection[torch.dtype] = DTYPES) -> bool:
    """Whether a tensor of this dtype uses a Triton kernel on CUDA. Kernels accumulate in fp32, so fp64 uses the reference."""
    return _chosen["kernels"] == "triton" and tensor.dtype in dtypes
