"""The order of Newton-Schulz steps: which products are made, in which storage; the product function is given."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megakernels.ops.newton_schulz.facts import segments

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7
Product = Callable[..., None]
"""`reference.product`, or the kernel's."""


def inner_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of x xᵀ and derived matrices: its small eigenvalues are squares, which need fp16's three additional bits."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float16


def iterate(x: Tensor, num_steps: int, product: Product) -> None:
    """Follows the contract of `newton_schulz_`, in the storage of x, one more of its size, and two of x xᵀ.

    A segment's other buffers of x xᵀ lie in the storage that its product with x is written to afterwards.
    """
    if not x.numel():
        return
    num_matrices, (short, long) = x.shape[0], sorted(x.shape[1:])
    tall = x.shape[1] > x.shape[2]
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    inverse = torch.linalg.vector_norm(x, dim=(1, 2), dtype=wide).clamp_(min=EPSILON).reciprocal_()
    if x.dtype is torch.float16:  # fp16's range is too small for the factor of a matrix that is not divided by its norm
        x.mul_(inverse.view(-1, 1, 1))
        inverse.fill_(1.0)
    shape, here, other = (num_matrices, short, short), x, torch.empty_like(x)
    own = [x.new_empty(shape) for _ in range(2)]
    elements = num_matrices * short * short
    for place, length in enumerate(segments(num_steps, short, long)):
        spare = [other.view(-1)[start : start + elements].view(shape) for start in range(0, elements * min(2, long // short), elements)]
        factor = _polynomial(here, length, [*own, *spare], product, inverse if place == 0 else None, tall=tall)
        torch.bmm(*((here, factor) if tall else (factor, here)), out=other)
        here, other = other, here
    if here is not x:
        x.copy_(here)


def _polynomial(x: Tensor, num_steps: int, buffers: Sequence[Tensor], product: Product, inverse: Tensor | None, *, tall: bool) -> Tensor:
    """The matrices that x is multiplied by in so many steps, in the first buffer or, after one step, in the second.

    x xᵀ is multiplied by a power of two near its number of rows, which keeps its elements in fp16's normal range: its trace is about 1
    at first, and its eigenvalues never exceed 1.5. `inverse` are factors of x.
    """
    a, b, c = COEFFICIENTS
    unit = 2.0 ** round(math.log2(buffers[0].shape[1]))
    gram, *free = (buffer.view(inner_dtype(x.dtype)) for buffer in buffers)
    squares = None if inverse is None else inverse.square()
    product(x, x, gram, alpha=unit, scales=squares, tall=tall)

    def step(out: Tensor, scales: Tensor | None = None) -> Tensor:
        product(gram, gram, out, alpha=c / unit**2, added=gram, beta=b / unit, diagonal=a, scales=scales)
        return out

    if num_steps == 1:
        return step(buffers[1], inverse)
    found = factor = step(free.pop(0))
    for place in range(1, num_steps):
        between = free.pop(0)
        product(gram, factor, between)
        product(between, factor, gram)
        free.append(between)
        if factor is not found:
            free.append(factor)
        factor = step(free.pop(0))
        if place < num_steps - 1:
            together = free.pop(0)
            product(factor, found, together)
            free.append(found)
            found = together
    product(factor, found, buffers[0], scales=inverse)  # x xᵀ has been read for the last time
    return buffers[0]
