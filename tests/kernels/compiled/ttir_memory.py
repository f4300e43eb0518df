"""The memory that a kernel's pointers point into: the storages of the tensors of a launch."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import ttir_values as values
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


def type_name(kind: str) -> str:
    """`f32` of `!tt.ptr<f32>`."""
    return kind.removeprefix("!tt.ptr<").split(">")[0].split(",")[0]


class Memory:
    """Loads and stores at addresses of bytes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.views: list[tuple[int, int, Any]] = []
        for start, size in {(each.untyped_storage().data_ptr(), each.untyped_storage().nbytes()) for each in tensors}:
            if size:
                whole = np.frombuffer((ctypes.c_char * size).from_address(start), dtype=np.uint8)
                self.views.append((start, start + size, whole))

    def place(self, kind: str, addresses: Any) -> tuple[Any, Any]:
        """The storage that contains all these addresses, as an array of a type, and their indices in it.

        Raises:
            IndexError: None has, or an address is not one of an element.
        """
        size, low, high = values.size_of(kind), int(addresses.min()), int(addresses.max())
        for start, stop, whole in self.views:
            if start <= low and high + size <= stop:
                at, rest = np.divmod(addresses - start, size)
                if np.any(rest):
                    break
                return whole[: len(whole) // size * size].view(values.STORED[kind]), at
        raise IndexError(f"{kind} at {low} to {high} is outside of the tensors of the launch")

    def prefetch(self, addresses: Any) -> Any:
        """The results of a request for the lines of these addresses, which must exist."""
        addresses = np.asarray(addresses)
        self.place("i8", addresses)
        return np.zeros(addresses.shape, dtype=np.int32)

    def load(self, kind: str, addresses: Any, mask: Any = True, other: Any = 0) -> Any:
        addresses = np.asarray(addresses)
        wanted = np.broadcast_to(mask, addresses.shape)
        if wanted.all():
            storage, at = self.place(kind, addresses)
            return values.from_stored(storage[at], kind)
        found = np.array(np.broadcast_to(other, addresses.shape), dtype=values.COMPUTED[kind])
        if wanted.any():
            storage, at = self.place(kind, addresses[wanted])
            found[wanted] = values.from_stored(storage[at], kind)
        return found if found.shape else found[()]

    def descriptor_load(self, kind: str, sides: tuple[int, ...], tensor: TensorDescriptor, *first: Any) -> Any:
        """A tile from `first` on; 0 outside of the descriptor's tensor."""
        places = np.ix_(*(int(start) + np.arange(side) for start, side in zip(first, sides, strict=True)))
        inside = [(place >= 0) & (place < size) for place, size in zip(places, tensor.shape, strict=True)]
        offset = sum(place * stride for place, stride in zip(places, tensor.strides, strict=True))
        return self.load(kind, tensor.base.data_ptr() + offset * values.size_of(kind), np.logical_and.reduce(np.broadcast_arrays(*inside)))

    def store(self, kind: str, addresses: Any, value: Any, mask: Any = True) -> None:
        addresses = np.asarray(addresses)
        wanted = np.broadcast_to(mask, addresses.shape)
        if wanted.any():
            storage, at = self.place(kind, addresses[wanted])
            storage[at] = values.to_stored(np.broadcast_to(value, addresses.shape)[wanted], kind)
