"""A depthwise causal convolution between two gates in plain torch, with explicit backward formulas.

u = input_gate · value in the inputs' dtype, z = conv(u) as in `megakernels.ops.causal_conv1d`, y = output_gate · z. The backward recomputes
u and z.

Source: arXiv:2511.23404, section 2.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from megakernels._common import upcast
from megakernels.ops.causal_conv1d import reference
from megakernels.ops.causal_conv1d.pieces import padded_pieces
from megakernels.ops.causal_conv1d.reference import Convolution


class GatedConvolution(NamedTuple):
    """The arguments of the torch op, as `gated_conv1d` documents them."""

    input_gate: Tensor
    output_gate: Tensor
    value: Tensor
    weight: Tensor
    bias: Tensor | None
    starts: Tensor | None


def forward(given: GatedConvolution, before: Tensor | None = None) -> Tensor:
    """Returns y [B, T, C]; with `before` [B, P, K − 1, C], the products before each of P pieces of T."""
    z = _of_rows(reference.forward(_convolution(given, before)), before)
    return (upcast(given.output_gate) * z).to(given.value.dtype).contiguous()


def backward(
    grad_y: Tensor, given: GatedConvolution, needs: Sequence[bool], before: Tensor | None = None
) -> tuple[tuple[Tensor | None, ...], Tensor | None]:
    """Returns the gradients of input_gate, output_gate, value, weight and bias, None if not needed, and the gradient of `before`."""
    convolution = _convolution(given, before)
    wide_y = upcast(grad_y)
    grad_output_gate = None
    if needs[1]:
        grad_output_gate = (wide_y * _of_rows(reference.forward(convolution), before)).to(given.output_gate.dtype)
    grad_z = wide_y * upcast(given.output_gate)
    if before is not None:
        grad_z = padded_pieces(grad_z, grad_z.new_zeros(before.shape), None)[0]
    wanted = (needs[0] or needs[2], needs[3], given.bias is not None and needs[4], False)
    grad_u, grad_weight, grad_bias, _ = reference.backward(grad_z, convolution, wanted)
    grad_before = None
    if before is not None and grad_u is not None:
        grad_before = grad_u[:, : before.shape[2]].reshape(before.shape).to(before.dtype)
        grad_u = _of_rows(grad_u, before)
    grad_input_gate = grad_value = None
    if grad_u is not None:
        grad_input_gate = (grad_u * upcast(given.value)).to(given.input_gate.dtype) if needs[0] else None
        grad_value = (grad_u * upcast(given.input_gate)).to(given.value.dtype) if needs[2] else None
    return (grad_input_gate, grad_output_gate, grad_value, grad_weight, grad_bias), grad_before


def _convolution(given: GatedConvolution, before: Tensor | None) -> Convolution:
    """The convolution of the products, its output in the accumulation dtype."""
    product, starts = upcast(given.input_gate * given.value), given.starts
    if before is not None:
        product, starts = padded_pieces(product, upcast(before), starts)
    return Convolution(product, given.weight, given.bias, starts, None, False)


def _of_rows(padded: Tensor, before: Tensor | None) -> Tensor:
    """Pieces without the values put before them, as rows again."""
    if before is None:
        return padded
    return padded[:, before.shape[2] :].reshape(before.shape[0], -1, before.shape[3])
