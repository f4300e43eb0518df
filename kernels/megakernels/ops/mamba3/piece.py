"""A piece of Mamba-3's scan, for some heads, from an initial to the final state and phase.

Two operations without an autograd formula, for a caller whose ranks share a sequence (`megarun.parallel.groups.relay_mamba3`). They write
into parts of tensors of the caller, so that groups of heads are processed one after another. State and phase are concatenated, [B, H, P·S +
N].

The weight of a piece's last position depends on the first position after it: `mamba3_ahead` computes the share of a piece's first
position, so that all pieces can exchange it before they start.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from megakernels._common import piece, types_of, upcast
from megakernels.ops.mamba3.chunk import ACCUMULATED, GRADIENTS, Mamba3Inputs
from megakernels.ops.mamba3.op import IMPLEMENTATION
from megakernels.ops.mamba3.sizes import backward_bytes, backward_cost, forward_bytes, forward_cost

__all__ = ["Mamba3Settings", "mamba3_ahead", "mamba3_ahead_backward", "mamba3_piece", "mamba3_piece_backward"]


class Mamba3Settings(NamedTuple):
    """Numbers of `mamba3`.

    Attributes:
        chunk_size: Positions computed at once.
        save_every: Positions between two saved states.
        heavy_tail: True if the decay rate is the function with slow decay below 0 instead of softplus.
    """

    chunk_size: int
    save_every: int
    heavy_tail: bool = False


def mamba3_ahead(dt: Tensor, trapezoid: Tensor, dt_bias: Tensor, starts: Tensor | None) -> Tensor:
    """(1 − λ) Δ of the first positions of pieces, zero where a document starts.

    Args:
        dt: [..., H], of these positions.
        trapezoid: [..., H].
        dt_bias: [H].
        starts: int32 [...] or None, relative to these positions: negative if the document started before.

    Returns:
        [..., H] in the accumulation dtype.
    """
    given = (1 - upcast(trapezoid).sigmoid()) * softplus(upcast(dt) + upcast(dt_bias))
    return given if starts is None else given * (starts < 0).unsqueeze(-1)


def mamba3_ahead_backward(
    gradient: Tensor, dt: Tensor, trapezoid: Tensor, dt_bias: Tensor, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of dt, trapezoid and dt_bias, in the accumulation dtype, from that of `mamba3_ahead`."""
    if starts is not None:
        gradient = gradient * (starts < 0).unsqueeze(-1)
    raw_step, share = upcast(dt) + upcast(dt_bias), upcast(trapezoid).sigmoid()
    grad_dt = gradient * (1 - share) * raw_step.sigmoid()
    return grad_dt, -gradient * softplus(raw_step) * share * (1 - share), grad_dt.flatten(0, -2).sum(0)


def mamba3_piece(
    carried: Tensor, inputs: Sequence[Tensor | None], starts: Tensor | None, ahead: Tensor,
    settings: Mamba3Settings,
    y: Tensor, states: Tensor, phases: Tensor,
) -> Tensor:  # fmt: skip
    """See `megakernels.mamba3`.

    Args:
        carried: [B, H, P·S + N] in the accumulation dtype, state and phase before the piece.
        inputs: x, z, B, C, dt, A, trapezoid and angles of the piece, B_bias, C_bias, D, dt_bias, mimo_x, mimo_z and mimo_o, of the heads.
        starts: int32 [B, t] or None, relative to the piece's first position: negative if the document started before it.
        ahead: [B, H] in the accumulation dtype, `mamba3_ahead` of the next piece; zero if there is none.
        settings: Constants of the scan.
        y: [B, t, H, P], written.
        states: [B, ceil(t / save_every), H, P, S], written: the weighted state at each segment's start.
        phases: [B, ceil(t / save_every), H, N] in the accumulation dtype, written: the angle before each segment.

    Returns:
        State and phase after the piece, shaped like `carried`.

    Scratch:
        As `mamba3`, and results before they are copied to the caller's tensors; copies of tensors that are views.

    Triton:
        The kernels of `mamba3`.
    """
    last: Tensor = _piece(carried, *inputs, starts, ahead, *settings, y, states, phases)
    return last


