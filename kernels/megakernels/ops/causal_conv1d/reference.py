"""Depthwise causal convolution over time in plain torch, with explicit backward formulas.

z[t, c] = bias[c] + Σ_i weight[c, i] · x[t − (K − 1) + i, c], x = 0 before the document; y = z or silu(z). The backward recomputes z. An
initial state is the K − 1 inputs before the first position, which are prepended to the row.

Source: Gu and Dao, arXiv:2312.00752, figure 3 (the convolution before the scan).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megakernels._common import upcast


class Convolution(NamedTuple):
    """The arguments of the torch op, as `causal_conv1d` documents them."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    starts: Tensor | None
    initial: Tensor | None
    silu: bool


def forward(given: Convolution) -> Tensor:
    """Returns y [B, T, C] in x's dtype."""
    x, weight, bias, starts, initial, silu = given
    num_before = 0 if initial is None else initial.shape[1]
    z = _convolve(*_extended(upcast(x), starts, initial), upcast(weight), bias)[:, num_before:]
    return (z * torch.sigmoid(z) if silu else z).to(x.dtype).contiguous()


def backward(grad_y: Tensor, given: Convolution, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Returns the gradients of x, weight, bias and initial, None where not needed."""
    x, weight, bias, starts, initial, silu = given
    num_before = 0 if initial is None else initial.shape[1]
    (wide_x, starts), wide_weight = _extended(upcast(x), starts, initial), upcast(weight)
    grad_z = upcast(grad_y)
    if num_before:
        grad_z = torch.cat([grad_z.new_zeros(x.shape[0], num_before, x.shape[2]), grad_z], 1)
    if silu:
        z = _convolve(wide_x, starts, wide_weight, bias)
        sigmoid = torch.sigmoid(z)
        grad_z = grad_z * (sigmoid + z * sigmoid * (1 - sigmoid))
    grad_x = grad_initial = grad_weight = None
    if needs[0] or needs[3]:
        grad_all = torch.zeros(wide_x.shape, dtype=wide_x.dtype, device=x.device)
        for tap, now, before in _taps(wide_x.shape[1], weight.shape[1]):
            grad_all[:, before].addcmul_(_inside(grad_z, now, before, starts), wide_weight[:, tap])
        if needs[0]:
            grad_x = grad_all[:, num_before:].to(x.dtype).contiguous()
        if initial is not None and needs[3]:
            grad_initial = grad_all[:, :num_before].to(initial.dtype, copy=True).contiguous()
    if needs[1]:
        grad_weight = torch.zeros(weight.shape, dtype=wide_x.dtype, device=x.device)
        for tap, now, before in _taps(wide_x.shape[1], weight.shape[1]):
            grad_weight[:, tap] = (_inside(grad_z, now, before, starts) * wide_x[:, before]).sum((0, 1))
    return (
        grad_x,
        None if grad_weight is None else grad_weight.to(weight.dtype),
        grad_z.sum((0, 1)).to(bias.dtype) if bias is not None and needs[2] else None,
        grad_initial,
    )


def _extended(x: Tensor, starts: Tensor | None, initial: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The row with its initial state prepended, and starts relative to it."""
    if initial is None:
        return x, starts
    num_before = initial.shape[1]
    if starts is not None:
        starts = torch.cat([starts.new_zeros(starts.shape[0], num_before), starts + num_before], 1)
    return torch.cat([upcast(initial), x], 1), starts


def _convolve(x: Tensor, starts: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
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
    """True if each pair of positions is in one document, bool [B, positions, 1]."""
    positions = torch.arange(before.start, before.stop, device=starts.device)
    return (positions >= starts[:, now]).unsqueeze(-1)


def _taps(num_positions: int, num_taps: int) -> Iterator[tuple[int, slice, slice]]:
    """Each tap with the positions it writes and the positions it reads, `delay` earlier."""
    for tap in range(max(0, num_taps - num_positions), num_taps):
        delay = num_taps - 1 - tap
        yield tap, slice(delay, num_positions), slice(0, num_positions - delay)
