"""Validation of operand shapes and dtypes."""

from collections.abc import Sequence

import torch
from torch import Tensor


def require(condition: bool, operation: str, expected: str, **values: object) -> None:
    """Refuse inputs whose shapes or dtypes do not match.

    Args:
        condition: Condition that must be true.
        operation: Name of the operation, the first word of the message.
        expected: Rule as text.
        **values: Sizes or dtypes for the message.

    Raises:
        ValueError: The condition is false; the message has the operation, the rule and every value.
    """
    if not condition:
        found = ", ".join(f"{name} = {tuple(value) if isinstance(value, (list, tuple)) else value}" for name, value in values.items())
        raise ValueError(f"{operation}: {expected}; got {found}")


def require_starts(operation: str, starts: Tensor | None, rows: Sequence[int]) -> None:
    """Refuses document starts that are not int32 [B, T].

    Raises:
        ValueError: another shape or dtype.
    """
    if starts is not None:
        fits = tuple(starts.shape) == tuple(rows) and starts.dtype == torch.int32
        require(fits, operation, "starts must be int32 [B,T]", starts=starts.shape, dtype=starts.dtype, rows=rows)
