"""Tiles of weights and of score gradients that attention's backward stores: five products per pair of positions instead of seven.

A tile has `STORED_TILE` keys as rows and `STORED_TILE` queries as columns. Tiles with visible pairs are stored, for some sequences and key
heads at a time; the next part reuses the arrays. Longer sequences compute weights twice instead.
"""

from typing import NamedTuple

from megakernels.facts import SMALLEST_DOT, block_of, ceil_div

STORED_TILE = 128
"""Queries and keys of a stored tile."""
STORED_SHORTEST = 4
"""Least number of tiles of a sequence: a shorter one has too large a masked share."""
STORED_BYTES = 5 << 28
"""Most bytes of the two arrays; large enough for the programs of all multiprocessors."""
SCORE_TILE = {"M": 128, "N": 64}
"""Queries and keys of a program that makes scores: two or three of them share a multiprocessor, one's stores overlap another's products."""
SCORE_OPTIONS = {"num_warps": 4, "num_stages": 3}
STORED_COLUMNS = 64
"""Columns of a head that a step of its products takes."""
DELTA_ROWS = 64
"""Queries of a program that makes δ."""
STORED_STEP = 64
"""Queries or keys that a step of a product with stored tiles takes."""
PRODUCT_OPTIONS = {"num_warps": 8, "num_stages": 3}


class StoredTiles(NamedTuple):
    """Stored tiles of a call, and the parts of it that are in memory at once.

    Attributes:
        side: Queries of a tile, and its keys.
        tiles: Tiles along the queries of a sequence.
        band: Tiles of one row of tiles if there is a window; 0 for all up to the diagonal.
        slots: Stored tiles of a head.
        sequences: Sequences of a part.
        groups: Key heads of a part, with the query heads that share them.
        num_bytes: Bytes of both arrays.
    """

    side: int
    tiles: int
    band: int
    slots: int
    sequences: int
    groups: int
    num_bytes: int


def stored_tiles(batch: int, positions: int, heads: int, groups: int, itemsize: int, window: int | None) -> StoredTiles | None:
    """The stored tiles of causal attention; None for short sequences, or if one key head's tiles exceed `STORED_BYTES`.

    Args:
        batch: Sequences.
        positions: Queries of a sequence, and its keys.
        heads: Query heads.
        groups: Key heads.
        itemsize: Bytes of an element.
        window: Positions that a query sees; None for all before it.
    """
    tiles, band = ceil_div(positions, STORED_TILE), 0
    if window is not None:
        band = min(tiles, (window + STORED_TILE - 2) // STORED_TILE + 1)
    slots = tiles * band or tiles * (tiles + 1) // 2
    each = 2 * slots * STORED_TILE**2 * itemsize * (heads // groups)
    most = STORED_BYTES // each
    if not most or tiles < STORED_SHORTEST:
        return None
    sequences = min(batch, max(1, most // groups))
    together = groups if most >= groups else ceil_div(groups, ceil_div(groups, most))
    return StoredTiles(STORED_TILE, tiles, band, slots, sequences, together, each * sequences * together)


def score_columns(width: int, value_width: int) -> int:
    """Columns of a step of the products over a head."""
    return min(STORED_COLUMNS, *(block_of(each & -each, SMALLEST_DOT) for each in (width, value_width)))
