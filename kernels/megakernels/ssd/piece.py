"""A piece of Mamba-2's scan, for some heads: it begins with a state and hands the last one on.

Two operations without an autograd formula, for a caller whose ranks share a sequence (`megarun.parallel.groups.relay`). They write into
parts of tensors that the caller has made, so that heads can follow one another.
"""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.library import custom_op

from megakernels._common import state_scratch
from megakernels.ssd.choice import chooses_kernel, chosen
from megakernels.ssd.sizes import backward_inside, forward_inside

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
    """See `megakernels.ssd.ssd`.

    Args:
        state: [B, H, P, S] in the accumulation dtype, before the piece.
        inputs: x [B, t, H, P], dt [B, t, H], A_log [H], B and C [B, t, G, S], D [H] and dt_bias [H].
        starts: int32 [B, t] or None, counted from the piece's first position: negative where a document began before.
        chunk_size: Positions computed at once.
        y: [B, t, H, P], written.
        states: [B, ceil(t / chunk_size), H, P, S], written: the state at each chunk's start.
        dt_limits: Smallest and largest Δ.

    Returns:
        The state after the piece, as `state`.
    """
    last: Tensor = _piece(state, *inputs, starts, chunk_size, *dt_limits, y, states)
    return last


def ssd_piece_backward(
    grad_last: Tensor,
    grad_y: Tensor,
    inputs: Sequence[Tensor],
    starts: Tensor | None,
    states: Tensor,
    chunk_size: int,
    gradients: Sequence[Tensor],
    dt_limits: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """The gradient of the state before the piece.

    Args:
        grad_last: Of the state after it.
        grad_y: [B, t, H, P].
        inputs: x, dt, A_log, B, C, D and dt_bias.
        starts: As in `ssd_piece`.
        states: As `ssd_piece` wrote them.
        chunk_size: As in `ssd_piece`.
        gradients: Of `inputs`; those of x, dt, B and C are written, those of parameters added to.
        dt_limits: As in `ssd_piece`.
    """
    grad_state: Tensor = _piece_backward(grad_last, grad_y, *inputs, starts, states, chunk_size, *dt_limits, *gradients)
    return grad_state


@custom_op("megakernels::ssd_piece", mutates_args=("y", "states"))
def _piece(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    starts: Tensor | None,
    chunk_size: int,
    dt_min: float,
    dt_max: float,
    y: Tensor,
    states: Tensor,
) -> Tensor:
    made, at_chunks, last = chosen(x, B, C).forward(state, x, dt, A_log, B, C, D, dt_bias, starts, chunk_size, dt_min, dt_max)
    y.copy_(made)
    states.copy_(at_chunks)
    after: Tensor = last.contiguous()
    return after


GRADIENTS = ("grad_x", "grad_dt", "grad_A_log", "grad_B", "grad_C", "grad_D", "grad_dt_bias")


@custom_op("megakernels::ssd_piece_backward", mutates_args=GRADIENTS)
def _piece_backward(
    grad_last: Tensor,
    grad_y: Tensor,
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    starts: Tensor | None,
    states: Tensor,
    chunk_size: int,
    dt_min: float,
    dt_max: float,
    grad_x: Tensor,
    grad_dt: Tensor,
    grad_A_log: Tensor,
    grad_B: Tensor,
    grad_C: Tensor,
    grad_D: Tensor,
    grad_dt_bias: Tensor,
) -> Tensor:
    given = (x, dt, A_log, B, C, D, dt_bias, starts, states, chunk_size, dt_min, dt_max)
    found, grad_state = chosen(x, B, C).backward(grad_last, grad_y, *given)
    totals = grad_x, grad_dt, grad_A_log, grad_B, grad_C, grad_D, grad_dt_bias
    for total, part in zip(totals, found, strict=True):
        if part.dim() == 1:
            total.add_(part)
        else:
            total.copy_(part)
    before: Tensor = grad_state.contiguous()
    return before


@_piece.register_fake
def _(state: Tensor, *_: Any) -> Tensor:
    return state.new_empty(state.shape)


@_piece_backward.register_fake
def _(grad_last: Tensor, *_: Any) -> Tensor:
    return grad_last.new_empty(grad_last.shape)


def _of_piece(state: Tensor, *operands: Any) -> int:
    *inputs, starts, chunk_size, _, _, _, _ = operands
    if not chooses_kernel(inputs[0], inputs[3], inputs[4]):
        return 0
    inside = forward_inside(state, inputs, starts, chunk_size)
    return inside.results + inside.scratch  # copied to where the caller wants them


def _of_piece_backward(grad_last: Tensor, grad_y: Tensor, *operands: Any) -> int:
    *inputs, starts, states, chunk_size, _, _ = operands[: -len(GRADIENTS)]
    if not chooses_kernel(inputs[0], inputs[3], inputs[4]):
        return 0
    inside = backward_inside(grad_last, grad_y, inputs, starts, states, chunk_size)
    return inside.results + inside.scratch


state_scratch(_piece, _of_piece)
state_scratch(_piece_backward, _of_piece_backward)
