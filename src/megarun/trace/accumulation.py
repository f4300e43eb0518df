"""Autograd's in-place accumulation of gradients, which a dispatch mode would disable.

When two operations produce gradients of one tensor, the engine adds the second in place to the first if there is no other reference to the
first or its storage. Under any dispatch mode it allocates a third tensor instead. So a mode that counts bytes must add in place itself when
the engine would.

Source: torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`; ATen/TensorSubclassLikeUtils.h, `isTensorSubclassLike`.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.utils._python_dispatch import TorchDispatchMode

ADD = torch.ops.aten.add.Tensor
_ADD_IN_PLACE = torch.ops.aten.add_.Tensor
_ENGINE = "_engine_run_backward"
_WRAPPERS = ("/torch/_dynamo/eval_frame.py", "/torch/_compile.py")  # torch wraps the dispatch of every mode in these

Holders = tuple[int, int, int]  # reference counts of a tensor, its storage, and its Python object (one reference of the tensor)


class Accumulation:
    """Decides by reference counts of the first gradient which sums the engine would do in place."""

    def __init__(self) -> None:
        self._alone = _holders_when_alone()

    def in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        """True if the dispatched operation is a sum of gradients that the engine makes; call it only from `__torch_dispatch__`."""
        if func is not ADD or kwargs or len(args) != 2 or not _called_by_engine(2) or torch.is_grad_enabled():
            return False
        return (
            isinstance(args[1], Tensor)
            and args[0].shape == args[1].shape
            and is_non_overlapping_and_dense_or_false(args[0])
            and _holders(args) == self._alone
        )

    @staticmethod
    def add(first: Tensor, second: Tensor) -> Tensor:
        """Add in place and return the first gradient."""
        _ADD_IN_PLACE(first, second)
        return first


def _called_by_engine(depth: int) -> bool:
    """True if the `__torch_dispatch__` frame at `depth` was called by the autograd engine, not by Python code inside a node."""
    frame = sys._getframe(depth + 1).f_back
    while frame is not None and frame.f_code.co_filename.replace("\\", "/").endswith(_WRAPPERS):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == _ENGINE


def _holders(args: tuple[Any, ...]) -> Holders:
    """Reference counts of the first argument, to which the caller must have no other reference than `args`."""
    first = args[0]
    storage = torch._C._storage_Use_Count(first.untyped_storage()._cdata)
    return first._use_count(), storage, sys.getrefcount(first)


class _Note(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's mode has no types
    """Records the reference counts of the first operand of the engine's sum."""

    found: Holders | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is ADD and _called_by_engine(1):
            self.found = _holders(args)
        return func(*args, **(kwargs or {}))


def _holders_when_alone() -> Holders:
    """Reference counts of a gradient that only the engine references; measured, because torch's versions differ."""
    leaf = torch.ones(1, requires_grad=True)
    shared = leaf * 2
    total = (shared * 3, shared * 3)
    with _Note() as note:  # type: ignore[no-untyped-call]
        torch.autograd.backward(total, (torch.ones(1), torch.ones(1)))
    found: Holders | None = note.found
    if found is None:
        raise RuntimeError("autograd summed two gradients without an addition; the trace needs to be adapted to this version of torch")
    return found
