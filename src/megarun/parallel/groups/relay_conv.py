"""The gated convolution across the ranks of a CP group (R-33), in the order of `megarun.parallel.groups.relay`.

Ranks exchange the products before each piece, so that the next rank does not compute them again.
"""

from typing import Any

import torch
from torch import Tensor

from megakernels import gated_conv1d, gated_conv_pieces, gated_conv_pieces_backward
from megarun.parallel.groups.context import ContextParallel
from megarun.parallel.groups.relay import of_next, of_previous


def convolve_gated(
    cp: ContextParallel,
    input_gate: Tensor,
    output_gate: Tensor,
    value: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    starts: Tensor | None,
) -> Tensor:
    """output_gate · causal convolution(input_gate · value) of local tokens, [B, T / cp, C] in and out."""
    if cp.continued is not None:
        return cp.continued.convolve_gated(input_gate, output_gate, value, weight, bias)
    if cp.degree == 1:
        return gated_conv1d(input_gate, output_gate, value, weight, bias, starts)
    y: Tensor = _GatedConvolution.apply(cp, input_gate, output_gate, value, weight, bias, starts)  # type: ignore[no-untyped-call]
    return y


class _GatedConvolution(torch.autograd.Function):
    """Saves the gates and the value, as the op on full sequences, and the products before each piece."""

    @staticmethod
    def forward(
        ctx: Any,
        cp: ContextParallel,
        input_gate: Tensor,
        output_gate: Tensor,
        value: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        starts: Tensor | None,
    ) -> Tensor:
        """See `convolve_gated`."""
        num_before = weight.shape[1] - 1
        before = of_previous(cp, _ends(input_gate, num_before) * _ends(value, num_before))
        ctx.save_for_backward(input_gate, output_gate, value, before, weight, bias, starts)
        ctx.cp = cp
        return gated_conv_pieces(input_gate, output_gate, value, before, weight, bias, starts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of local tokens, and their contribution to the gradients of weight and bias."""
        input_gate, output_gate, value, before, weight, bias, starts = ctx.saved_tensors
        num_before = before.shape[2]
        of_input, of_output, of_value, of_before, of_weight, of_bias = gated_conv_pieces_backward(
            gradient, input_gate, output_gate, value, before, weight, bias, starts, ctx.needs_input_grad[4:6]
        )
        arrived = of_next(ctx.cp, of_before)
        _ends(of_input, num_before).addcmul_(arrived, _ends(value, num_before))
        _ends(of_value, num_before).addcmul_(arrived, _ends(input_gate, num_before))
        return None, of_input, of_output, of_value, of_weight, of_bias, None


def _ends(tensor: Tensor, num_positions: int) -> Tensor:
    """The last positions of both pieces, a view [B, 2, num_positions, C]."""
    pieces = torch.unflatten(tensor, 1, (2, -1))
    return pieces[:, :, pieces.shape[2] - num_positions :]
