"""The M²RNN recurrence in plain torch, a segment of positions at a time, with explicit backward formulas.

Per head, with decay_t = exp(−exp(A_log) · softplus(f_t + dt_bias)) and state S ∈ ℝ^{K×V} (q and k are shared by the heads):

    Z_t = tanh(S_{t−1} W + k_t v_tᵀ),    S_t = S_{t−1} + (1 − decay_t)(Z_t − S_{t−1}),    y_t = S_tᵀ q_t + D ⊙ v_t.

The loop over time is inherent: the state passes through tanh. Each step is three operations on all sequences and heads; everything else is
computed for an entire segment at a time. The backward recomputes a segment's states from the one saved before it, so scratch is a
segment's, never the sequence's. 1 − decay comes from expm1: near decay 1 the subtraction would lose what the state gains per step.

Letters: B sequences, L positions of a segment, H heads, K key width, V value width. The layout of states is [L, H, B·K, V]: one batched
product over heads.

Source: arXiv:2603.14360, the recurrence of an M²RNN layer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from megakernels._common import accumulator_dtype, row_blocks, upcast
from megakernels.ops.m2rnn.inputs import M2rnnInputs


def forward(state: Tensor | None, given: M2rnnInputs) -> tuple[Tensor, Tensor]:
    """Runs the scan from a state [B, H, K, V] in the accumulation dtype; None is zero.

    Returns:
        y [B, T, H, V] in q's dtype and the states before each segment and after the last [B, ceil(T / save_every) + 1, H, K, V].
    """
    q, v, D, save_every = given.q, given.v, given.D, given.save_every
    batch, num_positions, key_width = q.shape
    num_heads, value_width = v.shape[2:]
    segments = list(row_blocks(num_positions, 1, save_every))
    dtype = accumulator_dtype(q.dtype)
    y = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    states = torch.zeros(batch, len(segments) + 1, num_heads, key_width, value_width, dtype=dtype, device=q.device)
    if state is not None:
        states[:, 0] = state
    for index, positions in enumerate(segments):
        segment = _segment(given, states[:, index], positions)
        queries = _per_step(q, positions).unsqueeze(3)  # [L, 1, B, 1, K]
        read = (queries @ _by_sequence(segment.states[1:], batch, key_width)).squeeze(3)
        y[:, positions] = (read + upcast(D).unsqueeze(1) * segment.v).permute(2, 0, 1, 3)
        states[:, index + 1] = segment.states[-1].view(num_heads, batch, key_width, value_width).transpose(0, 1)
    return y, states


def backward(grad_last: Tensor | None, grad_y: Tensor, given: M2rnnInputs, states: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """The gradients of q to A_log in order, and of the first state, from those of the last state [B, H, K, V] (None is zero) and of y."""
    q, k, v, f, state_map, D, dt_bias, A_log, _, save_every = given
    batch, _, key_width = q.shape
    grad_q, grad_k, grad_v, grad_f = (torch.empty(like.shape, dtype=like.dtype, device=like.device) for like in (q, k, v, f))
    parameters = (state_map, D, dt_bias, A_log)
    grad_map, grad_D, grad_dt_bias, grad_A_log = (torch.zeros(like.shape, dtype=states.dtype, device=like.device) for like in parameters)
    grad_state = torch.zeros_like(_merged(states[:, 0])) if grad_last is None else _merged(grad_last)
    for index, positions in reversed(list(enumerate(row_blocks(q.shape[1], 1, save_every)))):
        segment = _segment(given, states[:, index], positions)
        grad = upcast(grad_y[:, positions]).permute(1, 2, 0, 3)  # [L, H, B, V]
        queries = _per_step(q, positions)
        grad_states, grad_inner = _segment_backward(segment, upcast(state_map), queries, grad, grad_state)
        grad_state = grad_states[0].clone()  # a view would keep the entire segment alive
        inner = _by_sequence(grad_inner, batch, key_width)

        grad_q[:, positions] = (_by_sequence(segment.states[1:], batch, key_width) @ grad.unsqueeze(-1)).squeeze(-1).sum(1).transpose(0, 1)
        grad_k[:, positions] = (inner @ segment.v.unsqueeze(-1)).squeeze(-1).sum(1).transpose(0, 1)
        grad_v[:, positions] = ((segment.k.unsqueeze(3) @ inner).squeeze(3) + upcast(D).unsqueeze(1) * grad).permute(2, 0, 1, 3)
        grad_map += segment.before().transpose(0, 1).flatten(1, 2).mT @ grad_inner.transpose(0, 1).flatten(1, 2)
        grad_D += (grad * segment.v).sum((0, 2))

        moved = segment.candidates.sub_(segment.before()).mul_(grad_states[1:])
        grad_log_decay = -segment.log_decay.exp() * _by_sequence(moved, batch, key_width).sum((3, 4))  # [L, H, B]
        grad_raw = grad_log_decay * segment.rate * torch.sigmoid(segment.raw)
        grad_f[:, positions] = grad_raw.permute(2, 0, 1)
        grad_dt_bias += grad_raw.sum((0, 2))
        grad_A_log += (grad_log_decay * segment.log_decay).sum((0, 2))
    found = (
        grad_q,
        grad_k,
        grad_v,
        grad_f,
        grad_map.to(state_map.dtype),
        grad_D.to(D.dtype),
        grad_dt_bias.to(dt_bias.dtype),
        grad_A_log.to(A_log.dtype),
    )
    return found, torch.unflatten(grad_state, 1, (batch, key_width)).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class _Segment:
    """One segment's inputs and states in the accumulation dtype."""

    k: Tensor  # [L, 1, B, K]
    v: Tensor  # [L, H, B, V]
    raw: Tensor  # [L, H, B], f + dt_bias
    rate: Tensor  # [H, 1], −exp(A_log)
    log_decay: Tensor  # [L, H, B]
    gain: Tensor  # [L, H, B·K, 1], 1 − decay
    candidates: Tensor  # [L, H, B·K, V], Z
    states: Tensor  # [L + 1, H, B·K, V], S before the segment and after each of its positions
    kept: Tensor | None  # [L, 1, B·K, 1], 0 where a document starts, else 1; None if none does

    def before(self) -> Tensor:
        """The state that each position starts from, [L, H, B·K, V]."""
        return self.states[:-1] if self.kept is None else self.states[:-1] * self.kept


