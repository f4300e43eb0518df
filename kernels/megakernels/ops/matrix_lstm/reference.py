"""mLSTM in chunks, in plain torch, with an explicit backward.

With a column of ones after the values, numerators and normaliser are one scan of Mamba-2: h' = f h + u kᵀ with u = exp(i) · [v, 1], read
by q / √K. Its chunks and their gradients are `megakernels.ops.ssd.reference`'s; this module adds gates and the quotient.

Soft caps bound the gates, so a state is at most exp(soft_cap) times as large as sums of keys and values: fp32 holds it, and no running
maximum has to be carried. max(|n|, 1) is what a stabilised form writes as max(|n'|, exp(−m)), with n = n' · exp(m).

Source: arXiv:2405.04517, equations 19 to 27; arXiv:2503.13427, section 3.2 (soft caps).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from megakernels._common import accumulator_dtype, row_blocks, upcast
from megakernels.ops.matrix_lstm.inputs import MatrixLstmInputs
from megakernels.ops.ssd.reference import SsdChunk, chunk_backward, make_chunk


class _Gates(NamedTuple):
    """One chunk's gates and values in the accumulation dtype."""

    values: Tensor  # [B, H, Q, V + 1], v and a one
    strength: Tensor  # [B, H, Q, 1], exp of the input gate
    input_slope: Tensor  # [B, H, Q, 1], derivative of the capped input gate with respect to the given one
    forget_slope: Tensor  # [B, H, Q, 1], derivative of the log decay with respect to the given forget gate


def forward(given: MatrixLstmInputs) -> tuple[Tensor, Tensor]:
    """Returns y [B, T, H, V] in v's dtype, and the state at each chunk's start [B, ceil(T / chunk_size), H, V + 1, K]."""
    v, dtype = given.v, accumulator_dtype(given.v.dtype)
    batch, num_positions, num_heads, width = v.shape
    chunks = list(row_blocks(num_positions, 1, given.chunk_size))
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    states = torch.empty(batch, len(chunks), num_heads, width + 1, given.k.shape[3], dtype=dtype, device=v.device)
    state = torch.zeros(batch, num_heads, width + 1, given.k.shape[3], dtype=dtype, device=v.device)
    for index, positions in enumerate(chunks):
        states[:, index] = state
        chunk = _chunk(given, positions)[0]
        y[:, positions] = _quotient(chunk.outputs(state))[0].transpose(1, 2)
        state = chunk.next_state(state)
        del chunk  # before the next one is made
    return y, states


def backward(grad_y: Tensor, given: MatrixLstmInputs, states: Tensor) -> tuple[Tensor, ...]:
    """The gradients of q, k, v and both gates."""
    q, k, v, input_gate, forget_gate = given[:5]
    found = tuple(torch.empty(like.shape, dtype=like.dtype, device=like.device) for like in (q, k, v, input_gate, forget_gate))
    grad_q, grad_k, grad_v, grad_input, grad_forget = found
    grad_state = torch.zeros(states.shape[0], *states.shape[2:], dtype=states.dtype, device=states.device)
    for index, positions in reversed(list(enumerate(row_blocks(v.shape[1], 1, given.chunk_size)))):
        chunk, gates = _chunk(given, positions)
        state = states[:, index].clone(memory_format=torch.contiguous_format)
        grads = chunk_backward(chunk, _quotient_backward(_wide(grad_y, positions), chunk.outputs(state)), state, grad_state)
        del state
        grad_v[:, positions] = (gates.strength * grads.u)[..., :-1].transpose(1, 2)
        grad_input[:, positions] = ((grads.u * chunk.u).sum(-1, keepdim=True) * gates.input_slope).squeeze(-1).transpose(1, 2)
        grad_forget[:, positions] = (grads.log_decay * gates.forget_slope).squeeze(-1).transpose(1, 2)
        grad_q[:, positions] = (grads.C * q.shape[3] ** -0.5).transpose(1, 2)
        grad_k[:, positions] = grads.B.transpose(1, 2)
        grad_state = grads.state
        del chunk, gates, grads  # before the next ones are made
    return found


def _chunk(given: MatrixLstmInputs, positions: slice) -> tuple[SsdChunk, _Gates]:
    q, k, v = (_wide(each, positions) for each in given[:3])
    bent = [torch.tanh(upcast(each[:, positions]).transpose(1, 2).unsqueeze(-1) / given.soft_cap) for each in given[3:5]]
    strength, forget = (bent[0] * given.soft_cap).exp(), bent[1] * given.soft_cap
    slopes = [1 - each.square() for each in bent]
    gates = _Gates(pad(v, (0, 1), value=1.0), strength, slopes[0], slopes[1] * torch.sigmoid(-forget))
    chunk = make_chunk(strength * gates.values, k, q * q.shape[3] ** -0.5, logsigmoid(forget), given.starts, positions)
    return chunk, gates


def _wide(tensor: Tensor, positions: slice) -> Tensor:
    """A chunk of [B, T, H, N] as a contiguous copy [B, H, Q, N] in the accumulation dtype."""
    part = tensor[:, positions].transpose(1, 2)
    return part.to(accumulator_dtype(tensor.dtype), copy=True, memory_format=torch.contiguous_format)


def _quotient(read: Tensor) -> tuple[Tensor, Tensor]:
    """Numerators and normaliser [B, H, Q, V + 1] -> the output [B, H, Q, V] and its divisor [B, H, Q, 1]."""
    divisor = read[..., -1:].abs().clamp(min=1)
    return read[..., :-1] / divisor, divisor


def _quotient_backward(grad: Tensor, read: Tensor) -> Tensor:
    """The gradient of numerators and normaliser."""
    y, divisor = _quotient(read)
    normaliser = read[..., -1:]
    found = torch.empty_like(read)
    found[..., :-1] = grad / divisor
    found[..., -1:] = -(grad * y).sum(-1, keepdim=True) / divisor * normaliser.sign() * (normaliser.abs() > 1)
    return found
