"""Depthwise causal convolution, optionally with silu. Saved: x, weight, bias, starts, initial."""

from typing import Any

from torch import Tensor
from torch.library import custom_op

from megakernels._common import fake_like, join, only_needed, require, require_starts, runs_triton
from megakernels.ops.causal_conv1d import reference

__all__ = ["causal_conv1d"]


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    silu: bool = True,
    starts: Tensor | None = None,
    initial: Tensor | None = None,
) -> Tensor:
    """Convolves each channel with its own K taps; position t reads t − K + 1 … t.

    Args:
        x: [B, T, C].
        weight: [C, K]; the last tap multiplies the present position.
        bias: [C] or None.
        silu: whether y = silu(convolution).
        starts: int32 [B, T] or None: index of the first position of each position's document, for rows that hold several documents;
            None is one document a row. Zeros stand before each. A negative start is a document's that began before the row. No gradient.
        initial: [B, K − 1, C] in x's dtype, the inputs that stand before the first position, or None for zeros.

    Returns:
        [B, T, C], contiguous, in x's dtype.

    Triton:
        One kernel forward, one backward. The backward walks the positions. More than four taps stay with plain torch.

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
    before = (x.shape[0], weight.shape[1] - 1, x.shape[2])
    fits = initial is None or (initial.shape == before and initial.dtype == x.dtype)
    require(fits, "causal_conv1d", "initial must be [B,K-1,C] in x's dtype", initial=None if initial is None else initial.shape, x=x.shape)
    y: Tensor = _causal_conv1d(x, weight, bias, starts, initial, silu)
    return y


@custom_op("megakernels::causal_conv1d", mutates_args=())
def _causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None, initial: Tensor | None, silu: bool) -> Tensor:
    if runs_triton(x):
        from megakernels.ops.causal_conv1d import kernel  # noqa: PLC0415  triton is optional, and only CUDA needs it

        if weight.shape[1] <= kernel.LARGEST_KERNEL:
            return kernel.forward(x, weight, bias, starts, initial, silu)
    return reference.forward(x, weight, bias, starts, initial, silu)


@custom_op("megakernels::causal_conv1d_backward", mutates_args=())
def _causal_conv1d_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    starts: Tensor | None,
    initial: Tensor | None,
    silu: bool,
    needs: list[bool],
) -> list[Tensor]:
    if runs_triton(x):
        from megakernels.ops.causal_conv1d import kernel  # noqa: PLC0415

        if weight.shape[1] <= kernel.LARGEST_KERNEL:
            return only_needed(kernel.backward(grad_y, x, weight, bias, starts, initial, silu, needs))
    return only_needed(reference.backward(grad_y, x, weight, bias, starts, initial, silu, needs))


@_causal_conv1d.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return fake_like(x)


join(_causal_conv1d, _causal_conv1d_backward, outputs=("y",), gradients=("x", "weight", "bias", "initial"))
