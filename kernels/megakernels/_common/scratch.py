"""What an operation holds inside itself, beside its operands and results, while it runs.

A fake implementation shows results alone. An operation whose inside is large states it here from its operands' shapes, so that whoever
counts bytes without a GPU can count it.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

SUMS_BYTES = 4
"""Of a number that is summed or carried: fp32."""


class Inside(NamedTuple):
    """Bytes of one run of a scan's `kernel.forward` or `kernel.backward`.

    Attributes:
        results: What it returns first: y and the states that it saves, or the gradients of its inputs.
        last: What it returns last: the state after the positions, or the gradient of the one before them.
        scratch: At the highest moment, beside all results.
    """

    results: int
    last: int
    scratch: int


STATED: dict[str, Callable[..., int]] = {}
"""What each operation that holds something inside itself states, by its name in `torch.ops`."""


def state_scratch(op: CustomOpDef, bytes_of: Callable[..., int]) -> None:
    """Registers what `op` holds on CUDA at its highest moment, beside operands and results; `bytes_of` takes the op's own arguments."""
    STATED[str(op._opoverload)] = bytes_of


def scratch_bytes(op: str, operands: tuple[Any, ...]) -> int:
    """What an operation states, as `torch.ops` names it ("megakernels.NAME.default"), of a call with these arguments; 0 if nothing."""
    bytes_of = STATED.get(op)
    return 0 if bytes_of is None else bytes_of(*operands)


def copies_bytes(dense: Iterable[Tensor] = (), rows: Iterable[Tensor] = ()) -> int:
    """What a kernel's contiguous copies of operands take: of `dense` where they are not, of `rows` where their last dim is not."""
    whole = sum(tensor.nbytes for tensor in dense if not tensor.is_contiguous())
    return whole + sum(tensor.nbytes for tensor in rows if tensor.stride(-1) != 1 and tensor.shape[-1] != 1)


def dropped_bytes(inputs: Iterable[Tensor], needs: Iterable[bool]) -> int:
    """Gradients that a kernel makes and nobody wants."""
    return sum(each.nbytes for each, need in zip(inputs, needs, strict=True) if not need)


def narrowed_bytes(result: Tensor, sum_bytes: int) -> int:
    """An fp32 sum that is there beside the result it is rounded to; where it is the result, nothing."""
    return 0 if result.dtype == torch.float32 else sum_bytes
