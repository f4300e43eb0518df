"""Depthwise causal convolution over time in plain torch, with explicit backward formulas.

z[t, c] = bias[c] + Σ_i weight[c, i] · x[t − (K − 1) + i, c], x = 0 before the document; y = z or silu(z). The backward recomputes z.

Source: Gu and Dao, arXiv:2312.00752, figure 3 (the convolution before the scan).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megakernels._common import upcast


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None, silu: bool) -> Tensor:
    """Returns y [B, T, C] in x's dtype."""
    z = _convolve(upcast(x), upcast(weight), bias, starts)
    return (z * torch.sigmoid(z) if silu else z).to(x.dtype)


def backward(
    grad_y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None, silu: bool, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of x, weight and bias, None where not needed."""
    wide_x, wide_weight, grad_z = upcast(x), upcast(weight), upcast(grad_y)
    if silu:
        z = _convolve(wide_x, wide_weight, bias, starts)
        sigmoid = torch.sigmoid(z)
        grad_z = grad_z * (sigmoid + z * sigmoid * (1 - sigmoid))
    grad_x = grad_weight = None
    if needs[0]:
        grad_x = torch.zeros(x.shape, dtype=wide_x.dtype, device=x.device)
        for tap, now, before in _taps(x.shape[1], weight.shape[1]):
            grad_x[:, before].addcmul_(_inside(grad_z, now, before, starts), wide_weight[:, tap])
    if needs[1]:
        grad_weight = torch.zeros(weight.shape, dtype=wide_x.dtype, device=x.device)
        for tap, now, before in _taps(x.shape[1], weight.shape[1]):
            grad_weight[:, tap] = (_inside(grad_z, now, before, starts) * wide_x[:, before]).sum((0, 1))
    return (
        None if grad_x is None else grad_x.to(x.dtype),
        None if grad_weight is None else grad_weight.to(weight.dtype),
        grad_z.sum((0, 1)).to(bias.dtype) if bias is not None and needs[2] else None,
    )


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None) -> Tensor:
    z = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    if bias is not None:
        z += upcast(bias)
    for tap, now, before in _taps(x.shape[1], weight.shape[1]):
        if starts is None:
            z[:, now].addcmul_(x[:, before], weight[:, tap])
        else:
            z[:, now].addcmul_(x[:, before] * _same_document(now, before, starts), weight[:, tap])
    return z


def _inside(grad_z: Tensor, now: slice, before: slice, starts: Tensor | None) -> Tensor:
    """Gradients at `now`, zero where `before` belongs to an earlier document."""
    return grad_z[:, now] if starts is None else grad_z[:, now] * _same_document(now, before, starts)


def _same_document(now: slice, before: slice, starts: Tensor) -> Tensor:
    """Whether each pair of positions is of one document, bool [B, positions, 1]."""
    positions = torch.arange(before.start, before.stop, device=starts.device)
    return (positions >= starts[:, now]).unsqueeze(-1)


def _taps(num_positions: int, num_taps: int) -> Iterator[tuple[int, slice, slice]]:
    """Each tap with the positions it writes and the positions it reads, `delay` earlier."""
    for tap in range(max(0, num_taps - num_positions), num_taps):
        delay = num_taps - 1 - tap
        yield tap, slice(delay, num_positions), slice(0, num_positions - delay)
