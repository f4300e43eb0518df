"""torch's caching allocator as its source says: rounding, segments, splitting, merging, pools of streams, pages."""

from itertools import pairwise
from random import Random

import pytest

from megaplan.hosts.allocator import CachingAllocator, MemoryBlock

MIB = 1 << 20


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # a remainder of 1 MiB is not a block of its own
        (13 * MIB - 512, 14 * MIB - MIB - 512, 14 * MIB),
    ],
)
def test_segments_without_expansion(size: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator(expandable=False)
    allocator.allocate(size)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)


def test_pages_of_an_expandable_segment() -> None:
    """The segment grows by the missing bytes, in pages; a free end is used."""
    allocator = CachingAllocator(expandable=True)
    first = allocator.allocate(11 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.allocate(10 * MIB)  # 9 MiB lie free at the end
    assert allocator.reserved_bytes == 40 * MIB
    allocator.free(first)
    allocator.allocate(11 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_free_neighbours_merge_within_a_segment_alone() -> None:
    """Two freed halves of one segment serve the whole; two segments never serve what neither holds."""
    for expandable, reserved in ((False, 120 * MIB), (True, 60 * MIB)):
        allocator = CachingAllocator(expandable=expandable)
        blocks = [allocator.allocate(20 * MIB) for _ in range(3)]
        for block in blocks:
            allocator.free(block)
        allocator.allocate(60 * MIB)
        assert allocator.reserved_bytes == reserved


def test_a_stream_cannot_use_what_another_has_freed() -> None:
    for expandable in (False, True):
        allocator = CachingAllocator(expandable=expandable)
        allocator.free(allocator.allocate(40 * MIB, stream=0))
        allocator.allocate(40 * MIB, stream=1)
        assert allocator.reserved_bytes == 80 * MIB


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator(expandable=False)
    small, large = allocator.allocate(30 * MIB), allocator.allocate(50 * MIB)
    allocator.free(large)
    allocator.free(small)
    allocator.allocate(28 * MIB)
    allocator.allocate(50 * MIB)
    assert allocator.reserved_bytes == 80 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_reserved_is_what_the_blocks_are(expandable: bool) -> None:
    """Over random requests: reserved is never below allocated memory and never falls, no byte is allocated twice, and all is freed."""
    draw, allocator = Random(7), CachingAllocator(expandable=expandable)
    held: list[MemoryBlock] = []
    before = 0
    for _ in range(3000):
        if held and draw.random() < 0.5:
            allocator.free(held.pop(draw.randrange(len(held))))
        else:
            held.append(allocator.allocate(draw.choice((1, 700, MIB, 3 * MIB, 25 * MIB)) * draw.randint(1, 3), draw.randint(0, 1)))
        assert allocator.reserved_bytes >= max(allocator.allocated_bytes, before)
        assert allocator.allocated_bytes == sum(block.size for block in held)
        before = allocator.reserved_bytes
    spans = sorted((id(block.pool), block.place, block.place + block.size) for block in held)
    assert all(first[0] != second[0] or first[2] <= second[1] for first, second in pairwise(spans))
    for block in held:
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    again = [allocator.allocate(size) for size in (512, 2 * MIB)]
    assert allocator.reserved_bytes == before
    assert all(block.size for block in again)
