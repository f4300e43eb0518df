"""Storages: bytes, budget column and composition by name.

Storages of blocks come first, then those that M and R keep and hold if a CP group shares a sequence (two pieces per rank,
docs/concepts/context-parallelism.md), then bytes that operations allocate for their Triton kernels.
"""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from megakernels.facts import KernelBytes, KernelScratch
from megaplan.blocks.ops import INPUT, OUTPUT, Dims, Op, partial_gradient
from megaplan.columns import Basis, Column
from megaplan.dtypes import DType

Stored = tuple[int, Column, tuple[int, ...], DType, Basis]
"""A storage: its bytes, their column and composition. A plain tuple: an evaluation makes hundreds."""
Shapes = dict[str, Stored]


def storages(dtype: DType, column: Column, shapes: Mapping[str, tuple[int, ...]], basis: Basis = Basis.EXACT) -> Shapes:
    """Named storages of one dtype and column."""
    size = dtype.bytes
    return {name: (prod(shape) * size, column, shape, dtype, basis) for name, shape in shapes.items()}


def residual(shapes: Shapes) -> Shapes:
    """Add the block's input under its name, shaped as its output."""
    shapes[INPUT] = shapes[OUTPUT]
    return shapes


def mixer_storages(dims: Dims, shapes: Mapping[str, tuple[int, ...]], statistics: Mapping[str, tuple[int, ...]]) -> Shapes:
    """Storages of a mixer between its input and the block's output.

    Args:
        dims: Local sizes.
        shapes: Further storages in the dtype of activations.
        statistics: Further statistics and states.
    """
    stream = dict.fromkeys(("normed", "o", "out"), dims.residual)
    return {
        **storages(dims.dtype, Column.ACTIVATIONS, {**shapes, **stream}),
        **storages(dims.stat_dtype, Column.ACTIVATIONS, {"rstd": dims.residual[:2], **statistics}),
        **storages(dims.dtype, Column.COMMUNICATION, dict.fromkeys(("gathered", partial_gradient("gathered"), "partial"), dims.gathered)),
    }


PIECES = 2
HANDED, ARRIVING = "handed", "arriving"
"""Names of the storages of state on its way."""


def num_lanes(num_heads: int, cp: int) -> int:
    """Number of lanes into which a recurrence's heads (or groups of heads) are divided, so that all ranks of a CP group work at once.

    With n lanes a rank works in 2 · n of the 2 · n + 2 · cp − 2 turns that the walk over the pieces takes; more than twice as many lanes as
    ranks would gain little and make small kernels.
    """
    return max(lanes for lanes in range(1, min(num_heads, 2 * cp) + 1) if num_heads % lanes == 0)


def handed_storages(dims: Dims, num_heads: int, lanes: int, *widths: int) -> Shapes:
    """Lanes of state held at the peak of a relay, in addition to saved ones: `handed`, and `arriving`, which another rank has sent.

    Each rank holds the initial state and the lane in progress; a rank that sends its result also holds the previous lane, and the rank at
    which the relay reverses holds all previous lanes until the last.
    """
    state, before = dims.batch * num_heads // lanes * prod(widths), lanes - 1 if dims.is_last_cp_rank else 1
    return {
        **storages(dims.stat_dtype, Column.ACTIVATIONS, {HANDED: (before + 2, state)}),
        **storages(dims.stat_dtype, Column.COMMUNICATION, {ARRIVING: (state,)}),
    }


def piece_positions(dims: Dims) -> int:
    """Positions of a sequence, or under CP of a piece, that a recurrence processes at once."""
    return dims.tokens // PIECES if dims.cp > 1 else dims.tokens


