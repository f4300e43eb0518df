"""A piece of Mamba-2's scan, for some heads, from an initial to the final state.

Two operations without an autograd formula, for a caller whose ranks share a sequence (`megarun.parallel.groups.relay_scans`). They write
into parts of tensors of the caller, so that groups of heads are processed one after another.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from megakernels.ops.ssd.op import SCAN

__all__ = ["ssd_piece", "ssd_piece_backward"]


def ssd_piece(
    state: Tensor,
    inputs: Sequence[Tensor],
    starts: Tensor | None,
    chunk_size: int,
    y: Tensor,
    states: Tensor,
    dt_limits: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """See `megakernels.ssd`.

    Args:
        state: [B, H, P, S] in the accumulation dtype, before the piece.
        inputs: x [B, t, H, P], dt [B, t, H], A_log [H], B and C [B, t, G, S], D [H] and dt_bias [H].
        starts: int32 [B, t] or None, relative to the piece's first position: negative if the document started before it.
        chunk_size: Positions computed at once.
        y: [B, t, H, P], written.
        states: [B, ceil(t / chunk_size), H, P, S], written: the state at each chunk's start.
        dt_limits: Smallest and largest Δ.

    Returns:
        The state after the piece, shaped like `state`.

    Scratch:
        As `ssd`, and results before they are copied to the caller's tensors; copies of saved states and starts that are views.

    Triton:
        The kernels of `ssd`.
    """
    last: Tensor = _piece(state, *inputs, starts, chunk_size, *dt_limits, y, states)
    return last


def ssd_piece_backward(
    grad_last: Tensor, grad_y: Tensor, inputs: Sequence[Tensor], starts: Tensor | None, states: Tensor, chunk_size: int,
    gradients: Sequence[Tensor | None], dt_limits: tuple[float, float] = (0.0, math.inf),
) -> Tensor:  # fmt: skip
    """The gradient of the state before the piece.

    Args:
        grad_last: Gradient of the state after the piece.
        grad_y: [B, t, H, P].
        inputs: x, dt, A_log, B, C, D and dt_bias.
        starts: See `ssd_piece`.
        states: States that `ssd_piece` wrote.
        chunk_size: See `ssd_piece`.
        gradients: Gradients of `inputs`, None for frozen ones; those of x, dt, B and C are overwritten, those of parameters accumulated.
        dt_limits: See `ssd_piece`.
    """
    grad_state: Tensor = _piece_backward(grad_last, grad_y, *inputs, starts, states, chunk_size, *dt_limits, *gradients)
    return grad_state


_piece, _piece_backward = SCAN.register_piece()
