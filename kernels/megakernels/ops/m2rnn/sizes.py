"""Bytes and cost of the recurrence's kernels for given tensors: the facts of their sizes, and copies of operands; needs no triton."""

import torch
from torch import Tensor

from megakernels._common.cost import Cost
from megakernels._common.scratch import copies_bytes
from megakernels.facts import KernelBytes, ceil_div
from megakernels.ops.m2rnn.facts import RecurrenceSizes
from megakernels.ops.m2rnn.inputs import M2rnnInputs


def sizes_of(given: M2rnnInputs) -> RecurrenceSizes:
    """The sizes of these arguments."""
    batch, positions, heads, values = given.v.shape
    return RecurrenceSizes(batch, positions, heads, given.q.shape[2], values, given.save_every, given.q.element_size())


def accepts(given: M2rnnInputs) -> bool:
    """True if the kernels support these sizes."""
    return sizes_of(given).accepted


def forward_bytes(state: Tensor | None, given: M2rnnInputs) -> KernelBytes:
    """Bytes of `kernel.forward` with the same operands."""
    q, k, v, _, state_map, D, dt_bias, A_log, starts, _ = given
    dense = [each for each in (state_map, D, dt_bias, A_log, starts, state) if each is not None]
    has_states = q.shape[0] * v.shape[2] * v.shape[3] * q.shape[2] > 0
    return sizes_of(given).forward_bytes()._replace(scratch=copies_bytes(dense if has_states else (), rows=(q, k, v)))


def backward_bytes(_grad_last: Tensor | None, grad_y: Tensor, given: M2rnnInputs, states: Tensor) -> KernelBytes:
    """Bytes of `kernel.backward` with the same operands."""
    q, k, v, f, state_map, D, dt_bias, A_log, starts, _ = given
    parameters = state_map, D, dt_bias, A_log
    dense = [each for each in (*parameters, starts) if each is not None] if states.numel() else []
    sizes = [each.element_size() for each in parameters]
    found = sizes_of(given).backward_bytes((sizes[0], sizes[1], sizes[2], sizes[3]), copies_bytes(dense))
    results = sum(each.nbytes for each in (q, k, v, f, *parameters))
    return found._replace(results=results, scratch=found.scratch + copies_bytes((states,), rows=(q, k, v, grad_y)))


def forward_cost(_state: Tensor | None, given: M2rnnInputs) -> Cost:
    """Cost of `kernel.forward`: the product of state and map at each position, position by position."""
    return Cost({torch.float32: sizes_of(given).state_flops()}, steps=given.q.shape[1])


def backward_cost(_grad_last: Tensor | None, _grad_y: Tensor, given: M2rnnInputs, _states: Tensor) -> Cost:
    """Cost of `kernel.backward`: the walk over all positions, and each span's states again, segment by segment at the same time."""
    sizes = sizes_of(given)
    again = ceil_div(sizes.segments, sizes.span_segments) * given.save_every
    return Cost({torch.float32: 3 * sizes.state_flops()}, steps=given.q.shape[1] + min(again, given.q.shape[1]))