def mamba3_piece_backward(
    grad_last: Tensor, grad_y: Tensor, inputs: Sequence[Tensor | None], starts: Tensor | None, ahead: Tensor, states: Tensor,
    phases: Tensor,
    settings: Mamba3Settings,
    gradients: Sequence[Tensor | None], grad_ahead: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of state and phase before the piece.

    Args:
        grad_last: Gradient of state and phase after the piece.
        grad_y: [B, t, H, P].
        inputs: See `mamba3_piece`.
        starts: See `mamba3_piece`.
        ahead: See `mamba3_piece`.
        states: States that `mamba3_piece` wrote.
        phases: Phases that `mamba3_piece` wrote.
        settings: See `mamba3_piece`.
        gradients: Gradients of `inputs`, None for frozen ones; those of the angles, which all heads share, and of parameters are
            accumulated, others overwritten.
        grad_ahead: [B, H], written.
    """
    grad_carried: Tensor = _piece_backward(grad_last, grad_y, *inputs, starts, ahead, states, phases, *settings, *gradients, grad_ahead)
    return grad_carried


def _bind(ahead: Tensor, **arguments: Any) -> tuple[Mamba3Inputs, Tensor]:
    return Mamba3Inputs(**arguments), ahead


def _forward(carried: Tensor, given: tuple[Mamba3Inputs, Tensor]) -> tuple[Tensor, ...]:
    scan, ahead = given
    y, states, phases, *last = IMPLEMENTATION.module(scan).forward_from(scan, *_parted(carried, scan), ahead)
    return y, states, phases, _joined(*last)


def _backward(
    grad_last: Tensor, grad_y: Tensor, given: tuple[Mamba3Inputs, Tensor], states: Tensor, phases: Tensor
) -> tuple[tuple[Tensor | None, ...], Tensor]:
    scan, ahead = given
    parts = _parted(grad_last, scan)
    found, grad_state, grad_phase, grad_ahead = IMPLEMENTATION.module(scan).backward_from(*parts, grad_y, scan, ahead, states, phases)
    return (*found, grad_ahead), _joined(grad_state, grad_phase)


def _parted(carried: Tensor, scan: Mamba3Inputs) -> tuple[Tensor, Tensor]:
    """State [B, H, P, S] and phase [B, H, N]."""
    width, state_dim = scan.x.shape[3], scan.B.shape[4]
    return torch.unflatten(carried[..., : width * state_dim], -1, (width, state_dim)), carried[..., width * state_dim :]


def _joined(state: Tensor, phase: Tensor) -> Tensor:
    return torch.cat([state.flatten(2), phase], -1)


def _arguments() -> dict[str, Any]:
    """Arguments of the scan, with `ahead` after its tensors."""
    found: dict[str, Any] = {}
    for name, kind in types_of(Mamba3Inputs).items():
        found |= {name: kind, "ahead": Tensor} if name == "starts" else {name: kind}
    return found


def _forward_scratch(carried: Tensor, given: tuple[Mamba3Inputs, Tensor]) -> int:
    scan, ahead = given
    if not IMPLEMENTATION.chooses_kernel(scan):
        return 0
    inside = forward_bytes(scan, *_parted(carried, scan), ahead)
    return inside.results + max(inside.scratch, inside.last)  # state and phase are joined when the copies are freed


def _backward_scratch(grad_last: Tensor, grad_y: Tensor, given: tuple[Mamba3Inputs, Tensor], states: Tensor, phases: Tensor) -> int:
    scan, ahead = given
    if not IMPLEMENTATION.chooses_kernel(scan):
        return 0
    inside = backward_bytes(*_parted(grad_last, scan), grad_y, scan, ahead, states, phases)
    return inside.results + inside.scratch


_piece, _piece_backward = piece(
    "mamba3",
    _arguments(),
    _bind,
    made=("y", "states", "phases"),
    gradients=(*GRADIENTS, "ahead"),
    summed=ACCUMULATED,
    forward=_forward,
    backward=_backward,
    forward_scratch=_forward_scratch,
    backward_scratch=_backward_scratch,
    forward_cost=lambda _carried, given: forward_cost(given[0]),
    backward_cost=lambda _grad_last, _grad_y, given, *_: backward_cost(given[0]),
)
