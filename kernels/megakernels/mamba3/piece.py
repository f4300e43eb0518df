"""A piece of Mamba-3's scan, for some heads: it begins with a state and a phase and hands the last ones on.

Two operations without an autograd formula, for a caller whose ranks share a sequence (`megarun.parallel.groups.relay_mamba3`). They write
into parts of tensors that the caller has made, so that heads can follow one another. State and phase travel side by side, [B, H, P·S + N].

The last position of a piece arrives with a weight in which the first position behind it has a share: `behind` is what a piece's first
position has for the one before, so that all pieces can have theirs before any of them starts.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import softplus

from megakernels._common import upcast
from megakernels.mamba3 import reference
from megakernels.mamba3.chunk import Scan

__all__ = ["Settings", "behind", "behind_backward", "mamba3_piece", "mamba3_piece_backward"]


class Settings(NamedTuple):
    """Numbers of `mamba3`.

    Attributes:
        chunk_size: Positions computed at once.
        save_every: Positions between two kept states.
        heavy_tail: The rate of decay is the function that falls slowly below 0, not softplus.
    """

    chunk_size: int
    save_every: int
    heavy_tail: bool = False


def behind(dt: Tensor, trapezoid: Tensor, dt_bias: Tensor, starts: Tensor | None) -> Tensor:
    """(1 − λ) Δ of the first positions of pieces, zero where a document begins there.

    Args:
        dt: [..., H], of those positions.
        trapezoid: [..., H].
        dt_bias: [H].
        starts: int32 [...] or None, counted from those positions: negative where a document began before.

    Returns:
        [..., H] in the accumulation dtype.
    """
    given = (1 - upcast(trapezoid).sigmoid()) * softplus(upcast(dt) + upcast(dt_bias))
    return given if starts is None else given * (starts < 0).unsqueeze(-1)


def behind_backward(
    gradient: Tensor, dt: Tensor, trapezoid: Tensor, dt_bias: Tensor, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of dt, trapezoid and dt_bias, in the accumulation dtype, from that of `behind`."""
    if starts is not None:
        gradient = gradient * (starts < 0).unsqueeze(-1)
    raw_step, share = upcast(dt) + upcast(dt_bias), upcast(trapezoid).sigmoid()
    grad_dt = gradient * (1 - share) * raw_step.sigmoid()
    return grad_dt, -gradient * softplus(raw_step) * share * (1 - share), grad_dt.flatten(0, -2).sum(0)


def mamba3_piece(
    carried: Tensor,
    inputs: Sequence[Tensor | None],
    starts: Tensor | None,
    ahead: Tensor,
    settings: Settings,
    y: Tensor,
    states: Tensor,
    phases: Tensor,
) -> Tensor:
    """See `megakernels.mamba3.mamba3`.

    Args:
        carried: [B, H, P·S + N] in the accumulation dtype, state and phase before the piece.
        inputs: x, z, B, C, dt, A, trapezoid and angles of the piece, B_bias, C_bias, D, dt_bias, mimo_x, mimo_z and mimo_o, of the heads.
        starts: int32 [B, t] or None, counted from the piece's first position: negative where a document began before.
        ahead: [B, H] in the accumulation dtype, `behind` of the next piece; zero where there is none.
        settings: The rest.
        y: [B, t, H, P], written.
        states: [B, ceil(t / save_every), H, P, S], written: the weighted state at each segment's start.
        phases: [B, ceil(t / save_every), H, N] in the accumulation dtype, written: the angle before each segment.

    Returns:
        State and phase after the piece, as `carried`.
    """
    last: Tensor = _piece(carried, *inputs, starts, ahead, *settings, y, states, phases)
    return last


def mamba3_piece_backward(
    grad_last: Tensor,
    grad_y: Tensor,
    inputs: Sequence[Tensor | None],
    starts: Tensor | None,
    ahead: Tensor,
    states: Tensor,
    phases: Tensor,
    settings: Settings,
    gradients: Sequence[Tensor | None],
    grad_ahead: Tensor,
) -> Tensor:
    """The gradient of state and phase before the piece.

    Args:
        grad_last: Of those after it.
        grad_y: [B, t, H, P].
        inputs: As in `mamba3_piece`.
        starts: As in `mamba3_piece`.
        ahead: As in `mamba3_piece`.
        states: As `mamba3_piece` wrote them.
        phases: As `mamba3_piece` wrote them.
        settings: As in `mamba3_piece`.
        gradients: Of `inputs`; those of the angles, which all heads share, and of parameters are added to, all others written.
        grad_ahead: [B, H], written.
    """
    grad_carried: Tensor = _piece_backward(grad_last, grad_y, *inputs, starts, ahead, states, phases, *settings, *gradients, grad_ahead)
    return grad_carried


