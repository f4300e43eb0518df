"""The numbers that differ between steps, on the device: a rate, a factor of all gradients.

No launch of an update has one of them as an argument, so a recorded update is valid for every step. They are in fp64, as on the
host. Each number has its own allocation: for a pointer that is not a multiple of 16 Triton would compile a further kernel.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def on_host(values: Iterable[float]) -> Tensor:
    """Numbers, fp64 [n]."""
    return torch.tensor(list(values), dtype=torch.float64)


def number(value: float, device: torch.device) -> Tensor:
    """One number on a device, a scalar."""
    return on_host([value]).to(device, non_blocking=True)[0]
