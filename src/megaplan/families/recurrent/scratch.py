"""What the M²RNN recurrence holds inside its Triton kernels.

Backward a segment's states, made again, and the parts of the gradients of q and k.
"""

from __future__ import annotations

from math import prod

from megaplan.blocks.dims import Dims
from megaplan.blocks.scratch import Inside, lane_of, narrowed
from megaplan.dtypes import DType
from megaplan.families.recurrent.section import MatrixRecurrence

LARGEST_KEYS, LARGEST_VALUES = 128, 16
"""Sides of a state of R."""
PARTS_BYTES = 64 << 20
"""For the parts of the gradients of q and k in R."""


def recurrence_inside(dims: Dims, recurrent: MatrixRecurrence, heads: int, parameters: DType) -> Inside | None:
    """Of the M²RNN recurrence; arguments and result as of `scan_inside`."""
    keys, values, save_every = recurrent.key_dim, recurrent.value_dim, recurrent.save_every
    if keys > LARGEST_KEYS or values > LARGEST_VALUES:
        return None
    run, wide = lane_of(dims, heads, heads), dims.stat_dtype.bytes
    num_segments = -(-run.positions // save_every)
    span = max(1, PARTS_BYTES // (2 * wide * dims.batch * save_every * run.heads * keys))
    before = max(0, num_segments - span)  # segments before the span that is walked first
    longest = max(run.positions - before * save_every, min(span, before) * save_every)

    state = wide * dims.batch * run.heads * keys * values
    part = 2 * wide * dims.batch * longest * keys
    sums = [run.heads * prod(shape) for shape in ((values, values), (values,), (), ())]  # elements of the parameters
    gradients = [parameters.bytes * count for count in sums]
    walking = 2 * save_every * state + run.heads * part + max(part, run.copied_starts) - sum(gradients)
    summing = (narrowed(parameters, wide * count) - sum(gradients[index + 1 :]) for index, count in enumerate(sums))
    highest = wide * dims.batch * sum(sums) + max(walking, 0, *summing)
    if dims.cp == 1:
        return Inside(0, state + highest)
    y, states = dims.dtype.bytes * dims.batch * run.positions * run.heads * values, (num_segments + 1) * state
    made = y + dims.dtype.bytes * dims.batch * run.positions * (run.heads + 2 * keys) + sum(gradients)
    copied = run.copied_states(dims, num_segments + 1, states)
    return Inside(y + states + max(0, run.copied_starts - state), made + highest + copied)
