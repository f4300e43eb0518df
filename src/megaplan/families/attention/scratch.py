"""What the Triton kernels of the attention core hold inside themselves.

Plain attention holds one number per query and head in backward, with a relation bias one per key and head too; with sinks one in forward
and two in backward. With an indexer it also
holds the index scores of a chunk of queries, the rotated index queries, and a bit per query and key. The operations state the same
(`megakernels.scratch_bytes`).
"""

from __future__ import annotations

from megaplan.blocks.dims import Dims
from megaplan.blocks.relay import PIECES
from megaplan.blocks.scratch import Inside, narrowed
from megaplan.dtypes import DType
from megaplan.families.attention.section import GroupedQueryAttention, LatentAttention

CORE_WIDTH = {DType.BF16: 256, DType.FP16: 256, DType.FP32: 64}
"""Of a head of keys or values, at most, by dtype."""

BENT_WIDTH = 192
"""The same where scores are capped and have a relation bias."""
INDEX_WIDTH = 128
"""Of an index head, at most."""
INDEX_TILE = 64
"""Queries of a tile of index scores."""
CHUNK_ELEMENTS = 1 << 25
"""Index scores held at once, over all sequences."""
COLUMN_BLOCK, WORD_BITS = 128, 32
"""Keys are rounded up to the first; a word has a bit for each of the second."""
KEY_ROWS, KEY_PROGRAMS = 16, 64
"""Rows of a tile, and programs at most, of the backward of the index keys' norm."""


def core_has_kernels(attention: GroupedQueryAttention | LatentAttention, dtype: DType, *, relations: bool) -> bool:
    """Whether kernels run the core without an indexer: heads are not too wide for them, nor for a cap and a relation bias at once."""
    capped = isinstance(attention, GroupedQueryAttention) and attention.score_cap is not None
    widest = min(CORE_WIDTH[dtype], BENT_WIDTH) if relations and capped else CORE_WIDTH[dtype]
    return max(head_widths(attention)) <= widest


def core_inside(dims: Dims, attention: GroupedQueryAttention | LatentAttention, parameters: DType) -> Inside | None:
    """Of the core without an indexer; None where plain torch runs: `host.kernels: reference`, too wide heads. Sinks are of `parameters`."""
    if not dims.kernels or not core_has_kernels(attention, dims.dtype, relations=dims.relations > 0):
        return None
    heads = attention.num_heads // dims.tp
    sums = dims.stat_dtype.bytes * dims.batch * heads * dims.tokens
    backward = sums * (1 + dims.cp) if dims.relations else sums
    if isinstance(attention, GroupedQueryAttention) and attention.sinks:
        return Inside(sums, max(backward - parameters.bytes * heads, 2 * sums))  # the gradient of sinks is made last
    return Inside(0, backward)


def choice_words(dims: Dims) -> int:
    """Words of 32 bits for the keys that a query chooses among, those of all context ranks."""
    return -(-dims.tokens * dims.cp // COLUMN_BLOCK) * COLUMN_BLOCK // WORD_BITS


def indexed_inside(dims: Dims, attention: LatentAttention, parameters: DType, *, hands_on: bool = False) -> Inside | None:
    """Of the core with an indexer; None where plain torch runs. `hands_on`: whether forward's bits are a result.

    Forward has the scores of a chunk before out and lse exist, backward twice before the gradients of q, k and v, and then one number per
    query and head. Without CP the index keys and their gradient are inside too; under CP other operations make them.
    """
    indexer, (key, value) = attention.indexer, head_widths(attention)
    if not dims.kernels or indexer is None or max(key, value) > CORE_WIDTH[dims.dtype] or indexer.head_dim > INDEX_WIDTH:
        return None
    batch, tokens, width = dims.batch, dims.tokens, indexer.head_dim
    positions, heads, number = dims.tokens * dims.cp, attention.num_heads // dims.tp, dims.stat_dtype.bytes
    columns = -(-positions // COLUMN_BLOCK) * COLUMN_BLOCK
    most = max(INDEX_TILE, CHUNK_ELEMENTS // (batch * columns) // INDEX_TILE * INDEX_TILE)
    rows = min(tokens if dims.cp == 1 else tokens // PIECES, most)
    queries, scores = number * batch * tokens * indexer.num_heads * width, number * batch * rows * columns
    bits = DType.INT32.bytes * batch * tokens * choice_words(dims)
    made, later = (
        dims.dtype.bytes * batch * tokens * heads * value,
        dims.dtype.bytes * batch * heads * (tokens * key + positions * (key + value)),
    )
    sums = number * batch * heads * tokens
    forward, backward = (0 if hands_on else bits) + max(queries + scores - made - sums, 0), bits + max(queries + 2 * scores - later, sums)
    if dims.cp > 1:
        return Inside(forward, backward)
    keys, parts = number * batch * tokens * width, 2 * number * min(KEY_PROGRAMS, -(-batch * tokens // KEY_ROWS)) * width
    last = dims.dtype.bytes * batch * tokens * width + 2 * parameters.bytes * width
    return Inside(keys + forward, max(2 * keys + backward - last, keys + parts + narrowed(parameters, number * width)))


def head_widths(attention: GroupedQueryAttention | LatentAttention) -> tuple[int, int]:
    """Of a key and of a value."""
    if isinstance(attention, GroupedQueryAttention):
        return attention.head_dim, attention.head_dim
    return attention.qk_nope_head_dim + attention.qk_rope_head_dim, attention.v_head_dim
