"""Facts of attention to keys that an indexer chooses: heads of the index score every visible pair (arXiv:2512.02556, equation 1)."""

from typing import NamedTuple

from megakernels.facts import EXACT, SMALLEST_DOT, SUMS_BYTES, KernelScratch, KindWork, Pass, Passes, Work, block_of, ceil_div
from megakernels.ops.attention.facts import NUMBER, AttentionSizes, pairs_before
from megakernels.ops.attention.tiles.facts import Tile, split_width

WORD_BITS = 32
"""Keys whose choice a word of the bits has."""
COLUMN_BLOCK = 128
"""Columns of the scores, and bits of the chosen keys, are a multiple: the most keys of any tile."""
LARGEST_INDEX_WIDTH = 128
"""Largest head of the index; wider heads stay with the reference."""
SCORE_COLUMNS = 64
"""Columns of an index head that one product of scores takes."""
DIFFERENCE_BLOCK = 1024
"""Keys of a step of `index_difference_kernel`."""
INDEX_TILE = 64
"""Queries, and keys, of the largest tile of index products: chunks consist of whole tiles, also for the scores' gradient."""
INDEX_CHUNK_ELEMENTS = 1 << 25
"""Index scores held at once, over all sequences."""
INDEX_NORM_ROWS = 16
"""Rows of a tile of the kernels that normalise or rotate."""
KEY_PROGRAMS = 64
"""Programs of the backward of the keys' norm, each with a part of the gradients of its scale and bias."""
KEY_WARPS = 8
"""Warps of a program of that backward."""
LARGEST_HELD = 8192
"""Scores of a row that a program of the selection has in registers."""
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
"""Tiles of each kernel of index products: by whether its gradients are multiplied in fp32, and the largest width; sides divide
`INDEX_TILE`.

Overlaps are fp32 everywhere, and a warp group holds its operand of a product as two TF32 numbers: wide heads have small tiles.
"""
MASS_TILES = {
    (False, 128): Tile(128, 128, 8, 2),
    (False, 256): Tile(128, 64, 8, 2),
    (True, 64): Tile(64, 32, 4, 2),
}
"""Tiles of the sum of attention over heads: by whether operands are fp32, and the largest width."""


class Held(NamedTuple):
    """Bytes of the kernels' scratch: rotated queries, keys or their gradient, chosen keys as bits, and one chunk's scores."""

    queries: int
    keys: int
    bits: int
    scores: int


