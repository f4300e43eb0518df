"""What M and R keep and hold where a CP group shares a sequence, each rank with two pieces of it (docs/concepts/context-parallelism.md).

A convolution keeps the inputs before each piece. A recurrence saves its states piece by piece, and holds a little state on its way.
"""

from __future__ import annotations

from math import prod

from megaplan.dtypes import DType
from megaplan.hosts.megarun.ops import Op

PIECES = 2


def num_lanes(num_heads: int, cp: int) -> int:
    """Into how many lanes a recurrence's heads (or groups of heads) are cut, so that the ranks of a CP group work at the same time.

    With n lanes a rank works in 2 · n of the 2 · n + 2 · cp − 2 turns that the walk over the pieces takes; more lanes than twice the ranks
    would gain little and make small kernels.
    """
    return max(lanes for lanes in range(1, min(num_heads, 2 * cp) + 1) if num_heads % lanes == 0)


def handed_shape(batch: int, num_heads: int, lanes: int, *widths: int) -> tuple[int, ...]:
    """State held at once beside what is kept, at most: all lanes on the rank where the walk turns, one that arrives and one that leaves.

    A rank that sends holds four: what the walk begins with, the lane sent last, one that arrives and one that is made.
    """
    return (max(lanes, 2) + 2, batch * num_heads // lanes * prod(widths))


def piecewise(num_positions: int, per_state: int, *, handed: bool) -> int:
    """States saved one every `per_state` positions, of each piece on its own where the sequence is shared."""
    pieces = PIECES if handed else 1
    return pieces * -(-num_positions // pieces // per_state)


def convolution(name: str, reads: str, makes: str, params: tuple[str, ...], *, handed: bool) -> Op:
    """A causal convolution: keeps its input, and under CP the inputs before each piece, under the name `before(makes)`."""
    kept = (before(makes),) if handed else ()
    return Op(name, (reads,), (makes, *kept), keeps=(reads, *kept), params=params)


def before(made: str) -> str:
    """The inputs before each piece of the convolution that makes a storage."""
    return f"{made}_before"


def summed_shape(elements: int, parameters: DType, stored: DType) -> tuple[int, ...]:
    """What parameters' gradients take beside their own size while they are sums of pieces in fp32, in elements of `stored`."""
    return (elements * (DType.FP32.bytes - parameters.bytes) // stored.bytes,)
