"""Triton kernels of the gated delta rule: rows and scores, systems, states; in backward the same again, then their gradients.

A tile has at most 64 positions (fp32: 16). A segment is a sequence of tiles at whose start the state is saved. Kernels hand each other
buffers with a slot per tile and head, of a part of the segments at once; backward processes the parts from the last.

- `delta_scores_kernel` (one decay a head), or `delta_row_decay_kernel` and `delta_row_scores_kernel` (one a row of the state): one program
  per tile and head (the last: per 16 rows of it): decayed queries and keys, scores, and the triangular system.
- `delta_solve_kernel`: one program per tile and head: the inverse of the system, in fp32, and its products with keys and values.
- `delta_walk_kernel`: one program per sequence, head and columns of the state: y and the states before segments; in backward also per
  segment: the states before tiles.
- `delta_walk_gradient_kernel`: the same in reverse: the gradients of the states after tiles.
- `delta_value_gradient_kernel`, `delta_key_gradient_kernel`: one program per tile and head (and rows of the state): gradients of v, and of
  all that the first two kernels make.
- `delta_pair_gradient_kernel`, or `delta_row_pair_gradient_kernel` and `delta_row_decay_gradient_kernel`: one program per tile and head
  (16 rows of it): gradients of unit queries and keys, decay and beta.
- `delta_unit_gradient_kernel`: one program per 16 rows of a tile and key head: gradients of q and k.

No program adds to another's result: results are bitwise reproducible. The formulas are the reference's. Operands of products have q's
dtype, products and the carried state accumulate in fp32. No exponent is positive, and those of hidden pairs are masked
before they are exponentiated.
"""

import torch
from torch import Tensor

from megakernels._common.tiles import on_device_of, unit_stride
from megakernels.ops.gated_delta.inputs import GatedDeltaInputs
from megakernels.ops.gated_delta.launch import buffers_of, prepare, tile_gradients, walk, walk_gradient
from megakernels.ops.gated_delta.sizes import sizes_of


def forward(state: Tensor | None, given: GatedDeltaInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Follows the contract of `reference.forward`, for fp32, bf16 and fp16."""
    given, sizes = _dense(given), sizes_of(given).extents(backward=False)
    q, v = given.q, given.v
    batch, num_heads, widths = q.shape[0], v.shape[2], (q.shape[3], v.shape[3])
    y = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    states = torch.empty(batch, sizes.segments, num_heads, *widths, dtype=torch.float32, device=q.device)
    last = torch.empty(batch, num_heads, *widths, dtype=torch.float32, device=q.device)
    if not (v.numel() and q.numel()):
        return y, states, last.zero_() if state is None else last.copy_(state)
    state, made = None if state is None else state.contiguous(), buffers_of(given, sizes)
    with on_device_of(q):
        for first in range(0, sizes.segments, sizes.at_once):
            count = min(sizes.at_once, sizes.segments - first)
            prepare(given, sizes, made, first, count)
            walk(given, sizes, made, (first, count), state, states, (y, last))
            state = last
    return y, states, last


def backward(grad_last: Tensor | None, grad_y: Tensor, given: GatedDeltaInputs, states: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Follows the contract of `reference.backward`."""
    gradients = tuple(torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in given[:5])
    A_log, dt_bias = given.A_log, given.dt_bias
    given, sizes = _dense(given), sizes_of(given).extents(backward=True)
    q, v = given.q, given.v
    batch, num_heads, widths = q.shape[0], v.shape[2], (q.shape[3], v.shape[3])
    grad_y, states = unit_stride(grad_y.to(q.dtype)), states.contiguous()
    grad_first = torch.empty(batch, num_heads, *widths, dtype=torch.float32, device=q.device)
    shape = batch, sizes.segments * sizes.tiles, num_heads, sizes_of(given).shares
    shares = torch.zeros(shape, dtype=torch.float32, device=q.device)  # the shares of tiles beyond the end stay zero
    if v.numel() and q.numel():
        _run_backward(None if grad_last is None else grad_last.contiguous(), grad_y, given, states, gradients, (grad_first, shares))
    else:
        for each in gradients:
            each.zero_()
        grad_first = grad_first.zero_() if grad_last is None else grad_first.copy_(grad_last)
    totals = shares.sum((0, 1))
    of_bias = totals[:, 1:] if sizes_of(given).rows else totals[:, 1]
    return (*gradients, _as(totals[:, 0], A_log), _as(of_bias, dt_bias)), grad_first


def _run_backward(
    grad_state: Tensor | None,
    grad_y: Tensor,
    given: GatedDeltaInputs,
    states: Tensor,
    gradients: tuple[Tensor, ...],
    results: tuple[Tensor, Tensor],
) -> None:
    sizes, (grad_first, shares) = sizes_of(given).extents(backward=True), results
    made = buffers_of(given, sizes)
    with on_device_of(given.q):
        for begin in reversed(range(0, sizes.segments, sizes.at_once)):
            part = begin, min(sizes.at_once, sizes.segments - begin)
            prepare(given, sizes, made, *part)
            walk(given, sizes, made, part, None, states, None)
            walk_gradient(given, sizes, made, part, grad_y, grad_state, grad_first)
            tile_gradients(given, sizes, made, part, grad_y, gradients, shares)
            grad_state = grad_first


def _as(total: Tensor, parameter: Tensor) -> Tensor:
    """A parameter's gradient from its sum, in its own memory."""
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device).copy_(total)


def _dense(given: GatedDeltaInputs) -> GatedDeltaInputs:
    """Inputs whose rows are dense, and dense parameters and starts."""
    starts = None if given.starts is None else given.starts.contiguous()
    return given._replace(
        q=unit_stride(given.q),
        k=unit_stride(given.k),
        v=unit_stride(given.v),
        decay=unit_stride(given.decay) if sizes_of(given).rows else given.decay,
        A_log=given.A_log.contiguous(),
        dt_bias=given.dt_bias.contiguous(),
        starts=starts,
    )
