"""Live bytes: allocation, resizes and deallocation of every storage, on fake or real tensors.

A storage counts as allocated when a dispatched operation first returns it. Allocations, resizes and frees are logged. The kind of a storage
is often known only later (a gradient when it reaches its parameter), so labels are stored in the storage's record and the log is replayed
at the end, up to the peak of every phase. Each event has the current stream, as in CUDA's allocator: on a CPU torch's streams do nothing,
but FSDP2 still enters them.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from megaplan.columns import Phase
from megaplan.hosts.allocator import CachingAllocator, MemoryBlock
from megarun.trace.accumulation import Accumulation
from megarun.trace.fake import as_on_gpu
from megarun.trace.kinds import Kind
from megarun.trace.replaced import replaced

_PLAIN = (FakeTensor, torch.Tensor, torch.nn.Parameter)
_WAIT = torch.ops._c10d_functional.wait_tensor.default


@dataclass(slots=True, eq=False)
class StorageRecord:
    """The history of one storage.

    Attributes:
        nbytes: Current size in bytes; 0 after it is freed.
        op: Operation that allocated it.
        output: Output index of the operation.
        place: Path of the running module, or of the module of the operation's operands.
        shape: Shape of its first tensor.
        dtype: Dtype of its first tensor.
        kind: Kind as far as known.
        name: Name of its parameter, if any.
        forward: True if it was allocated in a forward pass.
        is_block_output: True if it is the output of a block.
        alive: True if it is not freed.
        savers: Paths of modules whose operations saved it for backward, if observed.
    """

    nbytes: int
    op: str
    output: int
    place: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    kind: Kind
    name: str = ""
    forward: bool = False
    is_block_output: bool = False
    alive: bool = True
    savers: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _PhasePeak:
    nbytes: int
    num_events: int


class Observer(Protocol):
    """Receives storage events and labels storages."""

    def on_alloc(self, record: StorageRecord, operands: tuple[Any, ...]) -> None:
        """A storage was allocated by `record.op` from `operands`."""
        ...

    def on_accumulate(self, total: StorageRecord, part: StorageRecord) -> None:
        """Autograd added a second gradient in place to the first."""
        ...

    def on_run(self, op: str, operands: tuple[Any, ...]) -> None:
        """An operation ran; its new storages were reported before."""
        ...


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's mode has no types
    """Counts live bytes of plain tensors while it is entered; put it inside (after) a `FakeTensorMode`."""

    def __init__(self, observer: Observer, granule_bytes: int = 1, *, fake_only: bool = False) -> None:
        """Start empty.

        Args:
            observer: Receiver of storage events.
            granule_bytes: Granularity of sizes in bytes, rounded up; 1 counts exactly, 512 like the CUDA allocator's blocks.
            fake_only: True to ignore real tensors.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._observer, self._granule, self._fake_only = observer, granule_bytes, fake_only
        self._records: dict[int, tuple[StorageRecord, Any]] = {}  # records by address of the StorageImpl; each with a weak reference
        self._log: list[tuple[StorageRecord, int]] = []
        self._log_streams: list[int] = []
        self._streams: dict[int, tuple[int, Any]] = {}  # streams by identity: a number, and the stream itself to keep it alive
        self._entered: list[tuple[int, Phase]] = []
        self._peaks: dict[Phase, _PhasePeak] = {}
        self._phase = Phase.INIT
        self._paused = False
        self._stack, self._accumulation = ExitStack(), Accumulation()
        self.live_bytes = 0
        self.enter_phase(Phase.INIT)

    @property
    def phase(self) -> Phase:
        """The current phase."""
        return self._phase

    @property
    def num_events(self) -> int:
        """Number of allocations, resizes and frees so far."""
        return len(self._log)

    def enter_phase(self, phase: Phase) -> None:
        """Start a phase; a phase that is entered again keeps its larger peak."""
        self._phase = phase
        self._entered.append((len(self._log), phase))
        self._note_peak()

    def at_peaks(self) -> dict[Phase, list[tuple[StorageRecord, int]]]:
        """The storages alive at the peak of each phase, with their bytes then; one replay of the log for all phases."""
        wanted: dict[int, list[Phase]] = {}
        for phase, peak in self._peaks.items():
            wanted.setdefault(peak.num_events, []).append(phase)
        found: dict[Phase, list[tuple[StorageRecord, int]]] = {}
        live: dict[StorageRecord, int] = {}
        for count in range(len(self._log) + 1):
            for phase in wanted.get(count, ()):
                found[phase] = [(record, nbytes) for record, nbytes in live.items() if nbytes]
            if count < len(self._log):
                record, delta = self._log[count]
                live[record] = live.get(record, 0) + delta
        return found

    def reserved(self, *, expandable: bool) -> dict[Phase, int]:
        """Bytes that CUDA's allocator would have reserved at the end of each phase, by a replay of the log with its streams."""
        allocator = CachingAllocator(expandable=expandable)
        blocks: dict[StorageRecord, MemoryBlock] = {}
        sizes: dict[StorageRecord, int] = {}
        found: dict[Phase, int] = {}
        ends = [*(start for start, _ in self._entered[1:]), len(self._log)]
        for (start, phase), end in zip(self._entered, ends, strict=True):
            for index in range(start, end):
                record, delta = self._log[index]
                if record in blocks:
                    allocator.free(blocks.pop(record))
                sizes[record] = sizes.get(record, 0) + delta
                if sizes[record]:
                    blocks[record] = allocator.allocate(sizes[record], self._log_streams[index])
            found[phase] = allocator.reserved_bytes
        return found

    def live(self) -> list[StorageRecord]:
        """The storages alive now."""
        return [record for record, _ in self._records.values()]

    def record(self, tensor: Tensor, op: str = "external", output: int = 0, operands: tuple[Any, ...] = ()) -> StorageRecord | None:
        """The record of a plain tensor's storage, created if needed; None if it is not counted (meta, or allocated outside the mode)."""
        if tensor.device.type == "meta" or (self._fake_only and not isinstance(tensor, FakeTensor)):
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._records.get(key)
        if known is not None:
            return known[0]
        if any(found.device.type != "meta" and found.untyped_storage()._cdata == key for found in plain_tensors(operands)):
            return None  # a view of a storage that is not traced
        record = StorageRecord(self._size(storage), op, output, "", tuple(tensor.shape), tensor.dtype, Kind.WORKING)
        self._observer.on_alloc(record, operands)
        self._records[key] = (record, weakref.ref(storage, lambda _: self._on_free(key)))
        self._event(record, record.nbytes)
        return record

    def known(self, tensor: Tensor) -> StorageRecord | None:
        """The record of a plain tensor's storage, if there is one."""
        if tensor.device.type == "meta":
            return None
        found = self._records.get(tensor.untyped_storage()._cdata)
        return found[0] if found is not None else None

    def records(self, value: Any) -> Iterator[StorageRecord]:
        """Records of every plain tensor inside a value."""
        for tensor in plain_tensors(value):
            record = self.record(tensor)
            if record is not None:
                yield record

    def declare(self, record: StorageRecord) -> None:
        """Count bytes as allocated now that no traced operation allocates."""
        self._event(record, record.nbytes)

    def record_transient(self, record: StorageRecord) -> None:
        """Count bytes that are allocated only while an operation runs."""
        self._event(record, record.nbytes)
        self._event(record, -record.nbytes)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which allocations are not counted."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation and count its results."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # returns the global size; its operation on local tensors is the next call of this method
        if func is _WAIT and isinstance(args[0], FakeTensor):
            return args[0]  # a wait returns its argument; the fake kernel would allocate a second buffer
        if self._accumulation.in_place(func, args, kwargs):
            total, part = (self.known(tensor) for tensor in args)
            if total is not None and part is not None:
                self._observer.on_accumulate(total, part)
            return self._accumulation.add(*args)
        out = func(*args, **(kwargs or {}))
        out = as_on_gpu(func, out) if self._fake_only else out
        if not self._paused:
            operands = (*args, *kwargs.values()) if kwargs else args
            op = str(func)
            for index, tensor in enumerate(plain_tensors(out)):
                self.record(tensor, op, index, operands)
            self._observer.on_run(op, operands)
        return out

    def __enter__(self) -> Self:
        """Observe resizes too, and ignore DTensor's shape inference."""
        resize, propagate = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

        def tracked_resize(storage: torch.UntypedStorage, size: int) -> Any:
            """FSDP2 frees and reallocates gathered parameters this way, below dispatch."""
            result = resize(storage, size)
            known = self._records.get(storage._cdata)
            if known is not None:
                before, known[0].nbytes = known[0].nbytes, self._size(storage)
                self._event(known[0], known[0].nbytes - before)
            return result

        def unseen(*args: Any) -> Any:
            """DTensor infers output shapes on fake tensors of the global size, which this mode would count."""
            with self.paused():
                return propagate(*args)

        self._stack.enter_context(replaced(torch.UntypedStorage, resize_=tracked_resize))
        self._stack.enter_context(replaced(ShardingPropagator, _propagate_tensor_meta_non_cached=unseen))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Restore the patched functions."""
        self._stack.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _size(self, storage: torch.UntypedStorage) -> int:
        return -(-storage.nbytes() // self._granule) * self._granule

    def _event(self, record: StorageRecord, delta: int) -> None:
        self.live_bytes += delta
        self._log.append((record, delta))
        stream = torch.cpu.current_stream()
        self._log_streams.append(self._streams.setdefault(id(stream), (len(self._streams), stream))[0])
        if self.live_bytes > self._peaks[self._phase].nbytes:
            self._note_peak()

    def _note_peak(self) -> None:
        peak = self._peaks.get(self._phase)
        if peak is None or self.live_bytes > peak.nbytes:
            self._peaks[self._phase] = _PhasePeak(self.live_bytes, len(self._log))

    def _on_free(self, key: int) -> None:
        record, _ = self._records.pop(key)
        record.alive = False
        nbytes, record.nbytes = record.nbytes, 0
        self._event(record, -nbytes)


def plain_tensors(value: Any) -> Iterator[Tensor]:
    """Every plain tensor inside a value; wrapper subclasses such as DTensor are unwrapped."""
    if isinstance(value, Tensor):
        if type(value) not in _PLAIN and is_traceable_wrapper_subclass(value):
            for name in value.__tensor_flatten__()[0]:
                yield from plain_tensors(getattr(value, name))
        else:
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from plain_tensors(item)
    elif value is not None and not isinstance(value, (int, float, str, torch.dtype, torch.device)):
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                yield from plain_tensors(leaf)
