"""Selects the functions of indexed attention, Triton kernels or plain torch; scratch and cost of the kernels."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megakernels._common import Cost, chooses_triton, dropped_bytes, runs_triton
from megakernels.facts import KernelScratch
from megakernels.ops.attention.inputs import Places
from megakernels.ops.attention.sinks import gradient_of_sinks
from megakernels.ops.indexed_attention import reference, sizes
from megakernels.ops.indexed_attention.bits import choice_like
from megakernels.ops.indexed_attention.facts import key_parts_bytes
from megakernels.ops.indexed_attention.facts import with_keys as with_keys_made
from megakernels.ops.indexed_attention.inputs import Arguments
from megakernels.ops.indexed_attention.reference import Indexed


def runs_kernels(given: Indexed) -> bool:
    """True if the Triton kernels accept these inputs and their device runs them; that includes the indexer's keys."""
    return runs_triton(given.q) and sizes.accepts(given)


def chooses_kernels(given: Indexed) -> bool:
    """True if the Triton kernels would run for these inputs on CUDA."""
    return chooses_triton(given.q) and sizes.accepts(given)


def makes_keys(index_k: Tensor) -> bool:
    """True if the kernels make index keys."""
    return runs_triton(index_k) and sizes.accepts_keys(index_k)


def chooses_keys(index_k: Tensor) -> bool:
    """True if the kernels would make the index keys on CUDA."""
    return chooses_triton(index_k) and sizes.accepts_keys(index_k)


def make_keys(index_k: Tensor, k_scale: Tensor, k_bias: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Follows the contract of `reference.make_keys`."""
    if not makes_keys(index_k):
        return reference.make_keys(index_k, k_scale, k_bias, cos, sin, eps)
    from megakernels.ops.indexed_attention import kernel  # noqa: PLC0415  triton is optional, and only CUDA needs it

    return kernel.make_keys(index_k, k_scale, k_bias, cos, sin, eps)


def make_keys_backward(
    grad_keys: Tensor, index_k: Tensor, k_scale: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Follows the contract of `reference.make_keys_backward`."""
    if not makes_keys(index_k):
        return reference.make_keys_backward(grad_keys, index_k, k_scale, cos, sin, eps)
    from megakernels.ops.indexed_attention import kernel  # noqa: PLC0415

    return kernel.make_keys_backward(grad_keys, index_k, k_scale, cos, sin, eps)


def kernel_forward(given: Indexed, places: Places) -> tuple[Tensor, ...]:
    """`kernel.forward`, the choice last."""
    from megakernels.ops.indexed_attention import kernel  # noqa: PLC0415

    return kernel.forward(given, places)


def kernel_backward(grad_out: Tensor, given: Indexed, made: Sequence[Tensor], places: Places) -> tuple[Any, ...]:
    """`kernel.backward`."""
    from megakernels.ops.indexed_attention import kernel  # noqa: PLC0415

    out, lse, thresholds, index_lse = made
    return kernel.backward(grad_out, given, out, lse, thresholds, index_lse, places)


def forward(arguments: Arguments) -> tuple[Tensor, ...]:
    """Follows the contract of `reference.forward`."""
    given = with_keys(arguments)
    return kernel_forward(given, Places())[:4] if runs_kernels(given) else reference.forward(given)


def forward_with_choice(arguments: Arguments) -> tuple[Tensor, ...]:
    """The results of `forward`, and the choice last."""
    given = with_keys(arguments)
    return kernel_forward(given, Places()) if runs_kernels(given) else chosen_forward(given, given.k.shape[1])


def chosen_forward(given: Indexed, num_keys: int) -> tuple[Tensor, ...]:
    """`reference.forward`, with the choice last: of these keys and those after them, in all `num_keys`."""
    found = choice_like(given.q, num_keys)
    return *reference.forward(given, found), found


def backward(grad_out: Tensor, arguments: Arguments, *made: Tensor | Sequence[bool]) -> tuple[Tensor | None, ...]:
    """All gradients, in the order of the operation; `made` is what was saved, and the needs."""
    saved = [each for each in made if isinstance(each, Tensor)]
    *heads, grad_keys, grad_weights, grad_sinks = _backward(grad_out, with_keys(arguments), saved)
    of_norm = arguments.index_k, arguments.k_scale, arguments.cos, arguments.sin, arguments.eps
    grad_k, *norm = make_keys_backward(grad_keys, *of_norm)
    return (*heads, grad_k, grad_weights, *norm, grad_sinks)


def _backward(grad_out: Tensor, given: Indexed, saved: Sequence[Tensor]) -> tuple[Any, ...]:
    if runs_kernels(given):
        return kernel_backward(grad_out, given, saved, Places())
    out, lse, thresholds, index_lse = saved
    found = reference.backward(grad_out, given, out, lse, thresholds, index_lse)
    return *found, gradient_of_sinks(grad_out, out, lse, given.sinks)


def with_keys(arguments: Arguments) -> Indexed:
    """The arguments with index keys after their norm and rotation."""
    return arguments.with_keys(
        make_keys(arguments.index_k, arguments.k_scale, arguments.k_bias, arguments.cos, arguments.sin, arguments.eps)
    )


def forward_scratch(arguments: Arguments, *, returns_choice: bool = False) -> int:
    """Bytes inside the Triton forward: the index keys, and the scratch of the kernels; `returns_choice`: true if the choice is a result."""
    given = arguments.with_keys(arguments.index_k)
    if not chooses_kernels(given):
        return 0
    own = sizes.sizes_of(given, Places())
    return with_keys_made(own, KernelScratch(sizes.forward_inside(given, Places(), returns_choice=returns_choice), 0), 0, 0).forward


def backward_scratch(grad_out: Tensor, arguments: Arguments, *made: Tensor | Sequence[bool]) -> int:
    """Bytes inside the Triton backward, which always makes all gradients; those of the index keys' inputs come last."""
    given = arguments.with_keys(arguments.index_k)
    if not chooses_kernels(given):
        return 0
    *saved, needs = made
    out, lse, thresholds, index_lse = (each for each in saved if isinstance(each, Tensor))
    last = sum(each.nbytes for each in (arguments.index_k, arguments.k_scale, arguments.k_bias))
    made_before = out, lse, thresholds, index_lse
    inside = KernelScratch(0, sizes.backward_inside(grad_out, given, made_before, Places(), sinks=bool(needs[8])))
    found = with_keys_made(sizes.sizes_of(given, Places()), inside, last, arguments.k_scale.element_size())
    inputs = (*arguments[:6], arguments.k_scale, arguments.k_bias)
    dropped = dropped_bytes(inputs, [bool(each) for each in needs[:8]])
    return dropped + found.backward


def keys_backward_inside(index_k: Tensor, k_scale: Tensor) -> int:
    """Bytes of `kernel.make_keys_backward` in addition to operands and results: parts of the gradients of scale and bias."""
    return key_parts_bytes(index_k.shape[0] * index_k.shape[1], index_k.shape[2], k_scale.element_size())


def cost_of_forward(arguments: Arguments) -> Cost:
    """Cost of the Triton forward."""
    return sizes.forward_cost(arguments.with_keys(arguments.index_k), Places())


def cost_of_backward(_grad_out: Tensor, arguments: Arguments, *_made: Tensor | Sequence[bool]) -> Cost:
    """Cost of the Triton backward."""
    return sizes.backward_cost(arguments.with_keys(arguments.index_k), Places())
