"""Delayed scaling: operands are multiplied by factors of earlier steps' largest magnitudes, and record those of this step.

A linear has numbers [3, 3] in fp32: in a column those of its input, its weight or its output's gradient, in a row the factor, the largest
magnitude since the last update, and the largest number of the format. Elements beyond that number are clamped to it. A step has one update,
so all its microbatches, and a recomputed forward, have equal factors; recording a value twice changes no maximum.

Source: Transformer Engine, `pytorch/quantization.py` (`_default_sf_compute`, `_default_get_amax_and_update_history`) and `common/recipe`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megakernels.ops.fp8_linear.blocks import GRADIENT, INPUT, WEIGHT
from megakernels.ops.fp8_linear.facts import DELAYED_NUMBERS

FACTOR, LARGEST, LIMIT = range(DELAYED_NUMBERS)
ROLES = (INPUT, WEIGHT, GRADIENT)


class Delayed(NamedTuple):
    """Numbers of one operand, fp32 [1] each.

    Attributes:
        factor: Factor of its elements.
        largest: Largest magnitude since the last update, which is raised.
    """

    factor: Tensor
    largest: Tensor


def delayed_of(numbers: Tensor | None, role: str) -> Delayed | None:
    """An operand's part of its linear's numbers [3, 3]; None without numbers."""
    if numbers is None:
        return None
    column = ROLES.index(role)
    return Delayed(numbers[FACTOR, column : column + 1], numbers[LARGEST, column : column + 1])


def record(x: Tensor, given: Delayed) -> None:
    """Join the largest magnitude of x to the numbers."""
    if x.numel():
        torch.maximum(given.largest, torch.linalg.vector_norm(x, float("inf")).view(1), out=given.largest)


def update_factors(numbers: Tensor, history: Tensor, place: int, *, most_recent: bool, margin: int) -> None:
    """Take a step's largest magnitudes into the history, make the next step's factors, and begin a new step.

    A factor does not change while the largest magnitude is zero or not finite.

    Args:
        numbers: fp32 [3, N], as described above, of all operands.
        history: fp32 [N, steps], largest magnitudes of that number of earlier steps.
        place: Column of the history that is the oldest, and is replaced.
        most_recent: True if a factor follows from the last step alone, and not from the largest magnitude of all.
        margin: A factor is divided by two to this power.
    """
    history[:, place].copy_(numbers[LARGEST])
    largest = numbers[LARGEST] if most_recent else history.amax(1)
    factors = (numbers[LIMIT] / largest) / 2.0**margin
    factors.clamp_(max=torch.finfo(torch.float32).max)
    known = (largest > 0) & largest.isfinite()
    numbers[FACTOR].copy_(torch.where(known, factors, numbers[FACTOR]))
    numbers[LARGEST].zero_()
