"""The experts' copies in eight bits and the operations between their products, in plain torch.

A product of groups that sums over rows reads both operands transposed, each expert's rows at a column that 16 divides: an expert without
rows has 16 columns of zeros, because the tensor cores' product of groups takes none that are empty.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megakernels._common import upcast
from megakernels.ops.fp8_experts.facts import turned_columns
from megakernels.ops.fp8_linear.delayed import Delayed, record
from megakernels.ops.fp8_linear.facts import padded
from megakernels.ops.fp8_linear.reference import Operand, power_of_two
from megakernels.ops.moe import grouped
from megakernels.ops.moe.inputs import Experts
from megakernels.ops.moe.reference import activate, activate_backward, gather_rows, row_weights_of, sum_rows

__all__ = ["Groups", "add_down_bias", "bias_gradients", "groups_of", "hidden_rows", "matrices_of", "pull", "sum_rows", "turned"]
FORMAT = torch.float8_e4m3fn
"""The one format that torch's scaled product of groups multiplies."""


class Groups(NamedTuple):
    """Rows of each expert, one after another.

    Attributes:
        num_rows: Rows of all experts.
        counts: int32 [E].
        ends: int32 [E], the row after each expert's last.
        stops: int32 [E], the same in a transposed copy.
        columns: Columns of a transposed copy; columns after the last expert's are not read.
    """

    num_rows: int
    counts: Tensor
    ends: Tensor
    stops: Tensor
    columns: int

    def sizes(self) -> list[int]:
        """Each expert's rows, on the host."""
        return grouped.sizes_of(self.counts, self.num_rows)

    def spans(self, *, turned: bool) -> Iterator[slice]:
        """Ranges of each expert's rows, or of its columns in a transposed copy, on the host."""
        start = 0
        for size in self.sizes():
            stop = start + (max(16, padded(size)) if turned else size)
            yield slice(start, stop)
            start = stop


def groups_of(counts: Tensor, num_rows: int) -> Groups:
    """The groups of sorted rows."""
    ends = counts.cumsum(0, dtype=torch.int32)
    stops = ((counts + 15) // 16 * 16).clamp_(min=16).cumsum(0, dtype=torch.int32)
    return Groups(num_rows, counts, ends, stops, turned_columns(num_rows, counts.shape[0]))


def matrices_of(stack: Tensor) -> Groups:
    """The rows of each matrix of [E, a, b], where 16 divides a."""
    count, rows, _ = stack.shape
    counts = torch.full((count,), rows, dtype=torch.int32, device=stack.device)
    ends = counts.cumsum(0, dtype=torch.int32)
    return Groups(count * rows, counts, ends, ends, count * rows)


def turned(
    x: Tensor, groups: Groups, *, by_row: bool, rows: Tensor | None = None, top_k: int = 1, delayed: Delayed | None = None
) -> Operand:
    """The transpose of rows, as an operand of a product that sums over each expert's.

    Args:
        x: [M, C]; with `rows`, [N, C], of which row i is x[rows[i] // top_k].
        groups: Groups of the rows.
        by_row: True if each column of each expert's rows has a scale; else all have x's scale.
        rows: int32 [M], or None.
        top_k: k.
        delayed: The operand's numbers of delayed scaling; None for others.

    Returns:
        e4m3 [C, groups.columns], and scales [E · C].
    """
    found = x if rows is None else gather_rows(x, rows, top_k)
    num_columns, count = x.shape[1], groups.counts.shape[0]
    data = torch.zeros(num_columns, groups.columns, dtype=FORMAT, device=x.device)
    scales = torch.empty(count, num_columns, dtype=torch.float32, device=x.device)
    if delayed is not None:
        record(x, delayed)
        whole: Tensor | None = delayed.factor
    else:
        whole = None if by_row else power_of_two(largest_of(x.flatten(), 0), FORMAT)
    limit = torch.finfo(FORMAT).max
    for index, (own, place) in enumerate(zip(groups.spans(turned=False), groups.spans(turned=True), strict=True)):
        block = found[own]
        factor = power_of_two(largest_of(block, 0), FORMAT) if whole is None else whole.expand(num_columns)
        scales[index] = 1 / factor
        values = block * factor.to(x.dtype) if delayed is None else (block * factor).clamp_(-limit, limit)
        data[:, place.start : place.start + block.shape[0]].copy_(values.mT)
    return Operand(data, scales.view(-1))


def largest_of(x: Tensor, dim: int) -> Tensor:
    """The largest magnitude along a dim; 0 where it is empty."""
    return x.abs().amax(dim) if x.shape[dim] else x.new_zeros(x.shape[1:])


def hidden_rows(gate_out: Tensor | None, up_out: Tensor, given: Experts, groups: Groups) -> Tensor:
    """The weighted activations [M, F] of the first products, to which their biases are added in place."""
    own = grouped.RowGroups(groups.counts, groups.num_rows)
    if gate_out is not None:
        own.add(gate_out, given.gate_bias)
    own.add(up_out, given.up_bias)
    return (activate(gate_out, up_out, given) * row_weights_of(given.weights, given.rows)).to(up_out.dtype)


def add_down_bias(products: Tensor, given: Experts, groups: Groups) -> None:
    """Add a row's weight times its expert's bias of `down` to the rows [M, h], in place."""
    grouped.RowGroups(groups.counts, groups.num_rows).add(products, given.down_bias, row_weights_of(given.weights, given.rows))


def pull(
    pulled: Tensor, gate_out: Tensor | None, up_out: Tensor, given: Experts, _groups: Groups
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """The gradients of gate_out and up_out, the weighted activations, and the gradient of the weights except for the bias of `down`.

    Args:
        pulled: [M, F], the gradients of the unweighted activations.
        gate_out: [M, F], or None.
        up_out: [M, F].
        given: The operation's arguments.
    """
    weights, wide = row_weights_of(given.weights, given.rows), upcast(pulled)
    acted = activate(gate_out, up_out, given)
    grad_weights = torch.zeros(given.weights.numel(), dtype=given.weights.dtype, device=pulled.device)
    grad_weights[given.rows] = (wide * acted).sum(-1)
    grad_gate_out, grad_up_out = activate_backward(wide * weights, gate_out, up_out, given)
    return grad_gate_out, grad_up_out, (acted * weights).to(up_out.dtype), grad_weights.view(given.weights.shape)


def bias_gradients(
    grad_y: Tensor, grad_weights: Tensor, given: Experts, grad_gate_out: Tensor | None, grad_up_out: Tensor, groups: Groups
) -> list[Tensor]:
    """The gradients of existing biases; the bias of `down` adds its part to the weights' gradient in place."""
    own, found = grouped.RowGroups(groups.counts, groups.num_rows), []
    for bias, grad in ((given.gate_bias, grad_gate_out), (given.up_bias, grad_up_out)):
        if bias is not None and grad is not None:
            found.append(own.total(grad).to(bias.dtype))
    if given.down_bias is not None:
        sent = upcast(gather_rows(grad_y, given.rows, given.weights.shape[1]))
        grad_weights.view(-1)[given.rows] += (sent * own.of_rows(upcast(given.down_bias))).sum(-1)
        found.append(own.total(sent, row_weights_of(given.weights, given.rows)).to(given.down_bias.dtype))
    return found
