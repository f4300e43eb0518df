"""What the kernels accept, their tiles, the bytes they hold inside themselves, and their cost. Needs no triton."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megakernels._common.blocks import SMALLEST_DOT, block_of
from megakernels._common.cost import Cost
from megakernels._common.scratch import SUMS_BYTES, copies_bytes
from megakernels.ops.attention import sizes as attention_sizes
from megakernels.ops.attention.inputs import Attention, Places
from megakernels.ops.indexed_attention.bits import WORD_BITS, num_columns
from megakernels.ops.indexed_attention.reference import Indexed

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_INDEX_WIDTH = 128
"""Of an index head: wider ones stay with the reference."""
SCORE_COLUMNS = 64
"""Columns of an index head that one product of scores takes."""
DIFFERENCE_BLOCK = 1024
"""Keys of a step of `index_difference_kernel`."""
INDEX_TILE = 64
"""Queries, and keys, of the largest tile of index products: chunks are whole ones, and the gradient of the scores is written in them."""
CHUNK_ELEMENTS = 1 << 25
"""Index scores held at once, over all sequences."""
ROWS = 16
"""Rows of a tile of the kernels that normalise or rotate."""
KEY_PROGRAMS = 64
"""Programs of the backward of the keys' norm, each with a part of the gradients of its scale and bias."""
KEY_WARPS = 8
"""Of such a program."""
LARGEST_HELD = 8192
"""Scores of a row that a program of the selection has in registers."""


class Tile(NamedTuple):
    """A launch: queries and keys per tile, warps, and stages of the load pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


INDEX_TILES: dict[str, dict[tuple[bool, int], Tile]] = {
    "score": {
        (False, 64): Tile(64, 64, 4, 2),
        (False, 128): Tile(64, 64, 8, 1),
        (True, 64): Tile(64, 64, 4, 2),
        (True, 128): Tile(64, 64, 8, 1),
    },
    "query": {
        (False, 64): Tile(64, 64, 4, 1),
        (False, 128): Tile(32, 32, 8, 1),
        (True, 64): Tile(64, 32, 4, 2),
        (True, 128): Tile(32, 32, 8, 1),
    },
    "key": {
        (False, 64): Tile(64, 64, 4, 1),
        (False, 128): Tile(32, 32, 8, 1),
        (True, 64): Tile(32, 64, 4, 2),
        (True, 128): Tile(32, 32, 8, 2),
    },
}
"""Per kernel of index products: by whether its gradients are multiplied in fp32, and the largest width; sides divide `INDEX_TILE`.

Overlaps are fp32 everywhere, and a warp group holds its operand of a product as two TF32 numbers: wide heads have small tiles.
"""
MASS_TILES = {
    (False, 128): Tile(128, 128, 8, 2),
    (False, 256): Tile(128, 64, 8, 2),
    (True, 64): Tile(64, 32, 4, 2),
}
"""Of the sum of attention over heads: by whether operands are fp32, and the largest width."""


class Chunk(NamedTuple):
    """Some queries of one piece whose scores are held at once.

    Attributes:
        offset: Row of the first of them.
        piece_first: Position of the first query of the piece.
        first: Position of the first of them.
        num_rows: How many they are.
    """

    offset: int
    piece_first: int
    first: int
    num_rows: int


def accepts(given: Indexed) -> bool:
    """Whether the kernels take these sizes and dtypes."""
    index = given.index_q.dtype in FLOATS and given.index_weights.dtype in FLOATS and given.keys.dtype in FLOATS
    width, num_heads = given.index_q.shape[3], given.index_q.shape[2]
    return attention_sizes.accepts(attended(given)) and index and 0 < width <= LARGEST_INDEX_WIDTH and num_heads > 0


def accepts_keys(index_k: Tensor) -> bool:
    """Whether the kernels make index keys of these."""
    return index_k.dtype in FLOATS and 0 < index_k.shape[2] <= LARGEST_INDEX_WIDTH


def attended(given: Indexed) -> Attention:
    """The attention to all keys that are visible."""
    return Attention(given.q, given.k, given.v, given.starts, given.scale, given.window)


def chunk_rows(batch: int, piece_length: int, num_keys: int) -> int:
    """Queries whose scores are held at once: whole tiles, at least one."""
    most = CHUNK_ELEMENTS // max(1, batch * num_columns(num_keys)) // INDEX_TILE * INDEX_TILE
    return min(piece_length, max(INDEX_TILE, most))


def chunks(batch: int, num_queries: int, num_keys: int, places: Places) -> Iterator[Chunk]:
    """Chunks of all queries, none of two pieces."""
    length = num_queries // len(places.firsts)
    rows = max(1, chunk_rows(batch, length, num_keys))
    for piece, first in enumerate(places.firsts):
        for start in range(0, length, rows):
            yield Chunk(piece * length + start, first, first + start, min(rows, length - start))


def index_constants(kernel: str, width: int, dtype: torch.dtype) -> tuple[dict[str, int], dict[str, int]]:
    """Constants of a kernel of index products, and its launch options. Scores take a wide head's columns in two products."""
    tile = _tile_of(INDEX_TILES[kernel], width, dtype)
    numbers = {"WIDTH": width, "M": tile.queries, "N": tile.keys}
    if kernel == "score":
        numbers["R"] = block_of(width - SCORE_COLUMNS, SMALLEST_DOT) if width > SCORE_COLUMNS else 0
    numbers["D"] = block_of(min(width, SCORE_COLUMNS) if kernel == "score" else width, SMALLEST_DOT)
    return numbers, {"num_warps": tile.warps, "num_stages": tile.stages}


