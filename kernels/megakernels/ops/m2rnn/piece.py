"""A piece of the M²RNN recurrence, for some heads, from an initial to the final state.

Two operations without an autograd formula, for a caller whose ranks share a sequence (`megarun.parallel.groups.relay_scans`). They write
into parts of tensors of the caller, so that groups of heads are processed one after another.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megakernels.ops.m2rnn.inputs import M2rnnInputs
from megakernels.ops.m2rnn.op import SCAN
from megakernels.ops.m2rnn.sizes import forward_bytes

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
    grad_last: Tensor, grad_y: Tensor, inputs: Sequence[Tensor], starts: Tensor | None, states: Tensor, save_every: int,
    gradients: Sequence[Tensor | None],
) -> Tensor:  # fmt: skip
    """The gradient of the state before the piece.

    Args:
        grad_last: Gradient of the state after the piece.
        grad_y: [B, t, H, V].
        inputs: q, k, v, f, state_map, D, dt_bias and A_log.
        starts: See `m2rnn_piece`.
        states: States that `m2rnn_piece` wrote.
        save_every: See `m2rnn_piece`.
        gradients: Gradients of `inputs`, None for frozen ones; those of v and f are overwritten, those of q and k, which all heads share,
            and of parameters are accumulated.
    """
    grad_state: Tensor = _piece_backward(grad_last, grad_y, *inputs, starts, states, save_every, *gradients)
    return grad_state


def _forward(state: Tensor, given: M2rnnInputs) -> tuple[Tensor, ...]:
    y, states = SCAN.forward(state, given)
    return y, states, states[:, -1].clone(memory_format=torch.contiguous_format)


def _forward_scratch(state: Tensor, given: M2rnnInputs) -> int:
    if not SCAN.chooses_kernel(given):
        return 0
    found = forward_bytes(state, given)
    return found.results + max(0, found.scratch - state.nbytes)  # copied to the caller's tensors, in addition to the last state


_piece, _piece_backward = SCAN.register_piece(_forward, _forward_scratch)
