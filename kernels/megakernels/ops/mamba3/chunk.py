"""One chunk of Mamba-3's scan: its steps, decays, and rotated rows, as `megakernels.ops.mamba3.reference` explains them."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from megakernels._common import accumulator_dtype, row_blocks, span_sums, upcast

GRADIENTS = (
    *("x", "z", "B", "C", "dt", "A", "trapezoid", "angles"),
    *("B_bias", "C_bias", "D", "dt_bias", "mimo_x", "mimo_z", "mimo_o"),
)
ACCUMULATED = GRADIENTS[GRADIENTS.index("angles") :]
"""Arguments whose gradients are sums over heads or positions: the angles, which all heads share, and the parameters."""
SLOWEST_RATE = 1e-4
"""Lower bound of a. Source: `A_floor` of state-spaces/mamba."""


class Mamba3Inputs(NamedTuple):
    """The arguments of the torch op, as `mamba3` documents them."""

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
    save_every: int
    heavy_tail: bool

    def segments(self) -> list[slice]:
        """Positions between two saved states."""
        return list(row_blocks(self.x.shape[1], 1, self.save_every))

    def chunks(self, segment: slice) -> list[slice]:
        """Positions of each chunk of a segment."""
        parts = row_blocks(segment.stop - segment.start, 1, self.chunk_size)
        return [slice(segment.start + part.start, segment.start + part.stop) for part in parts]

    @property
    def pairs_neighbours(self) -> bool:
        """True if an angle rotates dims 2i and 2i + 1, as in the single-input form; the MIMO form rotates i and i + S // 2."""
        return self.mimo_x is None

    def projection(self, weight: Tensor | None) -> Tensor:
        """A rank projection as [H, 1, R, P]; ones if there is none."""
        if weight is None:
            return torch.ones(self.x.shape[2], 1, 1, self.x.shape[3], dtype=accumulator_dtype(self.x.dtype), device=self.x.device)
        return upcast(weight).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class Steps:
    """Coefficients of every position's state update, [B, H, T] each in the accumulation dtype."""

    raw_step: Tensor  # dt + dt_bias
    step: Tensor  # Δ
    raw_rate: Tensor  # A
    rate: Tensor  # a
    share: Tensor  # λ
    gamma: Tensor  # λ Δ
    arrived: Tensor  # w
    continues: Tensor  # [B or 1, 1, T − 1], 1 where the next position is in the same document
    log_decay: Tensor  # −a Δ


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk's rows and weights in the accumulation dtype; rows are positions times ranks."""

    x: Tensor  # [B, H, Q, 1, P]
    values: Tensor  # [B, H, QR, P]
    keys: Tensor  # [B, H, QR, S], rotated
    queries: Tensor  # [B, H, QR, S], rotated
    cos: Tensor  # [B, H, Q, 1, N]
    sin: Tensor  # [B, H, Q, 1, N]
    phase: Tensor  # [B, H, Q, N], θ
    pairs: tuple[slice, slice]  # the dims that the angles rotate: the first and the second of each pair
    turn: Tensor  # [B, 1, Q, N], π tanh(angles)
    sums: Tensor  # [B or 1, 1, Q, Q], 1 if a phase includes a position's rotation: not later, in the same document
    before: Tensor  # [B or 1, 1, Q, 1], 1 in documents that began before the chunk
    decay: Tensor  # [B, H, Q, Q], exp(c_i − c_j) below the diagonal, in the same document
    weight: Tensor  # [B, H, Q, Q], decay · w_j, and γ on the diagonal
    scores: Tensor  # [B, H, QR, QR], q_i·k_j
    from_start: Tensor  # [B, H, Q, 1], exp(c_i), zero in documents that begin in the chunk
    to_end: Tensor  # [B, H, Q, 1], exp(c_last − c_j), zero in documents that end in the chunk
    across: Tensor  # [B, H, 1, 1], exp(c_last), zero if the last document begins in the chunk

    def mixing(self) -> Tensor:
        """Scores times weights, [B, H, QR, QR]."""
        return per_pair(self.scores, self.weight)


def rate_of(raw: Tensor, *, heavy_tail: bool) -> Tensor:
    """A before its lower bound: softplus, or the function 1 + x from 0 on and 1 / (1 − x) below.

    Source: `heavy_tail_activation` of state-spaces/mamba, `mamba_ssm/modules/mamba3.py`.
    """
    return raw.clamp(min=0) + (1 - raw.clamp(max=0)).reciprocal() if heavy_tail else softplus(raw)


def rate_slope(raw: Tensor, *, heavy_tail: bool) -> Tensor:
    """The derivative of the bounded rate: zero where the bound is above it."""
    slope = (1 - raw.clamp(max=0)).square().reciprocal() if heavy_tail else raw.sigmoid()
    return slope.masked_fill(rate_of(raw, heavy_tail=heavy_tail) < SLOWEST_RATE, 0)


def make_steps(scan: Mamba3Inputs, ahead: Tensor) -> Steps:
    """Coefficients of all positions; `ahead` is (1 − λ) Δ of the position after them [B, H]."""
    raw_step = (upcast(scan.dt) + upcast(scan.dt_bias)).mT
    raw_rate, share = upcast(scan.A).mT, upcast(scan.trapezoid).mT.sigmoid()
    step, rate = softplus(raw_step), rate_of(raw_rate, heavy_tail=scan.heavy_tail).clamp(min=SLOWEST_RATE)
    continues = torch.ones(1, 1, step.shape[-1] - 1, dtype=step.dtype, device=step.device)
    if scan.starts is not None:
        continues = (scan.starts[:, 1:] == scan.starts[:, :-1]).unsqueeze(1).to(step.dtype)
    gamma = share * step
    arrived = gamma.clone()
    arrived[:, :, :-1] += continues * ((1 - share) * step)[:, :, 1:]
    arrived[:, :, -1] += ahead
    return Steps(raw_step, step, raw_rate, rate, share, gamma, arrived, continues, -rate * step)


