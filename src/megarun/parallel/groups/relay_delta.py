"""The gated delta rule across the ranks of a CP group (R-33), in the order of `megarun.parallel.groups.relay`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megakernels import accumulator_dtype, gated_delta, gated_delta_piece, gated_delta_piece_backward
from megakernels.ops.gated_delta.piece import DeltaSettings
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

WRITTEN = 0, 1, 2, 3, 4
"""Inputs with positions among q, k, v, decay, beta, A_log and dt_bias of `megakernels.gated_delta`."""


def delta_rule(cp: ContextParallel, settings: DeltaSettings, starts: Tensor | None, *inputs: Tensor) -> Tensor:
    """The gated delta rule of local tokens.

    Args:
        cp: CP group.
        settings: Numbers of the rule.
        starts: Document starts of local tokens, or None.
        *inputs: q, k, v, decay, beta, A_log and dt_bias of `megakernels.gated_delta`.

    Returns:
        [B, T / cp, H, V].
    """
    if cp.degree == 1:
        chunk_size, save_every, beta_limit = settings
        q, k, v, decay, beta, A_log, dt_bias = inputs
        return gated_delta(q, k, v, decay, beta, A_log, dt_bias, chunk_size, save_every, starts, beta_limit=beta_limit)
    y: Tensor = _DeltaRule.apply(cp, settings, starts, *inputs)  # type: ignore[no-untyped-call]
    return y


class _DeltaRule(torch.autograd.Function):
    """Saves the inputs and the states before each segment of a piece, as the op on full sequences."""

    @staticmethod
    def forward(ctx: Any, cp: ContextParallel, settings: DeltaSettings, starts: Tensor | None, *inputs: Tensor) -> Tensor:
        """See `delta_rule`."""
        q, v = inputs[0], inputs[2]
        (batch, length, key_heads, keys), (num_heads, values) = q.shape, v.shape[2:]
        lanes = num_lanes(key_heads, cp.degree)

        def compute() -> tuple[Tensor, Tensor]:
            y = q.new_empty(v.shape)
            num_states = 2 * -(-length // 2 // settings.save_every)
            states = q.new_empty((batch, num_states, num_heads, keys, values), dtype=accumulator_dtype(q.dtype))

            def step(place: int, lane: int, state: Tensor) -> Tensor:
                heads = lane_slice(num_heads, lane, lanes)
                starts_here = None if starts is None else half(starts, place)
                made = half(y, place)[:, :, heads], half(states, place)[:, :, heads]
                return gated_delta_piece(state, part(inputs, place, lane, lanes), starts_here, settings, *made)

            relay_state(cp, FORWARD, lane_zeros(lanes, q, num_heads, keys, values), step)
            return y, states

        y, states = run_once(compute)
        ctx.save_for_backward(*inputs, starts, states)
        ctx.cp, ctx.settings = cp, settings
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of local tokens, and their contribution to those of parameters."""
        *inputs, starts, states = ctx.saved_tensors
        cp, q, v = ctx.cp, inputs[0], inputs[2]
        gradients, lanes = new_gradients(inputs, WRITTEN, WRITTEN, ctx.needs_input_grad[3:]), num_lanes(q.shape[2], cp.degree)

        def step(place: int, lane: int, grad_last: Tensor) -> Tensor:
            heads = lane_slice(v.shape[2], lane, lanes)
            starts_here = None if starts is None else half(starts, place)
            return gated_delta_piece_backward(
                grad_last,
                half(gradient, place)[:, :, heads],
                part(inputs, place, lane, lanes),
                starts_here,
                half(states, place)[:, :, heads],
                ctx.settings,
                part(gradients, place, lane, lanes),
            )

        relay_state(cp, BACKWARD, lane_zeros(lanes, q, v.shape[2], q.shape[3], v.shape[3]), step)
        return None, None, None, *as_inputs(gradients, inputs)


def part(tensors: Sequence[Given], place: int, lane: int, lanes: int) -> list[Given]:
    """One piece and lane of the inputs, or of their gradients, as views: a lane is key heads with their value heads."""
    found: list[Given] = []
    for index, each in enumerate(tensors):
        if each is None:
            found.append(None)
        elif index in WRITTEN:
            found.append(half(each, place)[:, :, lane_slice(each.shape[2], lane, lanes)])
        else:
            found.append(each[lane_slice(each.shape[0], lane, lanes)])
    return found
