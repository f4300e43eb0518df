"""Facts of Mamba-3's scan: H heads of width P, R inputs a position (ranks), a state of S columns, N angles.

Source: arXiv:2603.15569, section 3.
"""

from typing import NamedTuple

import megakernels.facts as base

MAMBA3_LARGEST_WIDTHS = {2: (64, 128), 4: (32, 32)}
"""Largest head and state width, by bytes of an element; an fp32 product stores each operand as two TF32 values."""
LARGEST_RANK = 4
"""Largest number of ranks; more use the reference, because a tile would have few positions."""
TILES_PER_SHARE = 4
"""Tiles whose gradients of parameters one program of the backward sums."""
STATES_BYTES = 1 << 30
"""Bytes of the states before every tile, their gradients and those of rotated rows and outputs: stored for as many segments as fit, at
least one."""
CHAIN = 32
"""Positions whose angles are summed at once."""
NUM_TABLES = 4
"""Values per position and head that the kernels over tiles read."""
STEP_TILE = {"T": 16, "H": 8}
"""Positions and heads of a tile of the last two kernels."""
PLAIN = base.PlainPasses(base.PlainPass(0, 69, 84), base.PlainPass(0, 198, 229), is_fp32=True)
MAMBA3_HEADS_PER_TABLE = 16
"""Heads of a program of `mamba3_table_kernel`."""


class Mamba3Extents(NamedTuple):
    """Sizes of a launch.

    Attributes:
        sides: Rows and positions of a tile, ranks, columns of a head and of half a state: powers of two.
        tiles: Tiles of a segment.
        pieces: Programs of the backward that share the tiles of a segment.
        segments: Segments of a sequence.
        at_once: Segments whose states are stored at once.
        stored: Elements that the backward stores per segment, for all sequences and heads: states, their gradients, those of queries, of
            keys and of outputs.
        passed_on: Sums in fp32 that it stores per segment: the gradients of log decays through each half of the carried states.
    """

    sides: dict[str, int]
    tiles: int
    pieces: int
    segments: int
    at_once: int
    stored: tuple[int, ...]
    passed_on: int


class Mamba3Products(NamedTuple):
    """FLOPs of products of a tile: of rows by rows over a state's width and over a head's, of rows by a state."""

    scores: int
    values: int
    state: int


