"""Scratch and cost of the experts' and the router's kernels for given tensors, by the facts of their sizes; needs no triton."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megakernels._common.cost import Cost
from megakernels.ops.moe.facts import ExpertGradients, ExpertSizes, RouterBytes, route_backward_bytes
from megakernels.ops.moe.inputs import Experts
from megakernels.ops.moe.scores import Router


def sizes_of(given: Experts) -> ExpertSizes:
    """The sizes of these arguments."""
    (tokens, slots), (experts, width, hidden) = given.weights.shape, given.up.shape
    return ExpertSizes(tokens, slots, experts, width, hidden, given.gate is not None, given.down_bias is not None, given.x.element_size())


def forward_scratch_bytes(given: Experts) -> int:
    """Scratch bytes of `kernel.forward`."""
    return sizes_of(given).forward_bytes()


def backward_scratch_bytes(given: Experts, needs: Sequence[bool]) -> int:
    """Scratch bytes of `kernel.backward`; `needs` are the required gradients of `inputs.GRADIENTS`."""
    biases = (_needed_bytes(bias, need) for bias, need in zip((given.gate_bias, given.up_bias, given.down_bias), needs[5:], strict=True))
    return sizes_of(given).backward_bytes(ExpertGradients(*needs[:5], *biases))


def forward_cost(given: Experts) -> Cost:
    """Cost of `kernel.routed_experts_forward`: one product per row and matrix; a token is read once per slot."""
    matrices = 3 if given.gate is not None else 2
    return Cost({given.x.dtype: matrices * _product_flops(given)}, repeated_bytes=_gathered_again(given))


def backward_cost(given: Experts, needs: Sequence[bool]) -> Cost:
    """Cost of `kernel.routed_experts_backward`; `needs` are the required gradients of `inputs.GRADIENTS`.

    The gradients of tokens are gathered for the product with `down` and for its bias; the matrices' gradients are products of copies.
    """
    first = 2 if given.gate is not None else 1
    products = 1 + first * needs[0] + needs[4] + (given.gate is not None and needs[2]) + needs[3]
    gathers = 1 + (given.down_bias is not None and (needs[1] or needs[7]))
    return Cost({given.x.dtype: products * _product_flops(given)}, repeated_bytes=gathers * _gathered_again(given))


def _needed_bytes(bias: Tensor | None, needed: bool) -> int:
    """Bytes of a bias' gradient."""
    return bias.nbytes if bias is not None and needed else 0


def _product_flops(given: Experts) -> int:
    """FLOPs of the product of all rows with one matrix per expert."""
    return 2 * given.rows.shape[0] * given.up.shape[1] * given.up.shape[2]


def _gathered_again(given: Experts) -> int:
    """Bytes of reading [N, h] once per row, N·k times in all, in addition to reading it once."""
    return (given.rows.shape[0] - given.weights.shape[0]) * given.up.shape[2] * given.x.element_size()


def gradient_parts(given: Router) -> int:
    """Parts of the gradient of the logits: two bf16 ones for products with bf16 operands, else one of fp32."""
    return 2 if given.x.dtype == given.weight.dtype == torch.bfloat16 else 1


def route_backward_scratch_bytes(given: Router, needs: Sequence[bool]) -> int:
    """Scratch bytes of `kernel_route.route_backward`; `needs` are the required gradients of x, weight, bias and correction."""
    x, weight, bias, correction = given[:4]
    sizes = RouterBytes(*(0 if each is None else each.element_size() for each in (x, weight, bias, correction)))
    wanted = needs[0], needs[1], needs[2], needs[3]
    return route_backward_bytes(x.shape[0], x.shape[1], weight.shape[0], sizes, wanted, parts=gradient_parts(given))
