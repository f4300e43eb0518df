"""Selects the functions of attention to chosen keys: the Triton kernels of attention, masked, or plain torch."""

from collections.abc import Sequence

from torch import Tensor

from megakernels._common import Cost, dropped_bytes
from megakernels._common.scratch import copies_bytes
from megakernels.ops.attention import sizes
from megakernels.ops.attention.choice import chooses_kernels, kernel_backward, kernel_forward, runs_kernels
from megakernels.ops.attention.inputs import Places
from megakernels.ops.attention.reference import made_like
from megakernels.ops.attention.sinks import add_sinks, gradient_of_sinks
from megakernels.ops.chosen_attention import reference
from megakernels.ops.chosen_attention.inputs import Chosen

__all__ = ["made_like"]

GRADIENTS = ("q", "k", "v", "sinks")


def masked_forward(given: Chosen, places: Places) -> tuple[Tensor, Tensor]:
    """The kernels' forward with the choice, without sinks."""
    return kernel_forward(given.attended, places, given.choice.contiguous())


def masked_backward(grad_out: Tensor, given: Chosen, out: Tensor, lse: Tensor, places: Places) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v and the sinks: of all except the first the part that these queries make."""
    return kernel_backward(grad_out, given.attended, out, lse, places, bits=given.choice.contiguous())[:4]


def forward(given: Chosen) -> tuple[Tensor, Tensor]:
    """Follows the contract of `reference.forward`, with sinks."""
    made = masked_forward(given, Places()) if runs_kernels(given.attended) else reference.forward(given)
    return add_sinks(*made, given.sinks)


def backward(grad_out: Tensor, given: Chosen, out: Tensor, lse: Tensor, _needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """All gradients."""
    if runs_kernels(given.attended):
        return masked_backward(grad_out, given, out, lse, Places())
    return *reference.backward(grad_out, given, out, lse), gradient_of_sinks(grad_out, out, lse, given.sinks)


def forward_inside(given: Chosen) -> int:
    """Bytes of `masked_forward` in addition to operands and results: copies of operands that are not dense."""
    return sizes.forward_inside(given.attended, given.choice)


def backward_inside(grad_out: Tensor, given: Chosen, out: Tensor, lse: Tensor, *, sinks: bool = True) -> int:
    """Bytes of `masked_backward` in addition to operands and results."""
    return sizes.backward_inside(grad_out, given.attended, out, lse, sinks=sinks) + copies_bytes((given.choice,))


def forward_scratch(given: Chosen) -> int:
    """Bytes inside the Triton forward."""
    return forward_inside(given) if chooses_kernels(given.attended) else 0


def backward_scratch(grad_out: Tensor, given: Chosen, out: Tensor, lse: Tensor, needs: Sequence[bool]) -> int:
    """Bytes inside the Triton backward, which always makes all gradients."""
    if not chooses_kernels(given.attended):
        return 0
    return dropped_bytes(given[:3], needs[:3]) + backward_inside(grad_out, given, out, lse, sinks=needs[3])


def cost_of_forward(given: Chosen) -> Cost:
    """Cost of the Triton forward, which computes the scores of all visible keys."""
    return sizes.forward_cost(given.attended, Places())


def cost_of_backward(_grad_out: Tensor, given: Chosen, *_made: Tensor | Sequence[bool]) -> Cost:
    """Cost of the Triton backward."""
    return sizes.backward_cost(given.attended, Places())
