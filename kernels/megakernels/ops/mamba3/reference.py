"""Mamba-3's scan in plain torch, a chunk of positions at a time, with explicit backward formulas.

Position j adds γ_j = λ_j Δ_j of its outer product u_j = Σ_r v_r k_rᵀ to the state, and (1 − λ) Δ of it again one step later. From that
step on its total weight is w_j = γ_j + (1 − λ_{j+1}) Δ_{j+1}, decayed from its own position. So with c = cumsum(−aΔ) inside a
chunk and g the weighted state at its start,

    o_i = Σ_{j<i} exp(c_i − c_j) w_j (q_i·k_j) v_j + γ_i (q_i·k_i) v_i + exp(c_i) g q_i + D v_i,
    g'  = exp(c_last) g + Σ_j exp(c_last − c_j) w_j v_j k_jᵀ,

rank by rank: q_i, k_j, v_j and o_i are R rows each. The last w of a chunk depends on the first position of the next, the last w of the
sequence on `ahead`, (1 − λ) Δ of the position after it if it is a piece of a longer sequence.

Where a row holds several documents, weights and decays between two of them are zero, and the sum of angles restarts.

A pair's decay is the exponential of the sum over its own span; a difference of running sums would have the rounding of the longer of them.
States and phases are saved at the start of each segment of `save_every` positions. The backward processes the segments from the last,
recomputes the states of a segment's chunks, and carries the gradient of g' through them.

The gradient of the phase before a chunk is the sum of those of all later angles. Turning all later queries and keys by the same angle turns
back what they read from g and turns the last state: with G the gradient of g it is G_first·g_second − G_second·g_first over pairs of dims,
plus what depends on the last phase alone. A running sum over positions would be the same except for its rounding: most of its terms cancel,
and what states in low precision leave of them grows with the sequence.

Letters: B sequences, T positions, Q of them in a chunk, R ranks, H heads in G groups, P head width, S state width, N angles.

Source: arXiv:2603.15569, section 3; chunks as in arXiv:2405.21060, section 6.
"""

import math

import torch
from torch import Tensor

from megakernels._common import accumulator_dtype, upcast
from megakernels.ops.mamba3.chunk import Chunk, Mamba3Inputs, Steps, make_chunk, make_steps, per_row
from megakernels.ops.mamba3.gradients import Gradients


