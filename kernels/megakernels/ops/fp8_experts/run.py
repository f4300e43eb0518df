"""Forward and backward of the experts' MLPs in eight bits: copies, products, and the operations between them.

Every tensor is dropped after its last use, in the order that `sizes` counts. Where blocks have scales, operands are values in fp32, and an
expert's matrix or columns of rows have their own factor.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from megakernels._common.device import module_for
from megakernels.ops.fp8_experts import reference
from megakernels.ops.fp8_experts.packed import Stack, stacked_of, stacks_of, turned_of
from megakernels.ops.fp8_experts.products import outer, times
from megakernels.ops.fp8_experts.reference import FORMAT, Groups, groups_of, matrices_of
from megakernels.ops.fp8_linear import blocks, choice
from megakernels.ops.fp8_linear.blocks import GRADIENT, INPUT, WEIGHT
from megakernels.ops.fp8_linear.delayed import delayed_of
from megakernels.ops.fp8_linear.facts import BLOCKS
from megakernels.ops.fp8_linear.reference import Operand
from megakernels.ops.moe.inputs import Experts
from megakernels.ops.moe.reference import gather_rows


def forward(given: Experts, scaling: str, packed: Sequence[Tensor | None], numbers: Sequence[Tensor], *, keeps: bool) -> list[Tensor]:
    """Returns y, gate_out if there is a gate, up_out, and if it keeps them the columns of x with their scales."""
    pieces, rows, top_k = module_for(given.x, reference), given.rows, given.weights.shape[1]
    groups, (gate, up, down) = groups_of(given.counts, rows.shape[0]), stacks_of(given, packed, numbers)
    read_by = gate or up  # its numbers are the rows'
    kept = _columns(pieces, given.x, groups, scaling, INPUT, read_by, rows, top_k) if keeps else ()
    first = _rows(given.x, scaling, INPUT, read_by, rows, top_k)
    gate_out = None if gate is None else times(first, _stacked(gate, scaling), groups, gate.like, fast=True)
    up_out = times(first, _stacked(up, scaling), groups, given.up, fast=True)
    del first
    hidden = pieces.hidden_rows(gate_out, up_out, given, groups)
    first = _rows(hidden, scaling, INPUT, down)
    del hidden
    made = times(first, _stacked(down, scaling), groups, given.down, fast=True)
    del first
    pieces.add_down_bias(made, given, groups)
    y = pieces.sum_rows(made, rows, top_k)
    return [y, *(() if gate_out is None else (gate_out,)), up_out, *kept]


def backward(
    grad_y: Tensor,
    given: Experts,
    scales: Tensor | None,
    gate_out: Tensor | None,
    up_out: Tensor,
    scaling: str,
    packed: Sequence[Tensor | None],
    numbers: Sequence[Tensor],
) -> list[Tensor]:
    """Returns the gradients of x, weights, the matrices and the biases that there are."""
    pieces, rows, top_k = module_for(grad_y, reference), given.rows, given.weights.shape[1]
    groups, (gate, up, down) = groups_of(given.counts, rows.shape[0]), stacks_of(given, packed, numbers)
    read_by = gate or up
    pulled = times(_rows(grad_y, scaling, GRADIENT, down, rows, top_k), _turned(pieces, down, scaling), groups, given.down, fast=False)
    grad_gate_out, grad_up_out, hidden, grad_weights = pieces.pull(pulled, gate_out, up_out, given, groups)
    del pulled
    second = _columns(pieces, hidden, groups, scaling, INPUT, down)
    del hidden
    grad_down = outer(_columns(pieces, grad_y, groups, scaling, GRADIENT, down, rows, top_k), second, groups, given.down)
    del second
    biases = pieces.bias_gradients(grad_y, grad_weights, given, grad_gate_out, grad_up_out, groups)
    made = times(_rows(grad_up_out, scaling, GRADIENT, up), _turned(pieces, up, scaling), groups, given.up, fast=False)
    if gate is not None and grad_gate_out is not None:
        made.add_(times(_rows(grad_gate_out, scaling, GRADIENT, gate), _turned(pieces, gate, scaling), groups, gate.like, fast=False))
    grad_x = pieces.sum_rows(made, rows, top_k)
    del made
    second = _columns(pieces, given.x, groups, scaling, INPUT, read_by, rows, top_k) if scales is None else Operand(given.x, scales)
    matrices = []
    if gate is not None and grad_gate_out is not None:
        matrices.append(outer(_columns(pieces, grad_gate_out, groups, scaling, GRADIENT, gate), second, groups, gate.like))
        del grad_gate_out
    matrices.append(outer(_columns(pieces, grad_up_out, groups, scaling, GRADIENT, up), second, groups, given.up))
    return [grad_x, grad_weights, *matrices, grad_down, *biases]


def _rows(x: Tensor, scaling: str, role: str, stack: Stack, rows: Tensor | None = None, top_k: int = 1) -> Operand:
    """Rows as the first operand, a scale for each: x [M, K], or rows[i] // top_k of [N, K] where they are given.

    They multiply the matrices of `stack`, or are the gradient of a product with them.
    """
    num_rows, of_blocks = x.shape[0] if rows is None else rows.shape[0], scaling in BLOCKS
    if not num_rows:
        return Operand(x.new_empty((0, x.shape[1]), dtype=FORMAT), None if of_blocks else x.new_empty(0, dtype=torch.float32))
    data, scale = choice.operand(x, scaling, role, numbers=stack.numbers)
    if rows is not None:
        token = rows if top_k == 1 else rows // top_k
        data = data.index_select(0, token) if of_blocks else data.view(torch.uint8).index_select(0, token).view(FORMAT)
        scale = scale.index_select(0, token) if scale is not None and scaling == "rows" else scale
    return Operand(data, scale if scaling == "rows" or scale is None else scale.expand(num_rows).contiguous())


def _stacked(given: Stack, scaling: str) -> Operand:
    """Matrices [E, N, K] as the second operand: of products that sum over K; a scale for each of their rows."""
    if given.packed is not None:
        return stacked_of(given, given.packed, scaling)
    stack = given.like
    if scaling in BLOCKS:
        return Operand(_each(stack, scaling), None)
    data, scale = choice.operand(stack.flatten(0, 1), scaling, WEIGHT, numbers=given.numbers)
    assert scale is not None
    return Operand(data.view(stack.shape), scale if scaling == "rows" else scale.expand(data.shape[0]).contiguous())


def _turned(pieces: ModuleType, given: Stack, scaling: str) -> Operand:
    """Matrices [E, K, N] as the second operand [E, N, K] of products that sum over K; a scale for each of their columns."""
    if given.packed is not None:
        return turned_of(given, given.packed, scaling)
    stack = given.like
    if scaling in BLOCKS:
        return Operand(_each(stack, scaling, transposed=True), None)
    own = delayed_of(given.numbers, WEIGHT)
    data, scale = pieces.turned(stack.flatten(0, 1), matrices_of(stack), by_row=scaling == "rows", delayed=own)
    return Operand(data.view(stack.shape[2], stack.shape[0], stack.shape[1]).transpose(0, 1), scale)


def _each(stack: Tensor, scaling: str, *, transposed: bool = False) -> Tensor:
    """The values of matrices whose blocks have scales, or of their transposes."""
    data = torch.empty((stack.mT if transposed else stack).shape, dtype=torch.float32, device=stack.device)
    for matrix, place in zip(stack, data, strict=True):
        place.copy_(blocks.rounded(matrix, scaling, WEIGHT, transposed=transposed))
    return data


def _columns(
    pieces: ModuleType, x: Tensor, groups: Groups, scaling: str, role: str, stack: Stack, rows: Tensor | None = None, top_k: int = 1
) -> Operand:
    """The transpose of rows [M, C], or of the gathered ones of tokens, as an operand of a product that sums over each expert's."""
    if scaling not in BLOCKS:
        how = {"by_row": scaling == "rows", "rows": rows, "top_k": top_k, "delayed": delayed_of(stack.numbers, role)}
        found: Operand = pieces.turned(x, groups, **how)
        return found
    gathered = x if rows is None else gather_rows(x, rows, top_k)
    data = torch.zeros(x.shape[1], groups.columns, dtype=torch.float32, device=x.device)
    for own, place in zip(groups.spans(turned=False), groups.spans(turned=True), strict=True):
        if own.stop > own.start:
            data[:, place.start : place.start + own.stop - own.start] = blocks.rounded(gathered[own], scaling, role, transposed=True)
    return Operand(data, None)
