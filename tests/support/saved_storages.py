"""Bytes that one forward keeps for backward, measured: autograd's saved tensors, what else survives, and the allocator's live bytes.

The three see different things: hooks name every saved tensor but miss what a context keeps as an attribute, in a closure or in a selective
checkpoint's cache; what survives a forward shows those too, if a dispatched operation made them; the allocator misses nothing and names
nothing. A ledger is right when all agree with it.
"""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True, slots=True)
class SavedStorage:
    """One storage that backward keeps.

    Attributes:
        nbytes: The whole storage, however small the view that is saved.
        dtype: Dtype of the tensor that was saved.
        shape: Shape of the tensor that owns the storage, where autograd knows it, else of the saved view.
        is_input: The storage is one of the module's inputs: its producer keeps it.
    """

    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_input: bool


@dataclass(frozen=True, slots=True)
class SavedForward:
    """The account of one forward.

    Attributes:
        storages: Each storage that autograd saved once, parameters and buffers excluded, in the order of saving.
        cached: Storages that survive the forward though autograd saved none of their tensors: what a selective checkpoint caches, or a
            module keeps; the output excluded.
        live_bytes: Allocated during the forward and alive after it, the output included, to the byte (CPU only).
        output_bytes: Bytes of the output's storage; 0 if it is among `storages`.
    """

    storages: tuple[SavedStorage, ...]
    cached: tuple[SavedStorage, ...]
    live_bytes: int
    output_bytes: int

    @property
    def kept(self) -> tuple[SavedStorage, ...]:
        """Storages that this module keeps, without its inputs."""
        return tuple(storage for storage in (*self.storages, *self.cached) if not storage.is_input)

    @property
    def saved_bytes(self) -> int:
        """Bytes of `kept`."""
        return sum(storage.nbytes for storage in self.kept)


def saved_storages(module: nn.Module, inputs: tuple[Any, ...]) -> SavedForward:
    """Run a few forwards and account for what one keeps; the module must be unsharded, on CPU.

    `live_bytes` equals `saved_bytes + output_bytes` exactly when nothing is kept but saved and cached tensors and the output.
    """
    given = {_pointer(t) for t in inputs if isinstance(t, Tensor)}
    owned = {_pointer(t) for t in [*module.parameters(), *module.buffers()]}
    module(*inputs)  # what is allocated once and kept for ever is not this forward's
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        output = module(*inputs)
        gc.collect()
    live = sum(event.self_cpu_memory_usage for event in measured.events())
    del output

    kept: dict[int, tuple[Tensor, SavedStorage]] = {}

    def pack(tensor: Tensor) -> Tensor:
        pointer = _pointer(tensor)
        if pointer not in owned and pointer not in kept and tensor.untyped_storage().nbytes() > 0:
            owner = tensor._base if tensor._base is not None else tensor
            kept[pointer] = (tensor.detach(), _record(tensor, tuple(owner.shape), pointer in given))
        return tensor.detach()

    with _Survivors() as survivors, saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(*inputs)
    gc.collect()
    found = survivors.alive()
    known = kept.keys() | {_pointer(output)}
    output_bytes = 0 if _pointer(output) in kept else output.untyped_storage().nbytes()
    cached = tuple(record for pointer, record in found.items() if pointer not in known)
    return SavedForward(tuple(record for _, record in kept.values()), cached, live, output_bytes)


class _Survivors(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's mode has no types
    """Notes every storage that an operation makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, tuple[weakref.ref[torch.UntypedStorage], SavedStorage]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        before = {_pointer(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _pointer(leaf) not in before:  # a view is not a new storage
                self._made[_pointer(leaf)] = (weakref.ref(leaf.untyped_storage()), _record(leaf, tuple(leaf.shape), False))
        return result

    def alive(self) -> dict[int, SavedStorage]:
        """The storages that still exist, by address."""
        return {pointer: record for pointer, (storage, record) in self._made.items() if record.nbytes and storage() is not None}


def _pointer(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _record(tensor: Tensor, shape: tuple[int, ...], is_input: bool) -> SavedStorage:
    return SavedStorage(tensor.untyped_storage().nbytes(), tensor.dtype, shape, is_input)
