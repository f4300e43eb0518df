"""Facts of Mamba-2's scan: H heads of width P in G groups, with a state of S columns per group (arXiv:2405.21060, section 6)."""

from typing import NamedTuple

import megakernels.facts as base

SSD_LARGEST_WIDTH = {2: 128, 4: 32}
"""Largest head and state width, by bytes of an element; an fp32 product stores each operand as two TF32 values."""
LARGEST_BLOCK = 64
"""Columns of a head per program."""
HEADS_PER_PART = 16
"""Heads of a group whose gradients of B and C one program of the backward sums."""
SEGMENT_BYTES = 1 << 28
"""Bytes of the states before every tile, their gradients and the parts of those of B and C: stored for as many
chunks as fit, at least one."""
PLAIN = base.PlainPasses(base.PlainPass(910, 46, 46), base.PlainPass(1290, 101, 100), is_fp32=True)
SSD_HEADS_PER_TABLE = 8
"""Heads of a program of the kernels over steps."""
PASS_COLUMNS = 1024
"""Elements of a state per program of the walk over chunks."""


class SsdExtents(NamedTuple):
    """Sizes of a launch.

    Attributes:
        sides: Positions of a tile, columns of a head and of a state: powers of two.
        tiles: Tiles of a chunk.
        chunks: Chunks of a sequence.
        blocks: Blocks of a head's columns.
        parts: Parts of a group's heads.
        tables: Values per position and head that the kernels over tiles read.
        rows: Values per position, head and block of columns that the backward's kernels over tiles write.
        at_once: Chunks whose tiles are stored at once.
        stored: Elements of what the backward stores per chunk, for all sequences and heads: states and their gradients in the input's
            dtype, pairs and edges in fp32.
    """

    sides: dict[str, int]
    tiles: int
    chunks: int
    blocks: int
    parts: int
    tables: int
    rows: int
    at_once: int
    stored: tuple[int, int, int, int]


class SsdProducts(NamedTuple):
    """Tiles of all sequences and heads, blocks of columns, and FLOPs of a tile's products: with a state, of scores, with x."""

    num: int
    blocks: int
    with_state: int
    scores: int
    values: int


