"""Facts of the gated delta rule: H value heads that share G key heads, keys of K columns, values of V (arXiv:2412.06464, section 3.3)."""

from typing import NamedTuple

from megakernels.facts import (
    LARGEST_TILE,
    SMALLEST_DOT,
    SUMS_BYTES,
    KernelBytes,
    Passes,
    PlainPass,
    PlainPasses,
    Work,
    block_of,
    ceil_div,
    ideal_passes,
)

DELTA_LARGEST_WIDTHS = {2: (128, 256), 4: (64, 64)}
"""Largest widths of a key and of a value, by bytes of an element; an fp32 product stores each operand as two TF32 values."""
PART_BYTES = 1 << 29
"""Scratch bytes for the slots of as many segments as fit; at least one segment."""
SUMMED = ("systems", "strengths", "carries", "sums", "unread", "falls")
"""Buffers in fp32; all others have the dtype of q."""
PLAIN = PlainPasses(PlainPass(0, 50, 54), PlainPass(0, 210, 209), is_fp32=True)
DELTA_COLUMNS = {"scores": 32, "row_decay": 32, "walk": 32, "value": 64, "key": 64, "key_rows": 64, "pair": 32, "row_decay_gradient": 32}
"""Columns, or rows of a state, that a kernel processes at once."""


class DeltaExtents(NamedTuple):
    """Sizes of the launches of one direction.

    Attributes:
        segments: Number of segments.
        tiles: Tiles of a segment.
        at_once: Segments of a launch.
        sides: Positions of a tile, and padded widths of a key and of a value.
        elements: Elements of each buffer per slot, by name.
        slots: Slots of a launch: tiles of all heads and sequences.
        num_bytes: Bytes of all buffers.
    """

    segments: int
    tiles: int
    at_once: int
    sides: dict[str, int]
    elements: dict[str, int]
    slots: int
    num_bytes: int