class TrapezoidalScan(NamedTuple):
    """Sizes of a call; `itemsize` is the bytes of an element of x."""

    batch: int
    positions: int
    heads: int
    groups: int
    rank: int
    width: int
    state: int
    angles: int
    chunk_size: int
    save_every: int
    itemsize: int

    @property
    def accepted(self) -> bool:
        """True if the Triton kernels take these sizes."""
        widest, widest_state = MAMBA3_LARGEST_WIDTHS[self.itemsize]
        return 0 < self.width <= widest and 1 < self.state <= widest_state and 0 < self.rank <= LARGEST_RANK

    @property
    def states(self) -> tuple[int, int, int, int, int]:
        """Shape of the saved states: the state at each segment's start."""
        return self.batch, base.ceil_div(self.positions, self.save_every), self.heads, self.width, self.state

    @property
    def segments(self) -> int:
        """Segments of a sequence."""
        return base.ceil_div(self.positions, self.save_every)

    @property
    def shares(self) -> int:
        """Partial gradients of a head's parameters: both biases, the three rank projections if there are several ranks, and D."""
        return 2 * self.rank * self.state + (3 * self.rank * self.width if self.rank > 1 else 0) + 1

    def work(self, seq_length: int) -> base.Work:
        """Ideal work in chunks of `chunk_size` positions, so of Q = rank · chunk rows.

        Per token and head, with R rows per position: C Bᵀ 2·R·Q·S, its product with x 2·R·Q·P, chunk states and their reading 4·R·S·P. C Bᵀ
        is per head, not per group: each head adds its own bias to B and C. States pass from chunk to chunk on chip; those at each
        `save_every`-th position are kept.

        Source: Mamba-3, arXiv:2603.15569, section 3 (MIMO).
        """
        rank, heads = self.rank, self.heads
        rows = min(self.chunk_size, self.save_every, seq_length) * rank
        scores = heads * 2 * rank * rows * self.state
        forward = scores + heads * rank * (2 * rows * self.width + 4 * self.state * self.width)
        width, shared = heads * self.width, self.groups * self.state * rank
        inputs = 2 * width + 2 * shared + 3 * heads  # x, z, B, C, and dt, A, trapezoid gate
        every = min(self.save_every, seq_length)
        return base.chunked_work(seq_length, every, forward, scores, inputs, width, width * self.state, self.itemsize)

    def extents(self) -> Mamba3Extents:
        """Sizes of a launch."""
        return _extents(self)

    def products(self) -> Mamba3Products:
        """FLOPs of the products of a tile."""
        rows, _, _, width, half = _extents(self).sides.values()
        state = 2 * half
        return Mamba3Products(2 * rows * rows * state, 2 * rows * rows * width, 2 * rows * width * state)

    def tile_flops(self) -> tuple[int, int]:
        """FLOPs of a tile and head, forward and backward.

        Forward the scores, their product with the values, and two products with the state. Backward a product each for the states and their
        gradients; scores and two products with values and state for the outputs; for queries and keys scores, two products of their size,
        one of that of the values and two with a state; for values scores, one product of the size of the values and one with a state.
        """
        scores, values, state = self.products()
        return scores + values + 2 * state, 5 * scores + 3 * values + 6 * state

    def num_tiles(self) -> int:
        """Tiles of all sequences and heads; the last segment may have fewer."""
        sizes = _extents(self)
        whole, rest = divmod(self.positions, self.save_every)
        return self.batch * self.heads * (whole * sizes.tiles + base.ceil_div(rest, sizes.sides["Q"]))

    def kernels(self, _work: base.Work, _tokens: int) -> base.Passes | None:
        """Five kernels forward and fourteen backward, seven of them for each part of the segments.

        Forward: tables, turns, angles, states before tiles, outputs. Backward: these again with the gradients of outputs, then of states,
        of queries and keys, and of values, sums over groups for C and B, angles and steps.
        """
        if not self.accepted:
            return None
        sizes, size, rank = _extents(self), self.itemsize, self.rank
        rows, of_rank = self.batch * self.positions, self.batch * self.positions * self.heads
        tiles = self.batch * sizes.segments * sizes.tiles * self.heads
        x, shared = of_rank * self.width * size, rows * self.groups * rank * self.state * size
        states, _, turned, _, outputs = (sizes.segments * each * size for each in sizes.stored)
        tables = self.tables()
        kept = self.batch * sizes.segments * self.heads * self.width * self.state * size
        partial = self.batch * sizes.segments * sizes.pieces * self.heads * rank * (2 * self.state + 3 * self.width) * base.SUMS_BYTES
        split = rows * (2 * self.heads * self.width + 2 * self.groups * rank * self.state + 3 * self.heads) * 2 * size
        parts = base.ceil_div(sizes.segments, sizes.at_once)
        flops, flops_back = (tiles * each for each in self.tile_flops())
        forward = 4 * x + 3 * shared + 2 * states + kept + 5 * tables
        backward = 13 * x + 10 * shared + 7 * states + 4 * turned + 4 * outputs + 12 * tables + 2 * kept + 3 * partial + split
        launches = 3 + 2 * parts, 16 + 7 * parts
        return (
            base.Pass(forward, flops, launches[0], (base.KindWork("mamba3", forward, flops, launches[0]),)),
            base.Pass(backward, flops_back, launches[1], (base.KindWork("mamba3", backward, flops_back, launches[1]),)),
        )

    def plain(self, work: base.Work, tokens: int) -> base.Passes:
        """Chunk by chunk, for each row of a head B or C, x, and its row of the tile twice."""
        chunk = min(self.chunk_size, self.save_every, self.positions)
        elements = self.heads * self.rank * (self.state + self.width + 2 * chunk * self.rank)
        return PLAIN.passes(work, tokens, elements, base.ceil_div(self.positions, chunk))

    def forward_bytes(self) -> base.KernelBytes:
        """Bytes of the forward kernels, without copies of operands."""
        sizes, state = _extents(self), self.width * self.state
        last = base.SUMS_BYTES * self.batch * self.heads * (state + self.angles)
        x = self.batch * self.positions * self.heads * self.width * self.itemsize
        kept = self.batch * sizes.segments * self.heads * (state * self.itemsize + self.angles * base.SUMS_BYTES)
        return base.KernelBytes(x + kept, last, self.tables() + max(sizes.at_once * sizes.stored[0] * self.itemsize, self.turns()))

    def backward_bytes(self, parameter_bytes: int, carried: int = 0, phase: int = 0) -> base.KernelBytes:
        """Bytes of the backward kernels, without copies of operands.

        The peak is that of the tables, the stored states and their gradients, or of the sums of partial gradients after them.

        Args:
            parameter_bytes: Bytes of the parameters' gradients.
            carried: Bytes of a copy of the gradient of the last state.
            phase: Bytes that the gradient of the last phase takes with its copy.
        """
        sizes, rows = _extents(self), self.batch * self.positions * self.heads
        last = base.SUMS_BYTES * self.batch * self.heads * (self.width * self.state + self.angles)
        keys = self.batch * self.positions * self.groups * self.rank * self.state
        of_inputs = self.itemsize * (2 * rows * self.width + 2 * keys + 3 * rows + self.batch * self.positions * self.angles)
        shares = self.batch * sizes.segments * sizes.pieces * self.heads * self.shares
        always = base.SUMS_BYTES * (rows * (self.angles + 3) + self.ends() + shares)
        between = sizes.at_once * (sum(sizes.stored) * self.itemsize + sizes.passed_on * base.SUMS_BYTES)
        summed = base.SUMS_BYTES * self.heads * (self.batch * base.ceil_div(self.positions, STEP_TILE["T"]) + self.shares + 1)
        scratch = always + max(self.tables() + max(between + carried, self.turns()), phase, summed)
        return base.KernelBytes(of_inputs + parameter_bytes, last, scratch)

    def tables(self) -> int:
        """Bytes that the kernels over tiles read per position and head: `NUM_TABLES` values, and cosines and sines of the angles."""
        of_head = NUM_TABLES * base.SUMS_BYTES + 2 * self.angles * self.itemsize
        return self.batch * self.positions * self.heads * of_head

    def turns(self) -> int:
        """Bytes of the rotations per position, from which all heads' angles are made before any state is stored."""
        return base.SUMS_BYTES * self.batch * self.positions * self.angles

    def ends(self) -> int:
        """Gradients of the angles at the start of every tile."""
        sizes = _extents(self)
        return self.batch * sizes.segments * sizes.tiles * self.heads * self.angles


