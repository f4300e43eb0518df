"""Facts of the M²RNN recurrence: H heads with states of K rows and V columns; all heads share q and k (arXiv:2603.14360)."""

from collections.abc import Iterator
from typing import NamedTuple

from megakernels.facts import (
    SUMS_BYTES,
    FixedRatios,
    KernelBytes,
    KernelPass,
    KindShare,
    Passes,
    PlainPass,
    PlainPasses,
    Work,
    ceil_div,
)

LARGEST_KEYS, LARGEST_VALUES = 128, 16
"""Largest sides of a head's state; larger states do not fit the backward's registers and use the reference."""
SPAN_BYTES = 512 << 20
"""Scratch bytes for a span: its states, their tanh and gradients, and the partial gradients of q and k."""
M2RNN_PLAIN_POSITIONS = 8
"""Positions per iteration of plain torch's loop."""
PASSES = FixedRatios(
    KernelPass(products=533, kinds=(KindShare("m2rnn.forward"),)),  # TF32, of three parts
    KernelPass(1150, 16, 544, (KindShare("m2rnn.backward", launches=16),)),  # launches per span when the steps were profiled; today 7 and 6
    PlainPasses(PlainPass(0, 41, 27), PlainPass(0, 162, 56), is_fp32=True),
)

TILE_POSITIONS = 16
"""Most positions of one program that sums gradients of the parameters."""


class Span(NamedTuple):
    """Segments [first, stop) of one launch of the backward, and their positions."""

    first: int
    stop: int
    positions: slice


class RecurrenceSizes(NamedTuple):
    """Sizes of a call; `itemsize` is the bytes of an element of q."""

    batch: int
    positions: int
    heads: int
    keys: int
    values: int
    save_every: int
    itemsize: int

    @property
    def accepted(self) -> bool:
        """True if the Triton kernels take these sizes."""
        return self.keys <= LARGEST_KEYS and self.values <= LARGEST_VALUES

    @property
    def segments(self) -> int:
        """Segments of a sequence."""
        return ceil_div(self.positions, self.save_every)

    @property
    def states(self) -> tuple[int, int, int, int, int]:
        """Shape of the saved states: the state at each segment's start, and the last."""
        return self.batch, self.segments + 1, self.heads, self.keys, self.values

    def work(self, seq_length: int) -> Work:
        """Ideal work of Z = tanh(H W + k vᵀ), H' = f H + (1 − f) Z, y = qᵀ H' + D ⊙ v.

        Forward per token and head: H W 2·K·V², k vᵀ 2·K·V, qᵀ H' 2·K·V. Backward: dH 2·K·V², dk, dv, dq and dH' 2·K·V each, dW 2·K·V²; and
        H W + k vᵀ once more, because only every `save_every`-th state is kept. Bytes: q, k, v, f, y, and the kept fp32 states.

        Source: arXiv:2603.14360, its state update; counting multiply-adds.
        """
        heads, key, value = self.heads, self.keys, self.values
        mapped, outer = 2 * key * value * value * heads, 2 * key * value * heads
        inputs, width = 2 * key + heads * value + heads, heads * value
        states = (ceil_div(seq_length, self.save_every) + 1) * heads * key * value * SUMS_BYTES
        written, moved = ceil_div(states, seq_length), ceil_div(2 * states, seq_length)
        return Work(
            mapped + 2 * outer,
            2 * mapped + 5 * outer,
            mapped,
            mapped + outer,
            moved_forward=(inputs + width) * self.itemsize + written,
            moved_input=(2 * inputs + width) * self.itemsize + moved - written,
        )

    def kernels(self, work: Work, tokens: int) -> Passes | None:
        """One kernel forward; backward three for each span, whose parts are summed."""
        return PASSES.kernels(work, tokens) if self.accepted else None

    def plain(self, work: Work, tokens: int) -> Passes | None:
        """The state, position by position."""
        assert PASSES.torch is not None
        return PASSES.torch.passes(work, tokens, self.heads * self.keys * self.values, ceil_div(self.positions, M2RNN_PLAIN_POSITIONS))

    def state_flops(self) -> int:
        """FLOPs of the products of states and maps."""
        return 2 * self.batch * self.positions * self.heads * self.keys * self.values * self.values

    @property
    def tile(self) -> int:
        """Positions of one program that sums gradients of the parameters."""
        return min(TILE_POSITIONS, self.save_every)

    @property
    def segment_tiles(self) -> int:
        """Tiles of a segment."""
        return ceil_div(self.save_every, self.tile)

    @property
    def share(self) -> int:
        """Sums of one program for a head's map, D, dt_bias and A_log."""
        return self.values * self.values + self.values + 2

    @property
    def position_bytes(self) -> int:
        """Scratch bytes of a position of a span: state, tanh and gradient of all heads, and parts of the gradients of q and k."""
        return SUMS_BYTES * self.batch * self.heads * self.keys * (3 * self.values + 2)

    @property
    def span_segments(self) -> int:
        """Segments of a span, which fits in the scratch; at least one."""
        return max(1, SPAN_BYTES // max(1, self.save_every * self.position_bytes))

    @property
    def longest_span(self) -> int:
        """Positions of the longest span: the last span, or a full one before it."""
        before = max(0, self.segments - self.span_segments)
        return max(self.positions - before * self.save_every, min(self.span_segments, before) * self.save_every)

    def spans(self) -> Iterator[Span]:
        """The spans of a sequence, from the last."""
        length = self.span_segments
        for stop in range(self.segments, 0, -length):
            first = max(0, stop - length)
            yield Span(first, stop, slice(first * self.save_every, min(stop * self.save_every, self.positions)))

    def forward_bytes(self) -> KernelBytes:
        """Bytes of the forward kernel, without copies of operands; its last state is one of the saved ones."""
        state = SUMS_BYTES * self.batch * self.heads * self.keys * self.values
        y = self.batch * self.positions * self.heads * self.values * self.itemsize
        return KernelBytes(y + (self.segments + 1) * state, 0, 0)

    def backward_bytes(self, parameters: tuple[int, int, int, int], copied: int = 0) -> KernelBytes:
        """Bytes of the backward kernels, without copies of rows.

        The peak is in a span, while its kernels run or its parts are summed, or where the shares of the parameters' gradients are summed.

        Args:
            parameters: Bytes of an element of the gradients of the map, D, dt_bias and A_log.
            copied: Bytes of dense copies of the parameters and starts.
        """
        heads, rows = self.heads, self.batch * self.positions
        counts = heads * self.values * self.values, heads * self.values, heads, heads
        gradients = sum(size * count for size, count in zip(parameters, counts, strict=True))
        state = SUMS_BYTES * self.batch * heads * self.keys * self.values
        length, parts = self.longest_span if state else 0, 2 * SUMS_BYTES * self.batch * self.keys
        shares = SUMS_BYTES * self.batch * self.segments * self.segment_tiles * heads * self.share
        span = max(self.position_bytes * length, parts * length * (heads + 1))
        summed = SUMS_BYTES * heads * self.share
        results = self.itemsize * rows * (2 * self.keys + heads * self.values + heads) + gradients
        return KernelBytes(results, state, copied + max(shares + max(span - gradients, summed - gradients), summed))
