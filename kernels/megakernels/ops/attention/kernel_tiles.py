"""Ranges of keys that a tile of queries sees and of queries that see a tile of keys, and the rows of keys in memory.

A query attends to the keys from the start of its document or window up to its position. Tiles that every query of a tile sees need no mask:
a program loops over three ranges of tiles, masked, unmasked and masked again.
"""

import triton
import triton.language as tl

from megakernels._common.tiles import LOG2_E, exp2, reciprocal, tanh
from megakernels.ops.attention.facts import START_SAMPLES

SAMPLES = tl.constexpr(START_SAMPLES)
"""Document starts that a step of the search reads at once."""


@triton.jit  # type: ignore[untyped-decorator]
def stored(position, key_length, num_ranks, ZIG_ZAG: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of keys at these positions: rank i of `num_ranks` has the pieces i and 2 · num_ranks − 1 − i, side by side."""
    if ZIG_ZAG:
        piece = position // key_length
        slot = tl.where(piece < num_ranks, 2 * piece, 4 * num_ranks - 1 - 2 * piece)
        position = slot * key_length + position % key_length
    return position.to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def visible(at, position, start, window, HAS_WINDOW: tl.constexpr, HAS_STARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """True if queries at `position`, of documents that begin at `start`, see the keys `at`. All broadcast."""
    seen = at <= position
    if HAS_WINDOW:
        seen &= at > position - window
    if HAS_STARTS:
        seen &= at >= start
    return seen


@triton.jit  # type: ignore[untyped-decorator]
def bent(x, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The hyperbolic tangent; unless EXACT within 3e-7, not relative to itself near 0, by two special instructions."""
    return tanh(x) if EXACT else 1.0 - 2.0 * reciprocal(1.0 + exp2(x * (2.0 * LOG2_E)))


@triton.jit
def added_scores(classes, relations, at, num_keys, head, num_heads):  # type: ignore[no-untyped-def]
    """The values that a head adds to the scores of the keys `at`, by the class of each, in powers of two."""
    known = at < num_keys
    kind = tl.load(classes + at, mask=known, other=0)
    return tl.load(relations + kind * num_heads + head, mask=known, other=0.0).to(tl.float32) * LOG2_E


@triton.jit  # type: ignore[untyped-decorator]
def chosen(words, there, first_key, N: tl.constexpr, KEYS_FIRST: tl.constexpr = False):  # type: ignore[no-untyped-def]
    """Mask of N keys from `first_key` on that the queries chose, [M, N], or [N, M] if KEYS_FIRST: a bit per key, 32 of them in a word.

    Args:
        words: Pointers [M] to each query's first word.
        there: Mask of the queries that exist.
        first_key: A multiple of N, or of 32.
        N: Keys of a tile, a power of two.
        KEYS_FIRST: The order of the result.
    """
    query: tl.constexpr = 0 if KEYS_FIRST else 1
    lane = tl.expand_dims(tl.arange(0, N), 1 - query)
    words += first_key // 32
    found = tl.expand_dims(tl.load(words, mask=there, other=0), query)
    for word in tl.static_range(1, N // 32):
        more = tl.expand_dims(tl.load(words + word, mask=there, other=0), query)
        found = tl.where(lane // 32 == word, more, found)
    return ((found >> ((first_key + lane) % 32)) & 1) != 0


@triton.jit  # type: ignore[untyped-decorator]
def query_tile(  # type: ignore[no-untyped-def]
    starts, piece_length, first_a, first_b, num_keys, window,
    M: tl.constexpr, N: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """The tile of queries of a program, and its range of keys. Tiles with the most keys start first.

    Args:
        starts: Document starts of the program's sequence, each counted from the first position of its piece.
        piece_length: Queries of a piece.
        first_a: Position of the first query of the first piece.
        first_b: Position of the first query of the last piece.
        num_keys: All keys.
        window: Positions that a query sees.
        M: Queries of a tile.
        N: Keys of a tile.
        HAS_WINDOW: True if there is a window.
        HAS_STARTS: True if there are document starts.

    Returns:
        Rows of the queries, which of them exist, their positions and the starts of their documents; then begin of the range, begin and
        end of its unmasked part, end.
    """
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    blocks = tl.cdiv(piece_length, M)
    piece = block // blocks
    first = tl.where(piece == 0, first_a, first_b)
    offset = (block % blocks) * M
    within = offset + tl.arange(0, M)
    there = within < piece_length
    row = (piece * piece_length + within).to(tl.int64)
    first_query = first + offset
    last_query = first + tl.minimum(offset + M, piece_length) - 1
    start = tl.zeros([M], dtype=tl.int32)
    begin, whole = 0, 0
    if HAS_STARTS:
        start = first + tl.load(starts + row, mask=there, other=0)
        begin = tl.maximum(tl.min(tl.where(there, start, num_keys), 0), 0)
        whole = tl.maximum(tl.max(tl.where(there, start, 0), 0), 0)
    if HAS_WINDOW:
        begin = tl.maximum(begin, first_query - window + 1)
        whole = tl.maximum(whole, last_query - window + 1)
    begin = begin // N * N
    end = tl.minimum(last_query + 1, num_keys)
    whole = tl.maximum(tl.minimum(tl.cdiv(whole, N), tl.cdiv(end, N)) * N, begin)
    whole_end = tl.maximum((first_query + 1) // N * N, whole)
    return row, there, first + within, start, begin, whole, whole_end, end


@triton.jit
def starts_up_to(starts, limit, num_queries):  # type: ignore[no-untyped-def]
    """Number of document starts, an ascending array, that are at most `limit`. Each step divides the remaining range by `SAMPLES`."""
    low = 0
    left = num_queries
    while left > 0:
        step = tl.cdiv(left, SAMPLES)
        at = low + tl.arange(0, SAMPLES) * step
        start = tl.load(starts + at, mask=at < low + left, other=2147483647)
        count = tl.sum((start <= limit).to(tl.int32), 0)
        end = low + left
        # the last sample before the first start beyond the limit is at most the limit; the starts between them are not known
        low = tl.where(count > 0, low + (count - 1) * step + 1, low)
        left = tl.where(count > 0, tl.minimum(step - 1, end - low), 0)
    return low


@triton.jit  # type: ignore[untyped-decorator]
def queries_of(  # type: ignore[no-untyped-def]
    first_key, last_key, first, piece_length, starts, window,
    M: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """Range of a piece's queries that see the keys `first_key` to `last_key`: begin, begin and end of its unmasked part, end; in its rows.

    Args:
        first_key: Position of the first key.
        last_key: Position of the last key.
        first: Position of the piece's first query.
        piece_length: Number of its queries.
        starts: Document starts of the piece, counted from its first position.
        window: Positions that a query sees.
        M: Queries of a tile.
        HAS_WINDOW: True if there is a window.
        HAS_STARTS: True if there are document starts.
    """
    begin = tl.minimum(tl.maximum(first_key - first, 0), piece_length)
    whole = tl.minimum(tl.maximum(last_key - first, 0), piece_length)
    end = piece_length
    all_end = piece_length
    if HAS_WINDOW:
        end = tl.minimum(end, tl.maximum(last_key + window - first, 0))
        all_end = tl.minimum(all_end, tl.maximum(first_key + window - first, 0))
    if HAS_STARTS:
        end = tl.minimum(end, starts_up_to(starts, last_key - first, piece_length))
        all_end = tl.minimum(all_end, starts_up_to(starts, first_key - first, piece_length))
    whole = begin + tl.cdiv(whole - begin, M) * M
    whole_end = whole + tl.maximum(all_end - whole, 0) // M * M
    return begin, whole, whole_end, end
