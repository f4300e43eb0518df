"""The gated convolution of some equal pieces of a sequence on a rank, each with the products directly before it.

Two operations without an autograd formula, for a caller that fetches those products from other ranks
(`megarun.parallel.groups.relay_conv`).
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.library import custom_op

from megakernels._common import fake_like, require
from megakernels.ops.causal_conv1d.pieces import wanted
from megakernels.ops.gated_conv1d.op import IMPLEMENTATION, check_shapes
from megakernels.ops.gated_conv1d.reference import GatedConvolution

__all__ = ["gated_conv_pieces", "gated_conv_pieces_backward"]


def gated_conv_pieces(
    input_gate: Tensor, output_gate: Tensor, value: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None
) -> Tensor:
    """See `megakernels.gated_conv1d`, for some pieces.

    Args:
        input_gate: [B, P · t, C], P concatenated pieces.
        output_gate: [B, P · t, C].
        value: [B, P · t, C].
        before: [B, P, K − 1, C], input_gate · value before each piece; zeros before the sequence.
        weight: [C, K].
        bias: [C] or None.
        starts: int32 [B, P · t] or None, each relative to the first position of its piece.

    Returns:
        [B, P · t, C], contiguous.

    Triton:
        The kernels of `gated_conv1d`.

    Raises:
        ValueError: Shapes do not fit.
    """
    check_shapes("gated_conv_pieces", GatedConvolution(input_gate, output_gate, value, weight, bias, starts))
    fits = value.shape[1] % before.shape[1] == 0 and before.shape == (value.shape[0], before.shape[1], weight.shape[1] - 1, value.shape[2])
    require(fits, "gated_conv_pieces", "before must be [B,P,K-1,C], P dividing T", before=before.shape, weight=weight.shape)
    y: Tensor = _pieces(input_gate, output_gate, value, before, weight, bias, starts)
    return y


def gated_conv_pieces_backward(
    grad_y: Tensor, input_gate: Tensor, output_gate: Tensor, value: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None,
    starts: Tensor | None,
    needs: Sequence[bool] = (True, True),
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of input_gate, output_gate, value, before, weight and bias; None for those of weight and bias that are not needed."""
    has_weight, has_bias = needs[0], needs[1] and bias is not None
    of_input, of_output, of_value, of_before, *others = _pieces_backward(
        grad_y, input_gate, output_gate, value, before, weight, bias, starts, [has_weight, has_bias]
    )
    return of_input, of_output, of_value, of_before, others.pop(0) if has_weight else None, others.pop(0) if has_bias else None


@custom_op("megakernels::gated_conv_pieces", mutates_args=())
def _pieces(
    input_gate: Tensor, output_gate: Tensor, value: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None
) -> Tensor:
    given = GatedConvolution(input_gate, output_gate, value, weight, bias, starts)
    y: Tensor = IMPLEMENTATION.module(given).forward(given, before)
    return y


@custom_op("megakernels::gated_conv_pieces_backward", mutates_args=())
def _pieces_backward(
    grad_y: Tensor, input_gate: Tensor, output_gate: Tensor, value: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None,
    starts: Tensor | None,
    needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    given = GatedConvolution(input_gate, output_gate, value, weight, bias, starts)
    (*of_tokens, of_weight, of_bias), of_before = IMPLEMENTATION.module(given).backward(grad_y, given, (True, True, True, *needs), before)
    return [gradient for gradient in (*of_tokens, of_before, *wanted((of_weight, of_bias), needs)) if gradient is not None]


@_pieces.register_fake
def _(_input_gate: Tensor, _output_gate: Tensor, value: Tensor, *_: Any) -> Tensor:
    return fake_like(value)


@_pieces_backward.register_fake
def _(_grad_y: Tensor, *arguments: Any) -> list[Tensor]:
    *tokens, weight, bias, _, needs = arguments
    return [fake_like(tensor) for tensor in (*tokens, *wanted((weight, bias), needs))]
