"""A piece of the selective scan, for some channels, from an initial to the final state.

Two operations without an autograd formula, for a caller whose ranks share a sequence (`megarun.parallel.groups.relay_scans`). They
write into parts of tensors of the caller, so that groups of channels are processed one after another.
"""

from collections.abc import Sequence

from torch import Tensor

from megakernels.ops.selective_scan.op import SCAN

__all__ = ["selective_scan_piece", "selective_scan_piece_backward"]


def selective_scan_piece(
    state: Tensor, inputs: Sequence[Tensor], starts: Tensor | None, save_every: int, y: Tensor, states: Tensor
) -> Tensor:
    """See `megakernels.selective_scan`.

    Args:
        state: [B, I, S] in the accumulation dtype, before the piece.
        inputs: x and dt [B, t, I], A_log [I, S], B and C [B, t, S], D and dt_bias [I].
        starts: int32 [B, t] or None, relative to the piece's first position: negative if the document started before it.
        save_every: Positions between two saved states.
        y: [B, t, I], written.
        states: [B, ceil(t / save_every), I, S] in the accumulation dtype, written: before each segment.

    Returns:
        The state after the piece, shaped like `state`.

    Scratch:
        As `selective_scan`, and results before they are copied to the caller's tensors; copies of saved states and starts that are views.

    Triton:
        The kernels of `selective_scan`.
    """
    last: Tensor = _piece(state, *inputs, starts, save_every, y, states)
    return last


def selective_scan_piece_backward(
    grad_last: Tensor, grad_y: Tensor, inputs: Sequence[Tensor], starts: Tensor | None, states: Tensor, save_every: int,
    gradients: Sequence[Tensor | None],
) -> Tensor:  # fmt: skip
    """The gradient of the state before the piece.

    Args:
        grad_last: Gradient of the state after the piece.
        grad_y: [B, t, I].
        inputs: x, dt, A_log, B, C, D and dt_bias.
        starts: See `selective_scan_piece`.
        states: States that `selective_scan_piece` wrote.
        save_every: See `selective_scan_piece`.
        gradients: Gradients of `inputs`, None for frozen ones; those of x and dt are overwritten, all others accumulated.
    """
    grad_state: Tensor = _piece_backward(grad_last, grad_y, *inputs, starts, states, save_every, *gradients)
    return grad_state


_piece, _piece_backward = SCAN.register_piece()
