"""How torch's CUDA caching allocator rounds: what it reserves beyond what it hands out. Modelled; fragmentation proper is not in it.

Blocks are multiples of 512 B. Tensors of 10 MiB and more get segments of their own, in multiples of 2 MiB; smaller ones share segments of
20 MiB (above 1 MiB) and 2 MiB, of which one each is taken to stand open.

Source: c10/cuda/CUDACachingAllocator.cpp (kMinBlockSize, kMinLargeAlloc, kRoundLarge, kLargeBuffer, kSmallBuffer).
"""

from __future__ import annotations

from collections.abc import Iterable

MIN_BLOCK_BYTES = 512
MIN_LARGE_BYTES = 10 << 20
ROUND_LARGE_BYTES = 2 << 20
OPEN_SEGMENTS_BYTES = (20 << 20) + (2 << 20)


def slack_bytes(sizes: Iterable[int]) -> int:
    """What rounding adds to tensors of these sizes."""
    slack = 0
    for size in sizes:
        slack += -size % (ROUND_LARGE_BYTES if size >= MIN_LARGE_BYTES else MIN_BLOCK_BYTES)
    return slack
