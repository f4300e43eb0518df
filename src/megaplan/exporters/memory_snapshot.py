"""A step as a snapshot of torch's CUDA allocator, which the viewer at pytorch.org/memory_viz opens.

The document is that of `torch.cuda.memory._snapshot()`: `segments` at the end of the trace and `device_traces`, the events before it. A pp
rank is a device. The viewer reads pickles of protocol 2 to 4 of lists, dicts, text and numbers (torch/utils/viz/MemoryViz.js, `unpickle`).
"""

import pickle
from typing import Any

from megaplan.columns import Column, Phase
from megaplan.exporters.values import Source
from megaplan.exporters.viewers import ReplayedStep, replayed_step
from megaplan.schedules import Action, ActionKind

BASE, DEVICE = 0x7F0000000000, 1 << 36
"""Address of the first device's segment, and the distance of the next device's: devices share one space of addresses, as CUDA's do."""
LASTING = (
    *(Column.REPLICATED_PARAMS, Column.TENSOR_PARALLEL_PARAMS, Column.EXPERT_PARALLEL_PARAMS, Column.GRADIENTS),
    *(Column.MATRIX_OPTIMIZER, Column.OTHER_OPTIMIZER, Column.WORKSPACE, Column.OVERHEAD),
)
"""Columns without tensors of microbatches in flight."""


def memory_snapshot(source: Source) -> bytes:
    """The snapshot of one optimizer step, pickled.

    Each microbatch on a slot is one allocation, from its forward to its backward (with a split backward a smaller one follows, from its
    input half to its weight half). Everything else of the rank was allocated before the trace: a block for each column.

    Raises:
        MegaplanError: MP481, the schedule has too many actions.
    """
    return pickle.dumps(snapshot_document(replayed_step(source)), protocol=4)


def snapshot_document(step: ReplayedStep) -> dict[str, Any]:
    """The snapshot as plain values."""
    devices = [_Device(step, rank) for rank in range(len(step.ranks))]
    return {
        "segments": [device.segment() for device in devices],
        "device_traces": [device.events for device in devices],
        "allocator_settings": {},
    }


class _Device:
    """Blocks and events of one pp rank; freed addresses are reused for allocations of the same size."""

    def __init__(self, step: ReplayedStep, rank: int) -> None:
        self.rank, self.kept, self.base = rank, step.kept, BASE + rank * DEVICE
        self.end = self.base
        self.events: list[dict[str, Any]] = []
        self.free: dict[int, list[int]] = {}
        self.held: dict[tuple[int, int], tuple[int, int, list[dict[str, Any]]]] = {}
        self.lasting = [(name, size, self._address(size)) for name, size in self._lasting(step)]
        for time, _, part in sorted(_changes(step, rank), key=lambda change: change[:2]):
            self._run(time, part)

    def _lasting(self, step: ReplayedStep) -> list[tuple[str, int]]:
        cells, held = step.ranks[self.rank].cells[Phase.FORWARD_BACKWARD], step.levels[self.rank][0][1]
        found = [(str(column), cells[column]) for column in LASTING if cells[column]]
        rest = held - sum(size for _, size in found)
        return (
            [*found, ("buffers, gathered parameters and the block that runs", rest)]
            if rest > 0
            else [("states and the running block", held)]
        )

    def _address(self, size: int) -> int:
        if self.free.get(size):
            return self.free[size].pop()
        address, self.end = self.end, self.end + size
        return address

    def _run(self, time: int, part: Action) -> None:
        kept, key = self.kept[part.slot], (part.slot, part.microbatch)
        if part.kind is ActionKind.FORWARD:
            self._allocate(time, key, kept.full, "saved for backward")
            return
        self._release(time, key)
        if part.kind is ActionKind.INPUT:
            self._allocate(time, key, kept.pending, "kept for weight gradients")

    def _allocate(self, time: int, key: tuple[int, int], size: int, what: str) -> None:
        if size == 0:
            return
        address, frames = self._address(size), _frames(f"{what}: slot {key[0]}, microbatch {key[1]}")
        self.held[key] = (address, size, frames)
        self.events.append(_event("alloc", time, address, size, frames))

    def _release(self, time: int, key: tuple[int, int]) -> None:
        if key not in self.held:
            return
        address, size, frames = self.held.pop(key)
        self.free.setdefault(size, []).append(address)
        self.events += [_event(action, time, address, size, frames) for action in ("free_requested", "free_completed")]

    def segment(self) -> dict[str, Any]:
        """The segment after the step, when no microbatch is in flight."""
        active = sum(size for _, size, _ in self.lasting)
        blocks = [_block(address, size, "active_allocated", _frames(name)) for name, size, address in self.lasting]
        if self.end > self.base + active:
            blocks.append(_block(self.base + active, self.end - self.base - active, "inactive", []))
        return {
            "device": self.rank,
            "address": self.base,
            "total_size": self.end - self.base,
            "allocated_size": active,
            "active_size": active,
            "requested_size": active,
            "stream": 0,
            "segment_type": "large",
            "frames": [],
            "blocks": blocks,
        }


def _changes(step: ReplayedStep, rank: int) -> list[tuple[int, bool, Action]]:
    """(time, allocates, action): a forward allocates when it begins, all others free when they end; at equal times frees come first."""
    parts = [(item, part, part.kind is ActionKind.FORWARD) for item in step.timeline.ranks[rank] for part in item.action.parts]
    return [(item.start if forward else item.stop, forward, part) for item, part, forward in parts]


def _event(action: str, time: int, address: int, size: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": time // 1000, "frames": frames}


def _block(address: int, size: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size if frames else 0, "state": state, "frames": frames}


def _frames(name: str) -> list[dict[str, Any]]:
    return [{"filename": "plan", "line": 0, "name": name}]
