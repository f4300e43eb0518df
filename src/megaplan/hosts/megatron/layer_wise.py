"""Muon's matrices, each unsharded in one shard of Megatron-Core's gradient buffer, with the resulting padding.

Source: `LayerWiseDistributedOptimizer._compute_per_buffer_param_layout` and `DistributedDataParallel.__init__` at d98e8a64.
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import lcm
from typing import NamedTuple

START = 64
"""Multiple of elements at which a tensor begins."""
OVER_MEAN, FILLED = 1.3, 0.9
"""Two limits: elements by which a shard may exceed the mean while work decides the assignment, and the fraction of a bucket's smallest
size that its tensors fill.
"""
BUCKET, BUCKET_PER_RANK = 40_000_000, 1_000_000
"""Smallest number of elements of a bucket, in total and per data rank, if reductions overlap; else all tensors are in one bucket."""


class Matrix(NamedTuple):
    """A matrix: its elements, and the work of one Muon iteration on it, up to a constant factor."""

    elements: int
    work: int


class Layout(NamedTuple):
    """One buffer.

    Attributes:
        elements: Elements of the buffer, padding included.
        shares: Elements of the matrices that each data rank steps.
    """

    elements: int
    shares: tuple[int, ...]


def bucket_elements(ranks: int) -> int:
    """Least elements of a bucket of a model chunk whose reductions overlap its backward."""
    return max(BUCKET, BUCKET_PER_RANK * ranks)


def layout_of(matrices: Sequence[Matrix], ranks: int, bucket: int | None) -> Layout:
    """The layout of one model chunk's buffer.

    Tensors of a bucket are assigned in descending order of work to the rank with the least work so far that has room. Every rank's shard of
    a bucket is as large as the fullest.

    Args:
        matrices: In model order.
        ranks: Data ranks.
        bucket: Least elements of a bucket; None for one bucket.
    """
    elements, work, shares = 0, [0] * ranks, [0] * ranks
    multiple = lcm(START, lcm(ranks, 128) // ranks)
    for some in _buckets(matrices, ranks, bucket, multiple):
        fill = _filled(some, work, shares)
        elements += ranks * _padded(max(fill), multiple)
    return Layout(elements, tuple(shares))


def _filled(some: Sequence[Matrix], work: list[int], shares: list[int]) -> list[int]:
    """Elements of each rank's shard of one bucket; adds its work and its matrices to `work` and `shares`."""
    ranks = len(work)
    fill, most = [0] * ranks, sum(one.elements for one in some) / ranks * OVER_MEAN
    by_work = [(load, rank) for rank, load in enumerate(work)]
    heapify(by_work)
    for one in sorted(some, key=lambda one: -one.work):
        passed = []
        while by_work and _padded(fill[by_work[0][1]], START) + one.elements > most:
            passed.append(heappop(by_work))
        rank = by_work[0][1] if by_work else min(range(ranks), key=fill.__getitem__)
        fill[rank] = _padded(fill[rank], START) + one.elements
        shares[rank] += one.elements
        work[rank] += one.work
        if by_work:
            heapreplace(by_work, (work[rank], rank))
        else:
            passed = [(work[each], each) for _, each in passed]
        for each in passed:
            heappush(by_work, each)
    return fill


def _buckets(matrices: Sequence[Matrix], ranks: int, bucket: int | None, multiple: int) -> Iterator[list[Matrix]]:
    """Buckets of tensors, starting at the end of the model; a full bucket still accepts tensors that fit into its padding."""
    some: list[Matrix] = []
    size, loads = 0, [0] * ranks
    for one in reversed(matrices):
        if bucket is not None and some:
            least = max(bucket, int(ranks * max(each.elements for each in some) * FILLED))
            if size >= least and _padded(loads[0], START) + one.elements > _padded(max(loads), multiple):
                yield some
                some, size, loads = [], 0, [0] * ranks
        heapreplace(loads, _padded(loads[0], START) + one.elements)
        some.append(one)
        size += one.elements
    if some:
        yield some


def _padded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
