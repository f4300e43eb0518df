"""Mamba-3's scan in plain torch, a chunk of positions at a time, with explicit backward formulas.

Position j adds γ_j = λ_j Δ_j of its outer product u_j = Σ_r v_r k_rᵀ to the state, and (1 − λ) Δ of it once more a step later. From that
step on it has arrived with the weight w_j = γ_j + (1 − λ_{j+1}) Δ_{j+1}, decayed from its own position. So with c = cumsum(−aΔ) inside a
chunk and g the weighted state at its start,

    o_i = Σ_{j<i} exp(c_i − c_j) w_j (q_i·k_j) v_j + γ_i (q_i·k_i) v_i + exp(c_i) g q_i + D v_i,
    g'  = exp(c_last) g + Σ_j exp(c_last − c_j) w_j v_j k_jᵀ,

rank by rank: q_i, k_j, v_j and o_i stand for R rows each. The last w of a chunk looks at the first position of the next, the very last at
`ahead`, (1 − λ) Δ of the position behind the sequence where it is a piece of a longer one.

Where a row holds several documents, weights and decays between two of them are zero, and angles are summed anew.

Differences of cumulative sums are masked before they are exponentiated: the masked half would overflow, and so would separate factors.
The backward walks the chunks from the last, carries the gradients of g' and of the phase, and takes each chunk's own from what was saved.

Letters: B sequences, T positions, Q of them in a chunk, R ranks, H heads in G groups, P head width, S state width, N angles.

Source: arXiv:2603.15569, section 3; chunks as in arXiv:2405.21060, section 6.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from megakernels._common import accumulator_dtype, row_blocks, upcast

SLOWEST_RATE = 1e-4
"""Lower bound of a. Source: `A_floor` of state-spaces/mamba."""


@dataclass(frozen=True, slots=True)
class Scan:
    """The operation's arguments, as `mamba3` documents them."""

    x: Tensor
    z: Tensor
    B: Tensor
    C: Tensor
    dt: Tensor
    A: Tensor
    trapezoid: Tensor
    angles: Tensor | None
    B_bias: Tensor
    C_bias: Tensor
    D: Tensor
    dt_bias: Tensor
    mimo_x: Tensor | None
    mimo_z: Tensor | None
    mimo_o: Tensor | None
    starts: Tensor | None
    chunk_size: int

    def chunks(self) -> list[slice]:
        """Positions of each chunk."""
        return list(row_blocks(self.x.shape[1], 1, self.chunk_size))

    def projection(self, weight: Tensor | None) -> Tensor:
        """A rank projection as [H, 1, R, P]; ones where there is none."""
        if weight is None:
            return torch.ones(self.x.shape[2], 1, 1, self.x.shape[3], dtype=accumulator_dtype(self.x.dtype), device=self.x.device)
        return upcast(weight).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class _Steps:
    """What every position does to the state, [B, H, T] each in the accumulation dtype."""

    raw_step: Tensor  # dt + dt_bias
    step: Tensor  # Δ
    raw_rate: Tensor  # A
    rate: Tensor  # a
    share: Tensor  # λ
    gamma: Tensor  # λ Δ
    arrived: Tensor  # w
    goes_on: Tensor  # [B or 1, 1, T − 1], 1 where the next position is of the same document
    log_decay: Tensor  # −a Δ


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One chunk's rows and weights in the accumulation dtype; rows are positions times ranks."""

    x: Tensor  # [B, H, Q, 1, P]
    values: Tensor  # [B, H, QR, P]
    keys: Tensor  # [B, H, QR, S], rotated
    queries: Tensor  # [B, H, QR, S], rotated
    cos: Tensor  # [B, H, Q, 1, N]
    sin: Tensor  # [B, H, Q, 1, N]
    phase: Tensor  # [B, H, Q, N], θ
    turn: Tensor  # [B, 1, Q, N], π tanh(angles)
    sums: Tensor  # [B or 1, 1, Q, Q], 1 where a phase includes a turn: not later, in the same document
    before: Tensor  # [B or 1, 1, Q, 1], 1 in documents that began before the chunk
    decay: Tensor  # [B, H, Q, Q], exp(c_i − c_j) below the diagonal, in the same document
    weight: Tensor  # [B, H, Q, Q], decay · w_j, and γ on the diagonal
    scores: Tensor  # [B, H, QR, QR], q_i·k_j
    from_start: Tensor  # [B, H, Q, 1], exp(c_i), zero in documents that begin in the chunk
    to_end: Tensor  # [B, H, Q, 1], exp(c_last − c_j), zero in documents that end in the chunk
    across: Tensor  # [B, H, 1, 1], exp(c_last), zero if the last document begins in the chunk

    def mixing(self) -> Tensor:
        """Scores times weights, [B, H, QR, QR]."""
        return _per_pair(self.scores, self.weight)