def difference_constants(num_keys: int) -> dict[str, int]:
    """Constants of the kernel that makes the gradient of the scores."""
    return {"M": INDEX_TILE, "N": INDEX_TILE, "BLOCK": min(DIFFERENCE_BLOCK, block_of(num_columns(num_keys)))}


def mass_constants(width: int, dtype: torch.dtype) -> tuple[dict[str, int], dict[str, int]]:
    """Constants of the kernel that sums the attention of all heads, and its launch options."""
    tile = _tile_of(MASS_TILES, width, dtype)
    head, rest = attention_sizes.split_width(width)
    numbers = {"WIDTH": width, "M": tile.queries, "N": tile.keys, "D": head, "R": rest}
    return numbers, {"num_warps": tile.warps, "num_stages": tile.stages}


def _tile_of(tiles: dict[tuple[bool, int], Tile], width: int, dtype: torch.dtype) -> Tile:
    return next(tile for (fp32, largest), tile in tiles.items() if fp32 == (dtype == torch.float32) and width <= largest)


def select_constants(num_keys: int) -> tuple[dict[str, int | bool], dict[str, int]]:
    """Constants of the selection, and its launch options: short rows share a program, and long ones are read once per digit."""
    block = min(LARGEST_HELD, block_of(num_columns(num_keys)))
    held = num_columns(num_keys) <= block
    numbers = {"R": max(1, 1024 // block), "BLOCK": block, "DIGIT": 1 if held else 2, "HELD": held}
    return numbers, {"num_warps": max(4, block // 1024)}


def rows_constants(width: int) -> dict[str, int]:
    """Constants of the kernels that normalise or rotate."""
    return {"WIDTH": width, "R": ROWS, "D": block_of(width, SMALLEST_DOT)}


def key_programs(num_rows: int) -> int:
    """Programs of the backward of the keys' norm."""
    return min(KEY_PROGRAMS, -(-num_rows // ROWS))


class Inside(NamedTuple):
    """Bytes of what the kernels hold, by purpose."""

    queries: int
    keys: int
    bits: int
    scores: int


def inside(given: Indexed, places: Places) -> Inside:
    """Rotated queries, keys or their gradient, chosen keys, and one chunk's scores."""
    batch, num_queries, _, width = given.index_q.shape
    num_keys = given.k.shape[1]
    columns = num_columns(num_keys)
    rows = chunk_rows(batch, num_queries // len(places.firsts), num_keys) if num_queries else 0
    return Inside(
        SUMS_BYTES * given.index_q.numel(),
        SUMS_BYTES * batch * num_keys * width,
        SUMS_BYTES * batch * num_queries * (columns // WORD_BITS),
        SUMS_BYTES * batch * rows * columns,
    )


def copied(given: Indexed) -> int:
    """Bytes of copies of operands that are not dense."""
    dense = [given.index_q, given.keys, given.index_weights, *([] if given.starts is None else [given.starts])]
    if given.cos.stride() != given.sin.stride():
        dense += [given.cos, given.sin]
    return copies_bytes(dense, rows=(given.q, given.k, given.v))


def forward_inside(given: Indexed, places: Places, *, hands_on: bool = False) -> int:
    """Bytes of `kernel.forward` in addition to operands and results, of which out and lse come last.

    `hands_on`: whether the bits are a result.
    """
    held, (batch, num_queries, num_heads, _) = inside(given, places), given.q.shape
    later = batch * num_queries * num_heads * (given.v.shape[3] * given.v.element_size() + SUMS_BYTES)
    return copied(given) + (0 if hands_on else held.bits) + max(held.queries + held.scores - later, 0)


def backward_inside(grad_out: Tensor, given: Indexed, made: tuple[Tensor, ...], places: Places) -> int:
    """Bytes of `kernel.backward` in addition to operands and results, of which those of q, k and v come last.

    First come the index scores of a chunk and the attention to its keys, then the gradients of q, k and v.
    """
    out, lse, *saved = made
    held = inside(given, places)
    later = given.q.nbytes + given.k.nbytes + given.v.nbytes
    own = out.numel() * given.q.element_size() if grad_out.dtype != given.q.dtype else copies_bytes(rows=(grad_out,))
    copies = copied(given) + copies_bytes((lse, *saved))
    first = held.queries + held.bits + 2 * held.scores - later
    second = held.bits + SUMS_BYTES * lse.numel() + own + copies_bytes((out,))
    return copies + max(first, second)


def forward_cost(given: Indexed, places: Places) -> Cost:
    """Cost of `kernel.forward`: index scores, and attention to all visible keys; those that are not chosen are masked."""
    found = dict(attention_sizes.forward_cost(attended(given), places).products)
    return _with_index(found, given, places, exact=1, narrow=0)


def backward_cost(given: Indexed, places: Places) -> Cost:
    """Cost of `kernel.backward`: attention's, its scores once more, index scores three times, and two products for their gradients."""
    found = dict(attention_sizes.backward_cost(attended(given), places).products)
    weights = 2 * attention_sizes.num_pairs(given.q, given.window, places) * given.q.shape[3]
    found[given.q.dtype] += weights
    return _with_index(found, given, places, exact=3, narrow=2)


def _with_index(found: dict[torch.dtype, int], given: Indexed, places: Places, *, exact: int, narrow: int) -> Cost:
    """With index products added: `exact` in fp32, `narrow` in the dtype of the queries."""
    one = 2 * attention_sizes.num_pairs(given.index_q, given.window, places) * given.index_q.shape[3]
    for dtype, count in ((torch.float32, exact), (given.index_q.dtype, narrow)):
        found[dtype] = found.get(dtype, 0) + count * one
    return Cost({dtype: flops for dtype, flops in found.items() if flops})
