"""A piece of the M²RNN recurrence, for some heads: it begins with a state and hands the last one on.

Two operations without an autograd formula, for a caller whose ranks share a sequence (`megarun.parallel.groups.relay`). They write into
parts of tensors that the caller has made, so that heads can follow one another.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from megakernels._common import state_scratch
from megakernels.m2rnn.choice import chooses_kernel, chosen
from megakernels.m2rnn.sizes import backward_inside, forward_inside

__all__ = ["m2rnn_piece", "m2rnn_piece_backward"]


def m2rnn_piece(state: Tensor, inputs: Sequence[Tensor], starts: Tensor | None, save_every: int, y: Tensor, states: Tensor) -> Tensor:
    """See `megakernels.m2rnn.m2rnn`.

    Args:
        state: [B, H, K, V] in the accumulation dtype, before the piece.
        inputs: q and k [B, t, K], v [B, t, H, V], f [B, t, H], state_map [H, V, V], D [H, V], dt_bias [H] and A_log [H].
        starts: int32 [B, t] or None, counted from the piece's first position: negative where a document began before.
        save_every: Positions of a segment.
        y: [B, t, H, V], written.
        states: [B, ceil(t / save_every) + 1, H, K, V] in the accumulation dtype, written: before each segment and after the last.

    Returns:
        The state after the piece, as `state`.
    """
    last: Tensor = _piece(state, *inputs, starts, save_every, y, states)
    return last


def m2rnn_piece_backward(
    grad_last: Tensor,
    grad_y: Tensor,
    inputs: Sequence[Tensor],
    starts: Tensor | None,
    states: Tensor,
    save_every: int,
    gradients: Sequence[Tensor],
) -> Tensor:
    """The gradient of the state before the piece.

    Args:
        grad_last: Of the state after it.
        grad_y: [B, t, H, V].
        inputs: q, k, v, f, state_map, D, dt_bias and A_log.
        starts: As in `m2rnn_piece`.
        states: As `m2rnn_piece` wrote them.
        save_every: As in `m2rnn_piece`.
        gradients: Of `inputs`; those of v and f are written, those of q and k, which all heads share, and of parameters added to.
    """
    grad_state: Tensor = _piece_backward(grad_last, grad_y, *inputs, starts, states, save_every, *gradients)
    return grad_state


@custom_op("megakernels::m2rnn_piece", mutates_args=("y", "states"))
def _piece(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    state_map: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    starts: Tensor | None,
    save_every: int,
    y: Tensor,
    states: Tensor,
) -> Tensor:
    made, at_segments = chosen(q, v).forward(state, q, k, v, f, state_map, D, dt_bias, A_log, starts, save_every)
    y.copy_(made)
    states.copy_(at_segments)
    last: Tensor = at_segments[:, -1].clone(memory_format=torch.contiguous_format)
    return last


GRADIENTS = ("grad_q", "grad_k", "grad_v", "grad_f", "grad_state_map", "grad_D", "grad_dt_bias", "grad_A_log")


@custom_op("megakernels::m2rnn_piece_backward", mutates_args=GRADIENTS)
def _piece_backward(
    grad_last: Tensor,
    grad_y: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    state_map: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    starts: Tensor | None,
    states: Tensor,
    save_every: int,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    grad_f: Tensor,
    grad_state_map: Tensor,
    grad_D: Tensor,
    grad_dt_bias: Tensor,
    grad_A_log: Tensor,
) -> Tensor:
    (*shared, part_v, part_f, part_map, part_D, part_bias, part_A), grad_state = chosen(q, v).backward(
        grad_last, grad_y, q, k, v, f, state_map, D, dt_bias, A_log, starts, states, save_every
    )
    grad_v.copy_(part_v)
    grad_f.copy_(part_f)
    totals = grad_q, grad_k, grad_state_map, grad_D, grad_dt_bias, grad_A_log
    for total, part in zip(totals, (*shared, part_map, part_D, part_bias, part_A), strict=True):
        total.add_(part)
    before: Tensor = grad_state.contiguous()
    return before


@_piece.register_fake
def _(state: Tensor, *_: Any) -> Tensor:
    return state.new_empty(state.shape)


@_piece_backward.register_fake
def _(grad_last: Tensor, *_: Any) -> Tensor:
    return grad_last.new_empty(grad_last.shape)


def _of_piece(state: Tensor, *operands: Any) -> int:
    *inputs, starts, save_every, _, _ = operands
    if not chooses_kernel(inputs[0], inputs[2]):
        return 0
    inside = forward_inside(state, inputs, starts, save_every)
    return inside.results + max(0, inside.scratch - state.nbytes)  # copied to where the caller wants them; then the last state is made


def _of_piece_backward(_grad_last: Tensor, grad_y: Tensor, *operands: Any) -> int:
    *inputs, starts, states, save_every = operands[: -len(GRADIENTS)]
    if not chooses_kernel(inputs[0], inputs[2]):
        return 0
    inside = backward_inside(grad_y, inputs, starts, states, save_every)
    return inside.results + inside.scratch


state_scratch(_piece, _of_piece)
state_scratch(_piece_backward, _of_piece_backward)