def forward(scan: Scan) -> tuple[Tensor, Tensor, Tensor]:
    """Returns y [B, T, H, P] and, at each chunk's start, the state [B, chunks, H, P, S] in x's dtype and the phase [B, chunks, H, N]."""
    dtype, rows = accumulator_dtype(scan.x.dtype), (scan.x.shape[0], scan.x.shape[2])
    state = torch.zeros(*rows, scan.x.shape[3], scan.B.shape[-1], dtype=dtype, device=scan.x.device)
    phase = torch.zeros(*rows, 0 if scan.angles is None else scan.angles.shape[-1], dtype=dtype, device=scan.x.device)
    return forward_from(scan, state, phase, torch.zeros_like(state[..., 0, 0]))[:3]


def forward_from(scan: Scan, state: Tensor, phase: Tensor, ahead: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `forward`, from a state [B, H, P, S] and phase [B, H, N], with (1 − λ) Δ of what follows [B, H]; returns the last two as well."""
    x, chunks = scan.x, scan.chunks()
    batch, _, num_heads, width = x.shape
    dtype, rows = accumulator_dtype(x.dtype), (batch, len(chunks), num_heads)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    states = torch.empty(*rows, width, scan.B.shape[-1], dtype=x.dtype, device=x.device)
    phases = torch.empty(*rows, 0 if scan.angles is None else scan.angles.shape[-1], dtype=dtype, device=x.device)
    steps = _steps(scan, ahead)
    for index, positions in enumerate(chunks):
        states[:, index], phases[:, index] = state, phase
        chunk = _chunk(scan, steps, positions, phase)
        gated = _outputs(scan, chunk, state) * _gate(scan, positions) * scan.projection(scan.mimo_o)
        y[:, positions] = gated.sum(3).transpose(1, 2)
        state = chunk.across * state + (_per_row(chunk.to_end * steps.arrived[:, :, positions, None], chunk) * chunk.values).mT @ chunk.keys
        phase = chunk.phase[:, :, -1].remainder(2 * math.pi)
    return y, states, phases, state, phase


def backward(grad_y: Tensor, scan: Scan, states: Tensor, phases: Tensor) -> tuple[Tensor | None, ...]:
    """Returns the gradients of all of `Scan` before starts, in its order; None for what is not given."""
    grad_state = torch.zeros(states[:, 0].shape, dtype=phases.dtype, device=grad_y.device)
    return backward_from(grad_state, torch.zeros_like(phases[:, 0]), grad_y, scan, torch.zeros_like(grad_state[..., 0, 0]), states, phases)[
        0
    ]


def backward_from(
    grad_state: Tensor, grad_phase: Tensor, grad_y: Tensor, scan: Scan, ahead: Tensor, states: Tensor, phases: Tensor
) -> tuple[tuple[Tensor | None, ...], Tensor, Tensor, Tensor]:
    """As `backward`, with the gradients of the last state and phase; returns those of the first two and of `ahead` too."""
    steps = _steps(scan, ahead)
    found = _Gradients(scan, steps)
    for index, positions in reversed(list(enumerate(scan.chunks()))):
        state = upcast(states[:, index])
        chunk = _chunk(scan, steps, positions, phases[:, index])
        grad = found.through_gate(positions, upcast(grad_y[:, positions]).transpose(1, 2).unsqueeze(3), _outputs(scan, chunk, state))
        grad_state, grad_phase = found.through_chunk(positions, chunk, grad.flatten(2, 3), state, grad_state, grad_phase)
    return found.finished(), grad_state, grad_phase, found.arrived[:, :, -1]


class _Gradients:
    """Gradients of everything, filled chunk by chunk from the last."""

    def __init__(self, scan: Scan, steps: _Steps) -> None:
        self.scan, self.steps = scan, steps
        self.x, self.z, self.B, self.C = (_empty(each) for each in (scan.x, scan.z, scan.B, scan.C))
        self.angles = None if scan.angles is None else _empty(scan.angles)
        self.B_bias, self.C_bias, self.D = (_zeros(each) for each in (scan.B_bias, scan.C_bias, scan.D))
        self.mimo_x, self.mimo_z, self.mimo_o = (_zeros(scan.projection(each)) for each in (scan.mimo_x, scan.mimo_z, scan.mimo_o))
        self.step, self.gamma, self.arrived, self.log_decay = (torch.zeros_like(steps.step) for _ in range(4))

    def through_gate(self, positions: slice, grad: Tensor, outputs: Tensor) -> Tensor:
        """Gradient of a chunk's rank outputs [B, H, Q, R, P] from that of y [B, H, Q, 1, P]."""
        scan = self.scan
        mimo_z, mimo_o = scan.projection(scan.mimo_z), scan.projection(scan.mimo_o)
        z = upcast(scan.z[:, positions]).transpose(1, 2).unsqueeze(3)
        inner = z * mimo_z
        sigmoid = inner.sigmoid()
        gate = inner * sigmoid
        self.mimo_o += (grad * outputs * gate).sum((0, 2)).unsqueeze(1)
        grad_inner = grad * mimo_o * outputs * sigmoid * (1 + inner - gate)
        self.mimo_z += (grad_inner * z).sum((0, 2)).unsqueeze(1)
        self.z[:, positions] = (grad_inner * mimo_z).sum(3).transpose(1, 2).to(self.z.dtype)
        return grad * mimo_o * gate

    def through_chunk(
        self, positions: slice, chunk: _Chunk, grad: Tensor, state: Tensor, grad_next: Tensor, grad_phase: Tensor
    ) -> tuple[Tensor, Tensor]:
        """From gradients of the outputs [B, H, QR, P], the state [B, H, P, S] and phase [B, H, N] after the chunk: those before it."""
        arrived = self.steps.arrived[:, :, positions, None]
        kept_weight = _per_row(chunk.to_end * arrived, chunk)
        from_state = _per_row(chunk.from_start, chunk) * grad
        read_next = chunk.keys @ grad_next.mT
        grad_values = chunk.mixing().mT @ grad + kept_weight * read_next + upcast(self.scan.D).view(-1, 1, 1) * grad
        grad_mixing = grad @ chunk.values.mT
        grad_scores = _per_pair(grad_mixing, chunk.weight)
        grad_queries = grad_scores @ chunk.keys + from_state @ state
        grad_keys = grad_scores.mT @ chunk.queries + kept_weight * (chunk.values @ grad_next)

        # A position's log decay scales every pair i ≥ t > j, what positions i ≥ t read from the state, what positions j < t add to the next
        # state, and the state passed on. Summing just these terms, rather than differences of row and column sums, cancels nothing.
        grad_weight = _by_position(grad_mixing * chunk.scores, chunk)
        pairs = grad_weight * chunk.weight
        ones = torch.ones(pairs.shape[-2:], dtype=pairs.dtype, device=pairs.device)
        across_pairs = (ones.triu() @ pairs).mul_(ones.tril(-1)).sum(-1)
        read = _row_sums(from_state * (chunk.queries @ state.mT), chunk)
        added = chunk.to_end.squeeze(-1) * _row_sums(read_next * chunk.values, chunk)
        kept = added * arrived.squeeze(-1)
        passed_on = (chunk.across * grad_next * state).sum((-1, -2)).unsqueeze(-1)
        self.log_decay[:, :, positions] = across_pairs + read.flip(-1).cumsum(-1).flip(-1) + (kept.cumsum(-1) - kept) + passed_on
        self.gamma[:, :, positions] = grad_weight.diagonal(dim1=-2, dim2=-1)
        self.arrived[:, :, positions] = (grad_weight * chunk.decay).sum(-2) + added

        self.D += (grad * chunk.values).sum((0, 2, 3))
        self._through_values(positions, chunk, grad_values)
        before = self._through_rotation(positions, chunk, grad_queries, grad_keys, grad_phase)
        return chunk.across * grad_next + from_state.mT @ chunk.queries, before

    def _through_values(self, positions: slice, chunk: _Chunk, grad: Tensor) -> None:
        grad = torch.unflatten(grad, 2, (chunk.x.shape[2], -1))
        self.mimo_x += (grad * chunk.x).sum((0, 2)).unsqueeze(1)
        self.x[:, positions] = (grad * self.scan.projection(self.scan.mimo_x)).sum(3).transpose(1, 2).to(self.x.dtype)

    def _through_rotation(self, positions: slice, chunk: _Chunk, grad_queries: Tensor, grad_keys: Tensor, grad_phase: Tensor) -> Tensor:
        """Of B, C, their biases and the angles, from those of rotated queries and keys and of the phase after the chunk."""
        num_groups = self.scan.B.shape[3]
        turned = torch.zeros_like(chunk.phase)
        for rows, grad, grad_bias, whole in (
            (chunk.queries, grad_queries, self.C_bias, self.C),
            (chunk.keys, grad_keys, self.B_bias, self.B),
        ):
            split = torch.unflatten(grad, 2, (chunk.x.shape[2], -1))
            turned += _turning(split, rows.view(split.shape), chunk.cos.shape[-1]).sum(3)
            plain = _rotated(split, chunk.cos, -chunk.sin)
            grad_bias.add_(plain.sum((0, 2)))
            whole[:, positions] = torch.unflatten(plain, 1, (num_groups, -1)).sum(2).permute(0, 2, 3, 1, 4).to(whole.dtype)
        if self.angles is None or self.scan.angles is None:
            return grad_phase
        turned[:, :, -1] += grad_phase
        grad_turns = chunk.sums.mT @ turned  # of turn · Δ
        self.step[:, :, positions] += (grad_turns * chunk.turn).sum(-1)
        slope = math.pi * (1 - upcast(self.scan.angles[:, positions]).tanh().square())
        weighted = (grad_turns * self.steps.step[:, :, positions, None]).sum(1)
        self.angles[:, positions] = (slope * weighted).to(self.angles.dtype)
        return (chunk.before * turned).sum(2)

    def finished(self) -> tuple[Tensor | None, ...]:
        """The gradients of all of `Scan` before starts, in its order."""
        scan, steps = self.scan, self.steps
        later = self.arrived[:, :, :-1] * steps.goes_on  # of (1 − λ) Δ of the position after
        gamma = self.gamma + self.arrived
        grad_share, grad_step = steps.step * gamma, self.step + steps.share * gamma - steps.rate * self.log_decay
        grad_share[:, :, 1:] -= steps.step[:, :, 1:] * later
        grad_step[:, :, 1:] += (1 - steps.share[:, :, 1:]) * later
        grad_dt = grad_step * steps.raw_step.sigmoid()
        bounded = softplus(steps.raw_rate) < SLOWEST_RATE
        grad_A = (-steps.step * self.log_decay * steps.raw_rate.sigmoid()).masked_fill_(bounded, 0)
        grad_trapezoid = grad_share * steps.share * (1 - steps.share)
        mimo = zip((self.mimo_x, self.mimo_z, self.mimo_o), (scan.mimo_x, scan.mimo_z, scan.mimo_o), strict=True)
        return (
            *(self.x, self.z, self.B, self.C),
            *(_like(each.mT, like) for each, like in ((grad_dt, scan.dt), (grad_A, scan.A), (grad_trapezoid, scan.trapezoid))),
            self.angles,
            *(_like(each, like) for each, like in ((self.B_bias, scan.B_bias), (self.C_bias, scan.C_bias), (self.D, scan.D))),
            _like(grad_dt.sum((0, 2)), scan.dt_bias),
            *(None if like is None else _like(each.squeeze(1), like) for each, like in mimo),
        )


def _steps(scan: Scan, ahead: Tensor) -> _Steps:
    raw_step = (upcast(scan.dt) + upcast(scan.dt_bias)).mT
    raw_rate, share = upcast(scan.A).mT, upcast(scan.trapezoid).mT.sigmoid()
    step, rate = softplus(raw_step), softplus(raw_rate).clamp(min=SLOWEST_RATE)
    goes_on = torch.ones(1, 1, step.shape[-1] - 1, dtype=step.dtype, device=step.device)
    if scan.starts is not None:
        goes_on = (scan.starts[:, 1:] == scan.starts[:, :-1]).unsqueeze(1).to(step.dtype)
    gamma = share * step
    arrived = gamma.clone()
    arrived[:, :, :-1] += goes_on * ((1 - share) * step)[:, :, 1:]
    arrived[:, :, -1] += ahead
    return _Steps(raw_step, step, raw_rate, rate, share, gamma, arrived, goes_on, -rate * step)


def _chunk(scan: Scan, steps: _Steps, positions: slice, phase: Tensor) -> _Chunk:
    x = upcast(scan.x[:, positions]).transpose(1, 2).unsqueeze(3)
    length = x.shape[2]
    sums = steps.log_decay[:, :, positions].cumsum(2).unsqueeze(-1)
    last = sums[:, :, -1:]
    seen = torch.ones(1, 1, length, length, dtype=torch.bool, device=x.device).tril()
    before = torch.ones(1, 1, length, 1, dtype=x.dtype, device=x.device)
    from_start, to_end, across = sums.exp(), (last - sums).exp(), last.exp()
    if scan.starts is not None:
        first = scan.starts[:, None, positions, None]  # [B, 1, Q, 1]
        position = torch.arange(positions.start, positions.stop, device=x.device)
        seen = seen & (position >= first)
        before = (first < positions.start).to(x.dtype)
        from_start = from_start * before
        to_end = to_end * (position[:, None] >= first[:, :, -1:])
        across = across * before[:, :, -1:]
    strictly = seen.tril(-1)
    decay = (sums - sums.mT).masked_fill_(~strictly, float("-inf")).exp_()
    weight = decay * steps.arrived[:, :, None, positions] + steps.gamma[:, :, positions].diag_embed()
    included = seen.to(x.dtype)
    turn = torch.zeros(1, 1, length, 0, dtype=x.dtype, device=x.device)
    if scan.angles is not None:
        turn = math.pi * upcast(scan.angles[:, positions]).tanh().unsqueeze(1)
    phase = included @ (turn * steps.step[:, :, positions, None]) + before * phase.unsqueeze(2)
    cos, sin = phase.cos().unsqueeze(3), phase.sin().unsqueeze(3)
    keys = _rotated(_heads(scan.B[:, positions], scan.B_bias), cos, sin).flatten(2, 3)
    queries = _rotated(_heads(scan.C[:, positions], scan.C_bias), cos, sin).flatten(2, 3)
    return _Chunk(
        x=x,
        values=(x * scan.projection(scan.mimo_x)).flatten(2, 3),
        keys=keys,
        queries=queries,
        cos=cos,
        sin=sin,
        phase=phase,
        turn=turn,
        sums=included,
        before=before,
        decay=decay,
        weight=weight,
        scores=queries @ keys.mT,
        from_start=from_start,
        to_end=to_end,
        across=across,
    )


def _outputs(scan: Scan, chunk: _Chunk, state: Tensor) -> Tensor:
    """What each rank reads, D's part included, before the gate: [B, H, Q, R, P]."""
    found = chunk.mixing() @ chunk.values + _per_row(chunk.from_start, chunk) * (chunk.queries @ state.mT)
    found += upcast(scan.D).view(-1, 1, 1) * chunk.values
    return torch.unflatten(found, 2, (chunk.x.shape[2], -1))


def _gate(scan: Scan, positions: slice) -> Tensor:
    """silu(z ⊙ mimo_z), [B, H, Q, R, P]."""
    inner = upcast(scan.z[:, positions]).transpose(1, 2).unsqueeze(3) * scan.projection(scan.mimo_z)
    return inner * inner.sigmoid()


def _heads(whole: Tensor, bias: Tensor) -> Tensor:
    """[B, Q, R, G, S] with each head's bias [H, R, S], as [B, H, Q, R, S]."""
    repeats = bias.shape[0] // whole.shape[3]
    return upcast(whole).permute(0, 3, 1, 2, 4).repeat_interleave(repeats, 1) + upcast(bias).unsqueeze(1)


def _rotated(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rows [..., S], dims i and i + S // 2 turned by angle i < N."""
    count, half = cos.shape[-1], rows.shape[-1] // 2
    turned = rows.clone()
    first, second = rows[..., :count], rows[..., half : half + count]
    turned[..., :count] = first * cos - second * sin
    turned[..., half : half + count] = first * sin + second * cos
    return turned


def _turning(grad: Tensor, rotated: Tensor, count: int) -> Tensor:
    """Gradient of each angle [..., N] from that of rotated rows [..., S]."""
    half = rotated.shape[-1] // 2
    return grad[..., half : half + count] * rotated[..., :count] - grad[..., :count] * rotated[..., half : half + count]


def _per_row(weights: Tensor, chunk: _Chunk) -> Tensor:
    """A weight a position [B, H, Q, 1], repeated for its ranks: [B, H, QR, 1]."""
    return weights.repeat_interleave(chunk.values.shape[2] // weights.shape[2], 2)


def _per_pair(rows: Tensor, weights: Tensor) -> Tensor:
    """Pairs of rows [B, H, QR, QR], times a weight a pair of positions [B, H, Q, Q]."""
    batch, num_heads, length, _ = weights.shape
    split = rows.view(batch, num_heads, length, -1, length, rows.shape[-1] // length)
    return (split * weights[:, :, :, None, :, None]).view(rows.shape)


def _by_position(rows: Tensor, chunk: _Chunk) -> Tensor:
    """Pairs of rows [B, H, QR, QR], summed over their ranks: [B, H, Q, Q]."""
    length = chunk.weight.shape[-1]
    return rows.view(*rows.shape[:2], length, -1, length, rows.shape[-1] // length).sum((3, 5))


def _row_sums(rows: Tensor, chunk: _Chunk) -> Tensor:
    """Rows [B, H, QR, P], summed over ranks and width: [B, H, Q]."""
    return torch.unflatten(rows, 2, (chunk.weight.shape[-1], -1)).sum((3, 4))


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=accumulator_dtype(like.dtype), device=like.device)


def _like(gradient: Tensor, like: Tensor) -> Tensor:
    return gradient.to(like.dtype).contiguous()
