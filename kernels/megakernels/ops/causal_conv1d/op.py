"""Depthwise causal convolution, optionally with silu. Saved: x, weight, bias, starts, initial."""

from torch import Tensor

from megakernels._common import fake_like, operation, require, require_starts, types_of
from megakernels._common.device import Implementation
from megakernels.ops.causal_conv1d import reference
from megakernels.ops.causal_conv1d.facts import LARGEST_KERNEL
from megakernels.ops.causal_conv1d.reference import Convolution

__all__ = ["causal_conv1d"]


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    silu: bool = True,
    starts: Tensor | None = None,
    initial: Tensor | None = None,
) -> Tensor:
    """Convolves each channel with its K taps; position t reads t − K + 1 … t.

    Args:
        x: [B, T, C].
        weight: [C, K]; the last tap multiplies the current position.
        bias: [C] or None.
        silu: True if y = silu(convolution).
        starts: int32 [B, T] or None: index of the first position of each position's document, for rows that hold several documents;
            None for one document per row. Each document is padded with zeros. A negative start means that the document started before the
            row. No gradient.
        initial: [B, K − 1, C] in x's dtype, the inputs before the first position, or None for zeros.

    Returns:
        [B, T, C], contiguous, in x's dtype.

    Triton:
        One kernel forward, one backward. The backward iterates over positions. More than four taps use plain torch.

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


IMPLEMENTATION = Implementation(reference, lambda given: given.weight.shape[1] <= LARGEST_KERNEL)
_causal_conv1d, _ = operation(
    "causal_conv1d",
    types_of(Convolution),
    Convolution,
    outputs=("y",),
    saved=(),
    gradients=("x", "weight", "bias", "initial"),
    forward=lambda given: (IMPLEMENTATION.module(given).forward(given),),
    backward=lambda grad_y, given, needs: IMPLEMENTATION.module(given).backward(grad_y, given, needs),
    fake=lambda given: (fake_like(given.x),),
)
