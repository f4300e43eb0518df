"""Scratch memory of operations: bytes allocated while an operation runs, in addition to operands and results.

A fake implementation only shows results. An operation with large scratch registers its size here as a function of operand shapes, so that
it can be counted without a GPU.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch._library.custom_ops import CustomOpDef

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