def _segment(given: M2rnnInputs, start: Tensor, positions: slice) -> _Segment:
    _, k, v, f, state_map, _, dt_bias, A_log, starts, _ = given
    keys, values = _per_step(k, positions), upcast(v[:, positions]).permute(1, 2, 0, 3)
    raw = (upcast(f[:, positions]) + upcast(dt_bias)).permute(1, 2, 0)
    rate = -upcast(A_log).exp().unsqueeze(1)
    log_decay = rate * softplus(raw)
    gain = (-torch.expm1(log_decay)).repeat_interleave(k.shape[2], dim=2).unsqueeze(3)
    candidates = (keys.unsqueeze(4) * values.unsqueeze(3)).flatten(2, 3)
    states = torch.empty(candidates.shape[0] + 1, *candidates.shape[1:], dtype=candidates.dtype, device=k.device)
    states[0] = _merged(start)
    kept = None if starts is None else _kept(starts, positions, k.shape[2], candidates.dtype)
    wide_map = upcast(state_map)
    steps = states.unbind()
    for t, (candidate, step_gain, after) in enumerate(zip(candidates.unbind(), gain.unbind(), steps[1:], strict=True)):
        before = steps[t] if kept is None else steps[t] * kept[t]
        candidate.baddbmm_(before, wide_map).tanh_()
        torch.lerp(before, candidate, step_gain, out=after)
    return _Segment(k=keys, v=values, raw=raw, rate=rate, log_decay=log_decay, gain=gain, candidates=candidates, states=states, kept=kept)


def _kept(starts: Tensor, positions: slice, key_width: int, dtype: torch.dtype) -> Tensor:
    """[L, 1, B·K, 1]: 0 at the first position of a document, else 1."""
    first = starts[:, positions] == torch.arange(positions.start, positions.stop, device=starts.device)
    return (~first).to(dtype).mT.repeat_interleave(key_width, dim=1)[:, None, :, None]


def _segment_backward(segment: _Segment, state_map: Tensor, queries: Tensor, grad_y: Tensor, grad_last: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the segment's L + 1 states and of the L arguments of tanh, from grad_y and the gradient of the last state."""
    grad_states = torch.empty_like(segment.states)
    grad_states[0] = 0
    grad_states[1:] = (queries.unsqueeze(4) * grad_y.unsqueeze(3)).flatten(2, 3)
    grad_states[-1] += grad_last
    slopes = (1 - segment.candidates.square()).mul_(segment.gain)
    decay = 1 - segment.gain
    back = state_map.mT
    steps = grad_states.unbind()
    kept = (None,) * len(slopes) if segment.kept is None else segment.kept.unbind()
    pairs = zip(slopes.unbind(), decay.unbind(), kept, steps[:-1], steps[1:], strict=True)
    for slope, step_decay, step_kept, before, after in reversed(list(pairs)):
        slope.mul_(after)
        if step_kept is None:
            before.addcmul_(step_decay, after).baddbmm_(slope, back)
        else:
            before.add_(torch.baddbmm(step_decay * after, slope, back) * step_kept)
    return grad_states, slopes


def _per_step(tensor: Tensor, positions: slice) -> Tensor:
    """[B, T, K] as [L, 1, B, K]."""
    return upcast(tensor[:, positions]).transpose(0, 1).unsqueeze(1)


def _merged(states: Tensor) -> Tensor:
    """[B, H, K, V] as [H, B·K, V]."""
    return states.transpose(0, 1).flatten(1, 2)


def _by_sequence(states: Tensor, batch: int, key_width: int) -> Tensor:
    """[L, H, B·K, V] as [L, H, B, K, V]."""
    return torch.unflatten(states, 2, (batch, key_width))
