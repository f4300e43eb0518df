"""Cost of Triton kernels that is not visible in their launches, for a roofline without a GPU.

The number of launches, and the bytes of one pass over each operand of each kernel, are counted from the launches themselves. An operation
registers the rest here: the FLOPs of matrix products inside its kernels, sequential steps, and repeated reads.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch._library.custom_ops import CustomOpDef


class Cost(NamedTuple):
    """Cost of one call of an operation with Triton kernels.

    Attributes:
        products: FLOPs of tensor-core products by operand dtype; a multiply-add counts as two.
        steps: Number of sequential steps of a recurrence.
        repeated_bytes: Bytes of repeated reads that caches cannot serve, in addition to one pass over each operand of each kernel.
        untouched_bytes: Bytes of operands that launches receive but do not touch, because each processes a part.
    """

    products: Mapping[torch.dtype, int]
    steps: int = 0
    repeated_bytes: int = 0
    untouched_bytes: int = 0


NO_PRODUCTS = Cost({})
REGISTERED: dict[str, Callable[..., Cost]] = {}
"""Cost functions of operations, by name in `torch.ops`."""


def register_cost(op: CustomOpDef, cost_of: Callable[..., Cost]) -> None:
    """Register the cost of the Triton kernels of `op`; `cost_of` takes the op's arguments."""
    REGISTERED[str(op._opoverload)] = cost_of


def registered_cost(op: str, operands: tuple[Any, ...]) -> Cost:
    """Cost of a call of the operation ("megakernels.NAME.default") with these arguments; no products if none is registered."""
    cost_of = REGISTERED.get(op)
    return NO_PRODUCTS if cost_of is None else cost_of(*operands)
