"""Scratch and cost of Newton-Schulz steps of given tensors; needs no triton."""

from math import prod

from torch import Tensor

from megakernels._common.cost import Cost
from megakernels._common.device import chooses_triton
from megakernels.ops.newton_schulz.facts import REFERENCE_BYTES, num_inner_products, segments, tiles_of
from megakernels.ops.newton_schulz.iteration import inner_dtype


def scratch(x: Tensor, _num_steps: int) -> int:
    """One more buffer of x, and two of x xᵀ; of the reference also a product in fp32, or its mirror image."""
    reference = 0 if chooses_triton(x) else REFERENCE_BYTES
    return x.numel() * x.element_size() + x.shape[0] * min(x.shape[1:]) ** 2 * (2 * x.element_size() + reference)


def cost(x: Tensor, num_steps: int) -> Cost:
    """The tiles of symmetric products; the products with x are the library's."""
    (short, long), size = sorted(x.shape[1:]), x.element_size()
    lengths = segments(num_steps, short, long)
    outer = prod(tiles_of(short, long, size, tall=x.shape[1] > x.shape[2]))
    inner = num_inner_products(lengths) * prod(tiles_of(short, short, size))
    found = {x.dtype: x.shape[0] * len(lengths) * outer}
    found[inner_dtype(x.dtype)] = found.get(inner_dtype(x.dtype), 0) + x.shape[0] * inner
    return Cost(found)
