"""Page-locked host memory for copies to and from a device.

Pages are registered, because torch's allocator of page-locked memory rounds each request to a power of two.

Source: aten/src/ATen/core/CachingHostAllocator.h.
"""

import weakref
from typing import Any

import torch
from torch import Tensor


def take_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Host memory of zeros, uint8 [num_bytes]; page-locked if the device is CUDA.

    Raises:
        RuntimeError: The pages cannot be locked.
    """
    memory = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
    if device.type == "cuda" and num_bytes:
        with torch.cuda.device(device):
            torch.cuda.check_error(_runtime().cudaHostRegister(memory.data_ptr(), num_bytes, 0))
    return memory


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def unlock_with(owner: object, memory: Tensor, device: torch.device) -> None:
    """Unlock the pages of memory when its owner is freed; the end of the process unlocks all pages."""
    if device.type == "cuda":
        weakref.finalize(owner, _unlock, memory).atexit = False


def _unlock(memory: Tensor) -> None:
    if len(memory):
        _runtime().cudaHostUnregister(memory.data_ptr())
