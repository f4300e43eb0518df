"""Blocks alive at a GPU's peak, compared with the storages that a trace has alive in that phase, to find the cause of a miss."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BLOCK_BYTES = 512
OURS = ("/src/megarun/", "/kernels/megakernels/")
UNKNOWN = "no Python frame"


@dataclass(frozen=True, slots=True)
class SizeRow:
    """All blocks of one size.

    Attributes:
        block_bytes: Rounded up as the allocator rounds.
        num_measured: Alive at the measured peak.
        num_traced: Alive at the trace's peak of the same phase.
        places: Places that allocated the measured blocks, as the innermost line of megarun or megakernels, with counts.
        rows: Rows of the trace with the traced blocks.
    """

    block_bytes: int
    num_measured: int
    num_traced: int
    places: tuple[str, ...]
    rows: tuple[str, ...]

    @property
    def excess_bytes(self) -> int:
        """Bytes that only the GPU had; negative if only the trace had them."""
        return (self.num_measured - self.num_traced) * self.block_bytes


def blocks_at_peak(events: Iterable[Mapping[str, Any]]) -> list[tuple[int, str, int]]:
    """(Bytes, place, count) of the allocations alive at the peak of a recorded history.

    Args:
        events: Events of torch's memory history since the first allocation. Bytes count from `alloc` to `free_requested`: until then
            they are inside `max_memory_allocated`.
    """
    entries = list(events)
    peak, total, highest = 0, 0, 0
    sizes: dict[int, int] = {}
    for index, event in enumerate(entries):
        if event["action"] == "alloc":
            sizes[event["addr"]] = event["size"]
            total += event["size"]
            if total > highest:
                peak, highest = index, total
        elif event["action"] == "free_requested":
            total -= sizes.pop(event["addr"], 0)
    alive: dict[int, tuple[int, str]] = {}
    for event in entries[: peak + 1]:
        if event["action"] == "alloc":
            alive[event["addr"]] = _rounded(event["size"]), _place(event.get("frames", ()))
        elif event["action"] == "free_requested":
            alive.pop(event["addr"], None)
    return [(size, place, count) for (size, place), count in Counter(alive.values()).items()]


def compared_with_trace(blocks: Iterable[tuple[int, str, int]], rows: Sequence[Any]) -> list[SizeRow]:
    """Measured blocks and a trace's rows by size, largest difference first.

    Args:
        blocks: Blocks from `blocks_at_peak`.
        rows: Rows of one phase of a `RankTrace`.
    """
    measured: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for size, place, count in blocks:
        measured[size].append((place, count))
    traced: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for row in rows:
        traced[_rounded(row.nbytes // row.count)].append((row.describe(), row.count))
    found = [
        SizeRow(
            size,
            sum(count for _, count in measured[size]),
            sum(count for _, count in traced[size]),
            tuple(f"{count} × {place}" for place, count in sorted(measured[size], key=lambda item: -item[1])),
            tuple(text for text, _ in traced[size]),
        )
        for size in measured.keys() | traced.keys()
    ]
    return sorted(found, key=lambda row: (-abs(row.excess_bytes), -row.block_bytes))


def _rounded(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _place(frames: Iterable[Mapping[str, Any]]) -> str:
    for frame in frames:  # innermost first
        if any(folder in frame["filename"] for folder in OURS):
            return f"{frame['filename'].rsplit('/src/', 1)[-1].rsplit('/kernels/', 1)[-1]}:{frame['line']} {frame['name']}"
    return UNKNOWN
