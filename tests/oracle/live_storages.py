"""Live bytes of every storage that dispatched operations make, while they run: what a tracer outside the operations can see,
and what operations state of their insides.

Autograd adds a second gradient into the first in place where nothing else holds the first or its storage, but never under a dispatch
mode (torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`). So it is done here where autograd would, and only there: a sum with
a view, such as a linear's input gradient, is a third storage.
"""

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from megakernels import scratch_bytes
from megarun.trace.accumulation import Accumulation


class LiveStorages(TorchDispatchMode):
    """Counts each storage from the operation that first returns it until it dies; `peak` is the largest sum so far."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._accumulation = Accumulation()
        self.at_peak: list[tuple[str, tuple[int, ...], int]] = []
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._live: dict[int, tuple[str, tuple[int, ...], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._accumulation.in_place(func, args, kwargs):
            return self._accumulation.add(*args)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf, str(func))
        inside = scratch_bytes(str(func), args)
        if self.now + inside > self.peak:
            self.restart(inside)
        return result

    def add(self, tensor: torch.Tensor, made_by: str = "given") -> None:
        """Count the tensor's storage from now on, once."""
        storage = tensor.untyped_storage()
        if storage in self._known or storage.nbytes() == 0:
            return
        self._known[storage] = True
        key = len(self._live) and max(self._live) + 1
        self._live[key] = (made_by, tuple(tensor.shape), storage.nbytes())
        self.now += storage.nbytes()
        weakref.finalize(storage, self._dead, key)

    def ignore(self, *tensors: torch.Tensor) -> None:
        """Never count these storages."""
        for tensor in tensors:
            self._known[tensor.untyped_storage()] = True

    def restart(self, inside: int = 0) -> None:
        """Forget the peak so far; `inside` is what the running operation states of itself."""
        self.peak, self.at_peak = self.now + inside, list(self._live.values())

    def _dead(self, key: int) -> None:
        self.now -= self._live.pop(key)[2]


class Ones(torch.autograd.Function):
    """A loss whose gradient is ones, which nobody but autograd holds."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        ctx.like = y.shape, y.dtype
        return y.new_zeros(0)

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> torch.Tensor:
        shape, dtype = ctx.like
        return torch.ones(shape, dtype=dtype)


def peaks(module: nn.Module, x: torch.Tensor, *, held: bool = True) -> list[tuple[int, int]]:
    """Forward and backward peaks of two microbatches, the module's input and output not counted; the second adds gradients in place.

    `held` is false if nobody holds the gradient of the output while backward runs.
    """
    live = LiveStorages()
    live.ignore(x, *module.parameters(), *module.buffers())
    found = []
    for _ in range(2):
        before = live.now
        live.restart()
        with live:
            y = module(x)
        forward = live.peak - before
        loss = y if held else Ones.apply(y)
        gradient = torch.ones_like(loss)
        live.add(gradient)
        live.restart()
        with live:
            torch.autograd.backward(loss, gradient)
        found.append((forward, live.peak - before - y.untyped_storage().nbytes()))
        x.grad = None
        del y, loss, gradient
    return found
