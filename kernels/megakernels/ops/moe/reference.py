"""Token-choice mixture of experts in plain torch: router losses, permutation, grouped MLP, with explicit backward formulas.

Rows are the N·k (token, slot) pairs sorted by expert; `rows[i]` is the flat index token·k + slot that row i serves.

Source: Shazeer et al., arXiv:1701.06538, section 2; dropless grouped experts, Gale et al., arXiv:2211.15841; balance of a sequence,
DeepSeek-V3, arXiv:2412.19437, equations 17 to 20; z-loss, ST-MoE, arXiv:2202.08906, equation 5. The router: `scores`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megakernels._common import upcast
from megakernels.ops.activation import reference as activations
from megakernels.ops.moe.facts import WHOLE
from megakernels.ops.moe.grouped import RowGroups
from megakernels.ops.moe.inputs import Experts, Made


def router_losses_forward(
    weights: Tensor, probs: Tensor, log_sums: Tensor, load: Tensor, balance: float, z: float
) -> tuple[Tensor, Tensor]:
    """Returns a copy of weights and both losses [2]."""
    mass = probs.view(load.shape[0], -1, load.shape[1]).sum(1)
    return weights.clone(), torch.stack([(load * mass).sum() * balance, log_sums.square().sum() * z])


def router_losses_backward(
    grad_weights: Tensor, log_sums: Tensor, load: Tensor, balance: float, z: float, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of weights, probs and log_sums."""
    tokens = log_sums.shape[0] // load.shape[0]
    grad_probs = (load.to(log_sums.dtype) * balance).repeat_interleave(tokens, 0, output_size=log_sums.shape[0]) if needs[1] else None
    return grad_weights.clone() if needs[0] else None, grad_probs, log_sums * (2 * z) if needs[2] else None


