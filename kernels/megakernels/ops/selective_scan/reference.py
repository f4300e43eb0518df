"""The selective scan in plain torch, a span of positions at a time, with explicit backward formulas.

Per channel i with a state h ∈ ℝ^S, Δ = softplus(dt + dt_bias) and a = exp(−Δ · exp(A_log)):

    h_t = a_t ⊙ h_{t−1} + Δ_t x_t B_t,    y_t = C_tᵀ h_t + D x_t.

With g_t the gradient of h_t, g_t = gy_t C_t + a_{t+1} ⊙ g_{t+1}: the gradient of log a_t is a_t ⊙ h_{t−1} ⊙ g_t, that of Δ_t x_t B_t is
g_t. Backward computes the states of a span again from the one saved before its segment, so scratch is a span's.

Letters: I channels, S state width, L positions of a span.

Source: arXiv:2312.00752, section 3.2 and algorithm 2.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from megakernels._common import accumulator_dtype, row_blocks, upcast
from megakernels.ops.selective_scan.facts import SELECTIVE_PLAIN_POSITIONS
from megakernels.ops.selective_scan.inputs import SelectiveScanInputs


def forward(state: Tensor | None, given: SelectiveScanInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the scan from a state [B, I, S] in the accumulation dtype; None is zero.

    Returns:
        y [B, T, I] in x's dtype, the states before each segment [B, ceil(T / save_every), I, S], and the last state.
    """
    now = _zero_state(given) if state is None else state
    segments = list(row_blocks(given.x.shape[1], 1, given.save_every))
    y = torch.empty(given.x.shape, dtype=given.x.dtype, device=given.x.device)
    states = torch.empty(now.shape[0], len(segments), *now.shape[1:], dtype=now.dtype, device=now.device)
    for index, segment in enumerate(segments):
        states[:, index] = now
        for positions in _spans(segment):
            span = _span(given, positions)
            found = span.states(now)
            y[:, positions] = (torch.einsum("blis,bls->bli", found, span.C) + upcast(given.D) * span.x).to(y.dtype)
            now = found[:, -1]
    return y, states, now.contiguous()


def backward(grad_last: Tensor | None, grad_y: Tensor, given: SelectiveScanInputs, states: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """The gradients of x to dt_bias, in order, and of the first state, given those of the last state (None is zero) and of y."""
    found = [torch.empty(like.shape, dtype=like.dtype, device=like.device) for like in (given.x, given.dt, given.B, given.C)]
    sums = [torch.zeros(like.shape, dtype=states.dtype, device=like.device) for like in (given.A_log, given.D, given.dt_bias)]
    grad_state = torch.zeros_like(states[:, 0]) if grad_last is None else grad_last
    for index, segment in reversed(list(enumerate(row_blocks(given.x.shape[1], 1, given.save_every)))):
        now, walked = states[:, index], []
        for positions in _spans(segment):
            walked.append((positions, now))
            now = _span(given, positions).states(now)[:, -1]
        for positions, before in reversed(walked):
            made, totals, grad_state = _span_backward(given, positions, before, grad_y, grad_state)
            for whole, part in zip(found, made, strict=True):
                whole[:, positions] = part
            for total, part in zip(sums, totals, strict=True):
                total.add_(part)
    (grad_x, grad_dt, grad_B, grad_C), parameters = found, (given.A_log, given.D, given.dt_bias)
    grad_A_log, grad_D, grad_dt_bias = (total.to(like.dtype) for total, like in zip(sums, parameters, strict=True))
    return (grad_x, grad_dt, grad_A_log, grad_B, grad_C, grad_D, grad_dt_bias), grad_state.contiguous()


class _Span(NamedTuple):
    """One span's inputs in the accumulation dtype."""

    x: Tensor  # [B, L, I]
    raw: Tensor  # [B, L, I], dt + dt_bias
    step: Tensor  # [B, L, I], Δ
    B: Tensor  # [B, L, S]
    C: Tensor  # [B, L, S]
    decay: Tensor  # [B, L, I, S], a; 0 at the first position of a document

    def states(self, before: Tensor) -> Tensor:
        """States [B, L, I, S] from the one before the span."""
        found = (self.step * self.x).unsqueeze(-1) * self.B.unsqueeze(2)
        for place in range(found.shape[1]):
            found[:, place] += self.decay[:, place] * (found[:, place - 1] if place else before)
        return found


def _span_backward(
    given: SelectiveScanInputs, positions: slice, before: Tensor, grad_y: Tensor, grad_after: Tensor
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    """Gradients of x, dt, B and C [B, L, …]; those of A_log, D and dt_bias; that of the state before the span."""
    span, rate, skip = _span(given, positions), upcast(given.A_log).exp(), upcast(given.D)
    states, wide_y = span.states(before), upcast(grad_y[:, positions])
    grads = wide_y.unsqueeze(-1) * span.C.unsqueeze(2)
    for place in reversed(range(grads.shape[1])):
        grads[:, place] += grad_after
        grad_after = span.decay[:, place] * grads[:, place]
    grad_C = torch.einsum("bli,blis->bls", wide_y, states)
    earlier = torch.cat([before.unsqueeze(1), states[:, :-1]], 1)
    grad_log = grads * earlier * span.decay
    written = torch.einsum("blis,bls->bli", grads, span.B)  # the gradient of Δ x
    grad_raw = (written * span.x - torch.einsum("blis,is->bli", grad_log, rate)) * torch.sigmoid(span.raw)
    tokens = (
        written * span.step + skip * wide_y,
        grad_raw,
        torch.einsum("blis,bli->bls", grads, span.step * span.x),
        grad_C,
    )
    sums = (
        -torch.einsum("blis,bli->is", grad_log, span.step) * rate,
        (wide_y * span.x).sum((0, 1)),
        grad_raw.sum((0, 1)),
    )
    return tokens, sums, grad_after


def _span(given: SelectiveScanInputs, positions: slice) -> _Span:
    raw = upcast(given.dt[:, positions]) + upcast(given.dt_bias)
    step = softplus(raw)
    decay = torch.exp(-step.unsqueeze(-1) * upcast(given.A_log).exp())
    if given.starts is not None:
        place = torch.arange(positions.start, positions.stop, device=given.starts.device)
        decay = decay * (given.starts[:, positions] < place)[:, :, None, None]
    return _Span(upcast(given.x[:, positions]), raw, step, upcast(given.B[:, positions]), upcast(given.C[:, positions]), decay)


def _spans(segment: slice) -> list[slice]:
    """The spans of a segment."""
    parts = row_blocks(segment.stop - segment.start, 1, SELECTIVE_PLAIN_POSITIONS)
    return [slice(segment.start + part.start, segment.start + part.stop) for part in parts]


def _zero_state(given: SelectiveScanInputs) -> Tensor:
    shape = given.x.shape[0], *given.A_log.shape
    return torch.zeros(shape, dtype=accumulator_dtype(given.x.dtype), device=given.x.device)
