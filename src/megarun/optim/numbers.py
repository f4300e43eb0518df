"""The numbers that differ between steps, on the device: a rate, a factor of all gradients.

Nothing that an update launches has one of them as an argument, so that a recorded update is that of every step. They are in fp64, as on the
host, and each has 16 bytes: Triton compiles a kernel of its own for a pointer that is no multiple of 16.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megaplan.spec.step_graphs import NUMBERS


def on_host(values: Iterable[float]) -> Tensor:
    """Numbers, fp64 [n, 2], of which the first column is read."""
    return torch.tensor([[value] * NUMBERS[1] for value in values], dtype=torch.float64)


def number(value: float, device: torch.device) -> Tensor:
    """One number on a device, a scalar."""
    return on_host([value]).to(device, non_blocking=True)[0, 0]