class DeltaSizes(NamedTuple):
    """Sizes of a call.

    Attributes:
        batch: Sequences.
        positions: Positions of a sequence.
        heads: Heads of values.
        groups: Heads of keys.
        keys: Width of a key.
        values: Width of a value.
        rows: True if each row of a state has its own decay (Kimi delta attention).
        chunk_size: Positions computed at once.
        save_every: Positions between two saved states.
        itemsize: Bytes of an element of q.
    """

    batch: int
    positions: int
    heads: int
    groups: int
    keys: int
    values: int
    rows: bool
    chunk_size: int
    save_every: int
    itemsize: int

    @property
    def accepted(self) -> bool:
        """True if the Triton kernels take these sizes."""
        widest, widest_value = DELTA_LARGEST_WIDTHS[self.itemsize]
        return self.keys <= widest and self.values <= widest_value

    @property
    def states(self) -> tuple[int, int, int, int, int]:
        """Shape of the saved states: the state at each segment's start."""
        return self.batch, ceil_div(self.positions, self.save_every), self.heads, self.keys, self.values

    @property
    def shares(self) -> int:
        """Sums per tile and head, for A_log and dt_bias."""
        return 1 + (self.keys if self.rows else 1)

    @property
    def planes(self) -> int:
        """Numbers per running sum of log decays, and per sum for their gradients."""
        return 2 if self.itemsize == SUMS_BYTES else 1

    def work(self, seq_length: int) -> Work:
        """Ideal work of S' = (diag(decay) − β k kᵀ diag(decay)) S + β k vᵀ, y = S'ᵀ q in chunks of Q positions, whole tiles computed.

        Forward per token and value head: k kᵀ and q kᵀ 2·Q·K each; a triangular system solved for V columns, Q·V; (q kᵀ) times the new
        values 2·Q·V; k S, q S and the state's update 2·K·V each. Backward: twice the forward's products, and again all except the outputs,
        q S and (q kᵀ) times the new values, because only every `save_every`-th state is kept. Bytes: q, k, v, decay, β and y, and the kept
        fp32 states.

        Source: arXiv:2412.06464, section 3.3 (the chunkwise form); counting multiply-adds.
        """
        heads, key, value = self.heads, self.keys, self.values
        chunk = min(self.chunk_size, self.save_every, seq_length)
        recomputed = heads * (4 * chunk * key + chunk * value + 4 * key * value)
        forward = recomputed + heads * (2 * chunk * value + 2 * key * value)
        inputs, width = 2 * self.groups * key + heads * value + heads * self.shares, heads * value
        written = ceil_div(ceil_div(seq_length, self.save_every) * heads * key * value * SUMS_BYTES, seq_length)
        return Work(
            forward,
            2 * forward + recomputed,
            0,
            recomputed,
            moved_forward=(inputs + width) * self.itemsize + written,
            moved_input=(2 * inputs + width) * self.itemsize + written,
        )

    def extents(self, *, backward: bool) -> DeltaExtents:
        """Sizes of one direction."""
        return _extents(self, backward)

    def kernels(self, work: Work, tokens: int) -> Passes | None:
        """One ideal kernel per pass: intermediates between the actual kernels are not counted."""
        return ideal_passes(work, tokens) if self.accepted else None

    def plain(self, work: Work, tokens: int) -> Passes:
        """Chunk by chunk: a head's key and value, its row of a chunk's tile (of each column with a decay), and its share of a state."""
        chunk = min(self.chunk_size, self.save_every, self.positions)
        pairs = chunk * self.keys if self.rows else chunk
        elements = self.heads * (self.keys + self.values + pairs + self.keys * self.values // chunk)
        return PLAIN.passes(work, tokens, elements, ceil_div(self.positions, chunk))

    def num_tiles(self) -> int:
        """Tiles of all heads and sequences; the last segment may have fewer."""
        Q, (whole, rest) = _extents(self, False).sides["Q"], divmod(self.positions, self.save_every)
        return self.batch * self.heads * (whole * ceil_div(self.save_every, Q) + ceil_div(rest, Q))

    def flops(self) -> tuple[int, int, int]:
        """FLOPs of the kernels' products, forward and backward, and of the fp32 products of either, the inverses.

        Forward per tile and head scores, system and its inverse; three products with a state and two within the tile. Where each row has a
        decay, only pairs of different blocks of 16 positions are products. Backward repeats the forward's products except those of y; the
        walk of the gradient, three with a state and two within the tile; two within the tile for systems and scores; three with a state for
        queries and keys; and pairs of positions, their scores again among them.
        """
        num, (Q, K, V) = self.num_tiles(), _extents(self, False).sides.values()
        pairs, inverse, side = Q * (Q - SMALLEST_DOT) // 2 if self.rows else Q * Q, 0, SMALLEST_DOT
        while side < Q:
            inverse += Q // (2 * side) * 2 * 2 * side**3
            side *= 2
        prepared = num * 4 * pairs * K
        forward = prepared + num * 2 * Q * (3 * K * V + 2 * Q * V)
        backward = prepared + num * 2 * (Q * (8 * K * V + 5 * Q * V) + 6 * pairs * K)
        return forward, backward, num * inverse

    def forward_bytes(self) -> KernelBytes:
        """Bytes of the forward kernels, without copies of operands."""
        sizes, last = _extents(self, False), SUMS_BYTES * self.batch * self.heads * self.keys * self.values
        y = self.batch * self.positions * self.heads * self.values * self.itemsize
        return KernelBytes(y + sizes.segments * last, last, sizes.num_bytes)

    def backward_bytes(self, parameter_bytes: int, carried: int = 0) -> KernelBytes:
        """Bytes of the backward kernels, without copies of operands.

        The peak is while the kernels run, or while the parts of the parameters' gradients are summed.

        Args:
            parameter_bytes: Bytes of the gradients of A_log and dt_bias.
            carried: Bytes of a copy of the gradient of the last state.
        """
        sizes, rows = _extents(self, True), self.batch * self.positions
        summed = SUMS_BYTES * self.heads * self.shares
        decays = self.keys if self.rows else 1
        of_inputs = 2 * rows * self.groups * self.keys + rows * self.heads * (self.values + 1 + decays)
        peak = max(sizes.num_bytes + carried - parameter_bytes, summed)
        scratch = summed * self.batch * sizes.segments * sizes.tiles + peak
        last = SUMS_BYTES * self.batch * self.heads * self.keys * self.values
        return KernelBytes(of_inputs * self.itemsize + parameter_bytes, last, scratch)


def _extents(sizes: DeltaSizes, backward: bool) -> DeltaExtents:
    size = sizes.itemsize
    Q = min(LARGEST_TILE[size], block_of(min(sizes.chunk_size, sizes.save_every), SMALLEST_DOT))
    K, V = block_of(sizes.keys, SMALLEST_DOT), block_of(sizes.values, SMALLEST_DOT)
    elements = {
        **dict.fromkeys(("queries", "keys", "reads"), Q * K),
        **dict.fromkeys(("scores", "systems", "inverses"), Q * Q),
        "strengths": Q,
        "carries": K,
    }
    if sizes.rows:
        elements["sums"] = sizes.planes * Q * K
    if backward:
        elements |= dict.fromkeys(("between", "grad_between"), K * V) | dict.fromkeys(("written", "solved"), Q * V) | {"unread": Q}
        elements |= {"falls": sizes.planes * Q * K} if sizes.rows else {}
    of_slot = sum(count * (SUMS_BYTES if name in SUMMED else size) for name, count in elements.items())
    segments, tiles = ceil_div(sizes.positions, sizes.save_every), ceil_div(min(sizes.save_every, sizes.positions), Q)
    of_segment = sizes.batch * sizes.heads * tiles
    at_once = min(segments, max(1, PART_BYTES // max(1, of_segment * of_slot)))
    slots = at_once * of_segment
    return DeltaExtents(segments, tiles, at_once, {"Q": Q, "K": K, "V": V}, elements, slots, slots * of_slot)
