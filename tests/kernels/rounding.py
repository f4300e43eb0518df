"""Rounding to eight bits in numpy, which the operations in eight bits are compared with, and a count of what is alive inside them."""

import weakref
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

FORMATS = {"e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0)}
"""Bits of the fraction, exponent of the smallest normal number, largest number."""


def rounded(x: np.ndarray, format: str) -> np.ndarray:
    """To the nearest number of the format, ties to even fractions; |x| is at most the largest."""
    fraction, smallest, _ = FORMATS[format]
    _, exponent = np.frexp(x)
    unit = np.exp2(np.maximum(exponent - 1, smallest) - fraction)
    return np.round(x / unit) * unit


def quantised(x: np.ndarray, format: str, axis: int | None) -> np.ndarray:
    """The values of a quantised matrix, scaled as a whole or along an axis."""
    largest = np.maximum(np.abs(x).max(axis, keepdims=True, initial=0.0), 1e-12)
    factor = np.exp2(np.floor(np.log2(FORMATS[format][2] / largest)))
    return rounded(x * factor, format) / factor


class Peak(TorchDispatchMode):
    """The largest sum of storages that were made inside and are alive."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        for tensor in tree_leaves(given):
            if isinstance(tensor, Tensor):
                self._known[tensor.untyped_storage()] = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage not in self._known:
                self._known[storage] = True
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, storage.nbytes())
        return result

    def _free(self, size: int) -> None:
        self.now -= size
