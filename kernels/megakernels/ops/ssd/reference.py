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
        chunk, steps = _chunk(scan, positions)
        y[:, positions] = (chunk.outputs(state) + upcast(D).view(-1, 1, 1) * steps.x).transpose(1, 2)
        state = chunk.next_state(state)
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
        chunk, steps = _chunk(scan, positions)
        grad = upcast(grad_y[:, positions]).transpose(1, 2)
        grads = chunk_backward(chunk, grad, upcast(states[:, index]), grad_state)
        grad_step = (grads.u * steps.x).sum(-1, keepdim=True) + steps.rate * grads.log_decay
        grad_raw_step = grad_step * steps.slope
        grad_x[:, positions] = (steps.step * grads.u + skip * grad).transpose(1, 2)
        grad_dt[:, positions] = grad_raw_step.squeeze(-1).transpose(1, 2)
        grad_B[:, positions] = grads.B.transpose(1, 2)
        grad_C[:, positions] = grads.C.transpose(1, 2)
        grad_A_log += (steps.rate * steps.step * grads.log_decay).sum((0, 2, 3))
        grad_D += (grad * steps.x).sum((0, 2, 3))
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
class SsdChunk:
    """One chunk of h' = decay · h + u Bᵀ, y = h C, in the accumulation dtype."""

    B: Tensor  # [B, G, Q, S]
    C: Tensor  # [B, G, Q, S]
    u: Tensor  # [B, H, Q, P], each position's addition
    decay: Tensor  # [B, H, Q, Q], exp of the sum of log decays over (j, i], zero above the diagonal and between documents
    mixing: Tensor  # [B, H, Q, Q], (C_i·B_j) · decay
    from_start: Tensor  # [B, H, Q, 1], exp(c_i), zero in documents that begin in the chunk
    to_end: Tensor  # [B, H, Q, 1], exp of the sum over (j, last], zero in documents that end in the chunk
    across: Tensor  # [B, H, 1, 1], exp(c_last), zero if the last document begins in the chunk

    def outputs(self, state: Tensor) -> Tensor:
        """[B, H, Q, P], from the state [B, H, P, S] at the chunk's start."""
        return self.mixing @ self.u + self.from_start * _read(state, self.C)

    def next_state(self, state: Tensor) -> Tensor:
        """The state after the chunk, [B, H, P, S]."""
        return self.across * state + _write(self.to_end * self.u, self.B)


@dataclass(frozen=True, slots=True)
class _Steps:
    """One chunk's inputs and steps in the accumulation dtype."""

    x: Tensor  # [B, H, Q, P]
    step: Tensor  # [B, H, Q, 1], Δ
    slope: Tensor  # [B, H, Q, 1], derivative of Δ with respect to dt: zero outside the limits
    rate: Tensor  # [H, 1, 1], a


@dataclass(frozen=True, slots=True)
class SsdChunkGradients:
    """Gradients of a chunk's operands, and of the state at its start."""

    u: Tensor  # [B, H, Q, P]
    B: Tensor  # [B, G, Q, S]
    C: Tensor  # [B, G, Q, S]
    log_decay: Tensor  # [B, H, Q, 1]
    state: Tensor  # [B, H, P, S]


def _chunk(scan: SsdInputs, positions: slice) -> tuple[SsdChunk, _Steps]:
    x, dt, A_log, B, C, _, dt_bias, starts, _, dt_min, dt_max = scan
    wide_x, wide_B, wide_C = (upcast(tensor[:, positions]).transpose(1, 2) for tensor in (x, B, C))
    raw_step = (upcast(dt[:, positions]) + upcast(dt_bias)).transpose(1, 2).unsqueeze(-1)
    unbounded = softplus(raw_step)
    step = unbounded.clamp(dt_min, dt_max)
    rate = -upcast(A_log).exp().view(-1, 1, 1)
    slope = torch.sigmoid(raw_step).masked_fill_((unbounded < dt_min) | (unbounded > dt_max), 0)
    return make_chunk(step * wide_x, wide_B, wide_C, step * rate, starts, positions), _Steps(wide_x, step, slope, rate)


def make_chunk(u: Tensor, B: Tensor, C: Tensor, log_decay: Tensor, starts: Tensor | None, positions: slice) -> SsdChunk:
    """The chunk at `positions`, of what they add [B, H, Q, P], keys [B, G, Q, S], and log decays [B, H, Q, 1]."""
    sums, spans = log_decay.cumsum(2), span_sums(log_decay.squeeze(-1))
    hidden = torch.ones(sums.shape[2], sums.shape[2], dtype=torch.bool, device=u.device).triu(1)
    from_start, to_end, across = sums.exp(), spans[:, :, -1].exp().unsqueeze(-1), sums[:, :, -1:].exp()
    if starts is not None:
        first = starts[:, None, positions, None]  # [B, 1, Q, 1]
        position = torch.arange(positions.start, positions.stop, device=u.device)
        hidden = hidden | (position < first)
        begun_before = first < positions.start
        from_start = from_start * begun_before
        to_end = to_end * (position[:, None] >= first[:, :, -1:])
        across = across * begun_before[:, :, -1:]
    decay = spans.masked_fill_(hidden, float("-inf")).exp_()
    overlap = C @ B.mT
    mixing = (_split_heads(decay, overlap.shape[1]) * overlap.unsqueeze(2)).flatten(1, 2)
    return SsdChunk(B=B, C=C, u=u, decay=decay, mixing=mixing, from_start=from_start, to_end=to_end, across=across)


def chunk_backward(chunk: SsdChunk, grad: Tensor, state: Tensor, grad_next: Tensor) -> SsdChunkGradients:
    """Gradients of a chunk's inputs from those of its outputs [B, H, Q, P] and of the state after it [B, H, P, S]."""
    num_groups = chunk.B.shape[1]
    grad_mixing = grad @ chunk.u.mT
    grad_overlap = _split_heads(grad_mixing * chunk.decay, num_groups).sum(2)
    from_state = chunk.from_start * grad
    through_state = chunk.to_end * _read(grad_next, chunk.B)
    grad_u = chunk.mixing.mT @ grad + through_state

    # The log decay of position t scales every pair i ≥ t > j, reads of the state by positions i ≥ t, additions of positions j < t to the
    # next state, and the carried state. Summing exactly these terms, instead of differences of row and column sums, avoids cancellation.
    pairs = grad_mixing.mul_(chunk.mixing)
    ones = torch.ones(pairs.shape[-2:], dtype=pairs.dtype, device=pairs.device)
    across_pairs = (ones.triu() @ pairs).mul_(ones.tril(-1)).sum(-1)
    read = (from_state * _read(state, chunk.C)).sum(-1)
    kept = (through_state * chunk.u).sum(-1)
    passed_on = (chunk.across * grad_next * state).sum((-1, -2)).unsqueeze(-1)
    grad_log_decay = across_pairs + read.flip(-1).cumsum(-1).flip(-1) + (kept.cumsum(-1) - kept) + passed_on
    return SsdChunkGradients(
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
