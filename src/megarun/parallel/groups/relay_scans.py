"""Scans with one state per head across the ranks of a CP group (R-33), in the order of `megarun.parallel.groups.relay`.

Mamba-2's and Mamba-1's scans, the M²RNN recurrence and the gated delta rule differ only in their kernels and in the dims of their inputs,
which `RelayedScan` states. Mamba-3's scan, whose pieces exchange more than a state, is in `megarun.parallel.groups.relay_mamba3`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megakernels import (
    accumulator_dtype,
    gated_delta,
    gated_delta_piece,
    gated_delta_piece_backward,
    m2rnn,
    m2rnn_piece,
    m2rnn_piece_backward,
    selective_scan,
    selective_scan_piece,
    selective_scan_piece_backward,
    ssd,
    ssd_piece,
    ssd_piece_backward,
)
from megakernels.ops.gated_delta.piece import DeltaSettings
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
    relay_state,
    run_once,
)

Given = TypeVar("Given", Tensor, Tensor | None)
"""Inputs, or their gradients, of which some are not needed."""


class RelayedScan(NamedTuple):
    """A scan that ranks compute piece by piece.

    Attributes:
        piece: Forward of a piece: (state, inputs, starts, setting, y, states).
        piece_backward: Backward of a piece: (gradient of the last state, of y, inputs, starts, states, setting, gradients).
        with_heads: Inputs with positions and, in dim 2, heads, groups or channels; a lane has a part of them.
        shared: Inputs with positions that all heads share. All other inputs are parameters, with heads in dim 0.
        output: The input whose shape y has; its dim 2 counts the state's heads.
        lanes: The input whose dim 2 is split into lanes.
        widths: Inputs whose last dims are the further dims of a head's state, in order.
        accumulates: True if states are saved in the accumulation dtype, else in the inputs' dtype.
        saves_last: True if the state after a piece is saved too.
        cached: True if the second run of a recompute region takes the outputs of the first.
    """

    piece: Callable[..., Tensor]
    piece_backward: Callable[..., Tensor]
    with_heads: tuple[int, ...]
    shared: tuple[int, ...] = ()
    output: int = 0
    lanes: int = 0
    widths: tuple[int, ...] = ()
    accumulates: bool = True
    saves_last: bool = False
    cached: bool = True

    def num_lanes(self, cp: ContextParallel, inputs: Sequence[Tensor]) -> int:
        """Number of lanes of local inputs."""
        return num_lanes(inputs[self.lanes].shape[2], cp.degree)

    def state(self, inputs: Sequence[Tensor]) -> list[int]:
        """Heads of the local state, and further dims."""
        return [inputs[self.output].shape[2], *(inputs[index].shape[-1] for index in self.widths)]

    def part(self, tensors: Sequence[Given], place: int, lane: int, lanes: int) -> list[Given]:
        """One piece and lane of the inputs, or of their gradients, as views."""
        found: list[Given] = []
        for index, tensor in enumerate(tensors):
            if tensor is None:
                found.append(None)
            elif index in self.shared:
                found.append(half(tensor, place))
            elif index in self.with_heads:
                found.append(half(tensor, place)[:, :, lane_slice(tensor.shape[2], lane, lanes)])
            else:
                found.append(tensor[lane_slice(tensor.shape[0], lane, lanes)])
        return found


SSD = RelayedScan(ssd_piece, ssd_piece_backward, (0, 1, 3, 4), lanes=3, widths=(0, 3), accumulates=False)
"""Inputs: x, dt, A_log, B, C, D and dt_bias."""
SELECTIVE = RelayedScan(selective_scan_piece, selective_scan_piece_backward, (0, 1), (3, 4), widths=(2,))
"""Inputs: x, dt, A_log, B, C, D and dt_bias; heads are channels, which share B and C."""
M2RNN = RelayedScan(
    m2rnn_piece, m2rnn_piece_backward, (2, 3), (0, 1), output=2, lanes=2, widths=(0, 2), saves_last=True, cached=False
)  # fmt: skip
"""Inputs: q, k, v, f, state_map, D, dt_bias and A_log; q and k have no heads."""
DELTA = RelayedScan(gated_delta_piece, gated_delta_piece_backward, (0, 1, 2, 3, 4), output=2, widths=(0, 2))
"""Inputs: q, k, v, decay, beta, A_log and dt_bias; a lane is key heads with their value heads."""


def scan(cp: ContextParallel, chunk_size: int, dt_limits: tuple[float, float], starts: Tensor | None, *inputs: Tensor) -> Tensor:
    """Mamba-2's scan; `inputs` are x, dt, A_log, B, C, D and dt_bias of `megakernels.ssd`, local tokens each."""
    if cp.degree == 1 and cp.continued is None:
        x, dt, A_log, B, C, D, dt_bias = inputs
        return ssd(x, dt, A_log, B, C, D, dt_bias, chunk_size, starts, dt_limits=dt_limits)
    limited = SSD._replace(piece=partial(ssd_piece, dt_limits=dt_limits), piece_backward=partial(ssd_piece_backward, dt_limits=dt_limits))
    return _relayed(cp, limited, chunk_size, chunk_size, starts, inputs)


