"""Facts of Newton-Schulz iterations: their products of matrices whose result is symmetric, tile by tile, and the order of the steps."""

from megakernels.facts import DESCRIPTOR_BYTES, SMALLEST_DOT, block_of, ceil_div

SYMMETRIC_TILE = {2: 128, 4: 64}
"""Rows and columns of a tile, by bytes of an element."""
SYMMETRIC_DEPTH = {2: 64, 4: 32}
"""Columns of the operands per step."""
SYMMETRIC_BAND = 256
"""Columns of a tile of a kernel with tensor descriptors: two tiles of the plain kernel."""
QUACK_ALIGNED = 8
"""Elements of 16 bits of which the sides of quack's matrices are multiples."""
REFERENCE_BYTES = 4
"""Bytes of an element of x xᵀ that the reference needs at once."""
LONGEST_SEGMENT, LONGEST_FIRST = 3, 2
"""Steps between two products with the matrix: small singular values are most exposed to rounding in the first steps."""
WIDE = 2
"""Ratio of a matrix's sides from which steps are made on x xᵀ alone: their buffers then fit into the matrix's own second buffer."""


def tile_side(num_rows: int, itemsize: int) -> int:
    """Rows and columns of a tile of the plain kernel."""
    return min(SYMMETRIC_TILE[itemsize], block_of(num_rows, SMALLEST_DOT))


def uses_descriptors(num_rows: int, num_cols: int, itemsize: int, *, tall: bool) -> bool:
    """True for operands [num_rows, num_cols], or tall ones [num_cols, num_rows], that the kernel reads and writes through descriptors.

    A tall operand's last step must not reach into the next matrix.
    """
    if itemsize != 2 or num_rows < SYMMETRIC_BAND:
        return False
    whole = num_cols % SYMMETRIC_DEPTH[2] == 0 if tall else num_cols * itemsize % DESCRIPTOR_BYTES == 0
    return whole and num_rows * itemsize % DESCRIPTOR_BYTES == 0


def in_quack(num_rows: int, num_cols: int, itemsize: int, *, scaled: bool) -> bool:
    """True for a product [num_rows, num_cols] · [num_cols, num_rows] that quack-kernels takes: aligned rows, no factor of each matrix."""
    return itemsize == 2 and not scaled and num_rows >= SYMMETRIC_BAND and not num_rows % QUACK_ALIGNED and not num_cols % QUACK_ALIGNED


def num_bands(num_rows: int) -> int:
    """Squares of `SYMMETRIC_BAND` rows in the lower triangle; each has two tiles."""
    bands = ceil_div(num_rows, SYMMETRIC_BAND)
    return bands * (bands + 1) // 2


def num_tiles(num_rows: int, itemsize: int) -> int:
    """Tiles of the lower triangle."""
    tiles = ceil_div(num_rows, tile_side(num_rows, itemsize))
    return tiles * (tiles + 1) // 2


def tiles_of(num_rows: int, num_cols: int, itemsize: int, *, tall: bool = False) -> tuple[int, int]:
    """Tiles of one symmetric product [num_rows, num_cols] · [num_cols, num_rows], and the FLOPs of each."""
    if uses_descriptors(num_rows, num_cols, itemsize, tall=tall):
        return 2 * num_bands(num_rows), SYMMETRIC_BAND**2 * num_cols
    return num_tiles(num_rows, itemsize), 2 * tile_side(num_rows, itemsize) ** 2 * num_cols


def segments(num_steps: int, short: int, long: int) -> tuple[int, ...]:
    """Numbers of steps that are made on x xᵀ before each product with x; an even number of products leaves the result in the storage of x.

    With R = x xᵀ, a step's polynomial Z = a + b R + c R² moves R to Z R Z, and their product is applied once. A separate step costs
    3 s² l + s³ FLOPs, s and l the shorter and longer side, and one in a segment about 4 s³.
    """
    if long < WIDE * short:  # the last two factors are in one segment if that makes the number of factors even
        return (1,) * num_steps if num_steps % 2 == 0 or num_steps == 1 else (*(1,) * (num_steps - 2), 2)
    count = 1 + ceil_div(max(0, num_steps - LONGEST_FIRST), LONGEST_SEGMENT)
    count = min(num_steps, count + count % 2)
    return tuple((num_steps + place) // count for place in range(count))


def num_inner_products(lengths: tuple[int, ...]) -> int:
    """Symmetric products of [s, s] matrices in segments of these lengths: of a step's polynomial, of Z R Z, and of the polynomials."""
    return sum(4 * length - 3 for length in lengths)
