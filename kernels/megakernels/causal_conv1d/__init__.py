"""Depthwise causal convolution, optionally with silu. Saved: x, weight, bias, starts."""

from typing import Any

from torch import Tensor
from torch.library import custom_op

from megakernels._common import fake_like, join, only_needed, require, require_starts
from megakernels.causal_conv1d import reference

__all__ = ["causal_conv1d"]


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, silu: bool = True, starts: Tensor | None = None) -> Tensor:
    """Convolves each channel with its own K taps; position t reads t − K + 1 … t.

    Args:
        x: [B, T, C]; zeros stand before the first position.
        weight: [C, K]; the last tap multiplies the present position.
        bias: [C] or None.
        silu: whether y = silu(convolution).
        starts: int32 [B, T] or None: index of the first position of each position's document, for rows that hold several documents;
            None is one document a row. Zeros stand before each. No gradient.

    Returns:
        [B, T, C], contiguous, in x's dtype.

    Raises:
        ValueError: shapes do not fit.

    Source: arXiv:2312.00752, figure 3.
    """
    fits = x.dim() == 3 and weight.dim() == 2 and weight.shape[0] == x.shape[2] and (bias is None or bias.shape == x.shape[2:])
    require(
        fits,
        "causal_conv1d",
        "x must be [B,T,C], weight [C,K], bias [C] or None",
        x=x.shape,
        weight=weight.shape,
        bias=None if bias is None else bias.shape,
    )
    require_starts("causal_conv1d", starts, x.shape[:2])
    y: Tensor = _causal_conv1d(x, weight, bias, starts, silu)
    return y


@custom_op("megakernels::causal_conv1d", mutates_args=())
def _causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None, silu: bool) -> Tensor:
    return reference.forward(x, weight, bias, starts, silu)


@custom_op("megakernels::causal_conv1d_backward", mutates_args=())
def _causal_conv1d_backward(
    grad_y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None, silu: bool, needs: list[bool]
) -> list[Tensor]:
    return only_needed(reference.backward(grad_y, x, weight, bias, starts, silu, needs))


@_causal_conv1d.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return fake_like(x)


join(_causal_conv1d, _causal_conv1d_backward, outputs=("y",), gradients=("x", "weight", "bias"))