class IndexedSizes(NamedTuple):
    """Sizes of a call on one rank.

    Attributes:
        core: The attention to the chosen keys.
        index_heads: Heads of the index.
        index_width: Width of an index head.
        pieces: Pieces of the sequence that this rank's queries are.
        rotated: Columns of an index head that rotary embedding rotates.
    """

    core: AttentionSizes
    index_heads: int
    index_width: int
    pieces: int = 1
    rotated: int = 0

    @property
    def accepted(self) -> bool:
        """True if the Triton kernels take these widths."""
        return self.core.accepted and 0 < self.index_width <= LARGEST_INDEX_WIDTH and self.index_heads > 0

    def work(self) -> Work:
        """Ideal work of the index: scores of every visible pair, 2·dim FLOPs per head, and 2 for the weighted sum over heads.

        Backward repeats the scores and takes their gradient, of the chosen pairs alone in principle, through all heads: counted whole.

        Source: DeepSeek-V3.2, arXiv:2512.02556, equation 1.
        """
        core, heads, width = self.core, self.index_heads, self.index_width
        scores = ceil_div(2 * pairs_before(core.keys, core.window) * heads * (width + 1), core.keys)
        moved = (heads * width + width + heads) * core.itemsize
        return Work(scores, 3 * scores, 0, scores, moved_forward=moved, moved_input=2 * moved)

    def own_passes(self, work: Work, tokens: int) -> Passes:
        """Scores of all visible pairs by fp32 products of three TF32 parts, and the choice.

        Scores of the index, as many as pairs of positions, are written by one kernel and read by the next; so are the rotated queries.
        Backward makes attention's scores of all visible pairs, too, whose mass the index learns.
        """
        core = self.core
        visible, scores = core.visible(), tokens * core.keys * SUMS_BYTES
        scored, turned = 2 * visible * self.index_heads * self.index_width, tokens * self.index_heads * self.index_width
        forward = Pass(work.moved_forward * tokens + 5 * scores // 2 + 16 * turned, EXACT * scored, 5)
        mass = 2 * visible * core.heads * core.width
        return forward, Pass(work.moved_input * tokens + 9 * scores + 38 * turned, (3 * EXACT + 2) * scored + mass, 16)

    def kernels(self, work: Work, tokens: int) -> Passes | None:
        """The index's own passes, and the excess of attention to all keys over attention to the chosen ones."""
        if not self.accepted:
            return None
        core, own = self.core, self.own_passes(work, tokens)
        rest = 2 * (core.visible() - core.visible(core.most_keys)) * core.heads
        flops = own[0].flops + rest * (core.width + core.value_width), own[1].flops + rest * (4 * core.width + 3 * core.value_width)
        forward, backward = (
            each._replace(
                flops=more,
                kinds=(
                    KindWork("index", each.num_bytes, each.flops, each.launches),
                    *core.kinds(Pass(0, more - each.flops, 1 + back), backward=back),
                ),
            )
            for each, more, back in zip(own, flops, (False, True), strict=True)
        )
        return forward, backward

    def plain(self, _work: Work, _tokens: int) -> Passes:
        """The index in plain torch, which runs in one operation with the attention: its additional work.

        Forward: scores of all index heads, and the choice by their sum. Backward: these again, and the loss of both. The attention with a
        choice allocates new scores where attention without one works in place.
        """
        core, heads, width = self.core, self.index_heads, self.index_width
        loop, copied = core.loop(), core.batch > 1
        own, scores, num_queries = loop.pairs * core.heads, loop.pairs * heads, core.batch * core.queries
        queries, turned = num_queries * heads * width, 28 * self.rotated
        keys, expanded = loop.keys * width * SUMS_BYTES, loop.keys * width * SUMS_BYTES * (heads + 1) * copied
        of_queries = queries * (loop.upcast + NUMBER) + num_queries * heads * turned
        of_keys = core.batch * core.keys * (width * (loop.upcast + 56) + turned)

        moved = 4 * own + 20 * scores + 75 * loop.pairs + 12 * num_queries * min(core.most_keys or core.keys, core.keys)
        moved += of_queries + of_keys + NUMBER * queries * copied + expanded
        forward = Pass(moved, 2 * scores * width, loop.blocks * (19 + 2 * copied) + 31, is_fp32=True)

        moved = 70 * own + (50 + 16 * copied) * scores + 148 * loop.pairs
        moved += 8 * loop.keys * core.groups * core.width + keys * (heads + 4) + 2 * expanded + 2 * NUMBER * queries * copied
        moved += 2 * (of_queries + 2 * of_keys) + NUMBER * queries
        return forward, Pass(moved, 6 * scores * width, loop.blocks * (46 + 6 * copied) + 78, is_fp32=True)

    def held(self) -> Held:
        """Bytes of the kernels' scratch."""
        core = self.core
        rows = chunk_rows(core.batch, core.queries // self.pieces, core.keys) if core.queries else 0
        columns = num_columns(core.keys)
        return Held(
            SUMS_BYTES * core.batch * core.queries * self.index_heads * self.index_width,
            SUMS_BYTES * core.batch * core.keys * self.index_width,
            SUMS_BYTES * core.batch * core.queries * (columns // WORD_BITS),
            SUMS_BYTES * core.batch * rows * columns,
        )

    def inside(self, copies: tuple[int, int, int] = (0, 0, 0), *, returns_choice: bool = False, sink_bytes: int = 0) -> KernelScratch:
        """Bytes of the kernels between queries, keys and choice, in addition to operands and results.

        Forward has the scores of a chunk before out and lse exist, backward twice before the gradients of q, k, v and sinks, and then what
        attention holds.

        Args:
            copies: Bytes of copies of operands, forward, backward, and backward after the index scores.
            returns_choice: True if the bits of the choice are a result.
            sink_bytes: Bytes of an element of the gradient of the sinks; 0 if there is none.
        """
        core, held = self.core, self.held()
        attends = core._replace(masked=True).inside(sink_bytes, (0, copies[2]))
        made = core.batch * core.queries * core.heads * (core.value_width * core.itemsize + SUMS_BYTES)
        of_keys = core.batch * core.keys * core.groups * (core.width + core.value_width)
        later = core.itemsize * (core.batch * core.queries * core.heads * core.width + of_keys) + sink_bytes * core.heads
        forward = copies[0] + (0 if returns_choice else held.bits) + max(held.queries + held.scores - made, attends.forward)
        return KernelScratch(forward, copies[1] + held.bits + max(held.queries + 2 * held.scores - later, attends.backward))


def with_keys(sizes: IndexedSizes, inside: KernelScratch, input_bytes: int, scale_bytes: int) -> KernelScratch:
    """Bytes of the operation that also makes the index keys, and their gradient, of their inputs.

    Args:
        sizes: Sizes of the call.
        inside: Bytes of the kernels between them.
        input_bytes: Bytes of the gradients of the keys' inputs, scale and bias, which are made last.
        scale_bytes: Bytes of an element of the scale.
    """
    keys, rows = sizes.held().keys, sizes.core.batch * sizes.core.keys
    last = keys + key_parts_bytes(rows, sizes.index_width, scale_bytes)
    return KernelScratch(keys + inside.forward, max(2 * keys + inside.backward - input_bytes, last))


def num_columns(num_keys: int) -> int:
    """Columns of the scores, and bits of a query: one per key, in whole tiles."""
    return ceil_div(num_keys, COLUMN_BLOCK) * COLUMN_BLOCK


def num_words(num_keys: int) -> int:
    """Words of a query."""
    return num_columns(num_keys) // WORD_BITS


def chunk_rows(batch: int, piece_length: int, num_keys: int) -> int:
    """Queries whose scores are held at once: whole tiles, at least one."""
    most = INDEX_CHUNK_ELEMENTS // max(1, batch * num_columns(num_keys)) // INDEX_TILE * INDEX_TILE
    return min(piece_length, max(INDEX_TILE, most))


def index_constants(kernel: str, width: int, itemsize: int) -> tuple[dict[str, int], dict[str, int]]:
    """Constants of a kernel of index products, and its launch options. The score kernel multiplies a wide head's columns in two parts."""
    tile = _tile_of(INDEX_TILES[kernel], width, itemsize)
    numbers = {"WIDTH": width, "M": tile.queries, "N": tile.keys}
    if kernel == "score":
        numbers["R"] = block_of(width - SCORE_COLUMNS, SMALLEST_DOT) if width > SCORE_COLUMNS else 0
    numbers["D"] = block_of(min(width, SCORE_COLUMNS) if kernel == "score" else width, SMALLEST_DOT)
    return numbers, {"num_warps": tile.warps, "num_stages": tile.stages}


def difference_constants(num_keys: int) -> dict[str, int]:
    """Constants of the kernel that makes the gradient of the scores."""
    return {"M": INDEX_TILE, "N": INDEX_TILE, "BLOCK": min(DIFFERENCE_BLOCK, block_of(num_columns(num_keys)))}


def mass_constants(width: int, itemsize: int) -> tuple[dict[str, int], dict[str, int]]:
    """Constants of the kernel that sums the attention of all heads, and its launch options."""
    tile = _tile_of(MASS_TILES, width, itemsize)
    head, rest = split_width(width)
    numbers = {"WIDTH": width, "M": tile.queries, "N": tile.keys, "D": head, "R": rest}
    return numbers, {"num_warps": tile.warps, "num_stages": tile.stages}


def select_constants(num_keys: int) -> tuple[dict[str, int | bool], dict[str, int]]:
    """Constants of the selection, and its launch options: short rows share a program, and long ones are read once per digit."""
    block = min(LARGEST_HELD, block_of(num_columns(num_keys)))
    held = num_columns(num_keys) <= block
    numbers = {"R": max(1, 1024 // block), "BLOCK": block, "DIGIT": 1 if held else 2, "HELD": held}
    return numbers, {"num_warps": max(4, block // 1024)}


def rows_constants(width: int) -> dict[str, int]:
    """Constants of the kernels that normalise or rotate."""
    return {"WIDTH": width, "R": INDEX_NORM_ROWS, "D": block_of(width, SMALLEST_DOT)}


def key_programs(num_rows: int) -> int:
    """Programs of the backward of the keys' norm."""
    return min(KEY_PROGRAMS, ceil_div(num_rows, INDEX_NORM_ROWS))


def key_parts_bytes(num_rows: int, width: int, scale_bytes: int) -> int:
    """Bytes of the parts of the gradients of scale and bias, and of a sum where the scale has `scale_bytes` an element and is not fp32."""
    return SUMS_BYTES * (2 * key_programs(num_rows) + (scale_bytes != SUMS_BYTES)) * width


def _tile_of(tiles: dict[tuple[bool, int], Tile], width: int, itemsize: int) -> Tile:
    return next(tile for (fp32, largest), tile in tiles.items() if fp32 == (itemsize == SUMS_BYTES) and width <= largest)
