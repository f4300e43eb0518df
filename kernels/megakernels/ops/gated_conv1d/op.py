"""A depthwise causal convolution between two gates. Saved: the gates, value, weight, bias, starts."""

from torch import Tensor

from megakernels._common import fake_like, operation, require, require_starts, types_of
from megakernels._common.device import Implementation
from megakernels.ops.causal_conv1d.facts import LARGEST_KERNEL
from megakernels.ops.gated_conv1d import reference
from megakernels.ops.gated_conv1d.reference import GatedConvolution

__all__ = ["gated_conv1d"]


def gated_conv1d(
    input_gate: Tensor, output_gate: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None = None, starts: Tensor | None = None
) -> Tensor:
    """output_gate · conv(input_gate · value): convolves each channel of the product with its K taps, as `causal_conv1d` without silu.

    Args:
        input_gate: [B, T, C].
        output_gate: [B, T, C].
        value: [B, T, C].
        weight: [C, K]; the last tap multiplies the current position.
        bias: [C] or None.
        starts: int32 [B, T] or None: index of the first position of each position's document, for rows that hold several documents;
            None for one document per row. Each document is padded with zeros. No gradient.

    Returns:
        [B, T, C], contiguous, in value's dtype.

    Triton:
        One kernel forward, one backward. Both iterate over positions. More than four taps, and gates of another dtype than value, use plain
        torch.

    Raises:
        ValueError: shapes do not fit.

    Source: arXiv:2511.23404, section 2.
    """
    check_shapes("gated_conv1d", GatedConvolution(input_gate, output_gate, value, weight, bias, starts))
    y: Tensor = _gated_conv1d(input_gate, output_gate, value, weight, bias, starts)
    return y


def check_shapes(name: str, given: GatedConvolution) -> None:
    """Raises ValueError unless the gates and value have one shape, and taps, bias and starts fit it."""
    value, weight, bias = given.value, given.weight, given.bias
    fits = value.dim() == 3 and value.shape == given.input_gate.shape == given.output_gate.shape
    require(fits, name, "gates and value must be [B,T,C]", input_gate=given.input_gate.shape, value=value.shape)
    fits = weight.dim() == 2 and weight.shape[0] == value.shape[2] and (bias is None or bias.shape == value.shape[2:])
    require(fits, name, "weight must be [C,K], bias [C] or None", value=value.shape, weight=weight.shape)
    require_starts(name, given.starts, value.shape[:2])


def accepts(given: GatedConvolution) -> bool:
    """True if the kernels take these taps and dtypes: products are rounded to the one dtype of gates and value."""
    return given.weight.shape[1] <= LARGEST_KERNEL and given.input_gate.dtype == given.output_gate.dtype == given.value.dtype


IMPLEMENTATION = Implementation(reference, accepts)
_gated_conv1d, _ = operation(
    "gated_conv1d",
    types_of(GatedConvolution),
    GatedConvolution,
    outputs=("y",),
    saved=(),
    gradients=("input_gate", "output_gate", "value", "weight", "bias"),
    forward=lambda given: (IMPLEMENTATION.module(given).forward(given),),
    backward=lambda grad_y, given, needs: IMPLEMENTATION.module(given).backward(grad_y, given, needs)[0],
    fake=lambda given: (fake_like(given.value),),
)
