"""Mamba-2's state-space scan in plain torch, a chunk of positions at a time, with explicit backward formulas.

Per head, with Δ = softplus(dt + dt_bias) within its limits, a = −exp(A_log), state h ∈ ℝ^{P×S}:

    h_t = exp(Δ_t a) h_{t−1} + Δ_t x_t B_tᵀ,    y_t = h_t C_t + D x_t.

Inside a chunk, with c = cumsum(Δ a), u = Δ x and h the state at its start:

    y_i = Σ_{j≤i} (C_i·B_j) exp(c_i − c_j) u_j + exp(c_i) h C_i + D x_i,    h' = exp(c_last) h + Σ_j exp(c_last − c_j) u_j B_jᵀ.

Where a row holds several documents, decays between two of them are zero: of pairs, from the chunk's start, to its end, and across.

A pair's decay is the exponential of the sum over its own span: a difference of two of the c has the rounding of the larger one, which
exceeds the value itself if decay is strong. Separate factors exp(c_i) · exp(−c_j) would overflow.
The backward processes the chunks from the last, carries ∂L/∂h', and takes each chunk's h from the saved states.

Letters: B sequences, Q positions of a chunk, H heads in G groups, P head width, S state width.

Source: Dao and Gu, arXiv:2405.21060, section 6 and listing 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from megakernels._common import accumulator_dtype, row_blocks, span_sums, upcast
from megakernels.ops.ssd.inputs import SsdInputs


def forward(state: Tensor | None, scan: SsdInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the scan from a state [B, H, P, S] in the accumulation dtype; None is zero.

    Returns:
        y [B, T, H, P] and the state at each chunk's start [B, ceil(T / chunk_size), H, P, S], both in x's dtype, and the last state.
    """
    x, B, D, chunk_size = scan.x, scan.B, scan.D, scan.chunk_size
    batch, num_positions, num_heads, width = x.shape
    chunks = list(row_blocks(num_positions, 1, chunk_size))
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    states = torch.empty(batch, len(chunks), num_heads, width, B.shape[-1], dtype=x.dtype, device=x.device)
    if state is None:
        state = torch.zeros(batch, num_heads, width, B.shape[-1], dtype=accumulator_dtype(x.dtype), device=x.device)
    for index, positions in enumerate(chunks):
        states[:, index] = state
        chunk = _chunk(scan, positions)
        inside = chunk.mixing @ chunk.u + chunk.from_start * _read(state, chunk.C)
        y[:, positions] = (inside + upcast(D).view(-1, 1, 1) * chunk.x).transpose(1, 2)
        state = chunk.across * state + _write(chunk.to_end * chunk.u, chunk.B)
    return y, states, state


