"""The convolution of some equal pieces of a sequence on a rank, each with the inputs directly before it.

Two operations without an autograd formula, for a caller that fetches those inputs from other ranks (`megarun.parallel.groups.relay`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import pad

from megakernels._common import fake_like, require, require_starts
from megakernels.ops.causal_conv1d import reference
from megakernels.ops.causal_conv1d.reference import Convolution

__all__ = ["conv_pieces", "conv_pieces_backward"]


def conv_pieces(x: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, starts: Tensor | None) -> Tensor:
    """See `megakernels.causal_conv1d`, for some pieces.

    Args:
        x: [B, P · t, C], P concatenated pieces.
        before: [B, P, K − 1, C], the inputs before each piece; zeros before the sequence.
        weight: [C, K].
        bias: [C] or None.
        silu: True if y = silu(convolution).
        starts: int32 [B, P · t] or None, each relative to the first position of its piece.

    Returns:
        [B, P · t, C], contiguous.

    Raises:
        ValueError: Shapes do not fit.
    """
    fits = x.shape[1] % before.shape[1] == 0 and before.shape == (x.shape[0], before.shape[1], weight.shape[1] - 1, x.shape[2])
    require(fits, "conv_pieces", "before must be [B,P,K-1,C], P dividing T", x=x.shape, before=before.shape, weight=weight.shape)
    require_starts("conv_pieces", starts, x.shape[:2])
    y: Tensor = _pieces(x, before, weight, bias, starts, silu)
    return y


def conv_pieces_backward(
    grad_y: Tensor, x: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None,
    silu: bool,
    starts: Tensor | None,
    needs: Sequence[bool] = (True, True),
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x, before, weight and bias; None for those of weight and bias that are not needed."""
    of_weight, of_bias = needs[0], needs[1] and bias is not None
    grad_x, grad_before, *others = _pieces_backward(grad_y, x, before, weight, bias, starts, silu, [of_weight, of_bias])
    return grad_x, grad_before, others.pop(0) if of_weight else None, others.pop(0) if of_bias else None


@custom_op("megakernels::conv_pieces", mutates_args=())
def _pieces(x: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None, silu: bool) -> Tensor:
    padded, padded_starts = padded_pieces(x, before, starts)
    y = reference.forward(Convolution(padded, weight, bias, padded_starts, None, silu))[:, before.shape[2] :]
    return y.reshape(x.shape).contiguous()


@custom_op("megakernels::conv_pieces_backward", mutates_args=())
def _pieces_backward(
    grad_y: Tensor, x: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None,
    silu: bool, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    padded, padded_starts = padded_pieces(x, before, starts)
    num_before = before.shape[2]
    grads = pad(torch.unflatten(grad_y, 1, (before.shape[1], -1)).flatten(0, 1), (0, 0, num_before, 0))
    given = Convolution(padded, weight, bias, padded_starts, None, silu)
    grad_x, *others = reference.backward(grads, given, (True, *needs, False))
    assert grad_x is not None
    inside, outside = grad_x[:, num_before:].reshape(x.shape), grad_x[:, :num_before].reshape(before.shape)
    return [inside.clone(), outside.clone(), *wanted(others, needs)]


@_pieces.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return fake_like(x)


@_pieces_backward.register_fake
def _(_grad_y: Tensor, x: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> list[Tensor]:
    return [fake_like(tensor) for tensor in (x, before, *wanted((weight, bias), rest[-1]))]


def wanted(gradients: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor]:
    """The gradients that are needed."""
    return [each for each, need in zip(gradients, needs, strict=False) if need and each is not None]


def padded_pieces(x: Tensor, before: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Pieces as rows, each prefixed with its earlier inputs, and their document starts."""
    pieces = before.shape[1]
    rows = torch.cat([before.flatten(0, 1), torch.unflatten(x, 1, (pieces, -1)).flatten(0, 1)], 1)
    if starts is None:
        return rows, None
    return rows, pad(torch.unflatten(starts, 1, (pieces, -1)).flatten(0, 1) + before.shape[2], (before.shape[2], 0))