def scan_channels(cp: ContextParallel, save_every: int, starts: Tensor | None, *inputs: Tensor) -> Tensor:
    """Mamba-1's scan; `inputs` are x, dt, A_log, B, C, D and dt_bias of `megakernels.selective_scan`, local tokens each."""
    if cp.degree == 1 and cp.continued is None:
        x, dt, A_log, B, C, D, dt_bias = inputs
        return selective_scan(x, dt, A_log, B, C, D, dt_bias, save_every, starts)
    return _relayed(cp, SELECTIVE, save_every, save_every, starts, inputs)


def recur(cp: ContextParallel, save_every: int, starts: Tensor | None, *inputs: Tensor) -> Tensor:
    """The M²RNN recurrence; `inputs` are q, k, v, f, state_map, D, dt_bias and A_log of `megakernels.m2rnn`, local tokens each."""
    if cp.degree == 1 and cp.continued is None:
        q, k, v, f, state_map, D, dt_bias, A_log = inputs
        return m2rnn(q, k, v, f, state_map, D, dt_bias, A_log, save_every, starts)
    return _relayed(cp, M2RNN, save_every, save_every, starts, inputs)


def delta_rule(cp: ContextParallel, settings: DeltaSettings, starts: Tensor | None, *inputs: Tensor) -> Tensor:
    """The gated delta rule; `inputs` are q, k, v, decay, beta, A_log and dt_bias of `megakernels.gated_delta`, local tokens each."""
    if cp.degree == 1 and cp.continued is None:
        chunk_size, save_every, beta_limit = settings
        q, k, v, decay, beta, A_log, dt_bias = inputs
        return gated_delta(q, k, v, decay, beta, A_log, dt_bias, chunk_size, save_every, starts, beta_limit=beta_limit)
    return _relayed(cp, DELTA, settings.save_every, settings, starts, inputs)


def _relayed(cp: ContextParallel, given: RelayedScan, every: int, setting: Any, starts: Tensor | None, inputs: Sequence[Tensor]) -> Tensor:
    if cp.continued is not None:
        return cp.continued.scan(given, every, setting, inputs)
    y: Tensor = _Relayed.apply(cp, given, every, setting, starts, *inputs)  # type: ignore[no-untyped-call]
    return y


class _Relayed(torch.autograd.Function):
    """Saves the inputs and the states before each segment of a piece, as the op on full sequences."""

    @staticmethod
    def forward(
        ctx: Any, cp: ContextParallel, given: RelayedScan, every: int, setting: Any, starts: Tensor | None, *inputs: Tensor
    ) -> Tensor:
        """Output of local tokens; `every` positions have one saved state, `setting` is the piece's argument."""
        like, dtype = inputs[given.output], inputs[0].dtype
        lanes = given.num_lanes(cp, inputs)

        def compute() -> tuple[Tensor, Tensor]:
            y, state_shape = inputs[0].new_empty(like.shape), given.state(inputs)
            num_states = 2 * (-(-like.shape[1] // 2 // every) + given.saves_last)
            kept = accumulator_dtype(dtype) if given.accumulates else dtype
            states = inputs[0].new_empty((like.shape[0], num_states, *state_shape), dtype=kept)

            def step(place: int, lane: int, state: Tensor) -> Tensor:
                heads = lane_slice(like.shape[2], lane, lanes)
                starts_here = None if starts is None else half(starts, place)
                made = half(y, place)[:, :, heads], half(states, place)[:, :, heads]
                return given.piece(state, given.part(inputs, place, lane, lanes), starts_here, setting, *made)

            relay_state(cp, FORWARD, lane_zeros(lanes, inputs[0], *state_shape), step)
            return y, states

        y, states = run_once(compute) if given.cached else compute()
        ctx.save_for_backward(*inputs, starts, states)
        ctx.cp, ctx.given, ctx.setting = cp, given, setting
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of local tokens, and their contribution to the gradients of parameters."""
        *inputs, starts, states = ctx.saved_tensors
        given: RelayedScan = ctx.given
        tokens = *given.with_heads, *given.shared
        gradients, lanes = new_gradients(inputs, given.with_heads, tokens, ctx.needs_input_grad[5:]), given.num_lanes(ctx.cp, inputs)

        def step(place: int, lane: int, grad_last: Tensor) -> Tensor:
            heads = lane_slice(inputs[given.output].shape[2], lane, lanes)
            return given.piece_backward(
                grad_last,
                half(gradient, place)[:, :, heads],
                given.part(inputs, place, lane, lanes),
                None if starts is None else half(starts, place),
                half(states, place)[:, :, heads],
                ctx.setting,
                given.part(gradients, place, lane, lanes),
            )

        relay_state(ctx.cp, BACKWARD, lane_zeros(lanes, inputs[0], *given.state(inputs)), step)
        return None, None, None, None, None, *as_inputs(gradients, inputs)
