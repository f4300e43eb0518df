"""What the kernels accept, their tiles, and the bytes they hold inside themselves. Needs no triton."""

from typing import NamedTuple

import torch
from torch import Tensor

from megakernels._common.blocks import SMALLEST_DOT, block_of
from megakernels._common.cost import Cost
from megakernels._common.scratch import SUMS_BYTES, copies_bytes
from megakernels.ops.attention.inputs import Attention, Places

LARGEST_WIDTH = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 64}
"""Of a head, of keys or of values: wider ones stay with the reference. An fp32 product holds each operand as two TF32 numbers."""


BENT_WIDTH = 192
"""The widest head of capped scores with relations: both at once need more registers than wider ones leave."""
KEY_WIDTH = {torch.bfloat16: 128, torch.float16: 128, torch.float32: 32}
"""The widest head whose gradients of k and v one launch makes."""


RELATION_TILE = {"N": 128, "R": 16}
"""Keys and classes of a tile of the sum over the keys of each class."""


class Tile(NamedTuple):
    """A launch: queries and keys per tile, warps, and stages of the load pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


TILES: dict[str, dict[tuple[bool, int], Tile]] = {
    "forward": {
        (False, 128): Tile(128, 64, 4, 3),
        (False, 256): Tile(128, 64, 8, 3),
        (False, 512): Tile(128, 32, 8, 2),
        (True, 128): Tile(64, 32, 8, 2),
    },
    "query": {
        (False, 256): Tile(128, 64, 8, 2),
        (False, 512): Tile(64, 32, 8, 2),
        (True, 128): Tile(64, 16, 4, 2),
    },
    "key": {
        (False, 128): Tile(64, 128, 8, 2),
        (False, 256): Tile(32, 128, 8, 2),
        (False, 384): Tile(32, 64, 8, 2),
        (False, 512): Tile(32, 64, 8, 2),
        (True, 128): Tile(16, 64, 4, 2),
    },
}
"""Per kernel: by whether operands are fp32, and the largest number of columns of a key's and a value's tiles together."""
BENT_TILES = {
    "forward": {(False, 128): Tile(64, 64, 4, 3)},
    "query": {(False, 512): Tile(64, 16, 8, 2)},
    "key": {
        (False, 128): Tile(32, 128, 8, 2),
        (False, 256): Tile(32, 64, 8, 2),
        (False, 384): Tile(16, 64, 8, 2),
        (False, 512): Tile(16, 64, 8, 2),
    },
}
"""The same, in place of these where scores are capped or have relations, which need more registers."""
MASKED_TILES = {"key": {(False, 512): Tile(16, 64, 8, 2)}}
"""The same, in place of these where a mask of chosen keys needs more registers than there are."""


def accepts(given: Attention) -> bool:
    """Whether the kernels take these sizes and dtypes: products of one dtype, by a factor above 0."""
    q, k, v = given[:3]
    narrowest, widest = sorted((q.shape[3], v.shape[3]))
    largest = LARGEST_WIDTH[q.dtype]
    if given.cap is not None and given.relations is not None:
        largest = min(largest, BENT_WIDTH)
    return q.dtype == k.dtype == v.dtype and narrowest > 0 and widest <= largest and given.scale > 0


def split_width(width: int) -> tuple[int, int]:
    """Columns of a head's tile and of a second one for the rest, 0 if there is none: powers of two, of which little is empty."""
    whole = block_of(width, SMALLEST_DOT)
    rest = block_of(width - whole // 2, SMALLEST_DOT)
    return (whole, 0) if width <= SMALLEST_DOT or rest == whole // 2 else (whole // 2, rest)


def tile_of(kernel: str, columns: int, dtype: torch.dtype, masked: bool, bent: bool) -> Tile:
    """The tile of one of `TILES`' kernels."""
    wide, tiles = dtype == torch.float32, TILES[kernel] | (MASKED_TILES.get(kernel, {}) if masked else {})
    tiles |= BENT_TILES.get(kernel, {}) if bent else {}
    return next(tile for (fp32, largest), tile in tiles.items() if fp32 == wide and columns <= largest)


def constants(
    kernel: str, width: int, value_width: int, dtype: torch.dtype, *, masked: bool = False, bent: bool = False
) -> tuple[dict[str, int], dict[str, int]]:
    """Constants of a kernel, and its launch options, that follow from widths and dtype.

    `masked`: whether queries choose keys; `bent`: whether scores are capped or have relations.
    """
    (head, rest), value = split_width(width), block_of(value_width, SMALLEST_DOT)
    tile = tile_of(kernel, head + rest + value, dtype, masked, bent)
    sides = {"WIDTH": width, "VALUE": value_width, "D": head, "R": rest, "V": value}
    return sides | {"M": tile.queries, "N": tile.keys}, {"num_warps": tile.warps, "num_stages": tile.stages}


def key_parts(width: int, value_width: int, dtype: torch.dtype, *, relations: bool = False) -> list[dict[str, bool]]:
    """Launches of the key kernel. Both gradients of a wide head do not fit into registers: each has a launch that makes the weights.

    With relations one more makes the gradient of what is added to the scores of keys, of each head.
    """
    none = {"KEYS": False, "VALUES": False, "ADDED": False}
    together = max(width, value_width) <= KEY_WIDTH[dtype]
    parts = [none | {"KEYS": True, "VALUES": True}] if together else [none | {"KEYS": True}, none | {"VALUES": True}]
    return [*parts, none | {"ADDED": True}] if relations else parts


def forward_inside(given: Attention) -> int:
    """Bytes of `kernel.forward` in addition to operands and results: copies of operands that are not dense."""
    return _copies(given)


def backward_inside(grad_out: Tensor, given: Attention, out: Tensor, lse: Tensor) -> int:
    """Bytes of `kernel.backward` in addition to operands and results.

    δ, one number per query and head; with relations one per key and head; and copies of operands.
    """
    own = out.numel() * out.element_size() if grad_out.dtype != given.q.dtype else copies_bytes(rows=(grad_out,))
    added = 0 if given.relations is None else given.k.shape[0] * given.k.shape[1] * lse.shape[1]
    return SUMS_BYTES * (lse.numel() + added) + own + copies_bytes((out, lse)) + _copies(given)


def forward_cost(given: Attention, places: Places) -> Cost:
    """Cost of `kernel.forward`: the scores and their product with the values."""
    q, _, v = given[:3]
    return Cost({q.dtype: 2 * num_pairs(q, given.window, places) * (q.shape[3] + v.shape[3])})


def backward_cost(given: Attention, places: Places) -> Cost:
    """Cost of `kernel.backward`.

    The query kernel makes the scores, their gradients and the gradient of q. A launch of the key kernel makes the scores; those of k and of
    relations make their gradients too.
    """
    q, _, v = given[:3]
    width, value_width = q.shape[3], v.shape[3]
    products = 2 * width + value_width
    for part in key_parts(width, value_width, q.dtype, relations=given.relations is not None):
        products += width + (value_width + width) * part["KEYS"] + value_width * (part["VALUES"] + part["ADDED"])
    return Cost({q.dtype: 2 * num_pairs(q, given.window, places) * products})


def num_pairs(q: Tensor, window: int | None, places: Places) -> int:
    """Pairs of a query and a key that it sees, of all sequences and heads. Rows count as one document, since `starts` has no values."""
    batch, num_queries, num_heads, _ = q.shape
    length = num_queries // len(places.firsts)
    return batch * num_heads * sum(_pairs_before(first + length, window) - _pairs_before(first, window) for first in places.firsts)


def _pairs_before(position: int, window: int | None) -> int:
    """Pairs of the queries before a position of one sequence and head."""
    seen = position if window is None else min(window, position)
    return seen * (seen + 1) // 2 + (position - seen) * seen


def _copies(given: Attention) -> int:
    dense = (each for each in (given.starts, given.classes, given.relations) if each is not None)
    return copies_bytes(dense, rows=given[:3])
