"""Facts of attention whose dot products are of eight-bit operands, emulated in plain torch: scratch bytes."""

from typing import NamedTuple

from megakernels.ops.attention.facts import AttentionSizes
from megakernels.ops.fp8_linear.facts import VALUE_BYTES, WHOLE, making_bytes

WEIGHT_FACTOR = 256.0
"""The factor of the softmax' weights: the largest power of two at which the weight one is still within e4m3's range."""
NUM_SCALES = 3
"""Scales of queries, keys and values."""
NUMBERS_OF_ROW = 4
"""Numbers of a query and head that a block holds."""


class LowAttention(NamedTuple):
    """Sizes of a call.

    Attributes:
        batch: Sequences.
        positions: Positions of a sequence.
        heads: Query heads.
        groups: Key heads.
        width: Width of a query and a key.
        value_width: Width of a value.
        itemsize: Bytes of an element of queries, keys and values.
        window: Positions that a query sees; None for all before it.
        packed: True if rows hold several documents.
        capped: True if scores have a cap.
    """

    batch: int
    positions: int
    heads: int
    groups: int
    width: int
    value_width: int
    itemsize: int
    window: int | None
    packed: bool
    capped: bool

    @property
    def forward_bytes(self) -> int:
        """Bytes inside the forward, in addition to its results."""
        most = 0
        for queries, keys in self._blocks:
            scores = VALUE_BYTES * queries * self._heads * keys
            outputs = VALUE_BYTES * queries * self._heads * self.value_width
            weights = scores + max(scores // VALUE_BYTES, outputs) + self._numbers(queries)
            most = max(most, self._scoring(queries, keys), weights)
        return max(self._quantising, self._values + most)

    @property
    def backward_bytes(self) -> int:
        """Bytes inside the backward, in addition to the gradients of queries, keys and values."""
        tokens, keys_width = self.batch * self.positions, self.groups * (self.width + self.value_width)
        given = tokens * self.heads * self.value_width
        sums, later = VALUE_BYTES * tokens * keys_width, self.itemsize * tokens * keys_width
        making = max(making_bytes(tokens * self.heads, self.value_width, WHOLE, self.itemsize, fused=False), VALUE_BYTES * given)
        first = self._values + given + making - later - self.itemsize * tokens * self.heads * self.width
        held = self._values + VALUE_BYTES * given + sums
        most = max(self._gradients(queries, keys) for queries, keys in self._blocks)
        return max(first, held + most - later, held)

    def _gradients(self, queries: int, keys: int) -> int:
        """Weights of a block and the gradient of its scores, and the products of both."""
        rows, of_keys = VALUE_BYTES * queries * self._heads, VALUE_BYTES * self.batch * self.groups * keys
        scores, copied = rows * keys, rows * (self.heads > self.groups)
        of_queries = max(2 * rows * self.width, copied * self.width + of_keys * self.width)
        bent = self.capped * (scores + copied * self.width)
        both = 2 * scores + max(scores, bent, copied * self.value_width, of_queries)
        of_values = scores + (copied + of_keys) * self.value_width
        return max(self._scoring(queries, keys), max(both, of_values) + self._numbers(queries))

    def _scoring(self, queries: int, keys: int) -> int:
        """Flags of the keys that a query may not see, the block's queries if heads share keys, and their scores."""
        pairs, windowed = queries * keys, self.window is not None
        made = pairs * (1 + windowed)
        flags = self.batch * pairs if self.packed else pairs
        made = max(made, pairs + 2 * flags) if self.packed else made
        rows = queries * self._heads * self.width * (self.heads > self.groups)
        return max(made, flags + VALUE_BYTES * (rows + queries * self._heads * keys))

    def _numbers(self, queries: int) -> int:
        return NUMBERS_OF_ROW * VALUE_BYTES * queries * self._heads

    @property
    def _heads(self) -> int:
        return self.batch * self.heads

    @property
    def _values(self) -> int:
        """The values of queries, keys and values."""
        tokens = VALUE_BYTES * self.batch * self.positions
        return tokens * (self.heads * self.width + self.groups * (self.width + self.value_width))

    @property
    def _quantising(self) -> int:
        """Most inside the making of one of the copies."""
        tokens = self.batch * self.positions
        rows = ((self.heads, self.width), (self.groups, self.width), (self.groups, self.value_width))
        return max(making_bytes(tokens * count, width, WHOLE, self.itemsize, fused=False) for count, width in rows)

    @property
    def _blocks(self) -> set[tuple[int, int]]:
        """Queries and keys of the largest blocks: the last full block, and the last block."""
        sizes = self.batch, self.positions, self.positions, self.heads, self.groups, self.width, self.value_width, self.itemsize
        rows = AttentionSizes(*sizes).plain_rows
        whole = max(0, (self.positions // rows - 1) * rows)
        last = (self.positions - 1) // rows * rows
        found = {(min(rows, self.positions - start), min(self.positions, start + rows)) for start in (whole, last)}
        return {(queries, keys if self.window is None else min(keys, self.window + queries - 1)) for queries, keys in found}
