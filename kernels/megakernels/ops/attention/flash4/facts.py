"""FlashAttention-4 on Hopper: the attention that it supports, and the memory and launches of its backward.

Its backward computes a pair's five products in one kernel, and adds each key block's part of dq in fp32 in the order of the blocks, by a
counter per query block, so that it is bitwise reproducible. Query heads that share a key head add their parts of dk and dv in the same way.

Source: the package's `flash_attn/cute/interface.py`, version 4.0.0b36, and its kernels compiled for sm_90a.
"""

from typing import NamedTuple

from megakernels.facts import SUMS_BYTES, ceil_div

WIDEST = 256
"""Widest head."""
EQUAL = (8, 16, 32, 48, 64, 80, 96, 112, 128, 192, WIDEST)
"""Widths of heads of one width for which both passes were compiled."""
UNEQUAL = {64: (80, 96, 128, 192, WIDEST), 128: (160, 192, WIDEST)}
"""Widths of keys, by width of values, for which both passes were compiled."""
COUNTER_BYTES = 4
SHARED_COUNTERS = 2
"""Counters of a block of keys, of each gradient that query heads share."""


class BackwardBlock(NamedTuple):
    """A block of the backward.

    Attributes:
        queries: Number of queries.
        keys: Number of keys.
        multiple: Head widths are rounded up to multiples of it.
    """

    queries: int
    keys: int
    multiple: int


BACKWARD_BLOCKS: dict[int, BackwardBlock] = {
    64: BackwardBlock(128, 128, 32),
    128: BackwardBlock(64, 128, 32),
    192: BackwardBlock(64, 96, 64),
    WIDEST: BackwardBlock(64, 48, 64),
}
"""Blocks of causal attention by the widest head of queries and keys that has them."""


def refusal(
    width: int, value_width: int, itemsize: int, *, shared: bool, whole: bool, packed: bool, relations: bool, masked: bool
) -> str | None:
    """Reason that FlashAttention-4 does not take a call on Hopper; None if it does.

    Args:
        width: Width of a head of queries and keys.
        value_width: Width of a head of values.
        itemsize: Bytes of an element.
        shared: True if query heads share a key head.
        whole: True if the numbers of queries and keys are equal and above one.
        packed: True if rows hold several documents.
        relations: True if each head adds a bias by the class of the key.
        masked: True if queries are in pieces, or attend to keys that they chose.
    """
    wanted = (
        (itemsize == SUMS_BYTES, "it has no fp32"),
        (packed, "it needs the number of documents on the host"),
        (relations, "it has no bias by the class of the key"),
        (masked or not whole, "it has no pieces of a sequence and no chosen keys"),
        (width not in (EQUAL if width == value_width else UNEQUAL.get(value_width, ())), "it was not compiled for these head widths"),
        (shared and width != value_width, "its backward shares no key heads of another width than the values'"),
    )
    return next((reason for holds, reason in wanted if holds), None)


def backward_bytes(batch: int, positions: int, heads: int, groups: int, width: int, value_width: int) -> int:
    """Bytes inside the backward in addition to operands and results.

    dq in fp32, δ and the log-sum-exp by base two, and the counters of blocks of queries; of shared key heads also dk and dv in fp32 and
    their counters. Positions are rounded up to whole blocks.
    """
    tile = tile_of(width)
    rows, keys = (ceil_div(positions, side) * side for side in (tile.queries, tile.keys))
    wide, values = (ceil_div(each, tile.multiple) * tile.multiple for each in (width, value_width))
    found = SUMS_BYTES * batch * heads * rows * (wide + 2) + COUNTER_BYTES * batch * heads * (rows // tile.queries)
    if heads > groups:
        counters = 2 * SHARED_COUNTERS * COUNTER_BYTES * (keys // tile.keys)
        found += batch * groups * (SUMS_BYTES * keys * (wide + values) + counters)
    return found


def backward_launches(*, shared: bool) -> int:
    """Kernels of a backward: counters set to zero, δ, the products, dq to its dtype; for shared heads the same for dk and dv."""
    return 4 + (6 if shared else 0)


def tile_of(width: int) -> BackwardBlock:
    """The block of heads of this width."""
    return next(tile for widest, tile in BACKWARD_BLOCKS.items() if width <= widest)
