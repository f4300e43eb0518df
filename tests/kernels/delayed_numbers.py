"""Numbers of delayed scaling for tests of all scalings."""

import torch
from torch import Tensor

from megakernels.ops.fp8_linear.facts import DELAYED


def numbers_for(scaling: str, count: int, factors: tuple[float, float, float] = (37.3, 2.71, 811.0)) -> list[Tensor]:
    """Numbers of so many linears with these factors of input, weight and gradient, nothing recorded; none for other scalings."""
    return [torch.tensor([factors, (0.0,) * 3, (448.0, 448.0, 57344.0)]) for _ in range(count if scaling == DELAYED else 0)]
