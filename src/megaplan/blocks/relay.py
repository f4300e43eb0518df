"""Storages that M and R keep and hold if a CP group shares a sequence, two pieces per rank (docs/concepts/context-parallelism.md).

A convolution keeps the inputs before each piece. A recurrence saves its states piece by piece, and holds a little state on its way.
"""

from __future__ import annotations

from math import prod

from megaplan.blocks.dims import Dims
from megaplan.blocks.ops import Op
from megaplan.blocks.storages import Shapes, storages
from megaplan.columns import Column
from megaplan.dtypes import DType

PIECES = 2
HANDED, ARRIVING = "handed", "arriving"
"""Names of the storages of state on its way."""


def num_lanes(num_heads: int, cp: int) -> int:
    """Into how many lanes a recurrence's heads (or groups of heads) are cut, so that the ranks of a CP group work at the same time.

    With n lanes a rank works in 2 · n of the 2 · n + 2 · cp − 2 turns that the walk over the pieces takes; more lanes than twice the ranks
    would gain little and make small kernels.
    """
    return max(lanes for lanes in range(1, min(num_heads, 2 * cp) + 1) if num_heads % lanes == 0)


def handed_storages(dims: Dims, num_heads: int, lanes: int, *widths: int) -> Shapes:
    """Lanes of state held at the highest moment of a walk, beside what is kept: `handed`, and `arriving`, which another rank has sent.

    Each rank holds what the walk begins with and the lane that is being made; one that sends on what it makes also the lane before that,
    and the one where the walk turns all the lanes before that, until it has the last one.
    """
    state, before = dims.batch * num_heads // lanes * prod(widths), lanes - 1 if dims.is_last_cp_rank else 1
    return {
        **storages(dims.stat_dtype, Column.ACTIVATIONS, {HANDED: (before + 2, state)}),
        **storages(dims.stat_dtype, Column.COMMUNICATION, {ARRIVING: (state,)}),
    }


def piece_positions(dims: Dims) -> int:
    """Positions of a sequence, or of a piece of it where it is shared, that a recurrence takes at once."""
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
