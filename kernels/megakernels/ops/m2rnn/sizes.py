"""Sizes supported by the recurrence's kernels, their spans of segments, and their scratch bytes; needs no triton."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megakernels._common.cost import Cost
from megakernels._common.scratch import SUMS_BYTES, KernelBytes, copies_bytes, narrowed_bytes
from megakernels.ops.m2rnn.inputs import Recurrence

LARGEST_KEYS, LARGEST_VALUES = 128, 16
"""Maximum sides of a head's state; larger states do not fit the backward's registers and use the reference."""
PARTS_BYTES = 64 << 20
"""Scratch bytes for the partial gradients of q and k."""


def accepts(given: Recurrence) -> bool:
    """Whether the kernels support these sizes."""
    return given.q.shape[-1] <= LARGEST_KEYS and given.v.shape[-1] <= LARGEST_VALUES


class Span(NamedTuple):
    """Segments [first, stop) of one launch of the backward, and their positions."""

    first: int
    stop: int
    positions: slice


def spans(q: Tensor, num_heads: int, save_every: int) -> Iterator[Span]:
    """The spans of a sequence, from the last."""
    batch, num_positions, key_width = q.shape
    segment_bytes = 2 * SUMS_BYTES * max(1, batch * save_every * num_heads * key_width)
    length = max(1, PARTS_BYTES // segment_bytes)
    for stop in range(-(-num_positions // save_every), 0, -length):
        first = max(0, stop - length)
        yield Span(first, stop, slice(first * save_every, min(stop * save_every, num_positions)))


def forward_bytes(state: Tensor | None, given: Recurrence) -> KernelBytes:
    """Bytes of `kernel.forward` with the same operands."""
    q, k, v, _, state_map, D, dt_bias, A_log, starts, save_every = given
    batch, num_positions, key_width = q.shape
    states = batch * (-(-num_positions // save_every) + 1) * v.shape[2] * key_width * v.shape[3]
    dense = [each for each in (state_map, D, dt_bias, A_log, starts, state) if each is not None]
    copied = copies_bytes(dense if states else (), rows=(q, k, v))
    return KernelBytes(v.numel() * q.element_size() + SUMS_BYTES * states, 0, copied)


def backward_bytes(grad_y: Tensor, given: Recurrence, states: Tensor) -> KernelBytes:
    """Bytes of `kernel.backward` with the same operands.

    The peak is while a span's parts are written or summed, in addition to a segment's states; or while the gradients of the parameters are
    summed over the sequences.
    """
    q, k, v, f, state_map, D, dt_bias, A_log, starts, save_every = given
    parameters = (state_map, D, dt_bias, A_log)
    batch, num_heads, key_width, value_width = q.shape[0], *v.shape[2:3], q.shape[2], v.shape[3]
    per_head = SUMS_BYTES * num_heads
    state = batch * per_head * key_width * value_width
    sums = [per_head * value_width * value_width, per_head * value_width, per_head, per_head]  # of the parameters, in order
    launches = list(spans(q, num_heads, save_every)) if states.numel() else []
    longest = max([span.positions.stop - span.positions.start for span in launches], default=0)
    part = 2 * SUMS_BYTES * batch * longest * key_width
    dense = [each for each in (*parameters, starts) if each is not None]
    launch_peak = 2 * save_every * state + num_heads * part + max(part, copies_bytes(dense if launches else ()))
    peaks = [launch_peak - sum(each.nbytes for each in parameters), 0]
    for index, (parameter, summed) in enumerate(zip(parameters, sums, strict=True)):
        later = sum(each.nbytes for each in parameters[index + 1 :])
        peaks.append(narrowed_bytes(parameter, summed) - later)
    copied = copies_bytes((states,), rows=(q, k, v, grad_y))
    return KernelBytes(sum(each.nbytes for each in (q, k, v, f, *parameters)), state, batch * sum(sums) + copied + max(peaks))


def forward_cost(_state: Tensor | None, given: Recurrence) -> Cost:
    """Cost of `kernel.forward`: the product of state and map at each position, position by position."""
    return Cost({torch.float32: _state_product_flops(given)}, steps=given.q.shape[1])


def backward_cost(_grad_last: Tensor | None, _grad_y: Tensor, given: Recurrence, _states: Tensor) -> Cost:
    """Cost of `kernel.backward`: the recomputed forward, the backward, and the gradient of the map, which is not sequential."""
    return Cost({torch.float32: 3 * _state_product_flops(given)}, steps=2 * given.q.shape[1])


def _state_product_flops(given: Recurrence) -> int:
    batch, num_positions, num_heads, value_width = given.v.shape
    return 2 * batch * num_positions * num_heads * given.q.shape[2] * value_width * value_width
