"""Scratch memory of operations: bytes allocated while an operation runs, in addition to operands and results.

A fake implementation only shows results. An operation with large scratch registers its size here as a function of operand shapes, so that
it can be counted without a GPU.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from megakernels.facts import KernelBytes

STATED: dict[str, Callable[..., int]] = {}
"""Scratch functions of operations, by name in `torch.ops`."""


def register_scratch(op: CustomOpDef, bytes_of: Callable[..., int]) -> None:
    """Register the peak scratch of `op` on CUDA, in addition to operands and results; `bytes_of` takes the op's arguments."""
    STATED[str(op._opoverload)] = bytes_of


def scratch_bytes(op: str, operands: tuple[Any, ...]) -> int:
    """Scratch bytes of a call of the operation ("megakernels.NAME.default") with these arguments; 0 if none is registered."""
    bytes_of = STATED.get(op)
    return 0 if bytes_of is None else bytes_of(*operands)


def copies_bytes(dense: Iterable[Tensor] = (), rows: Iterable[Tensor] = ()) -> int:
    """Bytes of a kernel's contiguous copies: of each of `dense` that is not contiguous, of each of `rows` whose last dim is not."""
    whole = sum(tensor.nbytes for tensor in dense if not tensor.is_contiguous())
    return whole + sum(tensor.nbytes for tensor in rows if tensor.stride(-1) != 1 and tensor.shape[-1] != 1)


def dropped_bytes(inputs: Iterable[Tensor], needs: Iterable[bool]) -> int:
    """Bytes of gradients that a kernel computes and that are not required."""
    return sum(each.nbytes for each, need in zip(inputs, needs, strict=True) if not need)


def scan_scratch(
    chooses_kernel: Callable[[Any], bool],
    forward_bytes: Callable[..., KernelBytes],
    backward_bytes: Callable[..., KernelBytes],
    gradients: Iterable[str],
) -> tuple[Callable[[Any], int], Callable[..., int]]:
    """Scratch of a scan over whole sequences, forward and backward: it drops the last state, and gradients that are not required.

    Args:
        chooses_kernel: Function of the scan's arguments; plain torch has no scratch of its own.
        forward_bytes: Function of the initial state and the arguments.
        backward_bytes: Function of the gradients of the last state and of y, the arguments and the saved states.
        gradients: Names of the arguments that have a gradient, in the order of `needs`.
    """
    names = tuple(gradients)

    def forward(given: Any) -> int:
        if not chooses_kernel(given):
            return 0
        inside = forward_bytes(None, given)
        return inside.last + inside.scratch

    def backward(grad_y: Tensor, given: Any, states: Tensor, needs: Iterable[bool]) -> int:
        if not chooses_kernel(given):
            return 0
        inside = backward_bytes(None, grad_y, given, states)
        return dropped_bytes((getattr(given, name) for name in names), needs) + inside.last + inside.scratch

    return forward, backward


def piece_scratch(
    chooses_kernel: Callable[[Any], bool], forward_bytes: Callable[..., KernelBytes], backward_bytes: Callable[..., KernelBytes]
) -> tuple[Callable[..., int], Callable[..., int]]:
    """Scratch of a scan over a piece, forward and backward: results are copied to the caller's tensors; arguments as for `scan_scratch`."""

    def forward(state: Tensor, given: Any) -> int:
        if not chooses_kernel(given):
            return 0
        inside = forward_bytes(state, given)
        return inside.results + inside.scratch

    def backward(grad_last: Tensor, grad_y: Tensor, given: Any, states: Tensor) -> int:
        if not chooses_kernel(given):
            return 0
        inside = backward_bytes(grad_last, grad_y, given, states)
        return inside.results + inside.scratch

    return forward, backward
