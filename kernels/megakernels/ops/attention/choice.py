"""Which functions run attention: a library's forward where one accepts the inputs, the Triton kernels, or plain torch."""

from collections.abc import Sequence

from torch import Tensor

from megakernels._common import Cost, chooses_triton, dropped_bytes, runs_triton
from megakernels.ops.attention import reference, vendor
from megakernels.ops.attention.inputs import Attention, Places
from megakernels.ops.attention.sizes import accepts, backward_cost, backward_inside, forward_cost, forward_inside


def runs_kernels(given: Attention) -> bool:
    """Whether the Triton kernels accept these inputs and their device runs them."""
    return runs_triton(given.q) and accepts(given)


def chooses_kernels(given: Attention) -> bool:
    """Whether they would run if the inputs were on CUDA."""
    return chooses_triton(given.q) and accepts(given)


def forward(given: Attention) -> tuple[Tensor, Tensor]:
    """Same contract as `reference.forward`."""
    if not runs_kernels(given):
        return reference.forward(given)
    library = vendor.library_for(given)
    if library is not None:
        return vendor.FORWARDS[library](given)
    return kernel_forward(given, Places())


def backward(grad_out: Tensor, given: Attention, out: Tensor, lse: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Same contract as `reference.backward`; the kernels make all gradients."""
    if not runs_kernels(given):
        return reference.backward(grad_out, given, out, lse, needs)
    return kernel_backward(grad_out, given, out, lse, Places())


def kernel_forward(given: Attention, places: Places) -> tuple[Tensor, Tensor]:
    """`kernel.forward`."""
    from megakernels.ops.attention import kernel  # noqa: PLC0415  triton is optional, and only CUDA needs it

    return kernel.forward(given, places)


def kernel_backward(grad_out: Tensor, given: Attention, out: Tensor, lse: Tensor, places: Places) -> tuple[Tensor, Tensor, Tensor]:
    """`kernel.backward`."""
    from megakernels.ops.attention import kernel  # noqa: PLC0415

    return kernel.backward(grad_out, given, out, lse, places)


def forward_scratch(given: Attention) -> int:
    """Bytes inside the Triton forward; a library needs no more copies of operands."""
    return forward_inside(given) if chooses_kernels(given) else 0


def backward_scratch(grad_out: Tensor, given: Attention, out: Tensor, lse: Tensor, needs: Sequence[bool]) -> int:
    """Bytes inside the Triton backward, which always makes all gradients."""
    return dropped_bytes(given[:3], needs) + backward_inside(grad_out, given, out, lse) if chooses_kernels(given) else 0


def cost_of_forward(given: Attention) -> Cost:
    """Of the Triton forward."""
    return forward_cost(given, Places())


def cost_of_backward(_grad_out: Tensor, given: Attention, _out: Tensor, _lse: Tensor, _needs: Sequence[bool]) -> Cost:
    """Of the Triton backward, which always makes all gradients."""
    return backward_cost(given, Places())
