"""Where a Triton kernel may stand in for the reference."""

import importlib.util

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None


def runs_triton(tensor: Tensor) -> bool:
    """True for CUDA tensors that the kernels accept: they accumulate in fp32, so fp64 stays with the reference."""
    return HAS_TRITON and tensor.is_cuda and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
