"""The selective scan across the ranks of a CP group (R-33), in the order of `megarun.parallel.groups.relay`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megakernels import accumulator_dtype, selective_scan, selective_scan_piece, selective_scan_piece_backward
from megaplan.blocks.relay import num_lanes
from megarun.parallel.groups.context import ContextParallel
from megarun.parallel.groups.relay import (
    BACKWARD,
    FORWARD,
    Given,
    as_inputs,
    half,
    lane_slice,
    lane_zeros,
    new_gradients,
    relay_state,
    run_once,
)

TOKENS = 0, 1, 3, 4
"""Inputs with positions among x, dt, A_log, B, C, D and dt_bias of `megakernels.selective_scan`."""
OF_ALL_CHANNELS = 3, 4
"""B and C."""


def scan_channels(cp: ContextParallel, save_every: int, starts: Tensor | None, *inputs: Tensor) -> Tensor:
    """The selective scan of local tokens.

    Args:
        cp: CP group.
        save_every: Positions between two kept states.
        starts: Document starts of local tokens, or None.
        *inputs: x, dt, A_log, B, C, D and dt_bias of `megakernels.selective_scan`.

    Returns:
        [B, T / cp, I].
    """
    if cp.degree == 1:
        x, dt, A_log, B, C, D, dt_bias = inputs
        return selective_scan(x, dt, A_log, B, C, D, dt_bias, save_every, starts)
    y: Tensor = _SelectiveScan.apply(cp, save_every, starts, *inputs)  # type: ignore[no-untyped-call]
    return y


class _SelectiveScan(torch.autograd.Function):
    """Saves the inputs and the states before each segment of a piece, as the op on full sequences."""

    @staticmethod
    def forward(ctx: Any, cp: ContextParallel, save_every: int, starts: Tensor | None, *inputs: Tensor) -> Tensor:
        """See `scan_channels`."""
        x, (channels, width) = inputs[0], inputs[2].shape
        lanes = num_lanes(channels, cp.degree)

        def compute() -> tuple[Tensor, Tensor]:
            y = x.new_empty(x.shape)
            num_states = 2 * -(-x.shape[1] // 2 // save_every)
            states = x.new_empty((x.shape[0], num_states, channels, width), dtype=accumulator_dtype(x.dtype))

            def step(place: int, lane: int, state: Tensor) -> Tensor:
                own = lane_slice(channels, lane, lanes)
                starts_here = None if starts is None else half(starts, place)
                made = half(y, place)[:, :, own], half(states, place)[:, :, own]
                return selective_scan_piece(state, _part(inputs, place, own), starts_here, save_every, *made)

            relay_state(cp, FORWARD, lane_zeros(lanes, x, channels, width), step)
            return y, states

        y, states = run_once(compute)
        ctx.save_for_backward(*inputs, starts, states)
        ctx.cp, ctx.save_every = cp, save_every
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of local tokens, and their contribution to those of parameters."""
        *inputs, starts, states = ctx.saved_tensors
        cp, (channels, width) = ctx.cp, inputs[2].shape
        gradients, lanes = new_gradients(inputs, (0, 1), TOKENS, ctx.needs_input_grad[3:]), num_lanes(channels, cp.degree)

        def step(place: int, lane: int, grad_last: Tensor) -> Tensor:
            own = lane_slice(channels, lane, lanes)
            starts_here = None if starts is None else half(starts, place)
            return selective_scan_piece_backward(
                grad_last,
                half(gradient, place)[:, :, own],
                _part(inputs, place, own),
                starts_here,
                half(states, place)[:, :, own],
                ctx.save_every,
                _part(gradients, place, own),
            )

        relay_state(cp, BACKWARD, lane_zeros(lanes, inputs[0], channels, width), step)
        return None, None, None, *as_inputs(gradients, inputs)


def _part(tensors: Sequence[Given], place: int, own: slice) -> list[Given]:
    """One piece and lane of the inputs, or of their gradients, as views: a lane is channels, which share B and C."""
    found: list[Given] = []
    for index, tensor in enumerate(tensors):
        if tensor is None:
            found.append(None)
        elif index in OF_ALL_CHANNELS:
            found.append(half(tensor, place))
        else:
            found.append(half(tensor, place)[:, :, own] if index in TOKENS else tensor[own])
    return found
