"""Where a Triton kernel stands in for the reference."""

import importlib.util
import os
from typing import Literal

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter runs the kernels on CPU tensors, slowly: for tests."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32)
"""Of activations, and of indices."""

_chosen = {"kernels": "triton"}  # of the process: autograd runs backwards in threads of its own


def use_kernels(kernels: Literal["reference", "triton"]) -> None:
    """Chooses, for this process, whether operations run their Triton kernels on CUDA (`triton`, at the start) or plain torch."""
    _chosen["kernels"] = kernels


def runs_triton(tensor: Tensor) -> bool:
    """True for CUDA tensors that the kernels accept, unless plain torch is chosen."""
    return HAS_TRITON and (tensor.is_cuda or INTERPRETED) and chooses_triton(tensor)


def chooses_triton(tensor: Tensor) -> bool:
    """Whether the like of this tensor goes to a Triton kernel where it is on CUDA. They accumulate in fp32, so fp64 is the reference's."""
    return _chosen["kernels"] == "triton" and tensor.dtype in DTYPES
