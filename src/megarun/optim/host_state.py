"""State of optimizers in host memory between updates (`host.optimizer_offload`): AdamW's averages of gradients and Muon's momentum.

Parameters stay on the device, which computes every update. An update goes through its units, the parameters that it changes at once. While
a unit is updated, the next unit's averages are copied to the device and the previous unit's back to the host. Both copies run in one
separate stream: a unit's averages leave before those of the next unit but one arrive. So the device holds two consecutive units, in one
buffer whose two ends they use alternately. It exists only during updates.

On the host all averages lie in one tensor, unit after unit. It is page-locked if the device is CUDA: its pages are registered, because
torch's allocator of page-locked memory rounds each request to a power of two.

Source: docs.nvidia.com/cuda/cuda-c-programming-guide, "Asynchronous Concurrent Execution"; aten/src/ATen/core/CachingHostAllocator.h.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megaplan.hosts.megarun.offload import aligned, buffer_bytes, num_on_host
from megarun import host_memory
from megarun.parallel.groups.local import local


class Averaging(Protocol):
    """An optimizer whose averages may be in host memory."""

    state: Any

    def averages(self, parameter: Tensor) -> dict[str, torch.dtype]:
        """Names of the averages of a parameter, with their dtypes."""
        ...


class Unit(NamedTuple):
    """Parameters that an optimizer updates at once."""

    optimizer: Averaging
    parameters: Sequence[Tensor]

    @property
    def state_elements(self) -> int:
        """Elements of its averages on all ranks that share them."""
        return sum(parameter.numel() * len(self.optimizer.averages(parameter)) for parameter in self.parameters)


class _Average(NamedTuple):
    """An average of a parameter, and its place in the memory of its unit."""

    parameter: Tensor
    key: str
    dtype: torch.dtype
    start: int
    num_bytes: int

    def of(self, memory: Tensor) -> Tensor:
        """The average in the memory of its unit, uint8 [n]."""
        return memory[self.start :][: self.num_bytes].view(self.dtype).view(local(self.parameter).shape)


class HostState:
    """The averages of the first units of an update, and the way there and back.

    Attributes:
        unit_bytes: Bytes of each of these units, on the host and in the buffer.
    """

    def __init__(self, units: Sequence[Unit], fraction: float, device: torch.device) -> None:
        """Takes host memory for the averages, which are zero.

        Args:
            units: All units of an update, in order.
            fraction: Fraction of the state, see `num_on_host`.
            device: The device of the parameters.
        """
        self._units = list(units[: num_on_host([unit.state_elements for unit in units], fraction)])
        self._device = device
        self._averages = [list(_averages(unit)) for unit in self._units]
        self.unit_bytes = [sum(aligned(average.num_bytes) for average in averages) for averages in self._averages]
        self._index = {id(unit.parameters[0]): index for index, unit in enumerate(self._units)}
        self._memory = host_memory.take_memory(self.num_bytes, device)
        host_memory.unlock_with(self, self._memory, device)
        self._on_host = [self._memory[end - size : end] for end, size in zip(accumulate(self.unit_bytes), self.unit_bytes, strict=True)]
        self._of_parameter: dict[int, dict[str, Tensor]] = {}
        for averages, memory in zip(self._averages, self._on_host, strict=True):
            for average in averages:
                self._of_parameter.setdefault(id(average.parameter), {})[average.key] = average.of(memory)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._arrived: list[torch.cuda.Event | None] = []
        self._buffer: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Host memory of all averages."""
        return sum(self.unit_bytes)

    def has(self, parameter: Tensor) -> bool:
        """True if the averages of a parameter are in host memory."""
        return id(parameter) in self._of_parameter

    def of(self, parameter: Tensor) -> dict[str, Tensor]:
        """The averages of a parameter that are in host memory, by name; none if they are on the device."""
        return self._of_parameter.get(id(parameter), {})

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Context of an update: the device has the buffer, and the first unit's averages are on their way."""
        if not self._units:
            yield
            return
        self._buffer = torch.empty(buffer_bytes(self.unit_bytes), dtype=torch.uint8, device=self._device)
        if self._stream is not None:  # the memory that the buffer reuses may still be read
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._arrived = []
        self._fetch(0)
        try:
            yield
        finally:
            if self._stream is not None:  # waits before the buffer's memory is used for other tensors
                torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._buffer = None

    @contextmanager
    def lent(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Context in which a unit is updated: its optimizer's state is on the device. Units are lent in their order."""
        index = self._index.get(id(parameters[0]))
        if index is None:
            yield
            return
        if index + 1 < len(self._units):
            self._fetch(index + 1)
        arrived = self._arrived[index]
        if arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(arrived)
        state, memory = self._units[index].optimizer.state, self._place(index)
        for average in self._averages[index]:
            state[average.parameter][average.key] = average.of(memory)
        try:
            yield
        finally:
            for average in self._averages[index]:
                state[average.parameter][average.key] = self._of_parameter[id(average.parameter)][average.key]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):  # none on a CPU
            self._on_host[index].copy_(memory, non_blocking=True)

    def settle(self) -> None:
        """Wait until the host can read and write the averages."""
        if self._stream is not None:
            self._stream.synchronize()

    def _fetch(self, index: int) -> None:
        """Begin to copy a unit's averages to the device, behind the copy back of the unit before the last, which had the same place."""
        with torch.cuda.stream(self._stream):
            self._place(index).copy_(self._on_host[index], non_blocking=True)
        self._arrived.append(None if self._stream is None else self._stream.record_event())

    def _place(self, index: int) -> Tensor:
        """A unit's part of the buffer, alternately at its start and its end."""
        if self._buffer is None:
            raise RuntimeError("averages are lent outside an update")
        size = self.unit_bytes[index]
        start = len(self._buffer) - size if index % 2 else 0
        return self._buffer[start : start + size]


def _averages(unit: Unit) -> Iterator[_Average]:
    start = 0
    for parameter in unit.parameters:
        for key, dtype in unit.optimizer.averages(parameter).items():
            num_bytes = local(parameter).numel() * dtype.itemsize
            yield _Average(parameter, key, dtype, start, num_bytes)
            start += aligned(num_bytes)