def make_chunk(scan: Mamba3Inputs, steps: Steps, positions: slice, phase: Tensor) -> Chunk:
    """Rows and weights of one chunk; `phase` is the angle before it [B, H, N]."""
    x = upcast(scan.x[:, positions]).transpose(1, 2).unsqueeze(3)
    length = x.shape[2]
    spans = span_sums(steps.log_decay[:, :, positions])
    sums = steps.log_decay[:, :, positions].cumsum(2).unsqueeze(-1)
    seen = torch.ones(1, 1, length, length, dtype=torch.bool, device=x.device).tril()
    before = torch.ones(1, 1, length, 1, dtype=x.dtype, device=x.device)
    from_start, to_end, across = sums.exp(), spans[:, :, -1].exp().unsqueeze(-1), sums[:, :, -1:].exp()
    if scan.starts is not None:
        first = scan.starts[:, None, positions, None]  # [B, 1, Q, 1]
        position = torch.arange(positions.start, positions.stop, device=x.device)
        seen = seen & (position >= first)
        before = (first < positions.start).to(x.dtype)
        from_start = from_start * before
        to_end = to_end * (position[:, None] >= first[:, :, -1:])
        across = across * before[:, :, -1:]
    strictly = seen.tril(-1)
    decay = spans.masked_fill_(~strictly, float("-inf")).exp_()
    weight = decay * steps.arrived[:, :, None, positions] + steps.gamma[:, :, positions].diag_embed()
    included = seen.to(x.dtype)
    turn = torch.zeros(1, 1, length, 0, dtype=x.dtype, device=x.device)
    if scan.angles is not None:
        turn = math.pi * upcast(scan.angles[:, positions]).tanh().unsqueeze(1)
    phase = included @ (turn * steps.step[:, :, positions, None]) + before * phase.unsqueeze(2)
    cos, sin = phase.cos().unsqueeze(3), phase.sin().unsqueeze(3)
    pairs = _turned_dims(scan, phase.shape[-1])
    keys = rotated(_heads(scan.B[:, positions], scan.B_bias), cos, sin, pairs).flatten(2, 3)
    queries = rotated(_heads(scan.C[:, positions], scan.C_bias), cos, sin, pairs).flatten(2, 3)
    return Chunk(
        x=x,
        values=(x * scan.projection(scan.mimo_x)).flatten(2, 3),
        keys=keys,
        queries=queries,
        cos=cos,
        sin=sin,
        phase=phase,
        pairs=pairs,
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


def _heads(whole: Tensor, bias: Tensor) -> Tensor:
    """[B, Q, R, G, S] with each head's bias [H, R, S], as [B, H, Q, R, S]."""
    repeats = bias.shape[0] // whole.shape[3]
    return upcast(whole).permute(0, 3, 1, 2, 4).repeat_interleave(repeats, 1) + upcast(bias).unsqueeze(1)


def _turned_dims(scan: Mamba3Inputs, count: int) -> tuple[slice, slice]:
    """First and second dims of the pairs that `count` angles rotate."""
    if scan.pairs_neighbours:
        return slice(0, 2 * count, 2), slice(1, 2 * count, 2)
    half = scan.B.shape[-1] // 2
    return slice(0, count), slice(half, half + count)


def rotated(rows: Tensor, cos: Tensor, sin: Tensor, pairs: tuple[slice, slice]) -> Tensor:
    """Rows [..., S] with their pairs of dims rotated."""
    turned = rows.clone()
    first, second = rows[..., pairs[0]], rows[..., pairs[1]]
    turned[..., pairs[0]] = first * cos - second * sin
    turned[..., pairs[1]] = first * sin + second * cos
    return turned


def turning(grad: Tensor, rotated_rows: Tensor, pairs: tuple[slice, slice]) -> Tensor:
    """Gradient of each angle [..., N] from that of rotated rows [..., S]."""
    return grad[..., pairs[1]] * rotated_rows[..., pairs[0]] - grad[..., pairs[0]] * rotated_rows[..., pairs[1]]


def per_row(weights: Tensor, chunk: Chunk) -> Tensor:
    """A weight per position [B, H, Q, 1], repeated for its ranks: [B, H, QR, 1]."""
    return weights.repeat_interleave(chunk.values.shape[2] // weights.shape[2], 2)


def per_pair(rows: Tensor, weights: Tensor) -> Tensor:
    """Pairs of rows [B, H, QR, QR], times a weight per pair of positions [B, H, Q, Q]."""
    batch, num_heads, length, _ = weights.shape
    rank = rows.shape[-1] // length
    split = rows.view(batch, num_heads, length, rank, length, rank)
    return (split * weights[:, :, :, None, :, None]).view(rows.shape)


def by_position(rows: Tensor, chunk: Chunk) -> Tensor:
    """Pairs of rows [B, H, QR, QR], summed over their ranks: [B, H, Q, Q]."""
    length = chunk.weight.shape[-1]
    rank = rows.shape[-1] // length
    return rows.view(*rows.shape[:2], length, rank, length, rank).sum((3, 5))


def row_sums(rows: Tensor, chunk: Chunk) -> Tensor:
    """Rows [B, H, QR, P], summed over ranks and width: [B, H, Q]."""
    return torch.unflatten(rows, 2, (chunk.weight.shape[-1], -1)).sum((3, 4))
