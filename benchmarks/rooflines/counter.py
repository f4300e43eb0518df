"""A dispatch mode that records every operation of a step with its part of the model."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from megaplan.devices import Device
from megarun.trace.places import Places
from megarun.trace.replaced import replaced
from rooflines.aten import kernel_of, tensors_of
from rooflines.own import NAMESPACE, Bodies
from rooflines.transfers import NAMESPACES, transfer_of
from rooflines.work import Action, Event, Kernel, Transfer, Work

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_NO_NUMBER = 2**63 - 1
"""Sequence numbers of AccumulateGrad nodes are above this one and do not identify a forward operation."""


class ForwardPlaces:
    """Module that created each node of the autograd graph, by the sequence number of the node."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._numbers: list[int] = []
        self._paths: list[str] = []
        self._last = ""
        self._before = ""  # last module of a forward

    def now(self) -> str:
        """Path of the module of the current operation; in backward, of the module that created the current node."""
        node = torch._C._current_autograd_node()
        if node is not None and not self._places.in_module:
            number = node._sequence_nr()
            if 0 <= number < _NO_NUMBER:
                self._last = self._of_number(number)
            path = self._last
        else:
            path = self._places.running
            if not path and self._before.startswith("final_norm"):
                path = "head"  # the stage computes the logits or the loss from the norm's output
            self._before = path if path != "head" else self._before
        if node is None or torch.is_grad_enabled():  # forward, or recompute inside a backward
            self._note(torch._C._autograd._get_sequence_nr() - 1, path)  # a node is created before its operation is dispatched
        return path

    def _note(self, made: int, path: str) -> None:
        """Assign the path to nodes from sequence number `made` on."""
        if made >= 0 and self._of_number(made) != path and (not self._numbers or self._numbers[-1] <= made):
            self._numbers.append(made)
            self._paths.append(path)

    def _of_number(self, number: int) -> str:
        found = bisect_right(self._numbers, number)
        return self._paths[found - 1] if found else ""


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's mode has no types
    """Records every operation; enter it inside (after) a `FakeTensorMode`.

    Attributes:
        events: Recorded operations, in order.
        action: Current computation of a microbatch, see `Event`.
        phase: Current phase of the step, see `Event`.
        counts: True if operations are recorded.
    """

    def __init__(self, places: Places, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places, self._bodies, self._stack = ForwardPlaces(places), Bodies(device), ExitStack()
        self.events: list[Event] = []
        self.action: Action | None = None
        self.phase = "microbatches"
        self.counts = False

    def note(self, done: Work | Transfer) -> None:
        """Record work at the current place."""
        if self.counts:
            self.events.append(Event(self.action, self.phase, self._places.now(), done))

    def waits(self, reason: str) -> None:
        """Record a host synchronisation."""
        self.note(Work(reason, (Kernel(reason, launches=1, syncs=1),)))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside the context."""
        before, self.counts = self.counts, False
        try:
            yield
        finally:
            self.counts = before

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation and record its work."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operation on local tensors is dispatched next
        if func is _WAIT and isinstance(args[0], FakeTensor):
            return args[0]
        given = kwargs or {}
        out = func(*args, **given)
        if not self.counts or not any(isinstance(each, FakeTensor) for each in tensors_of((args, given, out))):
            return out  # real tensors are on the host, such as the ranks of a mesh
        if func.namespace in NAMESPACES:
            transfer = transfer_of(func, args, given)
            if transfer is not None:
                self.note(transfer)
        elif func.namespace == NAMESPACE:
            self.note(self._bodies.work_of(func, args, out))
        else:
            kernel = kernel_of(func, args, given, out)
            if kernel is not None:
                self.note(Work(f"{func.namespace}.{kernel.op}", (kernel,), ideal_bytes=kernel.num_bytes))
        return out

    def __enter__(self) -> Self:
        """Ignore the shape propagation of DTensor, which runs on fake tensors of the global size."""
        propagate = ShardingPropagator._propagate_tensor_meta_non_cached

        def unseen(*args: Any) -> Any:
            with self.paused():
                return propagate(*args)

        self._stack.enter_context(replaced(ShardingPropagator, _propagate_tensor_meta_non_cached=unseen))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Restore the patched method."""
        self._stack.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]
