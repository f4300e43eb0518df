"""Selects the functions of attention: FlashAttention-4, a library's forward if one supports the inputs, Triton kernels, or plain torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megakernels._common import Cost, chooses_triton, dropped_bytes, runs_triton
from megakernels.ops.attention import reference, vendor
from megakernels.ops.attention.flash4 import calls as flash4
from megakernels.ops.attention.inputs import Attention, Places
from megakernels.ops.attention.relations import relations_gradient
from megakernels.ops.attention.sinks import add_sinks, gradient_of_sinks, sinks_gradient
from megakernels.ops.attention.sizes import accepts, backward_cost, backward_inside, forward_cost, forward_inside, sizes_of
from megakernels.ops.attention.stored.facts import StoredTiles


def runs_kernels(given: Attention) -> bool:
    """True if the Triton kernels accept these inputs and their device runs them."""
    return runs_triton(given.q) and accepts(given)


def chooses_kernels(given: Attention) -> bool:
    """True if the Triton kernels would run for these inputs on CUDA."""
    return chooses_triton(given.q) and accepts(given)


def forward(given: Attention) -> tuple[Tensor, Tensor]:
    """Follows the contract of `reference.forward`, with sinks."""
    return flash4.forward(given) if _runs_library(given) else add_sinks(*_forward(given), given.sinks)


def _runs_library(given: Attention) -> bool:
    return runs_kernels(given) and flash4.runs(given)


def _forward(given: Attention) -> tuple[Tensor, Tensor]:
    if not runs_kernels(given):
        return reference.forward(given)
    library = vendor.library_for(given)
    if library is not None:
        return vendor.FORWARDS[library](given)
    return kernel_forward(given, Places())


def backward(grad_out: Tensor, given: Attention, out: Tensor, lse: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, the sinks and the relations; the kernels make all of the first three."""
    if _runs_library(given):
        return flash4.backward(grad_out, given, out, lse, of_sinks=needs[3])
    if runs_kernels(given):
        return kernel_backward(grad_out, given, out, lse, Places(), sizes_of(given).stored)
    *found, added = reference.backward(grad_out, given, out, lse, (*needs[:3], needs[4]))
    return *found, gradient_of_sinks(grad_out, out, lse, given.sinks if needs[3] else None), of_relations(given, added)


def of_relations(given: Attention, added: Tensor | None) -> Tensor | None:
    """The gradient of the relations from that of the keys' scores; None without any."""
    if added is None or given.classes is None or given.relations is None:
        return None
    return relations_gradient(added, given.classes, given.relations)


def kernel_forward(given: Attention, places: Places, bits: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`kernel.forward`, without sinks."""
    from megakernels.ops.attention import kernel  # noqa: PLC0415  triton is optional, and only CUDA needs it

    return kernel.forward(given, places, bits)


def kernel_backward(
    grad_out: Tensor,
    given: Attention,
    out: Tensor,
    lse: Tensor,
    places: Places,
    parts: StoredTiles | None = None,
    bits: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, the sinks and the relations, None without these."""
    from megakernels.ops.attention import kernel  # noqa: PLC0415

    delta = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    *found, grad_relations = kernel.backward(grad_out, given, out, lse, places, bits, delta, parts)
    return *found, None if given.sinks is None else sinks_gradient(delta, lse, given.sinks), grad_relations


def forward_scratch(given: Attention) -> int:
    """Bytes inside the Triton forward, or the library's that runs both passes; another library needs no more copies of operands."""
    if not chooses_kernels(given):
        return 0
    return forward_inside(given)


def backward_scratch(grad_out: Tensor, given: Attention, out: Tensor, lse: Tensor, needs: Sequence[bool]) -> int:
    """Bytes inside the backward, which always makes all gradients."""
    if not chooses_kernels(given):
        return 0
    inside = backward_inside(grad_out, given, out, lse, sinks=needs[3], masked=False)
    dropped = dropped_bytes(given[:3], needs[:3])
    if given.relations is not None:
        dropped += dropped_bytes((given.relations,), needs[4:])
    return dropped + inside


def cost_of_forward(given: Attention) -> Cost:
    """Cost of the Triton forward; none where plain torch attends to all positions."""
    return forward_cost(given, Places()) if given.causal else Cost({})


def cost_of_backward(_grad_out: Tensor, given: Attention, _out: Tensor, _lse: Tensor, _needs: Sequence[bool]) -> Cost:
    """Cost of the Triton backward, which always makes all gradients; none where plain torch attends to all positions."""
    return backward_cost(given, Places(), masked=False) if given.causal else Cost({})
