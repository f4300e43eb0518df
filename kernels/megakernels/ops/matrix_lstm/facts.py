"""Facts of mLSTM: H heads with keys of K columns, values of V, and a normaliser (arXiv:2405.04517)."""

from typing import NamedTuple

from megakernels.facts import SUMS_BYTES, Passes, PlainPass, PlainPasses, Work, ceil_div, chunked_work

LARGEST_CAP = 30.0
"""Largest soft cap of the gates: with it sums of exponentials are far from the largest fp32 number."""
PLAIN = PlainPasses(PlainPass(817, 60, 52), PlainPass(1194, 152, 121), is_fp32=True)
"""Counted operand by operand of `reference` at xLSTM 7B's sizes."""


class _Live(NamedTuple):
    """Tensors in fp32 that exist together inside the operation, by their sizes.

    Attributes:
        pairs: Pairs of positions of a chunk.
        rows: Values of a chunk, with the normaliser's ones.
        values: Values of a chunk.
        keys: Keys of a chunk.
        states: States.
        numbers: One number a position of a chunk.
        shared: Bytes for each pair of positions that all heads share.
    """

    pairs: int
    rows: int
    values: int
    keys: int
    states: int
    numbers: int
    shared: int = 0

    def bytes_of(self, sizes: "MatrixLstmSizes") -> int:
        """Bytes at these sizes."""
        chunk, rows = min(sizes.chunk_size, sizes.positions), sizes.value + 1
        each = self.pairs * chunk * chunk + self.rows * chunk * rows + self.values * chunk * sizes.value + self.keys * chunk * sizes.key
        each += self.states * rows * sizes.key + self.numbers * chunk
        return SUMS_BYTES * sizes.batch * sizes.heads * each + self.shared * chunk * chunk


_CHUNK = _Live(3, 2, 1, 3, 1, 10, 1)
"""The point at which a chunk's decays are made."""
FORWARD_POINTS = (_CHUNK, _Live(2, 4, 0, 2, 1, 2), _Live(2, 2, 0, 2, 3, 2), _Live(2, 1, 0, 2, 4, 2))
BACKWARD_POINTS = (
    _CHUNK,
    _Live(5, 6, 0, 2, 2, 5, 8),
    _Live(4, 8, 0, 2, 2, 6, 4),
    _Live(4, 7, 0, 4, 2, 9, 4),
    _Live(4, 6, 0, 6, 2, 9, 4),
    _Live(4, 6, 0, 4, 5, 9, 4),
)
"""The points at which the operation can hold most, whichever sizes are large."""


class MatrixLstmSizes(NamedTuple):
    """Sizes of a call.

    Attributes:
        batch: Sequences.
        positions: Positions of a sequence.
        heads: Heads.
        key: Width of a key, and the columns of a state.
        value: Width of a value; a state has a row more, the normaliser.
        chunk_size: Positions computed at once.
        itemsize: Bytes of an element of q.
    """

    batch: int
    positions: int
    heads: int
    key: int
    value: int
    chunk_size: int
    itemsize: int

    @property
    def states(self) -> tuple[int, int, int, int, int]:
        """Shape of the saved states: the state at each chunk's start."""
        return self.batch, ceil_div(self.positions, self.chunk_size), self.heads, self.value + 1, self.key

    def work(self, seq_length: int) -> Work:
        """Ideal work in chunks of Q positions, full tiles included.

        Forward per token and head: q kᵀ 2·Q·K, its product with the values 2·Q·V, chunk states and reads of them 2·K·V each.
        Backward: twice the forward's products, and q kᵀ once more. Bytes: q, k, v, gates and y, and the fp32 states.

        Source: arXiv:2503.13427, section 3 (the chunkwise form); counting multiply-adds.
        """
        chunk, (heads, key, value) = min(self.chunk_size, seq_length), self[2:5]
        scores = heads * 2 * chunk * key
        forward = scores + heads * (2 * chunk * value + 4 * key * value)
        state = heads * key * (value + 1) * SUMS_BYTES // self.itemsize
        return chunked_work(seq_length, chunk, forward, scores, heads * (2 * key + value + 2), heads * value, state, self.itemsize)

    def kernels(self, _work: Work, _tokens: int) -> Passes | None:
        """None: there are no Triton kernels."""
        return None

    def plain(self, work: Work, tokens: int) -> Passes:
        """Chunk by chunk, a tile of chunk² for each head."""
        chunk = min(self.chunk_size, self.positions)
        return PLAIN.passes(work, tokens, chunk * self.heads, ceil_div(self.positions, chunk))

    def scratch_bytes(self) -> tuple[int, int]:
        """Bytes of the plain-torch operation, forward and backward, without operands, results and saved states."""
        forward, backward = (max([point.bytes_of(self) for point in points]) for points in (FORWARD_POINTS, BACKWARD_POINTS))
        return forward, backward
