"""A piece of the M²RNN recurrence, for some heads, from an initial to the final state.

Two operations without an autograd formula, for a caller whose ranks share a sequence (`megarun.parallel.groups.relay`). They write into
parts of tensors of the caller, so that groups of heads are processed in turn.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megakernels._common import piece, types_of
from megakernels.ops.m2rnn.choice import backward, chooses_kernel, forward
from megakernels.ops.m2rnn.inputs import GRADIENTS, SHARED, Recurrence
from megakernels.ops.m2rnn.sizes import backward_bytes, backward_cost, forward_bytes, forward_cost

__all__ = ["m2rnn_piece", "m2rnn_piece_backward"]


def m2rnn_piece(state: Tensor, inputs: Sequence[Tensor], starts: Tensor | None, save_every: int, y: Tensor, states: Tensor) -> Tensor:
    """See `megakernels.m2rnn`.

    Args:
        state: [B, H, K, V] in the accumulation dtype, before the piece.
        inputs: q and k [B, t, K], v [B, t, H, V], f [B, t, H], state_map [H, V, V], D [H, V], dt_bias [H] and A_log [H].
        starts: int32 [B, t] or None, relative to the piece's first position: negative if the document started before it.
        save_every: Positions of a segment.
        y: [B, t, H, V], written.
        states: [B, ceil(t / save_every) + 1, H, K, V] in the accumulation dtype, written: before each segment and after the last.

    Returns:
        The state after the piece, shaped like `state`.

    Scratch:
        As `m2rnn`, and results before they are copied to the caller's tensors; copies of saved states and starts that are views.

    Triton:
        The kernels of `m2rnn`.
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
    gradients: Sequence[Tensor | None],
) -> Tensor:
    """The gradient of the state before the piece.

    Args:
        grad_last: Gradient of the state after the piece.
        grad_y: [B, t, H, V].
        inputs: q, k, v, f, state_map, D, dt_bias and A_log.
        starts: As in `m2rnn_piece`.
        states: As `m2rnn_piece` wrote them.
        save_every: As in `m2rnn_piece`.
        gradients: Gradients of `inputs`, None for frozen ones; those of v and f are overwritten, those of q and k, which all heads share,
            and of parameters are accumulated.
    """
    grad_state: Tensor = _piece_backward(grad_last, grad_y, *inputs, starts, states, save_every, *gradients)
    return grad_state


def _forward(state: Tensor, given: Recurrence) -> tuple[Tensor, Tensor, Tensor]:
    y, states = forward(state, given)
    return y, states, states[:, -1].clone(memory_format=torch.contiguous_format)


def _forward_scratch(state: Tensor, given: Recurrence) -> int:
    if not chooses_kernel(given):
        return 0
    inside = forward_bytes(state, given)
    return inside.results + max(0, inside.scratch - state.nbytes)  # copied to the caller's tensors, in addition to the last state


def _backward_scratch(_grad_last: Tensor, grad_y: Tensor, given: Recurrence, states: Tensor) -> int:
    if not chooses_kernel(given):
        return 0
    inside = backward_bytes(grad_y, given, states)
    return inside.results + inside.scratch


_piece, _piece_backward = piece(
    "m2rnn",
    types_of(Recurrence),
    Recurrence,
    made=("y", "states"),
    gradients=GRADIENTS,
    summed=SHARED,
    forward=_forward,
    backward=backward,
    forward_scratch=_forward_scratch,
    backward_scratch=_backward_scratch,
    forward_cost=forward_cost,
    backward_cost=backward_cost,
)