def forward(scan: Mamba3Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Returns y [B, T, H, P] and, where segments start, the state [B, segments, H, P, S] in x's dtype and the phase [B, segments, H, N]."""
    dtype, rows = accumulator_dtype(scan.x.dtype), (scan.x.shape[0], scan.x.shape[2])
    state = torch.zeros(*rows, scan.x.shape[3], scan.B.shape[-1], dtype=dtype, device=scan.x.device)
    phase = torch.zeros(*rows, 0 if scan.angles is None else scan.angles.shape[-1], dtype=dtype, device=scan.x.device)
    return forward_from(scan, state, phase, torch.zeros_like(state[..., 0, 0]))[:3]


def forward_from(scan: Mamba3Inputs, state: Tensor, phase: Tensor, ahead: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`forward` from a state [B, H, P, S] and phase [B, H, N], with (1 − λ) Δ of what follows [B, H]; returns the last two as well."""
    x, segments = scan.x, scan.segments()
    batch, _, num_heads, width = x.shape
    dtype, rows = accumulator_dtype(x.dtype), (batch, len(segments), num_heads)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    states = torch.empty(*rows, width, scan.B.shape[-1], dtype=x.dtype, device=x.device)
    phases = torch.empty(*rows, 0 if scan.angles is None else scan.angles.shape[-1], dtype=dtype, device=x.device)
    steps = make_steps(scan, ahead)
    for index, segment in enumerate(segments):
        states[:, index], phases[:, index] = state, phase
        for positions in scan.chunks(segment):
            chunk = make_chunk(scan, steps, positions, phase)
            gated = _outputs(scan, chunk, state) * _gate(scan, positions) * scan.projection(scan.mimo_o)
            y[:, positions] = gated.sum(3).transpose(1, 2)
            state, phase = _after(steps, positions, chunk, state)
    return y, states, phases, state, phase


def backward(grad_y: Tensor, scan: Mamba3Inputs, states: Tensor, phases: Tensor) -> tuple[Tensor | None, ...]:
    """Returns the gradients of all of `Mamba3Inputs` before starts, in order; None for absent inputs."""
    rows = scan.x.shape[0], *states.shape[2:]
    grad_state = torch.zeros(rows, dtype=phases.dtype, device=grad_y.device)
    grad_phase = torch.zeros(*rows[:2], phases.shape[3], dtype=phases.dtype, device=grad_y.device)
    return backward_from(grad_state, grad_phase, grad_y, scan, torch.zeros_like(grad_state[..., 0, 0]), states, phases)[0]


def backward_from(
    grad_state: Tensor, grad_phase: Tensor, grad_y: Tensor, scan: Mamba3Inputs, ahead: Tensor, states: Tensor, phases: Tensor
) -> tuple[tuple[Tensor | None, ...], Tensor, Tensor, Tensor]:
    """`backward` with the gradients of the last state and phase; returns those of the first two and of `ahead` too."""
    steps = make_steps(scan, ahead)
    found = Gradients(scan, steps)
    of_end: Tensor | None = None  # the gradient of the last phase alone, without the rotation of the last state
    for index, segment in reversed(list(enumerate(scan.segments()))):
        for positions, chunk, state in reversed(_walked(scan, steps, segment, upcast(states[:, index]), phases[:, index])):
            if of_end is None:
                of_end = grad_phase - found.turning_back(chunk, grad_state, _after(steps, positions, chunk, state)[0])
            grad = found.through_gate(positions, upcast(grad_y[:, positions]).transpose(1, 2).unsqueeze(3), _outputs(scan, chunk, state))
            grad_state = found.through_chunk(positions, chunk, grad.flatten(2, 3), state, grad_state, grad_phase)
            of_end = of_end * chunk.before[:, :, -1]
            grad_phase = found.turning_back(chunk, grad_state, state) + of_end
    return found.finished(), grad_state, grad_phase, found.arrived[:, :, -1]


def _walked(scan: Mamba3Inputs, steps: Steps, segment: slice, state: Tensor, phase: Tensor) -> list[tuple[slice, Chunk, Tensor]]:
    """The chunks of a segment, each with its positions and the state at its start, from the values saved at the segment's start."""
    made: list[tuple[slice, Chunk, Tensor]] = []
    for positions in scan.chunks(segment):
        if made:
            state, phase = _after(steps, made[-1][0], made[-1][1], state)
        made.append((positions, make_chunk(scan, steps, positions, phase), state))
    return made


def _after(steps: Steps, positions: slice, chunk: Chunk, state: Tensor) -> tuple[Tensor, Tensor]:
    """State and phase after a chunk, from the state before it."""
    kept = per_row(chunk.to_end * steps.arrived[:, :, positions, None], chunk) * chunk.values
    return chunk.across * state + kept.mT @ chunk.keys, chunk.phase[:, :, -1].remainder(2 * math.pi)


def _outputs(scan: Mamba3Inputs, chunk: Chunk, state: Tensor) -> Tensor:
    """Output of each rank, including D's part, before the gate: [B, H, Q, R, P]."""
    found = chunk.mixing() @ chunk.values + per_row(chunk.from_start, chunk) * (chunk.queries @ state.mT)
    found += upcast(scan.D).view(-1, 1, 1) * chunk.values
    return torch.unflatten(found, 2, (chunk.x.shape[2], -1))


def _gate(scan: Mamba3Inputs, positions: slice) -> Tensor:
    """silu(z ⊙ mimo_z), [B, H, Q, R, P]."""
    inner = upcast(scan.z[:, positions]).transpose(1, 2).unsqueeze(3) * scan.projection(scan.mimo_z)
    return inner * inner.sigmoid()
