"""A piece of the gated delta rule, for some heads, from an initial to the final state.

Two operations without an autograd formula, for a caller whose ranks share a sequence (`megarun.parallel.groups.relay_scans`). They write
into parts of tensors of the caller, so that groups of heads are processed one after another.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from megakernels.ops.gated_delta.op import SCAN

__all__ = ["DeltaSettings", "gated_delta_piece", "gated_delta_piece_backward"]


class DeltaSettings(NamedTuple):
    """Numbers of `gated_delta`.

    Attributes:
        chunk_size: Positions computed at once.
        save_every: Positions between two saved states.
        beta_limit: The largest β.
    """

    chunk_size: int
    save_every: int
    beta_limit: float = 1.0


def gated_delta_piece(
    state: Tensor, inputs: Sequence[Tensor], starts: Tensor | None, settings: DeltaSettings, y: Tensor, states: Tensor
) -> Tensor:
    """See `megakernels.gated_delta`.

    Args:
        state: [B, H, K, V] in the accumulation dtype, before the piece.
        inputs: q and k [B, t, G, K], v [B, t, H, V], decay [B, t, H] or [B, t, H, K], beta [B, t, H], A_log [H], dt_bias [H] or [H, K].
        starts: int32 [B, t] or None, relative to the piece's first position: negative if the document started before it.
        settings: Numbers of the rule.
        y: [B, t, H, V], written.
        states: [B, ceil(t / save_every), H, K, V] in the accumulation dtype, written: before each segment.

    Returns:
        The state after the piece, shaped like `state`.

    Scratch:
        As `gated_delta`, and results before they are copied to the caller's tensors; copies of saved states and starts that are views.

    Triton:
        The kernels of `gated_delta`.
    """
    last: Tensor = _piece(state, *inputs, starts, *settings, y, states)
    return last


def gated_delta_piece_backward(
    grad_last: Tensor, grad_y: Tensor, inputs: Sequence[Tensor], starts: Tensor | None, states: Tensor, settings: DeltaSettings,
    gradients: Sequence[Tensor | None],
) -> Tensor:  # fmt: skip
    """The gradient of the state before the piece.

    Args:
        grad_last: Gradient of the state after the piece.
        grad_y: [B, t, H, V].
        inputs: q, k, v, decay, beta, A_log and dt_bias.
        starts: See `gated_delta_piece`.
        states: States that `gated_delta_piece` wrote.
        settings: See `gated_delta_piece`.
        gradients: Gradients of `inputs`, None for frozen ones; those of A_log and dt_bias are accumulated, all others overwritten.
    """
    grad_state: Tensor = _piece_backward(grad_last, grad_y, *inputs, starts, states, *settings, *gradients)
    return grad_state


_piece, _piece_backward = SCAN.register_piece()
