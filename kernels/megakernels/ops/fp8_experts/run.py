"""Forward and backward of the experts' MLPs in eight bits: copies, products, and what is between them.

Every tensor is dropped after its last use, in the order that `sizes` counts.
"""

from types import ModuleType

import torch
from torch import Tensor

from megakernels._common.device import module_for
from megakernels.ops.fp8_experts import reference
from megakernels.ops.fp8_experts.products import outer, times
from megakernels.ops.fp8_experts.reference import FORMAT, groups_of, matrices_of
from megakernels.ops.fp8_linear import choice
from megakernels.ops.fp8_linear.reference import Operand
from megakernels.ops.moe.inputs import Experts


def forward(given: Experts, *, by_row: bool, keeps: bool) -> list[Tensor]:
    """Returns y, gate_out if there is a gate, up_out, and if it keeps them the columns of x with their scales."""
    pieces, rows, top_k = module_for(given.x, reference), given.rows, given.weights.shape[1]
    groups = groups_of(given.counts, rows.shape[0])
    kept = pieces.turned(given.x, groups, by_row=by_row, rows=rows, top_k=top_k) if keeps else ()
    first = _rows(given.x, by_row, rows, top_k)
    gate_out = None if given.gate is None else times(first, _stacked(given.gate, by_row), groups, given.gate, fast=True)
    up_out = times(first, _stacked(given.up, by_row), groups, given.up, fast=True)
    del first
    hidden = pieces.hidden_rows(gate_out, up_out, given, groups)
    first = _rows(hidden, by_row)
    del hidden
    made = times(first, _stacked(given.down, by_row), groups, given.down, fast=True)
    del first
    pieces.add_down_bias(made, given, groups)
    y = pieces.sum_rows(made, rows, top_k)
    return [y, *(() if gate_out is None else (gate_out,)), up_out, *kept]


def backward(
    grad_y: Tensor, given: Experts, scales: Tensor | None, gate_out: Tensor | None, up_out: Tensor, *, by_row: bool
) -> list[Tensor]:
    """Returns the gradients of x, weights, the matrices and the biases that there are."""
    pieces, rows, top_k = module_for(grad_y, reference), given.rows, given.weights.shape[1]
    groups = groups_of(given.counts, rows.shape[0])
    pulled = times(_rows(grad_y, by_row, rows, top_k), _turned(pieces, given.down, by_row), groups, given.down, fast=False)
    grad_gate_out, grad_up_out, hidden, grad_weights = pieces.pull(pulled, gate_out, up_out, given, groups)
    del pulled
    second = pieces.turned(hidden, groups, by_row=by_row)
    del hidden
    grad_down = outer(pieces.turned(grad_y, groups, by_row=by_row, rows=rows, top_k=top_k), second, groups, given.down)
    del second
    biases = pieces.bias_gradients(grad_y, grad_weights, given, grad_gate_out, grad_up_out, groups)
    made = times(_rows(grad_up_out, by_row), _turned(pieces, given.up, by_row), groups, given.up, fast=False)
    if given.gate is not None and grad_gate_out is not None:
        made.add_(times(_rows(grad_gate_out, by_row), _turned(pieces, given.gate, by_row), groups, given.gate, fast=False))
    grad_x = pieces.sum_rows(made, rows, top_k)
    del made
    second = pieces.turned(given.x, groups, by_row=by_row, rows=rows, top_k=top_k) if scales is None else Operand(given.x, scales)
    matrices = []
    if given.gate is not None and grad_gate_out is not None:
        matrices.append(outer(pieces.turned(grad_gate_out, groups, by_row=by_row), second, groups, given.gate))
        del grad_gate_out
    matrices.append(outer(pieces.turned(grad_up_out, groups, by_row=by_row), second, groups, given.up))
    return [grad_x, grad_weights, *matrices, grad_down, *biases]


def _rows(x: Tensor, by_row: bool, rows: Tensor | None = None, top_k: int = 1) -> Operand:
    """Rows as the first operand, a scale for each: x [M, K], or rows[i] // top_k of [N, K] where they are given."""
    num_rows = x.shape[0] if rows is None else rows.shape[0]
    if not num_rows:
        return Operand(x.new_empty((0, x.shape[1]), dtype=FORMAT), x.new_empty(0, dtype=torch.float32))
    data, scale = choice.operand(x, dtype=FORMAT, by_row=by_row)
    if rows is not None:
        token = rows if top_k == 1 else rows // top_k
        data = data.view(torch.uint8).index_select(0, token).view(FORMAT)
        scale = scale.index_select(0, token) if by_row else scale
    return Operand(data, scale if by_row else scale.expand(num_rows).contiguous())


def _stacked(stack: Tensor, by_row: bool) -> Operand:
    """Matrices [E, N, K] as the second operand: of products that sum over K; a scale for each of their rows."""
    data, scale = choice.operand(stack.flatten(0, 1), dtype=FORMAT, by_row=by_row)
    return Operand(data.view(stack.shape), scale if by_row else scale.expand(data.shape[0]).contiguous())


def _turned(pieces: ModuleType, stack: Tensor, by_row: bool) -> Operand:
    """Matrices [E, K, N] as the second operand [E, N, K] of products that sum over K; a scale for each of their columns."""
    data, scale = pieces.turned(stack.flatten(0, 1), matrices_of(stack), by_row=by_row)
    return Operand(data.view(stack.shape[2], stack.shape[0], stack.shape[1]).transpose(0, 1), scale)
