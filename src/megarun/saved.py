"""What one forward really keeps for backward, measured: autograd's saved tensors by storage, and the allocator's live bytes.

The two see different things: hooks name every saved tensor but miss what a context keeps as an attribute or in a closure; the allocator
misses nothing and names nothing. A ledger is right when both agree with it.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, slots=True)
class SavedStorage:
    """One storage that backward keeps.

    Attributes:
        nbytes: The whole storage, however small the view that is saved.
        dtype: Of the tensor that was saved.
        shape: Of the tensor that owns the storage, where autograd knows it, else of the saved view.
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
        storages: Each storage once, parameters and buffers excluded, in the order of saving.
        live_bytes: Allocated during the forward and alive after it, the output included, to the byte (CPU only).
        output_bytes: Of the output's storage; 0 if it is among `storages`.
    """

    storages: tuple[SavedStorage, ...]
    live_bytes: int
    output_bytes: int

    @property
    def saved_bytes(self) -> int:
        """Bytes that this module adds: saved storages without the inputs."""
        return sum(storage.nbytes for storage in self.storages if not storage.is_input)


def saved_storages(module: nn.Module, inputs: tuple[Any, ...]) -> SavedForward:
    """Run one forward and account for what it keeps; the module must be unsharded, on CPU.

    `live_bytes` equals `saved_bytes + output_bytes` exactly when nothing is kept but saved tensors and the output.
    """
    given = {t.untyped_storage().data_ptr() for t in inputs if isinstance(t, Tensor)}
    owned = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers()]}
    module(*inputs)  # what is allocated once and kept for ever is not this forward's
    gc.collect()
    kept: dict[int, tuple[Tensor, SavedStorage]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        if pointer not in owned and pointer not in kept and storage.nbytes() > 0:
            owner = tensor._base if tensor._base is not None else tensor
            record = SavedStorage(storage.nbytes(), tensor.dtype, tuple(owner.shape), pointer in given)
            kept[pointer] = (tensor.detach(), record)
        return tensor.detach()

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            output = module(*inputs)
        gc.collect()
    live = sum(event.self_cpu_memory_usage for event in measured.events())
    output_storage = output.untyped_storage()
    output_bytes = 0 if output_storage.data_ptr() in kept else output_storage.nbytes()
    return SavedForward(tuple(record for _, record in kept.values()), live, output_bytes)
