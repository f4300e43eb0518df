"""Scratch memory of operations: bytes allocated while an operation runs, in addition to operands and results.

A fake implementation only shows results. An operation with large scratch registers its size here as a function of operand shapes, so that
it can be counted without a GPU.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

SUMS_BYTES = 4
"""Bytes of an accumulated value: fp32."""


class KernelBytes(NamedTuple):
    """Bytes of one run of a scan's `kernel.forward` or `kernel.backward`.

    Attributes:
        results: Bytes of its first results: y and the saved states, or the gradients of its inputs.
        last: Bytes of its last result: the final state, or the gradient of the initial state.
        scratch: Peak scratch bytes, in addition to all results.
    """

    results: int
    last: int
    scratch: int


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


def narrowed_bytes(result: Tensor, sum_bytes: int) -> int:
    """Bytes of an fp32 sum in addition to the rounded result; 0 if the sum is the result."""
    return 0 if result.dtype == torch.float32 else sum_bytes
