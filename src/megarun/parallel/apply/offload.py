"""Kept tensors of layers in host memory between forward and backward (`host.activation_offload`), by emptying their storages.

Tensors that autograd saves in a layer's forward are copied to host memory while the next layer runs forward, and are freed on the device
when that ends. They are copied back while the next layer runs backward. So in addition to the running layer the device has the saved
tensors of one layer; the last layer of a stage waits for its copy. Copies run in their own stream. Saved tensors stay the same objects,
whose storages have no bytes in between, so that values, views and the times at which autograd frees them are those without offload.

Not copied: parameters, buffers and further arguments of a layer, which others own, and tensors that a stage has received, which stay in its
buffer. Host memory is taken at the first use, and used again by later microbatches.

Source: torch.distributed.fsdp frees gathered parameters by emptying storages in the same way.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from megaplan.hosts.megarun.offload import aligned
from megaplan.inventory.tensors import Inventory
from megaplan.spec.models import Spec
from megarun import host_memory
from megarun.model.stage import Stage
from megarun.parallel.apply.gradients import groups_of

_POOL = "pool of kept tensors"


def offload_stage(stage: Stage, spec: Spec, inventory: Inventory, pool: "HostPool") -> None:
    """Make layers of a stage keep their tensors in host memory, as the spec says; the stages of a rank share the pool."""
    if not spec.host.activation_offload:
        return
    vars(stage)[_POOL] = pool
    layers = {int(name): module for name, module in stage.layers.items()}
    kept = [spec.offloads(index, inventory.layers[index].family) for index in layers]
    last, passing = len(layers) - 1, _Passing()
    for place, (module, offloads) in enumerate(zip(layers.values(), kept, strict=True)):
        make = partial(KeptTensors, pool, input_stays=place == 0 and not stage.embeds) if offloads else None
        at_ends = place == 0, place == last and not stage.predicts
        module.forward = partial(_run, module.forward, module, passing, make, at_ends)


def host_bytes(stages: Sequence[Stage]) -> int:
    """Host memory of a rank's stages for saved tensors."""
    return sum(pool.num_bytes for pool in {vars(stage)[_POOL] for stage in stages if _POOL in vars(stage)})


class HostPool:
    """Host memory of kept tensors, by size, and the stream of the copies.

    Attributes:
        device: The device of the tensors.
        num_bytes: Host memory taken so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.num_bytes = device, 0
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    @cached_property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream of the copies; None on a CPU."""
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def take(self, num_bytes: int) -> Tensor:
        """Memory, uint8 [num_bytes]; its former contents are no longer needed once the stream reaches this point."""
        if self._free[num_bytes]:
            return self._free[num_bytes].pop()
        self.num_bytes += num_bytes
        memory = host_memory.take_memory(num_bytes, self.device)
        host_memory.unlock_with(self, memory, self.device)
        return memory

    def give_back(self, memory: Tensor) -> None:
        """Let later tensors have memory."""
        self._free[len(memory)].append(memory)

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Begin to copy from each pair's second tensor to its first, after the current stream's work; returns an event at the end."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream), torch.no_grad():  # none on a CPU
            for to, of in pairs:
                with _unsafe_preserve_version_counter(to):
                    to.copy_(of, non_blocking=True)
        return None if self.stream is None else self.stream.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Make the current stream wait for copies."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


