"""torch's CUDA caching allocator: its rounding, and a model that replays allocations and frees.

Blocks are multiples of 512 B. A stream has its own pools, one for blocks up to 1 MiB and one for larger: memory that a stream has freed
cannot serve another. If no free block of a pool fits, the pool grows:

- by default by a segment: of 2 MiB for small blocks, of 20 MiB for blocks below 10 MiB, else of the block's size in multiples of 2 MiB.
  Free neighbours merge within a segment, never across two; a larger block's remainder is a separate block if it is above 1 MiB;
- with expandable segments at the end of the pool's one segment, in pages of 2 MiB for small blocks and 20 MiB for large ones.

Memory returns to the device only if an allocation fails, so reserved memory never falls.

Source: c10/cuda/CUDACachingAllocator.cpp (`round_size`, `get_allocation_size`, `get_free_block`, `should_split`, `try_merge_blocks`,
`try_allocate_expandable_block`; kMinBlockSize, kSmallSize, kMinLargeAlloc, kRoundLarge, kLargeBuffer, kSmallBuffer).
"""

from bisect import bisect_left, insort
from collections.abc import Iterable

MIN_BLOCK_BYTES = 512
SMALL_BYTES = 1 << 20
MIN_LARGE_BYTES = 10 << 20
ROUND_LARGE_BYTES = 2 << 20
LARGE_BUFFER_BYTES, SMALL_BUFFER_BYTES = 20 << 20, 2 << 20
OPEN_SEGMENTS_BYTES = LARGE_BUFFER_BYTES + SMALL_BUFFER_BYTES
"""Bytes that one stream's two pools hold beyond their blocks, if each has one segment or page that is not full."""


def slack_bytes(sizes: Iterable[int]) -> int:
    """Bytes that rounding adds to tensors of these sizes with their own segments."""
    slack = 0
    for size in sizes:
        slack += -size % (ROUND_LARGE_BYTES if size >= MIN_LARGE_BYTES else MIN_BLOCK_BYTES)
    return slack


class MemoryBlock:
    """A part of a segment, allocated or free."""

    __slots__ = ("after", "before", "free", "place", "pool", "size")

    def __init__(self, pool: "Pool", place: int, size: int) -> None:
        self.pool, self.place, self.size, self.free = pool, place, size, True
        self.before: MemoryBlock | None = None
        self.after: MemoryBlock | None = None


class Pool:
    """Free blocks of one stream and one kind; with expandable segments, `end` is the last block of its segment."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.end: MemoryBlock | None = None
        self._order: list[tuple[int, int]] = []
        self._free: dict[int, MemoryBlock] = {}

    def add(self, block: MemoryBlock) -> None:
        """Make a block free."""
        insort(self._order, (block.size, block.place))
        self._free[block.place] = block

    def remove(self, block: MemoryBlock) -> None:
        """Take a free block out."""
        del self._order[bisect_left(self._order, (block.size, block.place))]
        del self._free[block.place]

    def best_fit(self, size: int) -> MemoryBlock | None:
        """The smallest free block of at least a size; one that can still grow counts as larger than any other."""
        index = bisect_left(self._order, (size, -1))
        if index == len(self._order):
            return None
        found = self._free[self._order[index][1]]
        if found is self.end and index + 1 < len(self._order):
            found = self._free[self._order[index + 1][1]]
        return found


class CachingAllocator:
    """A replay of torch's allocator.

    Attributes:
        expandable: True if segments grow in place.
        reserved_bytes: Bytes reserved from the device.
        by_pool: Reserved bytes by stream and by small or large blocks.
        allocated_bytes: Bytes allocated.
    """

    def __init__(self, *, expandable: bool) -> None:
        self.expandable = expandable
        self.reserved_bytes = self.allocated_bytes = 0
        self.by_pool: dict[tuple[int, bool], int] = {}
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._segments = 0

    def allocate(self, size: int, stream: int = 0) -> MemoryBlock:
        """Allocate a block of at least a size from a stream's pool."""
        size = max(size + -size % MIN_BLOCK_BYTES, MIN_BLOCK_BYTES)
        key = stream, size <= SMALL_BYTES
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = Pool(small=key[1])
        block = pool.best_fit(size)
        if block is not None:
            pool.remove(block)
        else:
            block = self._grown(key, pool, size)
        block.free = False
        self._split(pool, block, size)
        self.allocated_bytes += block.size
        return block

    def free(self, block: MemoryBlock) -> None:
        """Free a block and merge it with free neighbours."""
        pool, block.free = block.pool, True
        self.allocated_bytes -= block.size
        before, after = block.before, block.after
        if before is not None and before.free:
            pool.remove(before)
            self._merge(pool, before, block)
            block = before
        if after is not None and after.free:
            pool.remove(after)
            self._merge(pool, block, after)
        pool.add(block)

    @staticmethod
    def _merge(pool: Pool, first: MemoryBlock, second: MemoryBlock) -> None:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        if pool.end is second:
            pool.end = first

    def _split(self, pool: Pool, block: MemoryBlock, size: int) -> None:
        """Free the part of a block beyond a size, unless the remainder is too small."""
        left = block.size - size
        if left < MIN_BLOCK_BYTES if pool.small or self.expandable else left <= SMALL_BYTES:
            return
        rest = MemoryBlock(pool, block.place + size, left)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        if pool.end is block:
            pool.end = rest
        pool.add(rest)

    def _grown(self, key: tuple[int, bool], pool: Pool, size: int) -> MemoryBlock:
        """A block of at least a size at the end of a pool's segment, or in a new segment."""
        end, missing = pool.end, size
        if end is not None and end.free:
            pool.remove(end)
            missing -= end.size
        page = SMALL_BUFFER_BYTES if pool.small else LARGE_BUFFER_BYTES
        taken = missing + -missing % (page if self.expandable or size < MIN_LARGE_BYTES else ROUND_LARGE_BYTES)
        self.reserved_bytes += taken
        self.by_pool[key] = self.by_pool.get(key, 0) + taken
        if not self.expandable:
            self._segments += 1
            return MemoryBlock(pool, self._segments << 48, taken)
        if end is not None and end.free:
            end.size += taken
            return end
        if end is None:
            self._segments += 1
        block = MemoryBlock(pool, self._segments << 48 if end is None else end.place + end.size, taken)
        block.before = end
        if end is not None:
            end.after = block
        pool.end = block
        return block
