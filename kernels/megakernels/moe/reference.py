"""Token-choice mixture of experts in plain torch: routing, permutation, grouped MLP, with explicit backward formulas.

Rows are the N·k (token, slot) pairs sorted by expert; `rows[i]` is the flat index token·k + slot that row i serves.

Source: Shazeer et al., arXiv:1701.06538, section 2; softmax before top-k with renormalised weights as in Mixtral, arXiv:2401.04088, section
2.1; dropless grouped experts, Gale et al., arXiv:2211.15841.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megakernels._common import upcast
from megakernels.activation import reference as activations
from megakernels.moe.grouped import RowGroups


def route_forward(x: Tensor, weight: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns weights [N, k], indices int32 [N, k] and probs [N, E]; slots in falling order of probability."""
    probs = torch.softmax(upcast(x) @ upcast(weight).mT, dim=-1)
    chosen, indices = torch.topk(probs, top_k, dim=-1)
    return chosen / chosen.sum(-1, keepdim=True) if normalize else chosen, indices.to(torch.int32), probs


def route_backward(
    grad_weights: Tensor, x: Tensor, weight: Tensor, probs: Tensor, indices: Tensor, normalize: bool, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of x and weight. With w = p / Σp over the chosen: ∂L/∂p = (∂L/∂w − Σ ∂L/∂w · w) / Σp."""
    slots = indices.long()
    grad_chosen = upcast(grad_weights)
    if normalize:
        chosen = probs.gather(1, slots)
        total = chosen.sum(-1, keepdim=True)
        grad_chosen = (grad_chosen - (grad_chosen * chosen / total).sum(-1, keepdim=True)) / total
    grad_probs = torch.zeros_like(probs).scatter_(1, slots, grad_chosen)
    grad_logits = probs * (grad_probs - (grad_probs * probs).sum(-1, keepdim=True))
    grad_x = (grad_logits @ upcast(weight)).to(x.dtype) if needs[0] else None
    grad_weight = (grad_logits.mT @ upcast(x)).to(weight.dtype) if needs[1] else None
    return grad_x, grad_weight


def dispatch_plan(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Returns rows int32 [N·k] and counts int32 [E]."""
    flat = indices.flatten()
    return torch.argsort(flat, stable=True).to(torch.int32), torch.bincount(flat, minlength=num_experts).to(torch.int32)


def arrival_plan(counts: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Returns rows int32 [M] and totals int32 [E]; given the number of rows, a device need not tell the host."""
    num_ranks, num_experts = counts.shape
    experts = torch.arange(num_experts, dtype=torch.int32, device=counts.device).repeat(num_ranks)
    owners = experts.repeat_interleave(counts.flatten(), output_size=num_rows)
    return torch.argsort(owners, stable=True).to(torch.int32), counts.sum(0, dtype=torch.int32)


def gather_rows(x: Tensor, rows: Tensor, top_k: int) -> Tensor:
    """Row i is x[rows[i] // k]: [N, h] → [N·k, h]."""
    return x.index_select(0, rows // top_k)


def sum_rows(x: Tensor, rows: Tensor, top_k: int) -> Tensor:
    """Each token's k rows summed in slot order: [N·k, h] → [N, h].

    It gathers through the inverse permutation, so repeats are bitwise equal.
    """
    position = torch.empty_like(rows)
    position[rows] = torch.arange(rows.shape[0], dtype=rows.dtype, device=rows.device)
    slots = position.view(-1, top_k)
    total = upcast(x.index_select(0, slots[:, 0]))
    for slot in range(1, top_k):
        total = total + upcast(x.index_select(0, slots[:, slot]))
    return total.to(x.dtype)


def experts_forward(
    x: Tensor, weights: Tensor, rows: Tensor, counts: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, activation: str
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns y [M, h], gate_out [M, F] (None without gate) and up_out [M, F], all in x's dtype."""
    groups, rows_of_x = RowGroups(counts), x.contiguous()
    gate_out = None if gate is None else groups.times(rows_of_x, gate.mT)
    up_out = groups.times(rows_of_x, up.mT)
    weighted = _activate(gate_out, up_out, activation) * _row_weights(weights, rows)  # before the product: one rounding less
    return groups.times(weighted.to(x.dtype), down.mT), gate_out, up_out


def experts_backward(
    grad_y: Tensor,
    x: Tensor,
    weights: Tensor,
    rows: Tensor,
    counts: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    gate_out: Tensor | None,
    up_out: Tensor,
    activation: str,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of x, weights, gate, up and down, None where not needed.

    A row's output is w · (hidden @ downᵀ), so with g = ∂L/∂y @ down: ∂L/∂w = g · hidden and ∂L/∂hidden = w · g. The unweighted output is
    not kept.
    """
    groups, grad_y, rows_of_x = RowGroups(counts), grad_y.contiguous(), x.contiguous()
    row_weights = _row_weights(weights, rows)
    hidden = _activate(gate_out, up_out, activation)
    pulled = upcast(groups.times(grad_y, down))
    grad_x = grad_weights = grad_gate = grad_up = grad_down = None
    if needs[1]:
        grad_weights = torch.zeros(weights.numel(), dtype=weights.dtype, device=weights.device)
        grad_weights[rows] = (pulled * hidden).sum(-1).to(weights.dtype)
        grad_weights = grad_weights.view(weights.shape)
    if needs[4]:
        grad_down = groups.outer(grad_y, (hidden * row_weights).to(x.dtype))
    grad_gate_out, grad_up_out = _activate_backward(pulled * row_weights, gate_out, up_out, activation)  # in x's dtype, for the products
    if needs[0]:
        grad_x = groups.times(grad_up_out, up)
        if gate is not None and grad_gate_out is not None:
            grad_x = (upcast(grad_x) + upcast(groups.times(grad_gate_out, gate))).to(x.dtype)
    if needs[2] and grad_gate_out is not None:
        grad_gate = groups.outer(grad_gate_out, rows_of_x)
    if needs[3]:
        grad_up = groups.outer(grad_up_out, rows_of_x)
    return grad_x, grad_weights, grad_gate, grad_up, grad_down


def _activate(gate_out: Tensor | None, up_out: Tensor, activation: str) -> Tensor:
    """The hidden rows [M, F] in the accumulation dtype."""
    up_out = upcast(up_out)
    if gate_out is not None:
        return activations.swiglu_forward(upcast(gate_out), up_out)
    return activations.relu2_forward(up_out) if activation == "relu2" else activations.gelu_forward(up_out)


def _activate_backward(grad: Tensor, gate_out: Tensor | None, up_out: Tensor, activation: str) -> tuple[Tensor | None, Tensor]:
    if gate_out is not None:
        grad_gate, grad_up = activations.swiglu_backward(grad, gate_out, up_out, (True, True))
        assert grad_up is not None
        return grad_gate, grad_up
    backward = activations.relu2_backward if activation == "relu2" else activations.gelu_backward
    return None, backward(grad, up_out)


def _row_weights(weights: Tensor, rows: Tensor) -> Tensor:
    return upcast(weights).flatten().index_select(0, rows).unsqueeze(1)
