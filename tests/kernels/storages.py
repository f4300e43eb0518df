"""Counts allocations of operations, to compare them with the stated ones."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Idle:
    """Replaces a kernel that is not run: Triton's interpreter references its arguments until Python collects garbage."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: None


class Storages(TorchDispatchMode):
    """Bytes of the storages that operations make inside; those of a tensor with fewer than `smallest` elements are not counted."""

    def __init__(self, smallest: int = 0) -> None:
        super().__init__()
        self.smallest = smallest
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {arg.untyped_storage()._cdata for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, Tensor)}
        if isinstance(out, Tensor) and out.numel() >= self.smallest and out.untyped_storage()._cdata not in known:
            self.live += out.nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(out.untyped_storage(), self.on_free, out.nbytes)
        return out

    def on_free(self, nbytes: int) -> None:
        """A storage is freed."""
        self.live -= nbytes

    def scratch(self, results: Any) -> int:
        """The peak without the bytes of the returned tensors."""
        return self.peak - sum(result.nbytes for result in results if result is not None)
