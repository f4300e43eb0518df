"""Gradients of Mamba-3's scan, filled chunk by chunk from the last, by explicit formulas."""

import math

import torch
from torch import Tensor

from megakernels._common import accumulator_dtype, upcast
from megakernels.ops.mamba3.chunk import Chunk, Mamba3Inputs, Steps, by_position, per_pair, per_row, rate_slope, rotated, row_sums, turning


class Gradients:
    """Gradients of all inputs, filled chunk by chunk from the last."""

    def __init__(self, scan: Mamba3Inputs, steps: Steps) -> None:
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

    def through_chunk(self, positions: slice, chunk: Chunk, grad: Tensor, state: Tensor, grad_next: Tensor, grad_phase: Tensor) -> Tensor:
        """Gradient of the state before the chunk, from those of outputs [B, H, QR, P], of state [B, H, P, S] and phase [B, H, N] after."""
        arrived = self.steps.arrived[:, :, positions, None]
        kept_weight = per_row(chunk.to_end * arrived, chunk)
        from_state = per_row(chunk.from_start, chunk) * grad
        read_next = chunk.keys @ grad_next.mT
        grad_values = chunk.mixing().mT @ grad + kept_weight * read_next + upcast(self.scan.D).view(-1, 1, 1) * grad
        grad_mixing = grad @ chunk.values.mT
        grad_scores = per_pair(grad_mixing, chunk.weight)
        grad_queries = grad_scores @ chunk.keys + from_state @ state
        grad_keys = grad_scores.mT @ chunk.queries + kept_weight * (chunk.values @ grad_next)

        # A position's log decay scales every pair i ≥ t > j, reads of the state by positions i ≥ t, additions of positions j < t to the
        # next state, and the state passed on. Summing exactly these terms, instead of differences of row and column sums, avoids
        # cancellation.
        grad_weight = by_position(grad_mixing * chunk.scores, chunk)
        pairs = grad_weight * chunk.weight
        ones = torch.ones(pairs.shape[-2:], dtype=pairs.dtype, device=pairs.device)
        across_pairs = (ones.triu() @ pairs).mul_(ones.tril(-1)).sum(-1)
        read = row_sums(from_state * (chunk.queries @ state.mT), chunk)
        added = chunk.to_end.squeeze(-1) * row_sums(read_next * chunk.values, chunk)
        kept = added * arrived.squeeze(-1)
        passed_on = (chunk.across * grad_next * state).sum((-1, -2)).unsqueeze(-1)
        self.log_decay[:, :, positions] = across_pairs + read.flip(-1).cumsum(-1).flip(-1) + (kept.cumsum(-1) - kept) + passed_on
        self.gamma[:, :, positions] = grad_weight.diagonal(dim1=-2, dim2=-1)
        self.arrived[:, :, positions] = (grad_weight * chunk.decay).sum(-2) + added

        self.D += (grad * chunk.values).sum((0, 2, 3))
        self._through_values(positions, chunk, grad_values)
        self._through_rotation(positions, chunk, grad_queries, grad_keys, grad_phase)
        return chunk.across * grad_next + from_state.mT @ chunk.queries

    @staticmethod
    def turning_back(chunk: Chunk, grad: Tensor, state: Tensor) -> Tensor:
        """Gradient [B, H, N] of angles that turn a state [B, H, P, S] back, from the gradient of the state."""
        return -turning(grad, state, chunk.pairs).sum(2)

    def _through_values(self, positions: slice, chunk: Chunk, grad: Tensor) -> None:
        grad = torch.unflatten(grad, 2, (chunk.x.shape[2], -1))
        self.mimo_x += (grad * chunk.x).sum((0, 2)).unsqueeze(1)
        self.x[:, positions] = (grad * self.scan.projection(self.scan.mimo_x)).sum(3).transpose(1, 2).to(self.x.dtype)

    def _through_rotation(self, positions: slice, chunk: Chunk, grad_queries: Tensor, grad_keys: Tensor, grad_phase: Tensor) -> None:
        """Gradients of B, C, their biases and the angles, from those of rotated queries and keys and of the phase after the chunk."""
        num_groups = self.scan.B.shape[3]
        turned = torch.zeros_like(chunk.phase)
        for rows, grad, grad_bias, whole in (
            (chunk.queries, grad_queries, self.C_bias, self.C),
            (chunk.keys, grad_keys, self.B_bias, self.B),
        ):
            split = torch.unflatten(grad, 2, (chunk.x.shape[2], -1))
            turned += turning(split, rows.view(split.shape), chunk.pairs).sum(3)
            plain = rotated(split, chunk.cos, -chunk.sin, chunk.pairs)
            grad_bias.add_(plain.sum((0, 2)))
            whole[:, positions] = torch.unflatten(plain, 1, (num_groups, -1)).sum(2).permute(0, 2, 3, 1, 4).to(whole.dtype)
        if self.angles is None or self.scan.angles is None:
            return
        turned[:, :, -1] += grad_phase
        grad_turns = chunk.sums.mT @ turned  # of turn · Δ
        self.step[:, :, positions] += (grad_turns * chunk.turn).sum(-1)
        slope = math.pi * (1 - upcast(self.scan.angles[:, positions]).tanh().square())
        weighted = (grad_turns * self.steps.step[:, :, positions, None]).sum(1)
        self.angles[:, positions] = (slope * weighted).to(self.angles.dtype)

    def finished(self) -> tuple[Tensor | None, ...]:
        """The gradients of all of `Mamba3Inputs` before starts, in its order."""
        scan, steps = self.scan, self.steps
        later = self.arrived[:, :, :-1] * steps.continues  # the gradient of (1 − λ) Δ of the next position
        gamma = self.gamma + self.arrived
        grad_share, grad_step = steps.step * gamma, self.step + steps.share * gamma - steps.rate * self.log_decay
        grad_share[:, :, 1:] -= steps.step[:, :, 1:] * later
        grad_step[:, :, 1:] += (1 - steps.share[:, :, 1:]) * later
        grad_dt = grad_step * steps.raw_step.sigmoid()
        grad_A = -steps.step * self.log_decay * rate_slope(steps.raw_rate, heavy_tail=scan.heavy_tail)
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


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=accumulator_dtype(like.dtype), device=like.device)


def _like(gradient: Tensor, like: Tensor) -> Tensor:
    return gradient.to(like.dtype).contiguous()