def tile_sides(rank: int, chunk_size: int, width: int, state: int, itemsize: int) -> dict[str, int]:
    """Rows and positions of a tile, ranks, columns of a head and of half a state."""
    ranks = base.block_of(rank)
    positions = min(base.LARGEST_TILE[itemsize] // ranks, base.block_of(chunk_size, max(1, base.SMALLEST_DOT // ranks)))
    return {"M": positions * ranks, "Q": positions, "R": ranks, "P": base.block_of(width, base.SMALLEST_DOT), "S": half_width(state)}


def half_width(state: int) -> int:
    """Columns of half a state."""
    return base.block_of(base.ceil_div(state, 2), base.SMALLEST_DOT)


def halves_turned(num_angles: int, state: int) -> int:
    """Halves of a state that angles rotate: each has as many pairs as half its columns."""
    return min(2, base.ceil_div(num_angles, half_width(state) // 2))


def step_sides(num_angles: int) -> dict[str, int]:
    """Positions, heads and angles of a tile of the last two kernels."""
    return {**STEP_TILE, "N": base.block_of(num_angles, base.SMALLEST_DOT)}


def phase_rows(positions: int) -> int:
    """Rows of a program that sums the angles' gradients of a tile's positions."""
    return max(positions, base.SMALLEST_DOT)


def _extents(sizes: TrapezoidalScan) -> Mamba3Extents:
    batch, positions, heads, _, rank, width, state, _, chunk_size, save_every, itemsize = sizes
    sides = tile_sides(rank, min(chunk_size, save_every), width, state, itemsize)
    tiles, segments = base.ceil_div(min(save_every, max(1, positions)), sides["Q"]), base.ceil_div(positions, save_every)
    padded = 2 * sides["S"]
    of_tile = width * padded, width * padded, sides["M"] * padded, sides["M"] * padded, sides["M"] * width
    stored = tuple(batch * tiles * heads * each for each in of_tile)
    at_once = min(segments, max(1, STATES_BYTES // max(1, sum(stored) * itemsize)))
    return Mamba3Extents(sides, tiles, base.ceil_div(tiles, TILES_PER_SHARE), segments, at_once, stored, 2 * batch * tiles * heads)