def sort_by_expert(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Rows int32 [M] in the order of their experts int32 [M], and the number of each expert's rows, int32 [E]."""
    return torch.argsort(indices, stable=True).to(torch.int32), torch.bincount(indices, minlength=num_experts).to(torch.int32)


def owners(counts: Tensor, num_rows: int) -> Tensor:
    """The expert of each received row, int32 [M]; with a known number of rows this needs no synchronisation."""
    num_ranks, num_experts = counts.shape
    experts = torch.arange(num_experts, dtype=torch.int32, device=counts.device).repeat(num_ranks)
    return experts.repeat_interleave(counts.flatten(), output_size=num_rows)


def places_of(experts: Tensor, weights: Tensor | None, num_experts: int, capacity: int, num_null: int) -> tuple[Tensor, Tensor]:
    """Pairs of each expert's rows, int32 [E·C], by weight or by position without; pairs of each choice, int32 [E + num_null]."""
    first = torch.arange(experts.shape[0], device=experts.device) if weights is None else weights.argsort(descending=True, stable=True)
    order = first[experts[first].argsort(stable=True)]
    chosen = experts[order].long()
    reached = torch.arange(num_experts + num_null + 1, device=experts.device, dtype=chosen.dtype)
    starts = torch.searchsorted(chosen, reached)
    within = torch.arange(chosen.shape[0], device=experts.device) - starts[chosen]
    kept = (within < capacity) & (chosen < num_experts)
    places = torch.full((num_experts * capacity + 1,), -1, dtype=torch.int32, device=experts.device)
    places[torch.where(kept, chosen * capacity + within, num_experts * capacity)] = torch.where(kept, order, -1).to(torch.int32)
    return places[:-1].clone(), starts.diff().to(torch.int32)


def gather_rows(x: Tensor, rows: Tensor, top_k: int, num_tokens: int = WHOLE) -> Tensor:
    """Row i is x[rows[i] // k]: [N, h] → [M, h], M = N·k where all pairs have rows; without a pair it is zero."""
    if num_tokens == WHOLE:
        return x.index_select(0, rows // top_k)
    if not num_tokens:
        return x.new_zeros(rows.shape[0], x.shape[1])
    return x.index_select(0, (rows // top_k).clamp_min(0)).masked_fill_((rows < 0).unsqueeze(1), 0)


def sum_rows(x: Tensor, rows: Tensor, top_k: int, num_tokens: int = WHOLE) -> Tensor:
    """Each token's rows summed in slot order: [M, h] → [N, h].

    It gathers through the inverse permutation, so repeats are bitwise equal.
    """
    if num_tokens != WHOLE:
        return _sum_some(x, rows, top_k, num_tokens)
    position = torch.empty_like(rows)
    position[rows] = torch.arange(rows.shape[0], dtype=rows.dtype, device=rows.device)
    slots = position.view(-1, top_k)
    total = upcast(x.index_select(0, slots[:, 0]))
    for slot in range(1, top_k):
        total = total + upcast(x.index_select(0, slots[:, slot]))
    return total.to(x.dtype)


def _sum_some(x: Tensor, rows: Tensor, top_k: int, num_tokens: int) -> Tensor:
    """`sum_rows` where pairs may have no row, and rows no pair."""
    position = torch.full((num_tokens * top_k + 1,), -1, dtype=rows.dtype, device=rows.device)
    position[torch.where(rows < 0, num_tokens * top_k, rows)] = torch.arange(rows.shape[0], dtype=rows.dtype, device=rows.device)
    slots = position[:-1].view(num_tokens, top_k)
    total = upcast(gather_rows(x, slots[:, 0], 1, x.shape[0]))
    for slot in range(1, top_k):
        total = total + upcast(gather_rows(x, slots[:, slot], 1, x.shape[0]))
    return total.to(x.dtype)


def experts_forward(given: Experts) -> Made:
    """Returns y [M, h], gate_out [M, F] (None without gate) and up_out [M, F], all in x's dtype."""
    x, rows, gate = given.x, given.rows, given.gate
    groups, rows_of_x = RowGroups(given.counts, rows.shape[0]), x.contiguous()
    gate_out = None if gate is None else groups.add(groups.times(rows_of_x, gate.mT), given.gate_bias)
    up_out = groups.add(groups.times(rows_of_x, given.up.mT), given.up_bias)
    row_weights = row_weights_of(given.weights, rows)
    weighted = activate(gate_out, up_out, given) * row_weights  # applied before the product: one rounding less
    return groups.add(groups.times(weighted.to(x.dtype), given.down.mT), given.down_bias, row_weights), gate_out, up_out


def experts_backward(
    grad_y: Tensor, given: Experts, gate_out: Tensor | None, up_out: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of x, weights, the matrices and the biases, None where not needed.

    A row's output is w · (hidden @ downᵀ + bias), so with g = ∂L/∂y @ down: ∂L/∂w = g · hidden + ∂L/∂y · bias and ∂L/∂hidden = w · g. The
    unweighted output is not saved.
    """
    x, weights, rows, gate, up, down = given.x, given.weights, given.rows, given.gate, given.up, given.down
    groups, grad_y, rows_of_x = RowGroups(given.counts, rows.shape[0]), grad_y.contiguous(), x.contiguous()
    row_weights = row_weights_of(weights, rows)
    hidden = activate(gate_out, up_out, given)
    pulled = upcast(groups.times(grad_y, down))
    grad_x = grad_weights = grad_gate = grad_up = grad_down = None
    if needs[1]:
        grad_weights = torch.zeros(weights.numel(), dtype=weights.dtype, device=weights.device)
        through_bias = 0 if given.down_bias is None else (upcast(grad_y) * groups.of_rows(upcast(given.down_bias))).sum(-1)
        grad_weights[rows] = ((pulled * hidden).sum(-1) + through_bias).to(weights.dtype)
        grad_weights = grad_weights.view(weights.shape)
    if needs[4]:
        grad_down = groups.outer(grad_y, (hidden * row_weights).to(x.dtype))
    grad_gate_out, grad_up_out = activate_backward(pulled * row_weights, gate_out, up_out, given)  # in x's dtype, for the products
    if needs[0]:
        grad_x = groups.times(grad_up_out, up)
        if gate is not None and grad_gate_out is not None:
            grad_x = (upcast(grad_x) + upcast(groups.times(grad_gate_out, gate))).to(x.dtype)
    if needs[2] and grad_gate_out is not None:
        grad_gate = groups.outer(grad_gate_out, rows_of_x)
    if needs[3]:
        grad_up = groups.outer(grad_up_out, rows_of_x)
    biases = (given.gate_bias, grad_gate_out, None), (given.up_bias, grad_up_out, None), (given.down_bias, grad_y, row_weights)
    made = (
        groups.total(grad, scale).to(bias.dtype) if bias is not None and grad is not None and need else None
        for (bias, grad, scale), need in zip(biases, needs[5:], strict=True)
    )
    return grad_x, grad_weights, grad_gate, grad_up, grad_down, *made


def routed_experts_forward(given: Experts) -> Made:
    """Returns y [N, h], gate_out [N·k, F] (None without gate) and up_out [N·k, F]."""
    rows, top_k = given.rows, given.weights.shape[1]
    y, gate_out, up_out = experts_forward(given._replace(x=gather_rows(given.x, rows, top_k)))
    return sum_rows(y, rows, top_k), gate_out, up_out


def routed_experts_backward(
    grad_y: Tensor, given: Experts, gate_out: Tensor | None, up_out: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """`experts_backward` of tokens that are gathered again, not saved."""
    rows, top_k = given.rows, given.weights.shape[1]
    grad_rows, rows_of_x = gather_rows(grad_y, rows, top_k), gather_rows(given.x, rows, top_k)
    grad_x, *others = experts_backward(grad_rows, given._replace(x=rows_of_x), gate_out, up_out, needs)
    return None if grad_x is None else sum_rows(grad_x, rows, top_k), *others


def activate(gate_out: Tensor | None, up_out: Tensor, given: Experts) -> Tensor:
    """The hidden rows [M, F] in the accumulation dtype."""
    up_out, activation = upcast(up_out), given.activation
    if gate_out is not None and given.limit is not None:
        return activations.clamped_swiglu_forward(upcast(gate_out), up_out, given.limit)
    if gate_out is not None:
        gated = activations.geglu_forward if activation == "geglu" else activations.swiglu_forward
        return gated(upcast(gate_out), up_out)
    return activations.relu2_forward(up_out) if activation == "relu2" else activations.gelu_forward(up_out)


def activate_backward(grad: Tensor, gate_out: Tensor | None, up_out: Tensor, given: Experts) -> tuple[Tensor | None, Tensor]:
    """The gradients of gate_out and up_out, in their dtype, from that of `activate`'s result."""
    activation = given.activation
    if gate_out is not None and given.limit is not None:
        return activations.clamped_swiglu_backward(grad, gate_out, up_out, given.limit)
    if gate_out is not None:
        gated = activations.geglu_backward if activation == "geglu" else activations.swiglu_backward
        grad_gate, grad_up = gated(grad, gate_out, up_out, (True, True))
        assert grad_up is not None
        return grad_gate, grad_up
    backward = activations.relu2_backward if activation == "relu2" else activations.gelu_backward
    return None, backward(grad, up_out)


def row_weights_of(weights: Tensor, rows: Tensor) -> Tensor:
    """The weight of each row, [M, 1] in the accumulation dtype."""
    return upcast(weights).flatten().index_select(0, rows).unsqueeze(1)
