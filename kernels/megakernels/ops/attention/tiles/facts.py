"""Tiles of attention's kernels: queries and keys of each launch, its warps and stages, by the columns of a head."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from megakernels.facts import SMALLEST_DOT, SUMS_BYTES, block_of

KEY_WIDTH = {2: 128, 4: 32}
"""Largest head whose gradients of k and v one launch makes, by bytes of an element."""
RELATION_TILE = {"N": 128, "R": 16}
"""Keys and classes of a tile of the sum over the keys of each class."""


class Tile(NamedTuple):
    """A launch: queries and keys per tile, warps, and stages of the load pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


TileTable = Mapping[tuple[bool, int], Tile]
TILES: dict[str, dict[tuple[bool, int], Tile]] = {
    "forward": {
        (False, 128): Tile(128, 64, 4, 3),
        (False, 256): Tile(128, 64, 8, 3),
        (False, 512): Tile(128, 32, 8, 2),
        (True, 128): Tile(64, 32, 8, 2),
    },
    "query": {
        (False, 256): Tile(128, 64, 8, 2),
        (False, 384): Tile(64, 32, 4, 2),
        (False, 512): Tile(64, 32, 8, 2),
        (True, 128): Tile(64, 16, 4, 2),
    },
    "key": {
        (False, 128): Tile(64, 128, 8, 2),
        (False, 160): Tile(64, 128, 8, 2),
        (False, 256): Tile(32, 128, 8, 2),
        (False, 384): Tile(32, 64, 4, 2),
        (False, 512): Tile(32, 64, 8, 2),
        (True, 128): Tile(16, 64, 4, 2),
    },
}
"""Tiles of each kernel, by whether operands are fp32, and the largest number of columns of a key's and a value's tiles together.

A product of 64 rows has one warp group: a second one halves the columns of each instruction, which then waits for its left operand. With
heads of 256 one warp group has too few registers, and its faster form, which spills some, is among the measured options alone. Loads of the
key kernel overlap its products if a tile has 64 queries, which fits into registers up to 160 columns.
"""
BENT_TILES = {
    "forward": {(False, 128): Tile(64, 64, 4, 3)},
    "query": {(False, 384): Tile(64, 16, 8, 2), (False, 512): Tile(64, 16, 8, 2)},
    "key": {
        (False, 128): Tile(32, 128, 8, 2),
        (False, 160): Tile(32, 64, 8, 2),
        (False, 256): Tile(32, 64, 8, 2),
        (False, 384): Tile(16, 64, 8, 2),
        (False, 512): Tile(16, 64, 8, 2),
    },
}
"""Tiles in place of these where scores are capped or have relations, which need more registers."""
PIECES_TILES = {"key": {(False, 160): Tile(32, 128, 8, 2)}}
"""Tiles in place of these where pieces of a sequence need more registers."""
LARGE_TILES = {"key": {(False, 256): Tile(64, 128, 8, 2)}}
"""Tiles in place of these under Triton's versions that compile them without spills, of rows of one document."""
MASKED_TILES = {"key": {(False, 384): Tile(32, 64, 8, 2), (False, 512): Tile(16, 64, 8, 2)}}
"""Smaller tiles for cases in which a mask of chosen keys needs too many registers."""


def split_width(width: int) -> tuple[int, int]:
    """Columns of a head's tile and of a second one for the rest, 0 if there is none: powers of two with little padding."""
    whole = block_of(width, SMALLEST_DOT)
    rest = block_of(width - whole // 2, SMALLEST_DOT)
    return (whole, 0) if width <= SMALLEST_DOT or rest == whole // 2 else (whole // 2, rest)


def tile_of(kernel: str, columns: int, itemsize: int, replaced: Iterable[Mapping[str, TileTable]]) -> Tile:
    """The tile of one of `TILES`' kernels, with those of `replaced` in their place, the last before the others."""
    wide, tiles = itemsize == SUMS_BYTES, dict(TILES[kernel])
    for each in replaced:
        tiles |= each.get(kernel, {})
    return next(tile for (fp32, largest), tile in tiles.items() if fp32 == wide and columns <= largest)


def constants(
    kernel: str, width: int, value_width: int, itemsize: int,
    *, masked: bool = False, bent: bool = False, pieces: bool = False, large: bool = False,
) -> tuple[dict[str, int], dict[str, int]]:  # fmt: skip
    """Constants of a kernel, and its launch options, that follow from widths and dtype.

    Args:
        kernel: A key of `TILES`.
        width: Width of a head of queries and keys.
        value_width: Width of a head of values.
        itemsize: Bytes of an element.
        masked: True if queries choose keys.
        bent: True if scores are capped or have relations.
        pieces: True if queries are pieces of a sequence.
        large: True if the compiler has registers for `LARGE_TILES`, and rows are of one document.
    """
    (head, rest), value = split_width(width), block_of(value_width, SMALLEST_DOT)
    choices = (LARGE_TILES, large and not pieces), (PIECES_TILES, pieces), (MASKED_TILES, masked), (BENT_TILES, bent)
    tile = tile_of(kernel, head + rest + value, itemsize, (tiles for tiles, applies in choices if applies))
    sides = {"WIDTH": width, "VALUE": value_width, "D": head, "R": rest, "V": value}
    return sides | {"M": tile.queries, "N": tile.keys}, {"num_warps": tile.warps, "num_stages": tile.stages}


def key_parts(width: int, value_width: int, itemsize: int, *, relations: bool = False) -> list[dict[str, bool]]:
    """Launches of the key kernel.

    Both gradients of a wide head do not fit into registers: each has its own launch, which computes the weights again.
    With relations one more launch makes the gradient of each head's term of the keys' scores.
    """
    none = {"KEYS": False, "VALUES": False, "ADDED": False}
    together = max(width, value_width) <= KEY_WIDTH[itemsize]
    parts = [none | {"KEYS": True, "VALUES": True}] if together else [none | {"KEYS": True}, none | {"VALUES": True}]
    return [*parts, none | {"ADDED": True}] if relations else parts
