"""Facts of Mamba-1's selective scan: channels with a state of S numbers each (arXiv:2312.00752, algorithm 2)."""

from typing import NamedTuple

from megakernels.facts import ISSUED, SUMS_BYTES, KernelBytes, Pass, Passes, PlainPass, PlainPasses, Work, block_of, ceil_div

LARGEST_STATE = 16
"""Numbers of a channel's state; more do not fit the backward's registers and use the reference."""
SELECTIVE_FORWARD_CHANNELS, SELECTIVE_BACKWARD_CHANNELS = 32, 128
"""Channels of a program. Gradients of B and C are written once per program of the backward, as sums over its channels."""
WARP = 32
"""Least channels of a program."""
GROUP_POSITIONS = 2
"""Positions of which the backward keeps one state in memory."""
INSTRUCTIONS = 228, 1547
"""Instructions of the forward and the backward, issued for a position of a channel of 16 states (`tests/kernels/sm90/issue.py`)."""
SELECTIVE_PLAIN_POSITIONS = 32
"""Positions per iteration of plain torch's loop."""
PLAIN = PlainPasses(PlainPass(0, 46, 84), PlainPass(0, 158, 254), is_fp32=True)


class SelectiveSizes(NamedTuple):
    """Sizes of a call; `itemsize` is the bytes of an element of x."""

    batch: int
    positions: int
    channels: int
    state: int
    save_every: int
    itemsize: int

    @property
    def accepted(self) -> bool:
        """True if the Triton kernels take these sizes."""
        return 0 < self.state <= LARGEST_STATE

    @property
    def segments(self) -> int:
        """Segments of a sequence."""
        return ceil_div(self.positions, self.save_every)

    @property
    def states(self) -> tuple[int, int, int, int]:
        """Shape of the saved states: the state at each segment's start."""
        return self.batch, self.segments, self.channels, self.state

    @property
    def groups(self) -> int:
        """Groups of positions of a segment."""
        return ceil_div(min(self.save_every, self.positions), GROUP_POSITIONS)

    @property
    def blocks(self) -> int:
        """Programs of the backward that share a sequence."""
        return ceil_div(self.channels, tile_of(self.channels, self.state, SELECTIVE_BACKWARD_CHANNELS)["CHANNELS"])

    def work(self, seq_length: int) -> Work:
        """Ideal work of h' = a h + (Δ x) B, y = C h', elementwise in every channel's state.

        Forward per token and channel: a h + (Δ x) B 3·S, C h' 2·S. Backward: dh' += C dy and dC 2·S each, its way through a, (Δ x) and B
        5·S, da 2·S; and h' once more, because only every `save_every`-th state is kept. Bytes: x, Δ and y of a channel, B and C, and the
        kept fp32 states.

        Source: arXiv:2312.00752, algorithm 2; counting multiplications and additions.
        """
        numbers = self.channels * self.state
        forward, recomputed, inputs = 5 * numbers, 3 * numbers, 2 * self.channels + 2 * self.state
        written = ceil_div(ceil_div(seq_length, self.save_every) * numbers * SUMS_BYTES, seq_length)
        return Work(
            forward,
            11 * numbers + recomputed,
            0,
            recomputed,
            moved_forward=(inputs + self.channels) * self.itemsize + written,
            moved_input=(2 * inputs + self.channels) * self.itemsize + written,
        )

    def kernels(self, _work: Work, _tokens: int) -> Passes | None:
        """One kernel each way, bound by the instructions that it issues.

        Backward x, Δ and B are read twice, every second state is written for each segment and read; parts of the gradients of B and C are
        written for each block of channels, summed and copied; and so are the parameters'.
        """
        if not self.accepted:
            return None
        rows, segments, blocks = self.batch * self.positions, self.segments, self.blocks
        x, shared, of_keys = rows * self.channels * self.itemsize, rows * self.state * self.itemsize, rows * self.state * SUMS_BYTES
        last = self.batch * self.channels * self.state * SUMS_BYTES
        issued = rows * self.channels * self.state * ISSUED // 16
        forward = 3 * x + 2 * shared + (segments + 1) * last
        backward = 7 * x + 4 * shared + (segments + 1) * last + 2 * segments * self.groups * last + 4 * (blocks + 1) * of_keys + 2 * last
        return Pass(forward, INSTRUCTIONS[0] * issued, 1), Pass(backward, INSTRUCTIONS[1] * issued, 9)

    def plain(self, work: Work, tokens: int) -> Passes:
        """The states of all channels, some positions at a time."""
        return PLAIN.passes(work, tokens, self.channels * self.state, ceil_div(self.positions, SELECTIVE_PLAIN_POSITIONS))

    def repeated_bytes(self) -> int:
        """Bytes of the states of a segment that backward makes again and keeps."""
        tile = tile_of(self.channels, self.state, SELECTIVE_BACKWARD_CHANNELS)
        return SUMS_BYTES * self.batch * self.blocks * self.groups * tile["CHANNELS"] * tile["STATES"]

    def forward_bytes(self, copied: int = 0) -> KernelBytes:
        """Bytes of the forward kernel; `copied`: bytes of dense copies of operands."""
        last = SUMS_BYTES * self.batch * self.channels * self.state
        return KernelBytes(self.batch * self.positions * self.channels * self.itemsize + self.segments * last, last, copied)

    def backward_bytes(self, parameter_bytes: int, copied: int = 0) -> KernelBytes:
        """Bytes of the backward kernel.

        The parts of the gradients of B and C, states of a segment and sums of parameters are there throughout; with them either dense
        copies of operands (`copied`), or one sum over programs or sequences.
        """
        rows = self.batch * self.positions
        of_keys, of_parameters = SUMS_BYTES * rows * self.state, SUMS_BYTES * self.channels * (self.state + 2)
        held = 2 * self.blocks * of_keys + self.repeated_bytes() + self.batch * of_parameters
        results = self.itemsize * 2 * rows * (self.channels + self.state) + parameter_bytes
        last = SUMS_BYTES * self.batch * self.channels * self.state
        return KernelBytes(results, last, held + max(copied, of_keys, of_parameters))


def tile_of(channels: int, state: int, most: int) -> dict[str, int]:
    """Sides of a tile of states, at most `most` channels."""
    return {"CHANNELS": min(most, block_of(channels, WARP)), "STATES": block_of(state)}