class KeptTensors:
    """The tensors that one layer keeps of one microbatch, on the device or in host memory."""

    def __init__(self, pool: HostPool, others: Iterable[Tensor], x: Tensor, *, input_stays: bool) -> None:
        """`others` are tensors whose storages stay where they are; `input_stays` is true if the layer's input is one of them."""
        self._pool = pool
        self._others = {each.untyped_storage()._cdata for each in (*others, *((x,) if input_stays else ()))}
        self._whole: dict[int, Tensor] = {}  # a view of each storage
        self._memory: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self._away = False

    def save(self, tensor: Tensor) -> Tensor:
        """Record a tensor that autograd saves, detached, since an output would reference its own graph."""
        storage = tensor.untyped_storage()
        if tensor.device.type == self._pool.device.type and storage._cdata not in self._others:
            self._whole.setdefault(storage._cdata, _whole(tensor))
        return tensor.detach()

    def leave(self, gathered: Iterable[Tensor]) -> None:
        """Begin to copy the tensors to host memory, except for gathered parameters."""
        for each in gathered:
            self._whole.pop(each.untyped_storage()._cdata, None)
        self._memory = self._pool.take(sum(aligned(each.nbytes) for each in self._whole.values()))
        self._copied = self._pool.copy(zip(self._on_host(), self._whole.values(), strict=True))

    def empty(self) -> None:
        """Free the device's memory when the copies have ended."""
        self._pool.wait(self._copied)
        for each in self._whole.values():
            each.untyped_storage().resize_(0)
        self._away = True

    def fetch(self) -> None:
        """Take memory on the device, and begin to copy to it; nothing if that has begun."""
        if not self._away:
            return
        self._away = False
        for each in self._whole.values():
            each.untyped_storage().resize_(each.nbytes)
        self._copied = self._pool.copy(zip(self._whole.values(), self._on_host(), strict=True))

    def arrive(self) -> None:
        """Wait until all tensors are on the device; from then on only autograd references them."""
        self.fetch()
        self._pool.wait(self._copied)
        if self._memory is not None:
            self._pool.give_back(self._memory)
        self._whole, self._memory = {}, None

    def _on_host(self) -> list[Tensor]:
        if self._memory is None:
            raise RuntimeError("tensors without host memory")
        sizes = [aligned(each.nbytes) for each in self._whole.values()]
        starts = [0, *accumulate(sizes)]
        return [self._memory[start:][: each.nbytes].view(each.dtype) for start, each in zip(starts, self._whole.values(), strict=False)]


class _Passing:
    """The saved tensors of the previous layer, of the microbatch in its forward."""

    kept: KeptTensors | None = None


def _run(
    forward: Callable[..., Tensor],
    module: nn.Module,
    passing: _Passing,
    make: Callable[..., KeptTensors] | None,
    at_ends: tuple[bool, bool],
    x: Tensor,
    *further: Any,
) -> Tensor:
    """Forward of a layer; `at_ends`: whether it is the first layer of its stage, and whether it is the last part."""
    if not torch.is_grad_enabled():
        return forward(x, *further)
    before, own = None if at_ends[0] else passing.kept, None
    if make is None:
        out = forward(x, *further)
    else:
        others = [each for each in tree_leaves(further) if isinstance(each, Tensor)]
        own = make([*others, *module.parameters(), *module.buffers()], x)
        with saved_tensors_hooks(own.save, _same):
            out = forward(x, *further)
        own.leave(_gathered(module))
    if before is not None:
        before.empty()
    if own is not None and at_ends[1]:
        own.empty()
    passing.kept = own
    out.register_hook(partial(_run_backward, own, before))  # type: ignore[no-untyped-call]
    return out


def _run_backward(own: KeptTensors | None, before: KeptTensors | None, _: Tensor) -> None:
    """The start of a layer's backward."""
    if own is not None:
        own.arrive()
    if before is not None:
        before.fetch()


def _gathered(module: nn.Module) -> Iterator[Tensor]:
    """Gathered parameters of FSDP2's groups in a layer; those of a bank inside it are known after its forward."""
    for each in module.modules():
        for group in groups_of(each) if isinstance(each, FSDPModule) else ():
            for item in group.fsdp_params:
                whole = getattr(item, "_unsharded_param", None)
                yield from (*item.all_gather_outputs, *(() if whole is None else (whole,)))


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor's storage, as a vector of its dtype."""
    with torch.no_grad():
        return tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