def backward(grad_state: Tensor | None, grad_y: Tensor, scan: SsdInputs, states: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """The gradients of x to dt_bias in order, and of the first state, from those of the last state (None is zero) and of y."""
    x, dt, A_log, B, C, D, dt_bias, _, chunk_size, _, _ = scan
    grad_x, grad_dt, grad_B, grad_C = (torch.empty(like.shape, dtype=like.dtype, device=like.device) for like in (x, dt, B, C))
    dtype = accumulator_dtype(x.dtype)
    grad_A_log, grad_D, grad_dt_bias = (torch.zeros(x.shape[2], dtype=dtype, device=x.device) for _ in range(3))
    if grad_state is None:
        grad_state = torch.zeros(x.shape[0], *states.shape[2:], dtype=dtype, device=x.device)
    skip = upcast(D).view(-1, 1, 1)
    for index, positions in reversed(list(enumerate(row_blocks(x.shape[1], 1, chunk_size)))):
        chunk = _chunk(scan, positions)
        grad = upcast(grad_y[:, positions]).transpose(1, 2)
        grads = _chunk_backward(chunk, grad, upcast(states[:, index]), grad_state)
        grad_step = (grads.u * chunk.x).sum(-1, keepdim=True) + chunk.rate * grads.log_decay
        grad_raw_step = grad_step * chunk.slope
        grad_x[:, positions] = (chunk.step * grads.u + skip * grad).transpose(1, 2)
        grad_dt[:, positions] = grad_raw_step.squeeze(-1).transpose(1, 2)
        grad_B[:, positions] = grads.B.transpose(1, 2)
        grad_C[:, positions] = grads.C.transpose(1, 2)
        grad_A_log += (chunk.rate * chunk.step * grads.log_decay).sum((0, 2, 3))
        grad_D += (grad * chunk.x).sum((0, 2, 3))
        grad_dt_bias += grad_raw_step.sum((0, 2, 3))
        grad_state = grads.state
    found = (
        grad_x,
        grad_dt,
        grad_A_log.to(A_log.dtype),
        grad_B,
        grad_C,
        grad_D.to(D.dtype),
        grad_dt_bias.to(dt_bias.dtype),
    )
    return found, grad_state


@dataclass(frozen=True, slots=True)
class _SsdChunk:
    """One chunk's inputs and decays in the accumulation dtype."""

    x: Tensor  # [B, H, Q, P]
    B: Tensor  # [B, G, Q, S]
    C: Tensor  # [B, G, Q, S]
    step: Tensor  # [B, H, Q, 1], Δ
    slope: Tensor  # [B, H, Q, 1], of Δ by dt: zero beyond the limits
    rate: Tensor  # [H, 1, 1], a
    u: Tensor  # [B, H, Q, P], Δ x
    decay: Tensor  # [B, H, Q, Q], exp of the sum of Δ a over (j, i], zero above the diagonal and between documents
    mixing: Tensor  # [B, H, Q, Q], (C_i·B_j) · decay
    from_start: Tensor  # [B, H, Q, 1], exp(c_i), zero in documents that begin in the chunk
    to_end: Tensor  # [B, H, Q, 1], exp of the sum over (j, last], zero in documents that end in the chunk
    across: Tensor  # [B, H, 1, 1], exp(c_last), zero if the last document begins in the chunk


@dataclass(frozen=True, slots=True)
class _SsdChunkGradients:
    u: Tensor  # [B, H, Q, P]
    B: Tensor  # [B, G, Q, S]
    C: Tensor  # [B, G, Q, S]
    log_decay: Tensor  # [B, H, Q, 1], of Δ a
    state: Tensor  # [B, H, P, S], of the state at the chunk's start


def _chunk(scan: SsdInputs, positions: slice) -> _SsdChunk:
    x, dt, A_log, B, C, _, dt_bias, starts, _, dt_min, dt_max = scan
    wide_x, wide_B, wide_C = (upcast(tensor[:, positions]).transpose(1, 2) for tensor in (x, B, C))
    raw_step = (upcast(dt[:, positions]) + upcast(dt_bias)).transpose(1, 2).unsqueeze(-1)
    unbounded = softplus(raw_step)
    step = unbounded.clamp(dt_min, dt_max)
    rate = -upcast(A_log).exp().view(-1, 1, 1)
    sums, spans = (step * rate).cumsum(2), span_sums((step * rate).squeeze(-1))
    hidden = torch.ones(sums.shape[2], sums.shape[2], dtype=torch.bool, device=x.device).triu(1)
    from_start, to_end, across = sums.exp(), spans[:, :, -1].exp().unsqueeze(-1), sums[:, :, -1:].exp()
    if starts is not None:
        first = starts[:, None, positions, None]  # [B, 1, Q, 1]
        position = torch.arange(positions.start, positions.stop, device=x.device)
        hidden = hidden | (position < first)
        begun_before = first < positions.start
        from_start = from_start * begun_before
        to_end = to_end * (position[:, None] >= first[:, :, -1:])
        across = across * begun_before[:, :, -1:]
    decay = spans.masked_fill_(hidden, float("-inf")).exp_()
    overlap = wide_C @ wide_B.mT
    mixing = (_split_heads(decay, overlap.shape[1]) * overlap.unsqueeze(2)).flatten(1, 2)
    return _SsdChunk(
        x=wide_x,
        B=wide_B,
        C=wide_C,
        step=step,
        slope=torch.sigmoid(raw_step).masked_fill_((unbounded < dt_min) | (unbounded > dt_max), 0),
        rate=rate,
        u=step * wide_x,
        decay=decay,
        mixing=mixing,
        from_start=from_start,
        to_end=to_end,
        across=across,
    )


def _chunk_backward(chunk: _SsdChunk, grad: Tensor, state: Tensor, grad_next: Tensor) -> _SsdChunkGradients:
    """Gradients of a chunk's inputs from those of its outputs [B, H, Q, P] and of the state after it [B, H, P, S]."""
    num_groups = chunk.B.shape[1]
    grad_mixing = grad @ chunk.u.mT
    grad_overlap = _split_heads(grad_mixing * chunk.decay, num_groups).sum(2)
    from_state = chunk.from_start * grad
    through_state = chunk.to_end * _read(grad_next, chunk.B)
    grad_u = chunk.mixing.mT @ grad + through_state

    # The log decay of position t scales every pair i ≥ t > j, what positions i ≥ t read from the state, what positions j < t add to the
    # next state, and the carried state. Summing exactly these terms, instead of differences of row and column sums, avoids cancellation.
    pairs = grad_mixing.mul_(chunk.mixing)
    ones = torch.ones(pairs.shape[-2:], dtype=pairs.dtype, device=pairs.device)
    across_pairs = (ones.triu() @ pairs).mul_(ones.tril(-1)).sum(-1)
    read = (from_state * _read(state, chunk.C)).sum(-1)
    kept = (through_state * chunk.u).sum(-1)
    passed_on = (chunk.across * grad_next * state).sum((-1, -2)).unsqueeze(-1)
    grad_log_decay = across_pairs + read.flip(-1).cumsum(-1).flip(-1) + (kept.cumsum(-1) - kept) + passed_on
    return _SsdChunkGradients(
        u=grad_u,
        B=grad_overlap.mT @ chunk.C + _keys(chunk.to_end * chunk.u, grad_next, num_groups),
        C=grad_overlap @ chunk.B + _keys(from_state, state, num_groups),
        log_decay=grad_log_decay.unsqueeze(-1),
        state=chunk.across * grad_next + _write(from_state, chunk.C),
    )


def _split_heads(tensor: Tensor, num_groups: int) -> Tensor:
    """[B, H, ...] as [B, G, H / G, ...]."""
    return torch.unflatten(tensor, 1, (num_groups, tensor.shape[1] // num_groups))


def _read(state: Tensor, keys: Tensor) -> Tensor:
    """State [B, H, P, S] times keys [B, G, Q, S]: [B, H, Q, P]. The heads of a group share keys, so they are one matrix product."""
    num_heads, width = state.shape[1:3]
    found = keys @ _split_heads(state, keys.shape[1]).flatten(2, 3).mT
    return torch.unflatten(found, -1, (num_heads // keys.shape[1], width)).transpose(2, 3).flatten(1, 2)


def _write(values: Tensor, keys: Tensor) -> Tensor:
    """Σ over positions of values [B, H, Q, P] times keys [B, G, Q, S]: [B, H, P, S]."""
    return (_merge_heads(values, keys.shape[1]).mT @ keys).view(*values.shape[:2], values.shape[3], keys.shape[3])


def _keys(values: Tensor, state: Tensor, num_groups: int) -> Tensor:
    """Values [B, H, Q, P] times state [B, H, P, S], summed over the heads of each group: [B, G, Q, S]."""
    return _merge_heads(values, num_groups) @ _split_heads(state, num_groups).flatten(2, 3)


def _merge_heads(values: Tensor, num_groups: int) -> Tensor:
    """[B, H, Q, P] as [B, G, Q, H / G · P]."""
    return _split_heads(values, num_groups).transpose(2, 3).flatten(3)