class Ssd(NamedTuple):
    """Sizes of a call; `itemsize` is the bytes of an element of x."""

    batch: int
    positions: int
    heads: int
    groups: int
    width: int
    state: int
    chunk_size: int
    itemsize: int

    @property
    def accepted(self) -> bool:
        """True if the Triton kernels take these sizes."""
        return max(self.width, self.state) <= SSD_LARGEST_WIDTH[self.itemsize]

    @property
    def states(self) -> tuple[int, int, int, int, int]:
        """Shape of the saved states: the state at each chunk's start."""
        return self.batch, base.ceil_div(self.positions, self.chunk_size), self.heads, self.width, self.state

    def work(self, seq_length: int) -> base.Work:
        """Ideal work in chunks of Q positions, whole Q × Q tiles computed.

        Forward per token: C Bᵀ 2·Q·S a group; (L ∘ C Bᵀ) x 2·Q·P, chunk states Bᵀ x 2·S·P and C · state 2·S·P a head. Backward: two
        products of the same size for each, and C Bᵀ once more; the states at chunk starts are kept. Bytes: x, y, B, C, dt, and the states.

        Source: arXiv:2405.21060, section 6 and its listing 1.
        """
        chunk = min(self.chunk_size, seq_length)
        scores = 2 * chunk * self.state * self.groups
        forward = scores + self.heads * (2 * chunk * self.width + 4 * self.state * self.width)
        width, shared = self.heads * self.width, self.groups * self.state
        inputs = width + 2 * shared + self.heads
        return base.chunked_work(seq_length, chunk, forward, scores, inputs, width, width * self.state, self.itemsize)

    def extents(self) -> SsdExtents:
        """Sizes of a launch."""
        return _extents(self)

    def products(self) -> SsdProducts:
        """FLOPs of the products of a tile."""
        sizes = _extents(self)
        Q, P, S = (sizes.sides[key] for key in "QPS")
        num = self.batch * sizes.chunks * sizes.tiles * self.heads
        return SsdProducts(num, sizes.blocks, 2 * Q * P * S, 2 * Q * Q * S, 2 * Q * Q * P)

    def flops(self) -> tuple[int, int]:
        """FLOPs of the kernels' products, forward and backward.

        Forward, per tile, head and block of columns: two products with a state in the first kernel and in the second, the scores, and
        their product with x. Backward, products with a state: one each for the gradients of the chunks' states, for the tiles' states and
        their gradients, for x and B, and two for C; two products of x's size. Per tile and 16 heads of a group the scores, twice, and per
        tile and group one product with B and one with C.
        """
        each, parts = self.products(), _extents(self).parts
        forward = each.num * each.blocks * (3 * each.with_state + each.scores + each.values)
        own = each.num * each.blocks * (7 * each.with_state + 2 * each.values)
        shared = each.num // max(1, self.heads) * self.groups * (2 * parts + 2) * each.scores
        return forward, own + shared

    def kernels(self, _work: base.Work, _tokens: int) -> base.Passes | None:
        """Four kernels forward: tables, what chunks add to states, states before chunks, outputs.

        Backward the first three again, for the states' gradients; for each part of the chunks states before tiles and their gradients,
        pairs of positions, gradients of x, and two for each of B and C; steps, sums and copies of three parameters, and parts of the
        projection and of the convolution's output joined.
        """
        if not self.accepted:
            return None
        sizes, (flops, flops_back) = _extents(self), self.flops()
        rows = self.batch * self.positions
        x, shared = rows * self.heads * self.width * self.itemsize, rows * self.groups * self.state * self.itemsize
        of_state = self.batch * self.heads * self.width * self.state
        states, last, per_step = (
            sizes.chunks * of_state * self.itemsize,
            2 * of_state * base.SUMS_BYTES,
            rows * self.heads * base.SUMS_BYTES,
        )
        of_tiles = sizes.chunks * sizes.stored[0] * self.itemsize
        pairs, edges = (sizes.chunks * each * base.SUMS_BYTES for each in sizes.stored[2:])
        forward = 3 * x + 3 * shared + 3 * states + last + 7 * per_step
        backward = 10 * x + 13 * shared + 4 * states + last + 7 * of_tiles + 3 * pairs + 4 * edges + (18 + 10 * sizes.blocks) * per_step
        joined = rows * (3 * self.heads * self.width + 4 * self.groups * self.state + self.heads) * 2 * self.itemsize
        launches = 10 + 8 * base.ceil_div(sizes.chunks, sizes.at_once)
        return (
            base.Pass(forward, flops, 4, (base.KindWork("ssd", forward, flops, 4),)),
            base.Pass(
                backward + joined,
                flops_back,
                launches,
                (base.KindWork("ssd", backward, flops_back, launches - 2), base.KindWork(base.JOIN, joined, 0, 2)),
            ),
        )

    def plain(self, work: base.Work, tokens: int) -> base.Passes:
        """Chunk by chunk, a tile of chunk² for each head."""
        chunk = min(self.chunk_size, self.positions)
        return PLAIN.passes(work, tokens, chunk * self.heads, base.ceil_div(self.positions, chunk))

    def forward_bytes(self) -> base.KernelBytes:
        """Bytes of the forward kernels, without copies of operands."""
        states, sizes = self.states, _extents(self)
        last = self.batch * self.heads * self.width * self.state
        rows = self.batch * self.positions * self.heads
        return base.KernelBytes(
            (rows * self.width + states[1] * last) * self.itemsize, base.SUMS_BYTES * last, self._tables(sizes) if last else 0
        )

    def backward_bytes(self, parameter_bytes: int, walked: int = 0) -> base.KernelBytes:
        """Bytes of the backward kernels, without copies of operands.

        Args:
            parameter_bytes: Bytes of the gradients of A_log, D and dt_bias.
            walked: Bytes of a copy of the gradient of the last state.
        """
        sizes, rows = _extents(self), self.batch * self.positions
        last = self.batch * self.heads * self.width * self.state
        of_inputs = (rows * self.heads * (self.width + 1) + 2 * rows * self.groups * self.state) * self.itemsize
        of_tiles, per_step = base.SUMS_BYTES * self.batch * sizes.chunks * sizes.tiles * self.heads, base.SUMS_BYTES * rows * self.heads
        between = 0
        if last:
            segments = sizes.at_once * _stored_bytes(sizes.stored, self.itemsize) + sizes.blocks * (sizes.rows * per_step + 2 * of_tiles)
            walk = walked + base.SUMS_BYTES * self.batch * sizes.chunks * self.heads
            between = sizes.chunks * last * self.itemsize + sizes.tables * per_step + max(walk, segments)
        scratch = 3 * of_tiles + max(between, 3 * base.SUMS_BYTES * self.heads)
        return base.KernelBytes(of_inputs + parameter_bytes, base.SUMS_BYTES * last, scratch)

    def _tables(self, sizes: SsdExtents) -> int:
        """Bytes of the tables, and of the decays across chunks, which go before outputs are made but are smaller than those."""
        return base.SUMS_BYTES * self.batch * self.heads * (sizes.tables * self.positions + sizes.chunks)


def tile_sides(chunk_size: int, width: int, state: int, itemsize: int) -> dict[str, int]:
    """Positions of a tile, columns of a head and of a state."""
    positions = min(base.LARGEST_TILE[itemsize], base.block_of(chunk_size, base.SMALLEST_DOT))
    return {
        "Q": positions,
        "P": min(LARGEST_BLOCK, base.block_of(width, base.SMALLEST_DOT)),
        "S": base.block_of(state, base.SMALLEST_DOT),
    }


def _extents(sizes: Ssd) -> SsdExtents:
    batch, positions, heads, groups, width, state, chunk_size, itemsize = sizes
    sides = tile_sides(chunk_size, width, state, itemsize)
    tiles, chunks = base.ceil_div(min(chunk_size, max(1, positions)), sides["Q"]), base.ceil_div(positions, chunk_size)
    blocks, parts = base.ceil_div(width, sides["P"]), base.ceil_div(heads // groups, HEADS_PER_PART) if groups else 0
    of_states, of_parts = batch * tiles * heads * blocks * sides["P"] * sides["S"], batch * tiles * groups * parts * sides["Q"]
    stored = of_states, of_states, of_parts * sides["Q"], of_parts * sides["S"]
    at_once = min(chunks, max(1, SEGMENT_BYTES // max(1, _stored_bytes(stored, itemsize))))
    tables, rows = (3, 4) if itemsize == base.SUMS_BYTES else (2, 3)
    return SsdExtents(sides, tiles, chunks, blocks, parts, tables, rows, at_once, stored)


def _stored_bytes(stored: tuple[int, int, int, int], itemsize: int) -> int:
    return itemsize * (stored[0] + stored[1]) + base.SUMS_BYTES * (stored[2] + stored[3])