@custom_op("megakernels::mamba3_piece", mutates_args=("y", "states", "phases"))
def _piece(
    carried: Tensor,
    x: Tensor,
    z: Tensor,
    B: Tensor,
    C: Tensor,
    dt: Tensor,
    A: Tensor,
    trapezoid: Tensor,
    angles: Tensor | None,
    B_bias: Tensor,
    C_bias: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    mimo_x: Tensor | None,
    mimo_z: Tensor | None,
    mimo_o: Tensor | None,
    starts: Tensor | None,
    ahead: Tensor,
    chunk_size: int,
    save_every: int,
    heavy_tail: bool,
    y: Tensor,
    states: Tensor,
    phases: Tensor,
) -> Tensor:
    tensors = (x, z, B, C, dt, A, trapezoid, angles, B_bias, C_bias, D, dt_bias, mimo_x, mimo_z, mimo_o, starts)
    scan = Scan(*tensors, chunk_size, save_every, heavy_tail)
    made, at_chunks, phase_at_chunks, *last = reference.forward_from(scan, *_parted(carried, x, B), ahead)
    y.copy_(made)
    states.copy_(at_chunks)
    phases.copy_(phase_at_chunks)
    return _joined(*last)


SUMMED = ("grad_angles", "grad_B_bias", "grad_C_bias", "grad_D", "grad_dt_bias", "grad_mimo_x", "grad_mimo_z", "grad_mimo_o")
WRITTEN = ("grad_x", "grad_z", "grad_B", "grad_C", "grad_dt", "grad_A", "grad_trapezoid")


@custom_op("megakernels::mamba3_piece_backward", mutates_args=(*WRITTEN, *SUMMED, "grad_ahead"))
def _piece_backward(
    grad_last: Tensor,
    grad_y: Tensor,
    x: Tensor,
    z: Tensor,
    B: Tensor,
    C: Tensor,
    dt: Tensor,
    A: Tensor,
    trapezoid: Tensor,
    angles: Tensor | None,
    B_bias: Tensor,
    C_bias: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    mimo_x: Tensor | None,
    mimo_z: Tensor | None,
    mimo_o: Tensor | None,
    starts: Tensor | None,
    ahead: Tensor,
    states: Tensor,
    phases: Tensor,
    chunk_size: int,
    save_every: int,
    heavy_tail: bool,
    grad_x: Tensor,
    grad_z: Tensor,
    grad_B: Tensor,
    grad_C: Tensor,
    grad_dt: Tensor,
    grad_A: Tensor,
    grad_trapezoid: Tensor,
    grad_angles: Tensor | None,
    grad_B_bias: Tensor,
    grad_C_bias: Tensor,
    grad_D: Tensor,
    grad_dt_bias: Tensor,
    grad_mimo_x: Tensor | None,
    grad_mimo_z: Tensor | None,
    grad_mimo_o: Tensor | None,
    grad_ahead: Tensor,
) -> Tensor:
    tensors = (x, z, B, C, dt, A, trapezoid, angles, B_bias, C_bias, D, dt_bias, mimo_x, mimo_z, mimo_o, starts)
    scan = Scan(*tensors, chunk_size, save_every, heavy_tail)
    found, grad_state, grad_phase, part_ahead = reference.backward_from(*_parted(grad_last, x, B), grad_y, scan, ahead, states, phases)
    grad_ahead.copy_(part_ahead)
    written = grad_x, grad_z, grad_B, grad_C, grad_dt, grad_A, grad_trapezoid
    summed = grad_angles, grad_B_bias, grad_C_bias, grad_D, grad_dt_bias, grad_mimo_x, grad_mimo_z, grad_mimo_o
    for index, (total, part) in enumerate(zip((*written, *summed), found, strict=True)):
        if total is None or part is None:
            continue
        if index < len(written):
            total.copy_(part)
        else:
            total.add_(part)
    return _joined(grad_state, grad_phase)


def _parted(carried: Tensor, x: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """State [B, H, P, S] and phase [B, H, N]."""
    width, state_dim = x.shape[3], B.shape[4]
    return torch.unflatten(carried[..., : width * state_dim], -1, (width, state_dim)), carried[..., width * state_dim :]


def _joined(state: Tensor, phase: Tensor) -> Tensor:
    return torch.cat([state.flatten(2), phase], -1)


@_piece.register_fake
def _(carried: Tensor, *_: Any) -> Tensor:
    return carried.new_empty(carried.shape)


@_piece_backward.register_fake
def _(grad_last: Tensor, *_: Any) -> Tensor:
    return grad_last.new_empty(grad_last.shape)
