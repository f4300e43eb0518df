"""Mamba-3's scan across the ranks of a CP group (R-33), in the order of `megarun.parallel.groups.relay`.

Two states are passed from piece to piece together: the weighted state, and the angle by which keys and queries are rotated. A third one is
passed in the other direction: a trapezoidal step adds a share to the previous position, so the weight of a piece's last position depends on
the next piece's first one. These shares depend only on inputs; all ranks exchange them before the scan, and their gradients after it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megakernels import accumulator_dtype, mamba3, mamba3_ahead, mamba3_ahead_backward, mamba3_piece, mamba3_piece_backward
from megakernels.ops.mamba3.piece import Mamba3Settings
from megaplan.blocks.storages import num_lanes
from megarun.parallel.groups.context import ContextParallel
from megarun.parallel.groups.relay import (
    BACKWARD,
    FORWARD,
    as_inputs,
    half,
    lane_slice,
    lane_zeros,
    new_gradients,
    of_next,
    of_previous,
    relay_state,
    run_once,
)

ScanInputs = Sequence[Tensor | None]
"""x, z, B, C, dt, A, trapezoid, angles, B_bias, C_bias, D, dt_bias, mimo_x, mimo_z and mimo_o of `megakernels.mamba3`."""
ANGLES, DT_BIAS = 7, 11
"""Indices of these inputs; inputs before the angles have heads or groups and tokens, inputs after them only heads."""


def trapezoidal_scan(
    cp: ContextParallel,
    settings: Mamba3Settings,
    starts: Tensor | None,
    tokens: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    angles: Tensor | None,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    mimo: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> Tensor:
    """Mamba-3's scan of local tokens.

    Args:
        cp: CP group.
        settings: Settings of `megakernels.mamba3`.
        starts: Document starts of local tokens, or None.
        tokens: x, z, B, C, dt, A and trapezoid of `megakernels.mamba3`.
        angles: [B, T / cp, N], or None.
        weights: B_bias, C_bias, D and dt_bias.
        mimo: mimo_x, mimo_z and mimo_o, or None each.

    Returns:
        [B, T / cp, H, P].
    """
    if cp.continued is not None:
        return cp.continued.trapezoidal_scan(settings, (*tokens, angles, *weights, *mimo))
    if cp.degree == 1:
        every, heavy_tail = settings.save_every, settings.heavy_tail
        return mamba3(*tokens, angles, *weights, *mimo, settings.chunk_size, starts, save_every=every, heavy_tail=heavy_tail)
    y: Tensor = _TrapezoidalScan.apply(cp, settings, starts, *tokens, angles, *weights, *mimo)  # type: ignore[no-untyped-call]
    return y


class _TrapezoidalScan(torch.autograd.Function):
    """Saves the inputs, the saved set of the op on full sequences, and the shares added to the last positions of pieces."""

    @staticmethod
    def forward(ctx: Any, cp: ContextParallel, settings: Mamba3Settings, starts: Tensor | None, *inputs: Any) -> Tensor:
        """See `trapezoidal_scan`."""
        x, keys, angles = inputs[0], inputs[2], inputs[ANGLES]
        width, state_dim, num_angles = x.shape[3], keys.shape[4], 0 if angles is None else angles.shape[2]

        def compute() -> tuple[Tensor, ...]:
            rows = x.shape[0], 2 * -(-x.shape[1] // 2 // settings.save_every), x.shape[2]
            y, states = x.new_empty(x.shape), x.new_empty((*rows, width, state_dim))
            phases = x.new_empty((*rows, num_angles), dtype=accumulator_dtype(x.dtype))
            ahead = of_next(cp, mamba3_ahead(*_firsts(inputs, starts)))
            lanes = num_lanes(keys.shape[3], cp.degree)

            def step(place: int, lane: int, carried: Tensor) -> Tensor:
                heads = lane_slice(x.shape[2], lane, lanes)
                made = (half(each, place)[:, :, heads] for each in (y, states, phases))
                own, starts_here = _own(inputs, place, lane, lanes), None if starts is None else half(starts, place)
                return mamba3_piece(carried, own, starts_here, ahead[:, place, heads], settings, *made)

            relay_state(cp, FORWARD, lane_zeros(lanes, x, x.shape[2], width * state_dim + num_angles), step)
            return y, states, phases, ahead

        y, *kept = run_once(compute)
        ctx.save_for_backward(*inputs, starts, *kept)
        ctx.cp, ctx.settings = cp, settings
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of local tokens, and their contribution to the gradients of parameters."""
        *inputs, starts, states, phases, ahead = ctx.saved_tensors
        cp, x, keys = ctx.cp, inputs[0], inputs[2]
        gradients, grad_ahead = new_gradients(inputs, range(ANGLES), range(ANGLES + 1), ctx.needs_input_grad[3:]), torch.empty_like(ahead)
        lanes = num_lanes(keys.shape[3], cp.degree)

        def step(place: int, lane: int, grad_last: Tensor) -> Tensor:
            heads = lane_slice(x.shape[2], lane, lanes)
            grad_y, *kept = (half(each, place)[:, :, heads] for each in (gradient, states, phases))
            return mamba3_piece_backward(
                grad_last,
                grad_y,
                _own(inputs, place, lane, lanes),
                None if starts is None else half(starts, place),
                ahead[:, place, heads],
                kept[0],
                kept[1],
                ctx.settings,
                _own(gradients, place, lane, lanes),
                grad_ahead[:, place, heads],
            )

        relay_state(cp, BACKWARD, lane_zeros(lanes, x, x.shape[2], x.shape[3] * keys.shape[4] + phases.shape[3]), step)
        grad_behind = mamba3_ahead_backward(of_previous(cp, grad_ahead), *_firsts(inputs, starts))
        for total, part in zip(_firsts(gradients, None)[:3], grad_behind, strict=True):
            if total is not None:
                total.add_(part)
        return None, None, None, *as_inputs(gradients, inputs)


def _firsts(inputs: ScanInputs, starts: Tensor | None) -> tuple[Any, Any, Any, Tensor | None]:
    """Dt and trapezoid [B, 2, H] of each local piece's first position, dt_bias of all heads, and its document start [B, 2]."""
    dt, trapezoid = (torch.unflatten(each, 1, (2, -1))[:, :, 0] for each in (inputs[4], inputs[6]) if each is not None)
    return dt, trapezoid, inputs[DT_BIAS], None if starts is None else torch.unflatten(starts, 1, (2, -1))[:, :, 0]


def _own(tensors: ScanInputs, place: int, lane: int, lanes: int) -> list[Tensor | None]:
    """One piece and lane of the inputs, or of their gradients, as views; the angles have no heads."""
    made: list[Tensor | None] = []
    for index, tensor in enumerate(tensors):
        if tensor is None:
            made.append(None)
        elif index == ANGLES:
            made.append(half(tensor, place))
        elif index > ANGLES:
            made.append(tensor[lane_slice(tensor.shape[0], lane, lanes)])
        else:
            dim = 3 if tensor.dim() == 5 else 2  # in B and C the group dim follows the rank dim
            size = tensor.shape[dim] // lanes
            made.append(half(tensor, place).narrow(dim, lane * size, size))
    return made
