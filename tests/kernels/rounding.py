"""Rounding to eight and four bits in numpy, with which the operations are compared, and a count of live bytes inside them."""

import weakref
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

FORMATS = {"e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0), "e2m1": (1, 0, 6.0)}
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


def blocked(x: np.ndarray, scaling: str, axis: int, *, format: str = "e4m3", square: bool = False) -> np.ndarray:
    """The values of a matrix whose blocks along an axis have scales: of 32 (mxfp8), 16 (nvfp4) or 128 elements (fp8_blockwise).

    If square, the same number of rows shares a scale. Source: Transformer Engine, `float_to_e8m0` of `common/util/ptx.cuh`, the Python
    reference of NVFP4, and `compute_scale_from_amax` of `common/recipe/recipe_common.cuh`, with powers of two.
    """
    size, moved = {"mxfp8": 32, "nvfp4": 16, "fp8_blockwise": 128}[scaling], np.moveaxis(x, axis, -1)
    rows, columns = moved.shape
    padded = np.pad(moved, ((0, -rows % size if square else 0), (0, -columns % size)))
    blocks = padded.reshape(len(padded), -(-columns // size), size)
    amax = np.abs(blocks).max(-1, keepdims=True)
    if square:
        amax = amax.reshape(-1, size, *amax.shape[1:]).max(1).repeat(size, 0)
    if scaling == "mxfp8":
        scales = np.exp2(np.ceil(np.log2(np.maximum(amax / FORMATS[format][2], 2.0**-127))))
        values = rounded(blocks / scales, format) * scales
    elif scaling == "fp8_blockwise":
        with np.errstate(divide="ignore"):
            ratio = np.minimum(FORMATS[format][2] / amax, 2.0**127)
        factor = np.where(amax > 0, np.exp2(np.floor(np.log2(ratio))), 1)
        values = rounded(blocks * factor, format) / factor
    else:
        six, one = np.float32(6), np.float32(1)  # the definition's arithmetic is in fp32, which decides ties
        encoding = np.float32(448 * 6) / np.float32(np.abs(x).max())
        scales = np.minimum(rounded((amax.astype(np.float32) / six * encoding).astype(float), "e4m3"), 448).astype(np.float32)
        with np.errstate(divide="ignore", over="ignore"):
            inverse = np.minimum(one / (scales * (one / encoding)), np.finfo(np.float32).max)
        elements = np.clip(blocks.astype(np.float32) * inverse, -six, six)
        values = rounded(elements.astype(float), "e2m1") * scales * (one / encoding)
    return np.moveaxis(values.reshape(padded.shape)[:rows, :columns], -1, axis)


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