def of_pieces(dims: Dims, states: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the states [B, number, ...] of all pieces of a sequence, from those of one."""
    batch, number, *widths = states
    return batch, number * (PIECES if dims.cp > 1 else 1), *widths


def convolution(name: str, reads: str, makes: str, params: tuple[str, ...], *, handed: bool) -> tuple[Op, ...]:
    """A causal convolution, which keeps its input; under CP also the inputs before each piece, which the ranks exchange."""
    if not handed:
        return (Op(name, (reads,), (makes,), keeps=(reads,), params=params),)
    before, ends, moved = f"{makes}_before", f"{makes}_ends", f"{makes}_moved"
    return (
        Op(exchange(name), (reads,), (before, ends), grads=()),
        Op(name, (reads, before), (makes,), keeps=(reads, before), params=params, grads=(reads,), fetches=(moved, ends)),
    )


def exchange(name: str) -> str:
    """The exchange before the convolution of this name."""
    return f"exchange {name}"


def exchanged_storages(dims: Dims, made: str, kernel: int, channels: int) -> Shapes:
    """Storages of a convolution: the inputs before each piece, those of all ranks at once, and their gradients, sent and received."""
    ends = dims.batch, PIECES, kernel - 1, channels
    return {
        **storages(dims.dtype, Column.ACTIVATIONS, {f"{made}_before": ends, f"{made}_moved": (2, *ends)}),
        **storages(dims.dtype, Column.COMMUNICATION, {f"{made}_ends": (dims.cp, *ends)}),
    }


def sums_separately(dims: Dims, parameters: DType) -> bool:
    """True if parameters' gradients are sums of pieces in a wider dtype, which are narrowed when all pieces are done."""
    return dims.cp > 1 and parameters is not dims.stat_dtype


INSIDE, INSIDE_BACKWARD = "inside", "inside_backward"
"""Names of the storages that represent it."""


class Lane(NamedTuple):
    """Sizes of one run: positions, heads, groups, number of lanes, and the document starts that are copied because they are a view."""

    positions: int
    heads: int
    groups: int
    lanes: int
    copied_starts: int

    def copied_states(self, dims: Dims, num_states: int, nbytes: int) -> int:
        """Bytes of the copied part (of a piece and lane) of saved states; 0 if the part is contiguous."""
        return nbytes if dims.batch > 1 or (self.lanes > 1 and num_states > 1) else 0

    def inside(
        self, dims: Dims, forward: KernelBytes, backward: KernelBytes, num_states: int, state_bytes: int, *, with_starts: bool = True
    ) -> KernelScratch:
        """Bytes inside a scan, which copies document starts and saved states that are views.

        Args:
            dims: Local sizes.
            forward: Bytes of one run's forward.
            backward: Bytes of one run's backward.
            num_states: Saved states of the run.
            state_bytes: Bytes of one of them.
            with_starts: True to add the copies of document starts; False if `forward` and `backward` have them.
        """
        if dims.cp == 1:
            return KernelScratch(forward.last + forward.scratch, backward.last + backward.scratch)
        starts = self.copied_starts if with_starts else 0
        copied = self.copied_states(dims, num_states, num_states * state_bytes) + starts
        return KernelScratch(forward.results + forward.scratch + starts, backward.results + backward.scratch + copied)


def lane_of(dims: Dims, heads: int, groups: int) -> Lane:
    """Sizes of one run on a rank with these heads and groups of heads."""
    if dims.cp == 1:
        return Lane(dims.tokens, heads, groups, 1, 0)
    lanes, positions = num_lanes(groups, dims.cp), dims.tokens // PIECES
    starts = dims.batch * positions * DType.INT32.bytes if dims.packed and dims.batch > 1 else 0
    return Lane(positions, heads // lanes, groups // lanes, lanes, starts)


def inside_storages(dims: Dims, inside: KernelScratch | None) -> Shapes:
    """The storages that represent an operation's scratch, counted in elements of activations; none for plain torch."""
    if inside is None:
        return {}
    counts = {INSIDE: (inside.forward // dims.dtype.bytes,), INSIDE_BACKWARD: (inside.backward // dims.dtype.bytes,)}
    return storages(dims.dtype, Column.WORKSPACE, counts)


def scan_op(
    name: str,
    inputs: tuple[str, ...],
    makes: str,
    saved: tuple[str, ...],
    params: tuple[str, ...],
    *,
    handed: bool,
    summed: bool,
    inside: tuple[bool, bool],
    fetches: tuple[str, ...] = (),
) -> Op:
    """A scan, which keeps its inputs and its own saved tensors.

    Args:
        name: Name of the operation.
        inputs: Storages that it reads.
        makes: Output of the scan.
        saved: Further results, which it keeps.
        params: Parameters of the scan.
        handed: True if a CP group hands its state from piece to piece.
        summed: True if parameters' gradients are sums of pieces in a wider dtype.
        inside: True for each direction whose kernels hold scratch.
        fetches: Storages that its backward makes for itself, in addition to the state on its way and the scratch.
    """
    state = (HANDED, ARRIVING) if handed else ()
    forward, backward = (((each,) if there else ()) for each, there in zip((INSIDE, INSIDE_BACKWARD), inside, strict=True))
    return Op(
        name,
        inputs,
        (makes, *saved, *state, *forward),
        keeps=(*inputs, *saved),
        params=params,
        fetches=(*state, *fetches, *backward),
        sums=("summed",) if summed else (),
    )
